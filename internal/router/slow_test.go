package router_test

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// TestSlowEngineIsNamed: of four engines under load one becomes ten times slower;
// it is named, in events and in the fleet's description, and no other is.
func TestSlowEngineIsNamed(t *testing.T) {
	if testing.Short() {
		t.Skip("takes half a minute of load")
	}
	r := start(t, "4a")
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer cancel()
	for i := range 16 {
		clients.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				body := encode(t, object{"model": "sim", "prompt": ids(100+i, 1000*i+n), "max_tokens": 60, "ignore_eos": true, "stream": true})
				if a, err := r.try(ctx, http.MethodPost, "/v1/completions", body); err == nil && a.status != http.StatusOK && ctx.Err() == nil {
					t.Errorf("%s", a)
					return
				}
			}
		})
	}
	ranks := func() map[string]admin.Rank {
		l, err := r.Admin.Workers(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]admin.Rank{}
		for _, w := range l.Workers {
			out[w.Name] = w.Ranks[0]
		}
		return out
	}
	// A past of some seconds.
	until := time.Now().Add(15 * time.Second)
	r.eventually("figures of all ranks", func() error {
		for name, k := range ranks() {
			if k.ITL == nil || k.TTFT == nil || k.OutputRate == nil || *k.OutputRate <= 0 {
				return fmt.Errorf("%s: ITL %v, TTFT %v, output %v", name, k.ITL, k.TTFT, k.OutputRate)
			}
			if k.Slow != nil {
				t.Fatalf("%s is slow: %+v", name, k.Slow)
			}
		}
		if time.Now().Before(until) {
			return fmt.Errorf("the past is short")
		}
		return nil
	})
	if err := r.Sim.Named("aggregated-2").SetFaults(fault.Set{Slow: 10}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	r.eventually("the slow one is named", func() error {
		if ranks()["aggregated-2"].Slow == nil {
			return fmt.Errorf("it is not")
		}
		return nil
	})
	t.Logf("named after %s", time.Since(began).Round(time.Millisecond))
	for name, k := range ranks() {
		if (k.Slow != nil) != (name == "aggregated-2") {
			t.Errorf("%s: %+v", name, k.Slow)
		}
	}
	e, err := r.Admin.Events(t.Context(), 0, 200, 0)
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for _, e := range e.Events {
		if e.Kind == "rank_slow" {
			if named++; e.Worker != "aggregated-2" {
				t.Errorf("%s: %s", e.Worker, e.Text)
			}
		}
	}
	if named == 0 {
		t.Error("no event")
	}
}
