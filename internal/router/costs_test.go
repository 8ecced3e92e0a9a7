package router

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/outcome"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings"
)

// idle is a router that does not run.
func idle(t *testing.T, c settings.Config) *Router {
	t.Helper()
	r, err := New(t.Context(), Options{Config: c})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return r
}

// learning is a router of one pair with a threshold that is auto. It does not run: what it
// learns is what a test reports.
func learning(t *testing.T) *Router {
	t.Helper()
	c := settings.Default()
	c.Routing.Threshold = decide.Threshold{Tokens: 2048, Auto: true}
	c.Decode, c.Prefill = []string{"http://127.0.0.1:1,engine=vllm,model=m,connector=nixl"}, []string{"http://127.0.0.1:2,engine=vllm,model=m,connector=nixl"}
	return idle(t, c)
}

// TestCostsAreDescribed: the status shows how much is known of a model's costs, and once
// that is enough from which revision and where they change the path.
func TestCostsAreDescribed(t *testing.T) {
	r := learning(t)
	at := time.Now()
	for _, enough := range []bool{false, true} {
		for i := range 1 + 100*len(r.state.Costs()) {
			at = at.Add(time.Second)
			tokens := 1000 + 100*(i%7)
			p := &decide.Plan{Path: route.Remote, Paths: cost.Paths{Prefill: cost.Work{Tokens: tokens, Context: tokens}, Transfer: cost.Work{Tokens: tokens}}}
			var q outcome.RequestSamples
			done := at.Add(100 * time.Microsecond * time.Duration(tokens))
			r.costs.Took(&q, p, outcome.LegSample{Model: "m", Phase: route.Prefill, Sent: at, First: done})
			r.costs.Took(&q, p, outcome.LegSample{Model: "m", Phase: route.Decode, Sent: at, First: done.Add(10 * time.Millisecond)})
		}
		s := r.state.Costs()
		if len(s) != 1 || (s[0].Revision > 0) != enough || (len(s[0].Crossings) > 0) != enough || s[0].TransferOutcomes == 0 {
			t.Errorf("enough is known: %v; status %+v", enough, s)
		}
	}
}

// TestDryRunsTakeNoPlace: what a dry run asks for is not learned of.
func TestDryRunsTakeNoPlace(t *testing.T) {
	r := learning(t)
	ep, err := api.Lookup(http.MethodPost, "/v1/completions")
	if err != nil {
		t.Fatal(err)
	}
	d, err := r.door.DryRun(t.Context(), ep, admin.RouteRequest{Body: []byte(`{"model":"m","prompt":"hello"}`)})
	if err != nil {
		t.Fatal(err)
	}
	if costs := r.state.Costs(); len(costs) != 0 {
		t.Errorf("learned of %+v by %+v", costs, d)
	}
}
