package live_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/bench/live"
	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rig/loopbacktest"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// stand is a router with simulated engines and a bench in front of it.
func stand(t *testing.T, o loopback.Options, headers bool) (*loopback.Rig, *live.Bench) {
	t.Helper()
	o.Configure = func(c *settings.Config) {
		c.Routing.AllowHeaders = headers
		c.Routing.PrefillFallback = "error"
	}
	g := loopbacktest.Start(t, o)
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
	defer cancel()
	if err := g.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	tgt, err := fleet.New(ctx, g.Admin, fleet.Options{URL: g.URL})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tgt.Close)
	facts, err := tgt.Describe(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	pool, _ := tgt.Pool(ctx, facts.Model)
	return g, &live.Bench{
		Target: tgt, Facts: facts, Pool: pool, Patience: 10 * time.Second,
		Spec: plan.Spec{ISL: []int{64, 256}, OSL: 4, Salt: t.Name(), Seed: 1, Arrival: "constant"},
	}
}

func cell(arm plan.Arm, eff, cached, n int) plan.Cell {
	return plan.Cell{ID: "test/" + string(arm), EffISL: eff, CachedTokens: cached, OSL: 4, Load: plan.Load{Concurrency: 2}, Arm: arm, Requests: n, Ramp: 2}
}

func TestArmsAreForcedAndProven(t *testing.T) {
	_, b := stand(t, loopback.Options{Fleet: "1p1d:profile=cpu,speed=20"}, true)
	for _, arm := range []plan.Arm{plan.Local, plan.Remote} {
		m, err := b.Measure(t.Context(), cell(arm, 200, 0, 8))
		if err != nil {
			t.Fatal(err)
		}
		want := *m
		want.Requests, want.Failed, want.PathOK, want.ExactISL, want.ExactOSL = 8, 0, 8, 8, 8
		if d := cmp.Diff(want, *m, cmpopts.EquateNaNs()); d != "" {
			t.Errorf("%s, with errors %v (-want +got):\n%s", arm, m.Errors, d)
		}
		if m.HitShare == nil || *m.HitShare != 0 {
			t.Errorf("%s: fresh prompts found a share cached: %v", arm, m.HitShare)
		}
		if m.Stages.Router == nil || m.Stages.Prefill == nil || (arm == plan.Remote) != (m.Stages.Transfer != nil) {
			t.Errorf("%s: stages %+v", arm, m.Stages)
		}
		if arm == plan.Remote && (m.TransferTokens == nil || *m.TransferTokens < m.ExpectedTransferTokens) {
			t.Errorf("moved %v of %v tokens", m.TransferTokens, m.ExpectedTransferTokens)
		}
	}
}

func TestCachedShareIsWhatItShouldBe(t *testing.T) {
	_, b := stand(t, loopback.Options{Fleet: "1p2d:profile=instant,dp=2"}, true)
	for _, arm := range []plan.Arm{plan.Local, plan.Remote} {
		m, err := b.Measure(t.Context(), cell(arm, 256, 256, 6))
		if err != nil {
			t.Fatal(err)
		}
		if m.HitShare == nil || math.Abs(*m.HitShare-0.5) > 0.02 || m.ExpectedHit != 0.5 {
			t.Errorf("%s: hit share %v, expected %v", arm, *m.HitShare, m.ExpectedHit)
		}
	}
}

func TestRouterWithoutTheHeader(t *testing.T) {
	_, b := stand(t, loopback.Options{Fleet: "1p1d:profile=instant"}, false)
	if _, _, err := b.Preflight(t.Context()); !errors.Is(err, live.ErrNotForced) {
		t.Errorf("%v", err)
	}
}

// The simulated engine is never faster than its profile. On a busy machine the
// difference between the two ends of the grid may be less than the noise, and then
// they are estimated alike.
func TestPreflightEstimates(t *testing.T) {
	_, b := stand(t, loopback.Options{Fleet: "1p1d:profile=cpu"}, true)
	b.Spec.ISL = []int{100} // one length is sent once: a second prompt like it is cached
	checks, _, err := b.Preflight(t.Context())
	if err != nil || len(checks) != 2 || !checks[0].OK || !checks[1].OK {
		t.Fatal(err, checks)
	}
	b.Spec.ISL = []int{64, 2048}
	checks, seconds, err := b.Preflight(t.Context())
	if err != nil || len(checks) != 4 {
		t.Fatal(err, checks)
	}
	profile, _ := engine.BuiltinProfile("cpu")
	ttft := func(isl float64) float64 { // seconds
		return (profile.Prefill[0] + profile.Prefill[1]*isl + profile.Prefill[2]*isl*isl) / 1000
	}
	for _, arm := range []plan.Arm{plan.Local, plan.Remote} {
		small, large := seconds(cell(arm, 64, 0, 10)), seconds(cell(arm, 2048, 0, 10))
		if least := 12 * ttft(2048); large < least {
			t.Errorf("%s: %.2f s for 12 prompts of 2048 tokens, of which the prefills alone take %.2f", arm, large, least)
		}
		if small < 12*ttft(64) || small > large {
			t.Errorf("%s: %.2f s for prompts of 64 tokens, %.2f for 2048", arm, small, large)
		}
	}
}

// A worker that dies in the middle of a cell makes the cell void, also when it
// is back before the cell ends, and the next cell finds it whole again.
func TestLostWorkerVoidsTheCell(t *testing.T) {
	g, b := stand(t, loopback.Options{Fleet: "1p1d:profile=cpu"}, true)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	e := g.Sim.Named("decode-0")
	killed, failed := false, make(chan struct{})
	var fail sync.Once
	b.OnResult = func(_ plan.Cell, r *loadgen.Result) {
		if !killed {
			killed = true
			e.Kill()
		}
		if r.Err != "" {
			fail.Do(func() { close(failed) })
		}
	}
	restarted := make(chan error, 1)
	go func() {
		// It comes back after a request met its absence and the router saw it.
		select {
		case <-failed:
		case <-ctx.Done():
		}
		restarted <- loopback.Wait(ctx, "the router to see that decode-0 is gone", func() error {
			l, err := g.Admin.Workers(ctx)
			if err != nil {
				return err
			}
			if i := slices.IndexFunc(l.Workers, func(w admin.Worker) bool { return w.Name == "decode-0" }); l.Workers[i].Usable {
				return errors.New("it is usable")
			}
			return e.Restart()
		})
	}()
	_, err := b.Measure(ctx, cell(plan.Local, 400, 0, 30))
	if err := <-restarted; err != nil {
		t.Fatal(err)
	}
	var void *experiment.VoidError
	if !errors.As(err, &void) || !strings.Contains(void.Reason, "decode-0") {
		t.Errorf("%v, want a void cell for decode-0", err)
	}
	b.OnResult = nil
	m, err := b.Measure(ctx, cell(plan.Local, 100, 0, 3))
	if err != nil {
		t.Fatalf("after it came back: %v", err)
	}
	if m.Requests != 3 || m.Failed > 0 {
		t.Errorf("after it came back: %d requests, %d failed %v", m.Requests, m.Failed, m.Errors)
	}
}

// A worker that was away and is back before the cell ends, without a request
// that failed: only the router's events and the engine's counters show it.
func TestWorkerThatIsBackVoidsTheCell(t *testing.T) {
	g, b := stand(t, loopback.Options{Fleet: "1p1d:profile=cpu"}, true)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	e := g.Sim.Named("prefill-0")
	if m, err := b.Measure(ctx, cell(plan.Remote, 64, 0, 2)); err != nil || m.Failed > 0 {
		t.Fatal(err)
	}
	bounced := false
	b.OnResult = func(plan.Cell, *loadgen.Result) {
		if bounced {
			return
		}
		bounced = true
		e.Kill()
		if err := e.Restart(); err != nil {
			t.Error(err)
		}
	}
	_, err := b.Measure(ctx, cell(plan.Local, 64, 0, 4)) // the prefill engine has no part in it
	var void *experiment.VoidError
	if !errors.As(err, &void) || !strings.Contains(void.Reason, "prefill-0") {
		t.Errorf("%v, want a void cell for prefill-0", err)
	}
}

func TestCancelledCell(t *testing.T) {
	_, b := stand(t, loopback.Options{Fleet: "1p1d:profile=mocker"}, true)
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	if _, err := b.Measure(ctx, cell(plan.Local, 256, 0, 1000)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

// runGates runs a small experiment and names the gates that failed. Where id is set, all cells
// are measured by that name, and so with the same prompts.
func runGates(t *testing.T, b *live.Bench, change func(*plan.Spec), id string) (*experiment.Result, []string) {
	t.Helper()
	s := plan.Spec{
		Schema: plan.Schema, ISL: []int{64, 128, 256}, OSL: 4, Loads: []plan.Load{{Concurrency: 1}}, Cached: []float64{0}, Repeats: 3, MaxRepeats: 3,
		Requests: 4, Level: 0.95, Objective: "ttft", Seed: 1, Salt: t.Name(), NoRefine: true, Arrival: "constant",
	}
	if change != nil {
		change(&s)
	}
	b.Spec = s
	start := time.Now()
	measure := func(ctx context.Context, c plan.Cell) (*experiment.Measure, error) {
		if id != "" {
			c.ID = id
		}
		return b.Measure(ctx, c)
	}
	r := &experiment.Runner{Spec: s, Block: b.Facts.Block, Measure: measure, Now: func() time.Duration { return time.Since(start) }}
	res, err := r.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var bad []string
	for _, g := range res.Gates {
		if g.Passed != nil && !*g.Passed {
			bad = append(bad, g.Name)
		}
	}
	return res, bad
}

// The broken set-ups over real sockets; each must fail at least its own gate
// and leave no recommendation.
func TestBrokenSetUps(t *testing.T) {
	if testing.Short() {
		t.Skip("runs whole experiments")
	}
	for _, c := range []struct {
		gate    string
		options loopback.Options
		prepare func(t *testing.T, g *loopback.Rig, b *live.Bench)
		spec    func(*plan.Spec)
		id      string
	}{
		{gate: "cache", options: loopback.Options{Fleet: "1p1d:profile=cpu,speed=10"}, id: "same"},
		{
			gate: "client", options: loopback.Options{Fleet: "1p1d:profile=cpu,speed=10"},
			// Ten times as much is planned as the one slot of the client can send.
			spec: func(s *plan.Spec) {
				s.Loads, s.Cap, s.Requests = []plan.Load{{Rate: 1000}}, 1, 20
				s.ISL, s.Repeats, s.MaxRepeats = []int{64, 128}, 2, 2
			},
		},
		{
			gate: "transfer",
			options: loopback.Options{Fleet: "1p1d:connector=none,profile=cpu,speed=10", Specs: func(s []workers.Spec) []workers.Spec {
				for i := range s {
					s[i].Connector = workers.ConnectorSharedStorage
				}
				return s
			}},
		},
		{
			gate: "drift", options: loopback.Options{Fleet: "1p1d:profile=cpu,speed=4"},
			prepare: func(t *testing.T, g *loopback.Rig, b *live.Bench) {
				// Far more than a busy machine drifts by itself.
				n := 0.0
				b.OnResult = func(plan.Cell, *loadgen.Result) {
					n++
					for _, e := range g.Sim.Engines() {
						if err := e.SetFaults(fault.Set{Slow: 1 + n/6}); err != nil {
							t.Error(err)
						}
					}
				}
			},
		},
	} {
		t.Run(c.gate, func(t *testing.T) {
			g, b := stand(t, c.options, true)
			if c.prepare != nil {
				c.prepare(t, g, b)
			}
			res, bad := runGates(t, b, c.spec, c.id)
			named := slices.ContainsFunc(bad, func(g string) bool { return strings.Contains(g, c.gate) })
			// On a starved machine the drift may drown: then its gate must say that it
			// cannot judge. That it judges otherwise is proven in virtual time (package
			// experiment).
			named = named || c.gate == "drift" && slices.ContainsFunc(res.Gates, func(g experiment.Gate) bool { return g.Name == c.gate && g.Passed == nil })
			if !named || res.Valid || res.Recommend != nil {
				t.Errorf("failed gates %v, want %s; valid %v, recommendation %v", bad, c.gate, res.Valid, res.Recommend)
			}
		})
	}
}
