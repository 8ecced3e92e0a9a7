package router_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

// TestLayouts: whichever ranks of a deployment answer behind which port, each request
// goes to a rank that is there, and each rank's events are taken for its own.
func TestLayouts(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		fleet  string
		starts []int
	}{
		{"1a:dp=4,lb=internal,profile=instant", []int{0}},
		{"2a:dp=2,lb=hybrid,profile=instant", []int{0, 2}},
		{"3a:lb=external,profile=instant", []int{0, 1, 2}},
	} {
		t.Run(tt.fleet, func(t *testing.T) {
			t.Parallel()
			r := startWith(t, loopback.Options{Fleet: tt.fleet}, func(c *settings.Config) { c.Routing.DecodePolicy = "round_robin" })
			for i := range 12 {
				if a := r.post("/v1/completions", map[string]any{"model": "sim", "prompt": fmt.Sprintf("%d: %s", i, strings.Repeat("word ", 100)), "max_tokens": 2}); a.status != http.StatusOK {
					t.Fatalf("request %d: %d %s", i, a.status, a.body)
				}
			}
			r.synced()
			for i, start := range tt.starts {
				w := r.worker(fmt.Sprintf("aggregated-%d", i))
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
}

// TestWrongLayout: a worker whose engine has other ranks behind its port than was
// stated is named, with both sides, and gets no request.
func TestWrongLayout(t *testing.T) {
	t.Parallel()
	of, err := sim.ParseFleet("2a:dp=2,lb=hybrid,profile=instant")
	if err != nil {
		t.Fatal(err)
	}
	fleet, err := sim.Start(context.Background(), of)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = fleet.Close() })
	specs := fleet.Specs("test")
	r := startCold(t, loopback.Options{Fleet: "1a:profile=instant"}, func(c *settings.Config) {
		c.Worker = append(c.Worker, specs[1].URL.String()+",name=wrong,lb=internal,dp=4")
	})
	r.eventually("the layout is refused", func() error {
		if w := r.worker("wrong"); w.Usable || !strings.Contains(w.Conflict, "data-parallel size 4") || !strings.Contains(w.Conflict, "its first rank is 2") {
			return fmt.Errorf("%+v", w)
		}
		if w := r.worker("aggregated-0"); !w.Usable {
			return fmt.Errorf("%+v", w)
		}
		return nil
	})
	for i := range 8 {
		if a := r.post("/v1/completions", map[string]any{"model": "sim", "prompt": fmt.Sprint(i), "max_tokens": 1}); a.status != http.StatusOK {
			t.Errorf("request %d: %d %s", i, a.status, a.body)
		}
	}
	for _, k := range r.worker("wrong").Ranks {
		if k.Requests != 0 {
			t.Errorf("%s got %d requests", k.Label, k.Requests)
		}
	}
}
