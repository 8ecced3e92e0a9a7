package router_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestDeadlyRequest: a request that every engine dies of takes down two of them, also where
// each attempt reaches two engines at once, and connections were used before.
func TestDeadlyRequest(t *testing.T) {
	t.Parallel()
	r := start(t, "4p4d:profile=instant,engine=sglang,deadly=boom,model=sglang+4p4d:profile=instant,deadly=boom,model=vllm+6a:profile=instant,deadly=boom,model=alone", func(c *settings.Config) {
		c.Routing.Threshold.Tokens, c.Routing.Policy = 1, "round_robin"
		c.Retry = settings.Retry{Attempts: 6, Budget: 1}
	})
	for _, model := range []string{"sglang", "vllm", "alone"} {
		t.Run(model, func(t *testing.T) {
			r := r.in(t)
			before, blamed := map[string]bool{}, max(0, r.metric("dynctl_requests_broke_engines_total"))
			for i := range 16 {
				if a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": model, "prompt": ids(100, i), "max_tokens": 2})); a.status != http.StatusOK {
					t.Fatal(a)
				}
			}
			died := func() (names []string) {
				for _, e := range r.Sim.Engines() {
					if e.Exits() > 0 && !before[e.Name()] {
						names = append(names, e.Name())
					}
				}
				return names
			}
			for _, name := range died() {
				before[name] = true
			}
			a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": model, "prompt": ids(100, 99), "user": "boom", "max_tokens": 2}))
			if a.status < 500 {
				t.Errorf("%s", a)
			}
			if err := loopback.Wait(waitCtx(t), "the engines that die", func() error {
				if n := len(died()); n < 2 {
					return fmt.Errorf("%d died so far", n)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
			// Of two engines that had it at the same time either may be at fault.
			if n := r.metric("dynctl_requests_broke_engines_total") - blamed; model == "alone" && n != 1 {
				t.Errorf("%v requests are blamed", n)
			}
			// Another one would have had the request before the client got its answer.
			if names := died(); len(names) > attempt.MaxLost {
				t.Errorf("%v died of one request: %q", names, r.receipt(a.header.Get("X-Dynctl-Decision")).Notes)
			}
		})
	}
}
