package serving_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// silence makes workers ones that answer no probe, though their ports take connections.
func silence(r *fakeengine.Router, prefix string) {
	for _, w := range r.Registry.Snapshot().Workers {
		if strings.HasPrefix(w.Name, prefix) {
			w.State.SetCondition(workers.Condition{Health: workers.Unhealthy, Reason: "no answer", Since: time.Now(), Silent: true})
		}
	}
}

// TestOnlySilentWorkers: where no worker of a phase is healthy, but ports answer, a request
// goes to one of them, and the receipt and an event show that.
func TestOnlySilentWorkers(t *testing.T) {
	for _, c := range []struct{ fleet, silent string }{{"2a", "aggregated"}, {"1p2d", "decode"}, {"2p1d", "prefill"}, {"2p1d sglang", "prefill"}} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", c.fleet, stream), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := fakeengine.New(t, c.fleet, func(s *settings.Config) { s.Routing.PrefillFallback = "error" })
					silence(r, c.silent)
					if got := r.Send(t.Context(), ask(stream, "")); !whole(got, stream) || !strings.Contains(notes(got), "answers no probe") {
						t.Errorf("%s: %q", got, got.Receipt.Notes)
					}
					if n := len(r.Events("silent_worker_used")); n != 1 {
						t.Errorf("%d events", n)
					}
				})
			})
		}
	}
}

// live has workers whose names have a prefix show a sign of life every second, until ctx ends.
func live(ctx context.Context, r *fakeengine.Router, prefix string) {
	for ctx.Err() == nil {
		for _, w := range r.Registry.Snapshot().Workers {
			if strings.HasPrefix(w.Name, prefix) {
				w.State.Life().Sign(time.Now())
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// TestHungEngine: a leg of which the client has no byte is given up when its worker has shown
// no sign of life for twice the time of a probe, in each phase, wherever the answer has got
// to; once in a request, for a worker to go to, and within the budget.
func TestHungEngine(t *testing.T) {
	const long = 5 * time.Minute
	begun := fakeengine.Stream(": hello\n\n").Then(1, fakeengine.Piece{Wait: fakeengine.Never})
	half := fakeengine.JSON(200, "{").Then(1, fakeengine.Piece{Wait: fakeengine.Never})
	for _, c := range []struct {
		name, fleet string
		hang        string // workers that hang from their first request on
		answer      fakeengine.Answer
		alive       bool // they show signs of life
		budget      float64
		stream      string // "only" or "no"
		took        time.Duration
		status      int
		givenUp     string // the worker whose leg is given up
		note        string
	}{
		{name: "whole", fleet: "2a", hang: "aggregated-0", took: 4 * time.Second, givenUp: "aggregated-0"},
		{name: "after the head", fleet: "2a", hang: "aggregated-0", answer: begun, stream: "only", took: 4 * time.Second, givenUp: "aggregated-0"},
		{name: "in the body", fleet: "2a", hang: "aggregated-0", answer: half, stream: "no", took: 4 * time.Second, givenUp: "aggregated-0"},
		{name: "prefill", fleet: "2p1d", hang: "prefill-0", took: 4 * time.Second, givenUp: "prefill-0"},
		{name: "only prefill", fleet: "1p1d", hang: "prefill-0", took: 4 * time.Second, givenUp: "prefill-0", note: "fallback to local prefill"},
		{name: "decode", fleet: "1p2d", hang: "decode-0", took: 4 * time.Second, givenUp: "decode-0"},
		{name: "prefill beside", fleet: "2p1d sglang", hang: "prefill-0", took: 4 * time.Second, givenUp: "prefill-0"},
		{name: "decode beside", fleet: "1p2d sglang", hang: "decode-0", took: 4 * time.Second, givenUp: "decode-0"},
		{name: "signs of life", fleet: "2a", hang: "aggregated-0", alive: true, took: long},
		{name: "prefill with signs of life", fleet: "2p1d", hang: "prefill-0", alive: true, took: long},
		{name: "no other worker", fleet: "1a", hang: "aggregated", took: long, status: 504},
		{name: "no budget", fleet: "2a", hang: "aggregated-0", budget: -1, took: 12 * time.Second, givenUp: "aggregated-0"},
		{name: "all hang", fleet: "3a", hang: "aggregated", took: long + 4*time.Second, status: 504, givenUp: "aggregated-0", note: attempt.NoMoreLost},
	} {
		for _, stream := range []bool{false, true} {
			if c.stream == "only" && !stream || c.stream == "no" && stream {
				continue
			}
			t.Run(fmt.Sprintf("%s/%v", c.name, stream), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := fakeengine.New(t, c.fleet, func(s *settings.Config) {
						s.Timeouts.Prefill, s.Timeouts.Response, s.Timeouts.Idle, s.Retry.Budget = long, long, long, max(0, c.budget)
					})
					r.Legs.Silence = 4 * time.Second
					r.Alive = func(w *workers.Worker) bool { return c.alive || !strings.HasPrefix(w.Name, c.hang) }
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					if c.alive {
						go live(ctx, r, "")
					}
					if c.budget < 0 {
						r.Retries() // uses it up
					}
					hangs := fakeengine.Hangs()
					if c.answer.Status != 0 {
						hangs = c.answer
					}
					all(r, c.hang, always(hangs))
					start := time.Now()
					got := r.Send(ctx, ask(stream, ""))
					took := time.Since(start)
					if c.status == 0 && !whole(got, stream) && !c.alive || c.status != 0 && got.Status != c.status || took < c.took || took > c.took+10*time.Second {
						t.Errorf("%s after %s, want it after %s: %q", got, took, c.took, got.Receipt.Notes)
					}
					var silent []string
					for _, l := range got.Receipt.Legs {
						if strings.Contains(l.Error, "silent") {
							silent = append(silent, l.Worker)
						}
					}
					if strings.Join(silent, " ") != c.givenUp || !strings.Contains(notes(got), c.note) {
						t.Errorf("given up %q, want %q: %q", silent, c.givenUp, got.Receipt.Notes)
					}
					if n := len(r.Events("worker_failing")); c.givenUp != "" && n == 0 {
						t.Error("no event names the worker")
					}
				})
			})
		}
	}
}

// TestPrefillHoldsTheAnswer: where a decode engine has no KV yet when its time is up, since the
// prefill beside it computes nothing, it is not at work on a long answer. Other engines are
// tried, although both show signs of life.
func TestPrefillHoldsTheAnswer(t *testing.T) {
	const long = 5 * time.Minute
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprint(stream), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := fakeengine.New(t, "2p2d sglang", func(s *settings.Config) {
					s.Timeouts.Prefill, s.Timeouts.Response, s.Timeouts.Idle = 2*long, long, long
				})
				r.Legs.Silence = 4 * time.Second
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				go live(ctx, r, "")
				for _, phase := range []string{"prefill", "decode"} {
					var begun atomic.Bool
					all(r, phase, func(q *fakeengine.Request) fakeengine.Answer {
						if begun.CompareAndSwap(false, true) {
							return fakeengine.Hangs()
						}
						return r.Model.Answer(q)
					})
				}
				got := r.Send(ctx, ask(stream, ""))
				if !whole(got, stream) {
					t.Errorf("%s: %q", got, got.Receipt.Notes)
				}
				for _, phase := range []string{"prefill", "decode"} {
					if asked := names(r.Requests(phase)); len(asked) != 2 || asked[0] == asked[1] {
						t.Errorf("%s legs went to %q, want both engines once", phase, asked)
					}
				}
			})
		})
	}
}
