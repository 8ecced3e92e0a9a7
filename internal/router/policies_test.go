package router_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// TestTurnsOfRoundRobin: a request has one turn in each phase, however
// many attempts it takes. With a turn for each attempt two attempts go round a
// fleet of an even number of ranks in step with it, and half of the ranks get
// all the work. A request that stays local takes no turn from the prefill ranks. If it did,
// requests that are local and remote in turns would load half of them only.
func TestTurnsOfRoundRobin(t *testing.T) {
	t.Parallel()
	r := start(t, "4p2d:profile=instant", func(c *settings.Config) {
		c.Routing.Policy, c.Routing.MissingParams = "round_robin", "local"
	})
	for i := range 4 {
		if err := r.Sim.Named(fmt.Sprint("prefill-", i)).SetFaults(fault.Set{EndRate: 1, EndReason: "length"}); err != nil {
			t.Fatal(err)
		}
	}
	check := func(requests int, prompt func(i int) []int, prefills, decodes int) {
		t.Helper()
		n := map[string]int{}
		for i := range requests {
			a, _ := r.complete(prompt(i))
			for _, l := range r.receipt(a.header.Get("X-Dynctl-Decision")).Legs {
				n[l.Worker]++
			}
		}
		want := map[string]int{"prefill-0": prefills, "prefill-1": prefills, "prefill-2": prefills, "prefill-3": prefills, "decode-0": decodes, "decode-1": decodes}
		if d := cmp.Diff(want, n); d != "" {
			t.Errorf("legs by worker, -want +got:\n%s", d)
		}
	}
	check(24, func(i int) []int { return ids(100, i) }, 6, 12)
	for i := range 4 {
		if err := r.Sim.Named(fmt.Sprint("prefill-", i)).SetFaults(fault.Set{}); err != nil {
			t.Fatal(err)
		}
	}
	r.set(func(c *settings.Config) { c.Routing.Threshold.Tokens, c.Routing.ThresholdOn = 50, "isl" })
	check(16, func(i int) []int { return ids(20+80*(i%2), 100+i) }, 2, 8)
}

// TestSessionsAndSleepers: a session stays on its rank, by header or by body field.
// Workers that sleep or are unhealthy are left out.
func TestSessionsAndSleepers(t *testing.T) {
	t.Parallel()
	r := start(t, "4a:profile=instant", func(c *settings.Config) { c.Routing.Policy = "session" })
	home := map[string]string{}
	for round := range 3 {
		for i := range 16 {
			s := fmt.Sprint("session-", i)
			body := object{"model": "sim", "prompt": ids(50, round*100+i), "max_tokens": 1}
			var a *answer
			if i%2 == 0 {
				a = r.post("/v1/completions", body, "X-Session-ID", s)
			} else {
				body["user"] = s
				a = r.post("/v1/completions", body)
			}
			rank := a.header.Get("X-Dynctl-Worker")
			if home[s] == "" {
				home[s] = rank
			}
			if home[s] != rank {
				t.Errorf("%s moved from %s to %s", s, home[s], rank)
			}
		}
	}
	used := map[string]bool{}
	for _, k := range home {
		used[k] = true
	}
	if len(used) < 3 {
		t.Errorf("16 sessions live on %d of 4 workers", len(used))
	}
	r.synced()
	if n := r.worker("aggregated-0").Ranks[0].IndexBlocks; n == 0 {
		t.Error("nothing is known of the cache of the worker that is to sleep")
	}
	// A worker that sleeps and one that does not answer its probes get nothing.
	r.set(func(c *settings.Config) { c.Routing.Policy = "round_robin" })
	q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.Sim.Named("aggregated-0").URL()+"/sleep", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := r.Client.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if err := r.Sim.Named("aggregated-1").SetFaults(fault.Set{Hang: true}); err != nil {
		t.Fatal(err)
	}
	r.eventually("the probes to see it", func() error {
		a, b := r.worker("aggregated-0"), r.worker("aggregated-1")
		if a.Usable || b.Usable {
			return fmt.Errorf("%s and %s", a.Health, b.Health)
		}
		// Its engine publishes that only with its next step.
		if n := a.Ranks[0].IndexBlocks; n != 0 {
			return fmt.Errorf("%d blocks of the worker that sleeps are known", n)
		}
		return nil
	})
	for i := range 6 {
		if a, _ := r.complete(ids(20, i)); a.header.Get("X-Dynctl-Worker") != "aggregated-2/dp0" && a.header.Get("X-Dynctl-Worker") != "aggregated-3/dp0" {
			t.Errorf("went to %s", a.header.Get("X-Dynctl-Worker"))
		}
	}
}

// busyThresholds: ranks over a limit get nothing; when all are and no request
// may wait, the client is refused with a time to come back.
func busyThresholds(t *testing.T, r *rig, p *tap, _ *onDecision) {
	r.set(func(c *settings.Config) {
		c.Routing.Busy.PrefillTokens = 100
		c.Routing.Policy, c.Limits.Queue = "round_robin", 0
	})
	_, release := p.blockEngines()
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if a, err := r.try(t.Context(), http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(200, i), "max_tokens": 1})); err != nil || a.status != 200 {
				t.Errorf("%v %v", a, err)
			}
		}()
		r.eventually("a busy rank", func() error {
			if n := len(p.callsOf("/v1/completions")); n != i+1 {
				return fmt.Errorf("%d calls", n)
			}
			return nil
		})
	}
	a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(200, 9), "max_tokens": 1}))
	a.refused(t, http.StatusTooManyRequests, "overloaded")
	if a.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	c := r.receipt(a.header.Get("X-Dynctl-Decision"))
	for _, k := range c.Decode.Candidates {
		if k.Excluded == "" {
			t.Errorf("%s stands in the receipt without a reason", k.Rank)
		}
	}
	release()
	wg.Wait()
	r.complete(ids(200, 10))
}

// TestSteeringHeaders: where the operator allows it, clients choose path,
// workers and rank; a wrong choice is an error.
func TestSteeringHeaders(t *testing.T) {
	t.Parallel()
	r := start(t, "2p2d:profile=instant,dp=2", func(c *settings.Config) { c.Routing.AllowHeaders = true; c.Routing.Threshold.Tokens = 100 })
	for i, c := range []struct{ path, decode, prefill, rank, wantPath string }{
		{"remote", "decode-1", "prefill-1", "1", "remote"}, {"local", "decode-0", "", "0", "local"}, {"auto", "decode-0", "prefill-0", "1", "remote"},
	} {
		a, _ := r.complete(ids(200, i), "X-Dynctl-Path", c.path, "X-Dynctl-Worker", c.decode, "X-Dynctl-Prefill-Worker", c.prefill, "X-data-parallel-rank", c.rank)
		if a.header.Get("X-Dynctl-Path") != c.wantPath || a.header.Get("X-Dynctl-Worker") != c.decode+"/dp"+c.rank || c.wantPath == "remote" && !strings.HasPrefix(a.header.Get("X-Dynctl-Prefill-Worker"), c.prefill) {
			t.Errorf("%+v went %s on %s from %s", c, a.header.Get("X-Dynctl-Path"), a.header.Get("X-Dynctl-Worker"), a.header.Get("X-Dynctl-Prefill-Worker"))
		}
	}
	body := []byte(`{"model":"sim","prompt":"x"}`)
	r.send(http.MethodPost, "/v1/completions", body, "X-Dynctl-Path", "sideways").refused(t, 400, "invalid_request")
	r.send(http.MethodPost, "/v1/completions", body, "X-Dynctl-Worker", "nobody").refused(t, 404, "worker_not_found")
	r.send(http.MethodPost, "/v1/completions", body, "X-data-parallel-rank", "minus").refused(t, 400, "invalid_request")
	if a := r.send(http.MethodPost, "/v1/completions", body, "X-data-parallel-rank", "9"); a.status != 503 {
		t.Errorf("a rank that is not there: %s", a)
	}
	r.set(func(c *settings.Config) { c.Routing.Threshold.Tokens = 0 })
	carries(t, r)
}
