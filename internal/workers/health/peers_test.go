package health

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
)

// group sends one request at a time to its workers, in turns.
type group struct {
	t      *testing.T
	o      *Outliers
	events *log
	list   []*workers.Worker
	next   int
}

func newGroup(t *testing.T, specs ...string) *group {
	t.Helper()
	o, reg, events := outliers(t, OutlierOptions{}, specs...)
	return &group{t: t, o: o, events: events, list: reg.Snapshot().Workers}
}

// send sends one request to the next worker that takes it; ends says how it ends there.
func (g *group) send(ends func(w *workers.Worker) Outcome) {
	g.t.Helper()
	for range g.list {
		w := g.list[g.next%len(g.list)]
		g.next++
		if !usable(w) {
			continue
		}
		if a, ok := g.o.Admit(w); ok {
			g.o.Report(a, ends(w))
			return
		}
	}
	g.t.Fatal("no worker takes a request")
}

func (g *group) ejected() (names []string) {
	for _, w := range g.list {
		if w.State.Ejection() != nil {
			names = append(names, w.Name)
		}
	}
	return names
}

var four = []string{"http://a:1,name=a,model=m", "http://b:1,name=b,model=m", "http://c:1,name=c,model=m", "http://d:1,name=d,model=m"}

// TestAllFailAlike: where requests fail at the same rate on all workers, none is ejected,
// for any rate, pace, kind of failure and phase.
func TestAllFailAlike(t *testing.T) {
	for _, role := range []string{"prefill", "decode", "aggregated"} {
		for _, share := range []float64{0.1, 0.25, 0.5, 0.9, 1} {
			for _, out := range []Outcome{ServerError, Timeout} {
				for _, pause := range []time.Duration{0, 20 * time.Millisecond, 3 * time.Second} {
					t.Run(fmt.Sprintf("%s, %v of %.2f every %v", role, out, share, pause), func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) {
							var specs []string
							for _, s := range four {
								specs = append(specs, s+",role="+role)
							}
							g := newGroup(t, specs...)
							rng := rand.New(rand.NewPCG(1, 2))
							for i := range 400 {
								// Before the first failures nothing is known of the peers.
								bad := i < len(specs) || rng.Float64() < share
								g.send(func(*workers.Worker) Outcome {
									if bad {
										return out
									}
									return Success
								})
								elapse(pause)
								if out := g.ejected(); len(out) > 0 {
									t.Fatalf("request %d: %v ejected: %q", i, out, g.events.take())
								}
							}
						})
					})
				}
			}
		}
	}
}

// TestOneFailsAmongPeers: a worker that alone fails is ejected by as many failures as if
// it had no peers, whether they were busy before or not; the failures of workers of
// another model or phase excuse nothing.
func TestOneFailsAmongPeers(t *testing.T) {
	others := []string{"http://x:1,name=x,model=other", "http://y:1,name=y,model=other", "http://p:1,name=p,model=m,role=prefill", "http://q:1,name=q,model=m,role=prefill"}
	for _, busy := range []int{0, 400} {
		for _, all := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d requests before, other models fail: %v", busy, all), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					specs := four
					if all {
						specs = append(append([]string{}, four...), others...)
					}
					g := newGroup(t, specs...)
					for range busy {
						g.send(func(*workers.Worker) Outcome { return Success })
						elapse(10 * time.Millisecond)
					}
					failures := 0
					for len(g.ejected()) == 0 || failures == 0 {
						g.send(func(w *workers.Worker) Outcome {
							if w.Name == "a" {
								failures++
								return ServerError
							}
							if strings.Contains("xypq", w.Name) {
								return Timeout
							}
							return Success
						})
						elapse(10 * time.Millisecond)
						if out := g.ejected(); failures == 5 && (len(out) == 0 || out[0] != "a") {
							t.Fatalf("after 5 failures in a row %v ejected", out)
						}
					}
				})
			})
		}
	}
}

// TestSomeFailAmongPeers: workers that fail every request beside others that serve all
// are ejected, one more slowly than if it were alone in that; so is one beside requests
// that break every worker.
func TestSomeFailAmongPeers(t *testing.T) {
	for name, c := range map[string]struct {
		broken string
		share  float64 // of requests that break every worker
		within int     // requests
	}{
		"two of four":              {"ab", 0, 80},
		"three of four":            {"abc", 0, 160},
		"one, and poison beside":   {"a", 0.25, 80},
		"one, and much beside":     {"a", 0.5, 160},
		"two, with poison beside":  {"ab", 0.1, 160},
		"one, among rare failures": {"a", 0.01, 40},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGroup(t, four...)
				rng := rand.New(rand.NewPCG(3, 4))
				ejected := map[string]bool{}
				for i := 0; len(ejected) < len(c.broken); i++ {
					if i == c.within {
						t.Fatalf("after %d requests only %v were ejected", i, ejected)
					}
					poison := rng.Float64() < c.share
					g.send(func(w *workers.Worker) Outcome {
						if poison || strings.Contains(c.broken, w.Name) {
							return ServerError
						}
						return Success
					})
					elapse(10 * time.Millisecond)
					for _, name := range g.ejected() {
						if ejected[name] = true; !strings.Contains(c.broken, name) {
							t.Fatalf("%s is well and was ejected", name)
						}
					}
				}
			})
		})
	}
}

// TestRefusals: workers that refuse requests for want of room are never ejected while
// their peers refuse as well or they take one now and then; one that takes none for
// seconds, while its peers do, is. It comes back with the first request that it takes,
// and refusing a trial does not lengthen its penalty.
func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		ends  func(w *workers.Worker, n int) Outcome
		stays bool
	}{
		"all are full": {func(*workers.Worker, int) Outcome { return Refused }, true},
		"all take one of ten": {func(_ *workers.Worker, n int) Outcome {
			if n%10 == 0 {
				return Success
			}
			return Refused
		}, true},
		"one is small, and takes one of ten": {func(w *workers.Worker, n int) Outcome {
			if w.Name != "a" || n%10 == 0 {
				return Success
			}
			return Refused
		}, true},
		"one takes none": {func(w *workers.Worker, _ int) Outcome {
			if w.Name == "a" {
				return Refused
			}
			return Success
		}, false},
		"one takes none, and its peers one of two": {func(w *workers.Worker, n int) Outcome {
			if w.Name == "a" || n%2 == 0 {
				return Refused
			}
			return Success
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGroup(t, four...)
				counts := map[string]int{}
				for i := 0; i < 4000 && len(g.ejected()) == 0; i++ {
					g.send(func(w *workers.Worker) Outcome {
						counts[w.Name]++
						return c.ends(w, counts[w.Name])
					})
					elapse(10 * time.Millisecond)
				}
				if out := g.ejected(); c.stays != (len(out) == 0) || !c.stays && out[0] != "a" {
					t.Fatalf("ejected: %v", out)
				}
				if c.stays {
					return
				}
				a := g.list[0]
				elapse(5 * time.Second)
				report(t, g.o, a, Refused) // its trial
				if e := a.State.Ejection(); e == nil || usable(a) || time.Until(e.Until) != 5*time.Second {
					t.Errorf("after a refused trial: %+v", e)
				}
				elapse(5 * time.Second)
				report(t, g.o, a, Success)
				if g.ejected() != nil {
					t.Error("it took its trial request and is not back")
				}
				want := []string{
					"outlier_ejected: worker a is ejected for 5s: it refused", "outlier_trial: worker a gets one trial request",
					"outlier_trial: worker a gets one trial request", "outlier_reinstated: worker a is back",
				}
				got := g.events.take()
				if len(got) != len(want) {
					t.Fatalf("events %q", got)
				}
				for i := range want {
					if !strings.HasPrefix(got[i], want[i]) {
						t.Errorf("event %d is %q, want %q", i, got[i], want[i])
					}
				}
			})
		})
	}
}

// TestFullOfLongAnswers: a worker that is in the middle of answers is not ejected for what
// it refuses, however long they take.
func TestFullOfLongAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		busy := true
		o, reg, events := outliers(t, OutlierOptions{Answering: func(w *workers.Worker) bool { return busy && w.Name == "a" }}, four...)
		for range 2000 {
			report(t, o, get(t, reg, "a"), Refused)
			report(t, o, get(t, reg, "b"), Success)
			elapse(50 * time.Millisecond)
			if !usable(get(t, reg, "a")) {
				t.Fatalf("ejected: %q", events.take())
			}
		}
		busy = false
		report(t, o, get(t, reg, "a"), Refused)
		if usable(get(t, reg, "a")) {
			t.Error("it answers nothing, takes nothing, and is not ejected")
		}
	})
}

// TestExcuseLeavesTheWindowAlone: taking back a failure of an earlier half of the window
// changes nothing of what the peers did in the present one.
func TestExcuseLeavesTheWindowAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _ := outliers(t, OutlierOptions{}, four...)
		old := report(t, o, get(t, reg, "a"), ServerError)
		elapse(6 * time.Second)
		for range 20 {
			report(t, o, get(t, reg, "b"), Success, ServerError)
		}
		now := func() tally {
			o.mu.Lock()
			defer o.mu.Unlock()
			return o.all(get(t, reg, "a")).recent(o.half(time.Now()))
		}
		before := now()
		o.Uncount(old)
		if after := now(); after != before.minus(tally{failed: 1}) {
			t.Errorf("the window has %+v, had %+v", after, before)
		}
	})
}

// TestTrialAmongFailures: a worker that fails its trial comes back where its peers fail
// half of their requests, and stays away where they serve theirs.
func TestTrialAmongFailures(t *testing.T) {
	for _, fail := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			g := newGroup(t, four...)
			a := g.list[0]
			report(t, g.o, a, ServerError, ServerError, ServerError, ServerError, ServerError)
			if len(g.ejected()) != 1 {
				t.Fatal("five failures in a row do not eject")
			}
			elapse(5 * time.Second)
			for _, w := range g.list[1:] {
				if report(t, g.o, w, Success); fail {
					report(t, g.o, w, ServerError)
				}
			}
			report(t, g.o, a, ServerError)
			if back := len(g.ejected()) == 0; back != fail {
				t.Errorf("its peers fail: %v; it is back: %v", fail, back)
			}
		})
	}
}

// TestPeersComeToBeKnown: a worker whose models are learned late, or change, is compared
// with its peers of now, and nothing is counted below zero.
func TestPeersComeToBeKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _ := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		for _, models := range [][]string{nil, {"m"}, {"n", "m"}, {"m"}} {
			for _, name := range []string{"a", "b"} {
				if models != nil {
					if _, err := reg.Update(get(t, reg, name), workers.Learned{Facts: workers.Facts{Models: models}}); err != nil {
						t.Fatal(err)
					}
				}
			}
			for range 3 {
				o.Uncount(report(t, o, get(t, reg, "a"), ServerError))
				report(t, o, get(t, reg, "b"), ServerError, Success)
			}
			o.Step()
			report(t, o, get(t, reg, "a"), ServerError, ServerError, ServerError, ServerError, ServerError)
			if !usable(get(t, reg, "a")) {
				t.Errorf("models %v: ejected although its peer fails every second request", models)
			}
			o.mu.Lock()
			for k, all := range o.peers {
				if all.total.requests() > 1000 || all.windows[0].plus(all.windows[1]).requests() > 1000 {
					t.Errorf("models %v: %v counts %+v", models, k, all)
				}
			}
			o.mu.Unlock()
			report(t, o, get(t, reg, "a"), Success)
			elapse(11 * time.Second) // another window
		}
	})
}
