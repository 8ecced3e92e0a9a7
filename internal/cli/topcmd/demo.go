package topcmd

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// demoFleet is small enough for a laptop and large enough to be interesting.
const demoFleet = "2p4d:dp=2,kv_blocks=2048,speed=2,auto_restart=8s"

// demoSessions is how many conversations run at a time.
const demoSessions = 40

// demo is a router with simulated engines under load in this process.
type demo struct {
	// URL is the admin address.
	URL  string
	rig  *loopback.Rig
	stop context.CancelFunc
	g    *errgroup.Group
}

// startDemo starts engines, router and load; Close ends them. profile is the engines'
// timing, empty for the default.
func startDemo(ctx context.Context, profile string) (*demo, error) {
	rig, err := loopback.Start(ctx, loopback.Options{Fleet: sim.WithProfile(demoFleet, profile), Configure: func(c *settings.Config) {
		c.Health.Interval, c.Health.Scrape = time.Second, 500*time.Millisecond
		c.Routing.Threshold.Tokens = 1024
	}})
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(ctx)
	d := &demo{URL: rig.AdminURL, rig: rig, stop: stop, g: &errgroup.Group{}}
	d.g.Go(func() error {
		// Clients come when the engines are up; one that never is, is no
		// reason to wait for longer.
		readyCtx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_ = rig.Ready(readyCtx)
		for i := range demoSessions {
			d.g.Go(func() error { d.sessions(ctx, rand.New(rand.NewPCG(uint64(i), 1))); return nil })
		}
		return nil
	})
	d.g.Go(func() error { d.faults(ctx); return nil })
	return d, nil
}

// Close ends the load, the router and the engines.
func (d *demo) Close() error {
	d.stop()
	_ = d.g.Wait() // the load has no errors of its own
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return d.rig.Close(ctx)
}

// sessions holds conversations one after the other: a system prompt that many
// share, turns that grow, and now and then a long document.
func (d *demo) sessions(ctx context.Context, rnd *rand.Rand) {
	for wait.For(ctx, time.Duration(rnd.ExpFloat64()*2*float64(time.Second))) {
		// The first system prompts are the popular ones.
		system := int(rnd.ExpFloat64() * 2)
		prompt := tokens(nil, 512+256*(system%5), rand.New(rand.NewPCG(uint64(system), 7)))
		if rnd.IntN(8) == 0 {
			prompt = tokens(prompt, 2000+rnd.IntN(4000), rnd) // a document
		}
		for range 1 + rnd.IntN(6) {
			prompt = tokens(prompt, 40+rnd.IntN(400), rnd)
			out := 16 + rnd.IntN(128)
			if d.complete(ctx, prompt, out) != nil {
				break
			}
			prompt = tokens(prompt, out, rnd) // the answer is part of the next turn
			if !wait.For(ctx, time.Duration(rnd.ExpFloat64()*float64(time.Second))) {
				return
			}
		}
	}
}

func tokens(prompt []int, n int, rnd *rand.Rand) []int {
	for range n {
		prompt = append(prompt, 100+rnd.IntN(20000))
	}
	return prompt
}

// complete streams one completion to its end.
func (d *demo) complete(ctx context.Context, prompt []int, out int) error {
	status, _, _, err := d.rig.Post(ctx, "/v1/completions", map[string]any{"model": sim.DefaultModel, "prompt": prompt, "max_tokens": out, "ignore_eos": true, "stream": true, "stream_options": map[string]bool{"include_usage": true}})
	if err == nil && status != http.StatusOK {
		err = errors.New(http.StatusText(status))
	}
	return err
}

// faults lets something go wrong every now and then, so that there is
// something to see: lost events, a slow engine, errors, a dead engine.
func (d *demo) faults(ctx context.Context) {
	for i := 0; wait.For(ctx, 20*time.Second); i++ {
		engines := d.rig.Sim.Engines()
		e := engines[(i*5+3)%len(engines)]
		switch i % 4 {
		case 0:
			_ = e.SetFaults(fault.Set{DropEvents: 0.3, For: fault.Duration(3 * time.Second)})
		case 1:
			_ = e.SetFaults(fault.Set{Slow: 6, For: fault.Duration(8 * time.Second)})
		case 2:
			_ = e.SetFaults(fault.Set{ErrorRate: 0.3, For: fault.Duration(6 * time.Second)})
		case 3:
			e.Kill() // it comes back by itself
			if !wait.For(ctx, 8*time.Second) {
				return
			}
			_ = e.Restart() // an engine that runs again says so, which is no harm
		}
	}
}
