package router_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/routertest"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// chaosTime is how long TestChaos runs: 6 s, or DYNCTL_CHAOS ("10m").
func chaosTime(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("DYNCTL_CHAOS")
	if text == "" {
		return 6 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("DYNCTL_CHAOS: %v", err)
	}
	return d
}

// chaosPrompts is how many prompts come again and again.
const chaosPrompts = 48

func chaosPrompt(n int) []int { return append(ids(160, n%6), ids(16+n*11, 100+n)...) }

// TestChaos: while engines are killed, restarted, hung, slowed, made to fail
// and to lose events, and clients hang up, no request fails before its first
// byte while another worker could serve it, no answer is wrong, and afterwards
// all books balance. One engine of each role is always left alone.
//
// internal/bench/soak is the long form with all kinds of load.
func TestChaos(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds; .ci/run runs it")
	}
	t.Parallel()
	for _, fleet := range []string{"2p3d:speed=20,kv_blocks=256", "2p3d:speed=20,kv_blocks=256,engine=sglang,bootstrap_wait=4s"} {
		t.Run(fleet, func(t *testing.T) {
			t.Parallel()
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			r := start(t, fleet, func(c *router.Config) {
				c.Routing.Threshold = 128
				c.Retry = router.RetryConfig{Attempts: 8, Budget: 1}
				c.Timeouts.Prefill, c.Timeouts.Response, c.Timeouts.Idle = 5*time.Second, 5*time.Second, 5*time.Second
				c.Health.Timeout = time.Second
			})
			oracle := start(t, strings.Replace("1a:profile=instant,engine=vllm", "vllm", string(r.Sim.Engine(0).Group().Engine), 1))
			want := make([]string, chaosPrompts)
			for i := range want {
				want[i] = direct(t, oracle.Sim.Engine(0).URL(), chaosPrompt(i))
			}

			ctx, stop := context.WithTimeout(t.Context(), chaosTime(t))
			defer stop()
			var wg sync.WaitGroup
			counts := &chaosCounts{}
			for c := range 8 {
				wg.Add(1)
				go func() {
					defer wg.Done()
					rng := rand.New(rand.NewPCG(seed, uint64(c)))
					for ctx.Err() == nil {
						r.chaosRequest(rng, want, counts)
					}
				}()
			}
			faults := r.unleash(ctx, rand.New(rand.NewPCG(seed, 99)))
			wg.Wait()

			// Everything is whole again. Without traffic nobody tries an ejected
			// worker.
			for _, e := range r.Sim.Engines() {
				r.Router.Heal(e.Name())
			}
			if err := r.Ready(r.wait()); err != nil {
				t.Error(err)
			}
			r.eventually("an empty ledger", r.Router.Balanced)
			// Fresh prompts turn every cache over. Before that the index may still
			// miss blocks: an engine tells the removal of one copy of a block as
			// that of the block (vLLM 0.32 does), and of copies at a prompt's
			// beginning the index knows nothing.
			for i := range 90 {
				r.complete(ids(400, int(seed%100_000)+1000+i))
			}
			if err := r.Synced(r.wait()); err != nil {
				t.Error(err)
				for _, e := range r.allEvents() {
					if strings.HasPrefix(e.Kind, "feed") {
						t.Log(e.At.Format(time.StampMilli), e.Kind, e.Text)
					}
				}
				for _, e := range r.Sim.Engines() {
					t.Logf("%+v", r.worker(e.Name()).Ranks[0].Feed)
				}
			}
			if v := r.metric("dynctl_ledger_double_releases_total"); v != 0 {
				t.Errorf("%v reservations were released twice", v)
			}
			if n := len(r.events("panic")); n != 0 {
				t.Errorf("%d panics", n)
			}
			counts.mu.Lock()
			defer counts.mu.Unlock()
			t.Logf("%d answers, %d cut after their first byte, %d left; %d faults", counts.good, counts.cut, counts.left, len(faults))
			if counts.good < 50 || len(faults) < 3 {
				t.Error("too little happened")
			}
			events := r.allEvents()
			for _, f := range faults {
				seen := false
				for _, e := range events {
					seen = seen || e.Worker == f.worker && !e.At.Before(f.from) && e.At.Before(f.to.Add(3*time.Second))
				}
				if !seen && f.mustShow {
					t.Errorf("%s of %s from %s to %s cannot be found in the events", f.kind, f.worker, f.from.Format(time.StampMilli), f.to.Format(time.StampMilli))
				}
			}
		})
	}
}

type chaosCounts struct {
	mu              sync.Mutex
	good, cut, left int
}

func (c *chaosCounts) add(n *int) {
	c.mu.Lock()
	*n++
	c.mu.Unlock()
}

func (r *rig) chaosRequest(rng *rand.Rand, want []string, counts *chaosCounts) {
	t := r.t
	n, stream, leave := rng.IntN(chaosPrompts), rng.IntN(2) == 0, rng.IntN(10) == 0
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	if leave {
		stop := time.AfterFunc(time.Duration(rng.IntN(30))*time.Millisecond, cancel)
		defer stop.Stop()
	}
	a, err := r.try(ctx, http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": chaosPrompt(n), "max_tokens": 12, "ignore_eos": true, "stream": stream}))
	if ctx.Err() != nil && leave {
		counts.add(&counts.left)
		return
	}
	if err != nil {
		t.Errorf("prompt %d: %v", n, err)
		return
	}
	if a.status != 200 {
		why := ""
		if raw, err := r.Admin.Decision(context.WithoutCancel(ctx), a.header.Get("X-Dynctl-Decision")); err == nil {
			for _, l := range gjson.GetBytes(raw, "legs").Array() {
				why += fmt.Sprintf("\n  attempt %s: %s on %s: %s", l.Get("attempt"), l.Get("kind"), l.Get("rank"), l.Get("error"))
			}
		}
		t.Errorf("a request failed though another worker was there: %s%s", a, why)
		return
	}
	text := ""
	if !stream {
		if a.err != nil {
			counts.add(&counts.cut)
			return
		}
		text = gjson.GetBytes(a.body, "choices.0.text").String()
	} else {
		failed := false
		for _, line := range bytes.Split(a.body, []byte("\n")) {
			if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
				failed = failed || gjson.GetBytes(data, "error").Exists()
				text += gjson.GetBytes(data, "choices.0.text").String()
			}
		}
		if a.err != nil || !bytes.HasSuffix(a.body, []byte("data: [DONE]\n\n")) {
			t.Errorf("a stream ended without a word: %q (%v)", a.body, a.err)
		}
		if failed { // told, after the first byte; what came before must be right
			if text == "" || !strings.HasPrefix(want[n], text) {
				t.Errorf("a stream with an error began with %q, want the beginning of %q", text, want[n])
			}
			counts.add(&counts.cut)
			return
		}
	}
	if text != want[n] {
		t.Errorf("prompt %d: wrong text %q, want %q (%v)", n, text, want[n], a.header)
	}
	counts.add(&counts.good)
}

type chaosFault struct {
	kind, worker string
	from, to     time.Time
	mustShow     bool
}

// unleash does one thing after the other until ctx ends. Each ends before the
// next begins, and the router knows it: every request always has an
// alternative.
func (r *rig) unleash(ctx context.Context, rng *rand.Rand) (done []chaosFault) {
	engines := r.Sim.Engines()
	for ctx.Err() == nil {
		e := engines[rng.IntN(len(engines))]
		f := chaosFault{worker: e.Name(), from: time.Now(), mustShow: true}
		var set fault.Set
		switch rng.IntN(9) {
		case 0, 1:
			f.kind = "kill"
		case 2:
			f.kind = "restart"
		case 3:
			f.kind, set.Refuse = "refuse", true
		case 4:
			f.kind, set.Hang = "hang", true
		case 5:
			f.kind, set.ErrorRate = "5xx", 1
		case 6:
			f.kind, set.DieRate, set.DieAfter = "die", 1, rng.IntN(6)
			// An answer that is shorter than what it is cut after is not cut, and a
			// prefill has one token.
			f.mustShow = set.DieAfter == 0 && e.Group().Role != workers.Prefill
		case 7:
			f.kind, set.DropEvents, set.ReorderEvents, set.CorruptEvents = "events", .3, .2, .2
		case 8:
			f.kind, set.Slow = "slow", 20
			f.mustShow = false // slow is not broken
		}
		before, batches := r.touchedOr(e.Name()), r.worker(e.Name()).Ranks[0].Feed.LastSeq
		switch f.kind {
		case "kill":
			e.Kill()
		case "restart":
			if err := e.Restart(); err != nil {
				r.t.Error(err)
			}
		default:
			if err := e.SetFaults(set); err != nil {
				r.t.Error(err)
			}
		}
		hold, cancel := context.WithTimeout(ctx, time.Duration(150+rng.IntN(250))*time.Millisecond)
		<-hold.Done()
		cancel()
		if f.kind == "kill" {
			if err := e.Restart(); err != nil {
				r.t.Error(err)
			}
		}
		if err := e.SetFaults(fault.Set{}); err != nil {
			r.t.Error(err)
		}
		// What nobody met shows nowhere.
		switch f.kind {
		case "5xx", "die", "hang":
			f.mustShow = f.mustShow && r.touchedOr(e.Name()) > before+8
		case "events":
			// Requests that find everything cached make no batch; of those that
			// are made, three in ten are left alone.
			f.mustShow = r.worker(e.Name()).Ranks[0].Feed.LastSeq > batches+16
		}
		f.to = time.Now()
		done = append(done, f)
		if err := routertest.Wait(r.wait(), e.Name(), func() error {
			w := r.worker(e.Name())
			// An ejected worker is back when it is needed: the router knows
			// nobody else then.
			if w.Health != "healthy" && w.Health != "ejected" {
				return fmt.Errorf("%s %s", w.Health, w.Reason)
			}
			if w.Ranks[0].Feed.State != "live" {
				return errors.New(w.Ranks[0].Feed.State)
			}
			return nil
		}); err != nil {
			r.t.Error(err)
		}
	}
	return done
}

// touchedOr is the number of requests that an engine has finished, 0 while it
// is down.
func (r *rig) touchedOr(name string) (n uint64) {
	s, err := r.Sim.Named(name).Counters()
	if err != nil {
		return 0
	}
	for i := range s {
		for _, k := range s[i].Finished {
			n += k
		}
	}
	return n
}
