package router

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/outcome"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/settings"
)

// learning is a router of one pair with a threshold that is auto. It does not run: what it
// learns is what a test reports.
func learning(t *testing.T) *Router {
	t.Helper()
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
	return r
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
			p := &decide.Plan{Path: decide.Remote, Asked: cost.Request{Prefill: cost.Work{Tokens: tokens, Context: tokens}, Transfer: cost.Work{Tokens: tokens}}}
			var q outcome.Request
			done := at.Add(100 * time.Microsecond * time.Duration(tokens))
			r.costs.Took(&q, p, outcome.Leg{Model: "m", Phase: selector.Prefill, Sent: at, First: done})
			r.costs.Took(&q, p, outcome.Leg{Model: "m", Phase: selector.Decode, Sent: at, First: done.Add(10 * time.Millisecond)})
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
	d, err := dryRun(t.Context(), r, ep, admin.RouteRequest{Body: []byte(`{"model":"m","prompt":"hello"}`)})
	if err != nil {
		t.Fatal(err)
	}
	if costs := r.state.Costs(); len(costs) != 0 {
		t.Errorf("learned of %+v by %+v", costs, d)
	}
}

// TestTrialsAreDescribed: once answers have shown what the time between their tokens depends
// on, prices of a stall are tried on the latest requests. The status and the metrics show what
// is in force.
func TestTrialsAreDescribed(t *testing.T) {
	r := learning(t)
	metrics := func() string {
		h, err := r.AdminHandler(AdminOptions{})
		if err != nil {
			t.Fatal(err)
		}
		page := httptest.NewRecorder()
		h.ServeHTTP(page, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1/metrics", nil))
		return page.Body.String()
	}
	const price = `dynctl_routing_stall_price{model="m"}`
	all := r.registry.Snapshot().Model("m")
	began, fleet := time.Now(), &cost.Fleet{Prefill: make([]int, 1), Decode: make([]cost.DecodeLoad, 1)}
	at := began
	for _, answered := range []bool{false, true} {
		for i := range 100 {
			at = at.Add(50 * time.Millisecond)
			tokens := 1000 + 100*(i%7)
			w := cost.Work{Tokens: tokens, Context: tokens}
			p := &decide.Plan{Path: decide.Remote, Asked: cost.Request{Local: w, Prefill: w, Transfer: cost.Work{Tokens: tokens}}}
			if i%2 == 0 {
				p.Path = decide.Local
			}
			r.costs.Chose("m", p, at)
			var q outcome.Request
			took := 50 * time.Microsecond * time.Duration(tokens)
			if p.Path == decide.Remote {
				r.costs.Took(&q, p, outcome.Leg{Model: "m", Phase: selector.Prefill, Sent: at, First: at.Add(took)})
				took += 5 * time.Millisecond
			}
			r.costs.Took(&q, p, outcome.Leg{Model: "m", Phase: selector.Decode, Sent: at, First: at.Add(took)})
			for _, w := range all {
				if !answered || !w.Role.CanDecode() {
					continue
				}
				r.costs.Runs(&q, true, "m", w, w.Ranks[0], 1, at.Add(took))
				q.Ran(200, at.Add(took+2*time.Second))
				q.Ended(took)
			}
		}
		r.costs.Of("m").Renew(fleet, at.Sub(began)+2*time.Second)
		if s := r.state.Costs(); len(s) != 1 || s[0].Revision == 0 || (len(s[0].Trials) >= 2) != answered || (s[0].StallPrice > 0) != answered {
			t.Errorf("answers were seen: %v; status %+v", answered, s)
		}
		if page := metrics(); strings.Contains(page, price) != answered || !strings.Contains(page, `dynctl_routing_crossing_tokens{bound="high",model="m",running="32"}`) {
			t.Errorf("answers were seen: %v; the metrics do not show what is in force:\n%s", answered, page)
		}
	}
}
