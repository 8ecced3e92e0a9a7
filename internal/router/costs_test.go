package router

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestCostsTellOfTheirChanges: a drift of the costs, the doubt after a second one, and its
// end are events in this order, and the status has no crossing in between.
func TestCostsTellOfTheirChanges(t *testing.T) {
	c := settings.Default()
	c.Routing.Threshold = decide.Threshold{Tokens: 2048, Auto: true}
	c.Decode, c.Prefill = []string{"http://127.0.0.1:1,engine=vllm,model=m,connector=nixl"}, []string{"http://127.0.0.1:2,engine=vllm,model=m,connector=nixl"}
	r, err := New(t.Context(), Options{Config: c})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	at := r.costs.began
	took := func(n int, prefill time.Duration) {
		for i := range n {
			at = at.Add(time.Second)
			tokens := 1000 + 100*(i%7)
			x := &exchange{errand: errand{r: r, model: "m"}}
			x.d.Settings, x.d.Run.Plan.Path = r.settings.Load(), decide.Remote
			x.d.Run.Plan.Asked = cost.Request{Prefill: cost.Work{Tokens: tokens, Context: tokens}, Transfer: cost.Work{Tokens: tokens}}
			done := at.Add(prefill * time.Duration(tokens) / 1000)
			x.legTook(selector.Prefill, at, done)
			x.legTook(selector.Decode, at, done.Add(10*time.Millisecond))
		}
	}
	told := func() (kinds []string) {
		for _, e := range r.events.Last(100) {
			if e.Kind == "costs_known" || e.Kind == "costs_drifted" || e.Kind == "costs_doubted" {
				kinds = append(kinds, e.Kind)
			}
		}
		return kinds
	}
	expect := func(known bool, kinds ...string) {
		t.Helper()
		if got := told(); !slices.Equal(got, kinds) {
			t.Errorf("events %v, want %v", got, kinds)
		}
		s := r.state.Costs()
		if len(s) != 1 || (s[0].Revision > 0) != known || (len(s[0].Crossings) > 0) != known {
			t.Errorf("known is to be %v: %+v", known, s)
		}
	}
	took(100, 100*time.Millisecond)
	expect(true, "costs_known")
	took(90, 400*time.Millisecond)
	expect(true, "costs_known", "costs_drifted")
	took(60, 100*time.Millisecond)
	expect(false, "costs_known", "costs_drifted", "costs_doubted")
	took(150, 100*time.Millisecond)
	expect(true, "costs_known", "costs_drifted", "costs_doubted", "costs_known")
}
