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
	r := start(t, "1a:dp=4,lb=internal,profile=instant,model=one+2a:dp=2,lb=hybrid,profile=instant,model=two+3a:lb=external,profile=instant,model=three+1a:profile=instant,dp=4,model=vllm+1a:profile=instant,dp=4,engine=sglang,model=sglang", func(c *settings.Config) { c.Routing.DecodePolicy = "round_robin" })
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
	t.Run("ranks hold their own", func(t *testing.T) { ranksOfOneWorkerHoldTheirOwn(t, r.in(t)) })
	r.set(func(*settings.Config) {})
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

// ranksOfOneWorkerHoldTheirOwn: with data-parallel ranks a prompt goes back
// to the rank that holds it, and the engine says so too.
func ranksOfOneWorkerHoldTheirOwn(t *testing.T, r *rig) {
	r.set(func(c *settings.Config) { c.Routing.DecodePolicy = "" })
	for _, engine := range []string{"vllm", "sglang"} {
		t.Run(engine, func(t *testing.T) {
			r := r.in(t)
			home := map[int]string{}
			for round := range 3 {
				for i := range 8 {
					a := r.post("/v1/completions", object{"model": engine, "prompt": ids(320, i), "max_tokens": 12, "ignore_eos": true})
					rank := a.header.Get("X-Dynctl-Worker")
					cached := a.completion(t).Usage.PromptTokensDetails.CachedTokens
					if round == 0 {
						home[i] = rank
					} else if rank != home[i] || cached != 304 {
						t.Errorf("prompt %d went to %s with %d cached tokens, its home is %s", i, rank, cached, home[i])
					}
					r.synced()
				}
			}
			used := map[string]bool{}
			for _, k := range home {
				used[k] = true
			}
			if len(used) != 4 {
				t.Errorf("eight prompts live on %v of four ranks", used)
			}
		})
	}
}
