package router_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestLayouts: whichever ranks of a deployment answer behind which port, each request
// goes to a rank that is there, and each rank's events are taken for its own. A worker whose
// engine has other ranks behind its port than was stated is named, with both sides, and gets
// no request.
func TestLayouts(t *testing.T) {
	t.Parallel()
	r := start(t, "1a:dp=4,lb=internal,profile=instant,model=one+2a:dp=2,lb=hybrid,profile=instant,model=two+3a:lb=external,profile=instant,model=three", func(c *settings.Config) { c.Routing.DecodePolicy = "round_robin" })
	send := func(t *testing.T, model string, n int) {
		t.Helper()
		for i := range n {
			if a := r.post("/v1/completions", object{"model": model, "prompt": fmt.Sprintf("%d: %s", i, strings.Repeat("word ", 100)), "max_tokens": 2}); a.status != http.StatusOK {
				t.Fatalf("request %d: %d %s", i, a.status, a.body)
			}
		}
	}
	engine := 0
	for _, tt := range []struct {
		model  string
		starts []int
	}{{"one", []int{0}}, {"two", []int{0, 2}}, {"three", []int{0, 1, 2}}} {
		t.Run(tt.model, func(t *testing.T) {
			r := r.in(t)
			send(t, tt.model, 12)
			r.synced()
			for _, start := range tt.starts {
				w := r.worker(fmt.Sprintf("aggregated-%d", engine))
				engine++
				if w.DPStart != start {
					t.Errorf("%s begins at rank %d, want %d", w.Name, w.DPStart, start)
				}
				for _, k := range w.Ranks {
					if k.Requests == 0 || k.Feed.Blocks == 0 || k.Feed.RankDisagree != 0 {
						t.Errorf("%s: %d requests, %d blocks, %d batches of another rank", k.Label, k.Requests, k.Feed.Blocks, k.Feed.RankDisagree)
					}
				}
			}
		})
	}
	second := r.Sim.Named("aggregated-2").URL() // of the two that are hybrid
	if err := r.Admin.RemoveWorker(t.Context(), "aggregated-2"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Admin.AddWorker(t.Context(), admin.AddWorker{Spec: second + ",name=wrong,lb=internal,dp=4"}); err != nil {
		t.Fatal(err)
	}
	r.eventually("the layout is refused", func() error {
		if w := r.worker("wrong"); w.Usable || !strings.Contains(w.Conflict, "data-parallel size 4") || !strings.Contains(w.Conflict, "its first rank is 2") {
			return fmt.Errorf("%+v", w)
		}
		return nil
	})
	send(t, "two", 8)
	for _, k := range r.worker("wrong").Ranks {
		if k.Requests != 0 {
			t.Errorf("%s got %d requests", k.Label, k.Requests)
		}
	}
}
