package decide

import (
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// trial is a request that is decided on again and again.
type trial struct {
	t    *testing.T
	r    Run
	s    *Options
	list []*workers.Worker
	seen FleetView
}

func newTrial(t *testing.T, list ...*workers.Worker) *trial {
	q := &trial{t: t, s: usual(), list: list, seen: nothing{}}
	q.s.Attempts = 8
	q.r.Begin(prompt(1000))
	return q
}

// next decides and returns the chosen workers, nil where a phase has none.
func (q *trial) next() (decode, prefill *workers.Worker, e Effects) {
	e = q.r.NextPlan(q.s, q.list, 16, q.seen)
	d, p := chosen(&q.r)
	find := func(name string) *workers.Worker {
		i := slices.IndexFunc(q.list, func(w *workers.Worker) bool { return w.Name == name })
		if i < 0 {
			return nil
		}
		return q.list[i]
	}
	return find(d), find(p), e
}

func (q *trial) failed(w *workers.Worker, phase route.Phase, reason attempt.Reason, other *workers.Worker) attempt.Next {
	f := attempt.Failure{Worker: w.State, Name: w.Name, Phase: phase, Reason: reason, Sent: reason != attempt.Connect && reason != attempt.Ejected}
	if other != nil {
		f.Other = other.State
	}
	return q.r.Failed(f)
}

// TestStayEndsNoEjection: a phase that stays on a worker which is ejected meanwhile does
// not end the ejection while others are well; those are chosen then.
func TestStayEndsNoEjection(t *testing.T) {
	for _, reason := range []attempt.Reason{attempt.Stale, attempt.Overloaded} {
		q := newTrial(t, well("d1", workers.Decode), well("d2", workers.Decode), well("d3", workers.Decode), well("p1", workers.Prefill), well("p2", workers.Prefill))
		d, p, _ := q.next()
		q.failed(d, route.Decode, reason, p)
		stays := d
		if reason == attempt.Overloaded {
			stays = p
		}
		eject(stays)
		for range 2 {
			again, from, e := q.next()
			if len(e.Readmit) > 0 {
				t.Fatalf("%s: %s is let back although others are well", reason, e.Readmit[0].Name)
			}
			if q.r.Plan.Err == nil {
				if again == stays || from == stays {
					t.Errorf("%s: chosen %s and %s", reason, again.Name, from.Name)
				}
				break
			}
			if next := q.r.NoChoice(); next.Step != attempt.LiftBans {
				t.Fatalf("%s: %s", reason, next.Step)
			}
		}
	}
}

// TestStaleMayHaveDied: an engine that broke a reused connection counts as one of the two
// that a request may break until it has answered, whatever comes between.
func TestStaleMayHaveDied(t *testing.T) {
	for name, between := range map[string]func(q *trial, a *workers.Worker){
		"nothing": func(*trial, *workers.Worker) {},
		"it is ejected between choice and dispatch": func(q *trial, a *workers.Worker) {
			q.next()
			q.failed(a, route.Decode, attempt.Ejected, nil)
			eject(a)
		},
		"a probe finds it down": func(q *trial, a *workers.Worker) {
			a.State.SetCondition(workers.Condition{Health: workers.Unhealthy})
			if q.next(); q.r.Plan.Err != nil {
				q.r.NoChoice()
			}
		},
		"a prefill is refused": func(q *trial, a *workers.Worker) {
			d, p, _ := q.next()
			if d != a {
				q.t.Errorf("%s instead of %s", d.Name, a.Name)
			}
			q.failed(p, route.Prefill, attempt.Overloaded, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			q := newTrial(t, well("d1", workers.Decode), well("d2", workers.Decode), well("d3", workers.Decode), well("d4", workers.Decode), well("p1", workers.Prefill), well("p2", workers.Prefill), well("p3", workers.Prefill))
			a, p, _ := q.next()
			died := []*workers.Worker{a}
			q.failed(a, route.Decode, attempt.Stale, p)
			between(q, a)
			for range 8 {
				d, p, _ := q.next()
				if d == nil {
					if q.r.NoChoice().Step != attempt.LiftBans {
						break
					}
					continue
				}
				reason := attempt.Reset
				if slices.Contains(died, d) {
					reason = attempt.Connect
				} else {
					died = append(died, d)
				}
				if next := q.failed(d, route.Decode, reason, p); next.Step == attempt.GiveUp {
					if next.Why != attempt.NoMoreLost {
						t.Errorf("given up: %s", next.Why)
					}
					break
				}
			}
			if len(died) != attempt.MaxLost {
				t.Errorf("%d engines died", len(died))
			}
		})
	}
}

// booked is [nothing] with a ledger.
type booked struct {
	nothing
	l *ledger.Ledger
}

func (b booked) Ledger() *ledger.Ledger { return b.l }

// TestComputedKVIsNotInLine: the prefill worker that has a prompt's KV already is chosen
// however many other prompts wait there.
func TestComputedKVIsNotInLine(t *testing.T) {
	for _, fallback := range []Fallback{FallbackError, FallbackLocal} {
		q := newTrial(t, well("d1", workers.Decode), well("d2", workers.Decode), well("p1", workers.Prefill), well("p2", workers.Prefill))
		q.s.Busy.PrefillTokens, q.s.Rule.Fallback = 2000, fallback
		l := ledger.New()
		q.seen = booked{l: l}
		d, p, _ := q.next()
		q.failed(d, route.Decode, attempt.Overloaded, p)
		l.Reserve(p.Ranks[0], ledger.Claim{PrefillTokens: 3000, BlockSize: 16})
		if again, from, _ := q.next(); again == nil || again == d || from != p {
			t.Errorf("fallback %s: %v and %v, %v", fallback, again, from, q.r.Plan.Err)
		}
	}
}
