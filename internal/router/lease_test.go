package router_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// TestLeases: a decode engine that hangs until the prefill
// engine has given the blocks to other prompts, and then goes on, fetches what
// these have put there. No client may get an answer made of that. An engine that is slow, and
// answers its probes, is waited for.
func TestLeases(t *testing.T) {
	t.Parallel()
	// Only the engine that hangs may be late.
	const lease = 3 * time.Second
	r := start(t, "1p2d:profile=instant,kv_blocks=64,lease="+lease.String(), func(c *settings.Config) {
		c.Routing.Threshold.Tokens, c.Routing.AllowHeaders, c.Routing.Policy = 1, true, "round_robin"
		c.Timeouts.KVLease, c.Health.Interval = lease, 100*time.Millisecond
	})
	if err := r.Sim.Named("decode-0").SetFaults(fault.Set{Hang: true}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	type given struct {
		*answer
		err error
	}
	answers := make([]given, 4)
	var wg sync.WaitGroup
	for i := range answers {
		wg.Go(func() {
			a, err := r.try(ctx, http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(200, i), "max_tokens": 12, "ignore_eos": true}))
			answers[i] = given{a, err}
		})
	}
	r.eventually("a lease that has ended", func() error {
		if s := r.counters("prefill-0"); s.Expired == 0 || s.Pinned > 0 {
			return fmt.Errorf("%d ended, %d not", s.Expired, s.Pinned)
		}
		return nil
	})
	for i := range 4 { // others take the blocks
		if a, _ := r.complete(ids(400, 100+i), "X-Dynctl-Worker", "decode-1"); a.header.Get("X-Dynctl-Path") != "remote" {
			t.Fatal(a.header)
		}
	}
	if err := r.Sim.Named("decode-0").SetFaults(fault.Set{}); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	stood := 0
	for i, a := range answers {
		if a.err != nil || a.status != http.StatusOK {
			t.Errorf("prompt %d: %v, %v", i, a.answer, a.err)
			continue
		}
		if got, want := a.completion(t).Choices[0].Text, direct(t, r.Sim.Named("decode-1").URL(), ids(200, i)); got != want {
			t.Errorf("prompt %d: wrong text %q, want %q", i, got, want)
		}
		for _, l := range r.receipt(a.header.Get("X-Dynctl-Decision")).Legs {
			if strings.Contains(l.Error, "no sign of life") {
				stood++
			}
		}
	}
	if stood == 0 {
		t.Error("no receipt shows an engine without a sign of life")
	}
	r.Router.Heal("decode-0")
	r.eventually("the engine that stood still", func() error {
		if w := r.worker("decode-0"); !w.Usable {
			return errors.New(w.Reason)
		}
		return nil
	})
	if err := r.Sim.Named("decode-0").SetFaults(fault.Set{Delay: fault.Duration(lease + lease/2)}); err != nil {
		t.Fatal(err)
	}
	a, _ := r.complete(ids(200, 50), "X-Dynctl-Worker", "decode-0")
	c := r.receipt(a.header.Get("X-Dynctl-Decision"))
	var failed error
	for _, l := range c.Legs {
		if l.Error != "" {
			failed = errors.Join(failed, errors.New(l.Error))
		}
	}
	if len(c.Legs) != 2 || failed != nil || a.header.Get("X-Dynctl-Path") != "remote" {
		t.Errorf("%d legs, %v, %v", len(c.Legs), failed, a.header)
	}
}
