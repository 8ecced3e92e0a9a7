package router_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/soak"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// chaosTurns is how often TestChaos does everything to an engine of each role,
// and the seed: once and always the same, or by `make soak` DYNCTL_CHAOS times
// from a seed of its own.
func chaosTurns(t *testing.T) (turns int, seed uint64) {
	t.Helper()
	text := os.Getenv("DYNCTL_CHAOS")
	if text == "" {
		return 1, 1
	}
	turns, err := strconv.Atoi(text)
	if err != nil || turns < 1 {
		t.Fatalf("DYNCTL_CHAOS: %q is no number of turns", text)
	}
	if text = os.Getenv("DYNCTL_SOAK_SEED"); text == "" {
		return turns, uint64(time.Now().UnixNano())
	}
	if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
		t.Fatalf("DYNCTL_SOAK_SEED: %v", err)
	}
	return turns, seed
}

// chaosPrompts is how many prompts come again and again.
const chaosPrompts = 48

func chaosPrompt(n int) []int { return append(ids(160, n%6), ids(16+n*11, 100+n)...) }

// TestChaos: while engines are killed, restarted, hung, slowed, made to fail
// and to lose events, and clients hang up, no request fails before its first
// byte while another worker could serve it, no answer is wrong, and afterwards
// all counts balance. One engine of each role is always left alone.
//
// internal/rig/soak is the long form with all kinds of load.
func TestChaos(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds; .ci/run runs it")
	}
	t.Parallel()
	turns, seed := chaosTurns(t)
	for _, fleet := range []string{"2p3d:speed=20,kv_blocks=256,lease=2s", "2p3d:speed=20,kv_blocks=256,lease=2s,engine=sglang,bootstrap_wait=4s"} {
		t.Run(fleet, func(t *testing.T) {
			t.Parallel()
			t.Logf("seed %d", seed)
			r := &chaosRig{rig: start(t, fleet, func(c *settings.Config) {
				c.Routing.Threshold.Tokens, c.Routing.AllowHeaders = 128, true
				c.Retry = settings.Retry{Attempts: 8, Budget: 1}
				c.Timeouts.Prefill, c.Timeouts.Response, c.Timeouts.Idle = 5*time.Second, 5*time.Second, 5*time.Second
				// The lease is shorter than an engine hangs.
				c.Health.Interval, c.Health.Timeout, c.Timeouts.KVLease = 200*time.Millisecond, 3*time.Second, 2*time.Second
			})}
			want := make([]string, chaosPrompts)
			for i := range want {
				want[i] = right(chaosPrompt(i))
			}

			ctx, stop := context.WithCancel(t.Context())
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
			rng, faults := rand.New(rand.NewPCG(seed, 99)), 0
			for range turns {
				for _, f := range r.turn(rng) {
					r.strike(f, rng)
					faults++
				}
			}
			stop()
			wg.Wait()

			// Everything is whole again. Without traffic no request tries an
			// ejected worker.
			for _, e := range r.Sim.Engines() {
				r.Router.Heal(e.Name())
			}
			if err := r.Ready(r.wait()); err != nil {
				t.Error(err)
			}
			r.eventually("an empty ledger", r.Router.Balanced)
			// Fresh prompts turn every cache over. Before that the index may still
			// miss blocks: an engine publishes the removal of one copy of a block
			// as that of the block (vLLM 0.32 does), and of copies at a prompt's
			// beginning the index knows nothing. Blocks of a transfer that were
			// not fetched keep their place until its lease ends.
			for i := 0; i < 3 && soak.IndexDiffers(r.Rig) != nil; i++ {
				r.eventually("the end of all transfers", r.unpinned)
				for _, e := range r.Sim.Engines() {
					for range 12 {
						if a, err := r.poke(t.Context(), e, 400); err != nil || a.status != http.StatusOK {
							t.Fatalf("%s: %v, %v", e.Name(), a, err)
						}
					}
				}
			}
			if err := soak.IndexSynced(r.wait(), r.Rig); err != nil {
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
			t.Logf("%d answers, %d cut after their first byte, %d taken for too long, %d left; %d faults", counts.good, counts.cut, counts.late, counts.left, faults)
			if counts.good == 0 {
				t.Error("nothing was answered")
			}
		})
	}
}

type chaosRig struct {
	*rig
	pokes int // prompts of poke, which all differ
	// running is held for reading by every request. A request that has met one
	// fault must not meet the next one, too: it would have no alternative.
	running sync.RWMutex
}

type chaosCounts struct {
	mu                    sync.Mutex
	good, cut, late, left int
}

func (c *chaosCounts) add(n *int) {
	c.mu.Lock()
	*n++
	c.mu.Unlock()
}

func (r *chaosRig) chaosRequest(rng *rand.Rand, want []string, counts *chaosCounts) {
	t := r.t
	n, stream, leave := rng.IntN(chaosPrompts), rng.IntN(2) == 0, rng.IntN(10) == 0
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	if leave {
		stop := time.AfterFunc(time.Duration(rng.IntN(30))*time.Millisecond, cancel)
		defer stop.Stop()
	}
	r.running.RLock()
	a, err := r.try(ctx, http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": chaosPrompt(n), "max_tokens": 12, "ignore_eos": true, "stream": stream}))
	r.running.RUnlock()
	if ctx.Err() != nil && leave {
		counts.add(&counts.left)
		return
	}
	if err != nil {
		t.Errorf("prompt %d: %v", n, err)
		return
	}
	// An engine that hangs for as long as timeouts.response answers a probe again when the router
	// gives its answer up, which then looks like one that takes too long (docs/reliability.md).
	if !stream && a.status == http.StatusGatewayTimeout && bytes.Contains(a.body, []byte("raise timeouts.response")) {
		counts.add(&counts.late)
		return
	}
	if a.status != 200 {
		why := ""
		if raw, err := r.Admin.Decision(context.WithoutCancel(ctx), a.header.Get("X-Dynctl-Decision")); err == nil {
			for l := range rawjson.Value(raw).Get("legs").Elements() {
				why += fmt.Sprintf("\n  attempt %s: %s on %s: %s", l.Get("attempt"), l.Get("kind"), l.Get("rank"), l.Get("error"))
			}
			why += fmt.Sprintf("\n  notes: %s\n  prefill: %s\n  decode: %s", rawjson.Value(raw).Get("notes"), rawjson.Value(raw).Get("prefill"), rawjson.Value(raw).Get("decode"))
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
		text = rawjson.Value(a.body).Get("choices.0.text").String()
	} else {
		failed := false
		for _, line := range bytes.Split(a.body, []byte("\n")) {
			if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
				failed = failed || rawjson.Value(data).Get("error").Exists()
				text += rawjson.Value(data).Get("choices.0.text").String()
			}
		}
		if a.err != nil || !bytes.HasSuffix(a.body, []byte("data: [DONE]\n\n")) {
			t.Errorf("a stream ended without [DONE]: %q (%v)", a.body, a.err)
		}
		if failed { // with an error event, after the first byte; what came before must be right
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

// chaosFault is one thing that is done to an engine.
type chaosFault struct {
	kind   string
	engine *sim.Engine
	set    fault.Set
}

// turn is everything that can be done to an engine, once for each role, in any
// order.
func (r *chaosRig) turn(rng *rand.Rand) (out []chaosFault) {
	roles := map[workers.Role][]*sim.Engine{}
	for _, e := range r.Sim.Engines() {
		roles[e.Group().Role] = append(roles[e.Group().Role], e)
	}
	for _, role := range []workers.Role{workers.Prefill, workers.Decode} {
		die := fault.Set{DieRate: 1}
		if role == workers.Decode { // a prefill has one token only
			die.DieAfter = rng.IntN(6)
		}
		for _, f := range []chaosFault{
			{kind: loopback.Kill}, {kind: loopback.Restart}, {kind: loopback.Refuse, set: fault.Set{Refuse: true}},
			{kind: loopback.Hang, set: fault.Set{Hang: true}}, {kind: loopback.Errors, set: fault.Set{ErrorRate: 1}},
			{kind: loopback.Die, set: die}, {kind: loopback.Slow, set: fault.Set{Slow: 20}},
			{kind: loopback.Drop, set: fault.Set{DropEvents: .3}},
			{kind: loopback.Corrupt, set: fault.Set{DropEvents: .3, ReorderEvents: .2, CorruptEvents: .2}},
			{kind: loopback.Lose, set: fault.Set{LoseEvents: .3}},
			{kind: loopback.Replay, set: fault.Set{DropEvents: .3, DropReplay: .3}},
		} {
			f.engine = roles[role][rng.IntN(len(roles[role]))]
			out = append(out, f)
		}
	}
	rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// strike does one thing to an engine until an operator can see it in the
// events, and waits until the router knows that it is over: every request
// always has an alternative. A fault that no request meets shows
// nowhere, so it sends requests of its own.
func (r *chaosRig) strike(f chaosFault, rng *rand.Rand) {
	e, from := f.engine, time.Now()
	switch f.kind {
	case loopback.Kill:
		e.Kill()
	case loopback.Restart:
		if err := e.Restart(); err != nil {
			r.t.Error(err)
		}
	default:
		if err := e.SetFaults(f.set); err != nil {
			r.t.Error(err)
		}
	}
	enough := from.Add(time.Duration(50+rng.IntN(200)) * time.Millisecond)
	if err := loopback.Wait(r.wait(), "an event of "+f.kind+" of "+e.Name(), func() error {
		if f.kind != loopback.Slow { // slow is not broken
			if !slices.ContainsFunc(r.allEvents(), func(v admin.Event) bool {
				return v.Worker == e.Name() && !v.At.Before(from) && slices.Contains(loopback.Shows[f.kind], v.Kind)
			}) {
				ctx, cancel := context.WithTimeout(r.t.Context(), time.Second)
				defer cancel()
				_, _ = r.poke(ctx, e, 200) // that it fails is the purpose
				return errors.New("there is none")
			}
		}
		if time.Now().Before(enough) {
			return errors.New("it has only begun")
		}
		return nil
	}); err != nil {
		r.t.Error(err)
	}
	if f.kind == loopback.Kill {
		if err := e.Restart(); err != nil {
			r.t.Error(err)
		}
	}
	if err := e.SetFaults(fault.Set{}); err != nil {
		r.t.Error(err)
	}
	r.calm()
	if err := loopback.Wait(r.wait(), e.Name(), func() error {
		w := r.worker(e.Name())
		// An ejected worker is back when it is needed: there is
		// no other then.
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

// calm waits for the requests that are under way.
func (r *chaosRig) calm() {
	r.running.Lock()
	defer r.running.Unlock()
}

// poke sends a fresh prompt that must pass one engine.
func (r *chaosRig) poke(ctx context.Context, e *sim.Engine, tokens int) (*answer, error) {
	r.pokes++
	header := "X-Dynctl-Worker"
	if e.Group().Role == workers.Prefill {
		header = "X-Dynctl-Prefill-Worker"
	}
	return r.try(ctx, http.MethodPost, "/v1/completions",
		encode(r.t, object{"model": "sim", "prompt": ids(tokens, r.pokes+1000), "max_tokens": 12, "ignore_eos": true}), header, e.Name())
}

// unpinned says which engines hold blocks for requests or transfers.
func (r *chaosRig) unpinned() error {
	var errs []error
	for _, e := range r.Sim.Engines() {
		stats, err := e.Counters()
		if err != nil {
			return err
		}
		for _, k := range stats {
			if k.Running+k.Waiting+k.Pinned > 0 {
				errs = append(errs, fmt.Errorf("%s: %d running, %d waiting, %d pinned", e.Name(), k.Running, k.Waiting, k.Pinned))
			}
		}
	}
	return errors.Join(errs...)
}
