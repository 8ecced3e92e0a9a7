package health

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

// outliers starts a detector over healthy workers, inside a synctest bubble.
func outliers(t *testing.T, opts OutlierOptions, texts ...string) (o *Outliers, reg *workers.Registry, events *log) {
	t.Helper()
	events = &log{}
	reg = registry(t, nil, texts...)
	for _, w := range reg.Snapshot().Workers {
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	}
	o = NewOutliers(reg, opts, events.sink)
	background(t, o.Run)
	return o, reg, events
}

// report ends requests that a worker is admitted for, and returns the admission
// of the last one.
func report(t testing.TB, o *Outliers, w *workers.Worker, outs ...Outcome) (a Admission) {
	t.Helper()
	for _, out := range outs {
		a = admit(t, o, w)
		a = o.Report(a, out)
	}
	return a
}

func admit(t testing.TB, o *Outliers, w *workers.Worker) Admission {
	t.Helper()
	a, ok := o.Admit(w)
	if !ok {
		t.Fatal("not admitted")
	}
	return a
}

func admitted(o *Outliers, w *workers.Worker) bool {
	_, ok := o.Admit(w)
	return ok
}

func usable(w *workers.Worker) bool {
	ok, _ := w.State.Usable()
	return ok
}

// TestExcuse: failures that were a request's fault are taken back: they do not
// add up with others, an ejection that needed them ends, one that did not stays,
// and a trial that failed by one is given again.
func TestExcuse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _ := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		a := get(t, reg, "a")
		for range 30 { // each is taken back before the next
			o.Uncount(report(t, o, a, ServerError))
		}
		report(t, o, a, ServerError, Timeout, ServerError, Timeout)
		if !usable(a) {
			t.Fatal("ejected by failures that do not count")
		}
		old := admit(t, o, a)
		fifth := report(t, o, a, ServerError)
		if usable(a) {
			t.Fatal("not ejected by five failures")
		}
		o.Uncount(fifth)
		if !usable(a) {
			t.Fatal("ejected by four failures")
		}
		o.Report(old, ServerError) // as if there had been no ejection
		if usable(a) {
			t.Fatal("the four others are forgotten")
		}
		elapse(6 * time.Second) // the penalty of a first ejection
		trial := report(t, o, a, ServerError)
		if admitted(o, a) {
			t.Fatal("a trial at once after one that failed")
		}
		o.Uncount(old)
		if admitted(o, a) {
			t.Fatal("a trial is given again that another request has spoilt")
		}
		o.Uncount(trial)
		report(t, o, a, Success)
		if !usable(a) {
			t.Fatal("not back after a good trial")
		}
		// A success has forgiven what is taken back after it.
		failed := report(t, o, a, ServerError)
		report(t, o, a, Success)
		o.Uncount(failed)
		o.Uncount(Admission{})
		o.Uncount(Admission{worker: &workers.Worker{State: &workers.State{}}}) // has left
		report(t, o, a, ServerError, ServerError, ServerError, ServerError)
		o.Uncount(old) // counts no more, and takes nothing of what others did back
		if !usable(a) {
			t.Fatal("ejected by four failures")
		}
		report(t, o, a, Success)
		// Ten of twenty eject; nine do not.
		report(t, o, a, Success)
		for range 20 {
			if usable(a) {
				report(t, o, a, Success)
			}
			if usable(a) {
				report(t, o, a, ServerError)
			}
		}
		if usable(a) {
			t.Fatal("not ejected by half of the requests")
		}
	})
}

// TestExcuseOfAnotherStreak: a failure that a success has followed takes nothing
// of the failures in a row that came after it back.
func TestExcuseOfAnotherStreak(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _ := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		a := get(t, reg, "a")
		old := report(t, o, a, ServerError)
		report(t, o, a, Success, ServerError, ServerError)
		o.Uncount(old)
		report(t, o, a, ServerError, ServerError, ServerError)
		if usable(a) {
			t.Fatal("five failures in a row do not eject")
		}
	})
}

// TestUncountedEjectionsLengthenNoPenalty: a trial that failed by the request's
// fault is not among the ejections that double the penalty.
func TestUncountedEjectionsLengthenNoPenalty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _ := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		a := get(t, reg, "a")
		report(t, o, a, ConnectError, ConnectError)
		elapse(5 * time.Second)
		for range 3 {
			o.Uncount(report(t, o, a, ServerError))
		}
		report(t, o, a, ServerError)
		if e := a.State.Ejection(); e == nil || e.Until.Sub(e.Since) != 10*time.Second {
			t.Fatalf("the second ejection that counts: %+v", e)
		}
	})
}

// TestUncountedGenerationIsTheOldOne: when an uncounted failure ends an ejection, no request is
// admitted under a generation that is taken back at once.
func TestUncountedGenerationIsTheOldOne(t *testing.T) {
	reg := registry(t, nil, "http://a:1,name=a", "http://b:1,name=b")
	var o *Outliers
	var during []uint64
	for _, w := range reg.Snapshot().Workers {
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	}
	a := get(t, reg, "a")
	o = NewOutliers(reg, OutlierOptions{}, func(e eventlog.Event) {
		if e.Kind == "outlier_reinstated" {
			during = append(during, admit(t, o, a).number)
		}
	})
	last := report(t, o, a, ServerError, ServerError, ServerError, ServerError, ServerError)
	o.Uncount(last)
	if !slices.Equal(during, []uint64{last.number}) {
		t.Errorf("admitted with %d while the ejection ended, want %d", during, last.number)
	}
}

func TestWhatEjects(t *testing.T) {
	repeat := func(n int, outs ...Outcome) []Outcome {
		var all []Outcome
		for range n {
			all = append(all, outs...)
		}
		return all
	}
	tests := []struct {
		name   string
		outs   []Outcome
		reason string // empty: not ejected
	}{
		{"four server errors", repeat(4, ServerError), ""},
		{"five server errors", repeat(5, ServerError), "5 failures in a row, the last a server error"},
		{"errors of kinds", []Outcome{ServerError, Timeout, ServerError, ConnectError, Timeout}, "5 failures in a row, the last a timeout"},
		{"two connect errors", repeat(2, ConnectError), "2 connect errors in a row"},
		{"connect errors apart", repeat(4, ConnectError, Success), ""},
		{"success in between", []Outcome{ServerError, ServerError, ServerError, ServerError, Success, ServerError}, ""},
		{"client errors never count", repeat(100, ClientError), ""},
		{"nor do cancels", repeat(100, Canceled), ""},
		{"client errors do not end a streak", append(repeat(4, ServerError, ClientError), ServerError), "5 failures in a row, the last a server error"},
		{"every second fails", repeat(10, Success, Timeout), "10 of 20 requests failed within 10s"},
		{"every third fails", repeat(30, Success, Success, Timeout), ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, reg, _ := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
				a := get(t, reg, "a")
				report(t, o, a, tt.outs...)
				health := workers.Ejected
				if tt.reason == "" {
					health = workers.Healthy
				}
				if c := a.State.Condition(); c.Health != health || c.Reason != tt.reason {
					t.Errorf("condition %s %q, want %s %q", c.Health, c.Reason, health, tt.reason)
				}
			})
		})
	}
}

func TestWindowForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _ := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		a := get(t, reg, "a")
		for range 9 {
			report(t, o, a, Timeout, Success)
		}
		elapse(11 * time.Second)
		report(t, o, a, Timeout, Success)
		if h := a.State.Condition().Health; h != workers.Healthy {
			t.Errorf("%s for failures of another window", h)
		}
	})
}

func TestPenaltyAndTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, events := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		a := get(t, reg, "a")
		old := admit(t, o, a)
		report(t, o, a, ConnectError, ConnectError)
		if admitted(o, a) || usable(a) {
			t.Error("admitted within the penalty")
		}
		o.Report(old, Success) // late ends of older requests
		o.Report(old, ServerError)
		elapse(4900 * time.Millisecond)
		if usable(a) {
			t.Error("usable before the penalty is over")
		}
		elapse(200 * time.Millisecond)
		if !usable(a) {
			t.Fatal("not usable after the penalty")
		}
		trial := admit(t, o, a)
		if admitted(o, a) || usable(a) {
			t.Error("not exactly one trial")
		}
		o.Report(trial, ClientError) // says nothing: another may try
		if !usable(a) {
			t.Error("a client's error used the trial up")
		}
		report(t, o, a, Timeout) // the second penalty is twice as long
		elapse(9900 * time.Millisecond)
		if usable(a) {
			t.Error("the penalty did not grow")
		}
		elapse(200 * time.Millisecond)
		admit(t, o, a)
		elapse(31 * time.Second) // nobody reports
		if !usable(a) {
			t.Error("an unreported trial blocks the worker for ever")
		}
		report(t, o, a, Success)
		if c := a.State.Condition(); c.Health != workers.Healthy {
			t.Errorf("condition %+v after a good trial", c)
		}
		elapse(6 * time.Minute)
		report(t, o, a, ConnectError, ConnectError)
		if e := a.State.Ejection(); e == nil || e.Until.Sub(e.Since) != 5*time.Second {
			t.Errorf("ejection %+v after a long good time", e)
		}
		synctest.Wait()
		want := []string{
			"outlier_ejected: worker a is ejected for 5s: 2 connect errors in a row",
			"outlier_trial: worker a gets one trial request",
			"outlier_ejected: worker a is ejected for 10s: the trial request ended with a timeout",
			"outlier_trial: worker a gets one trial request",
			"outlier_reinstated: worker a is back after 41.1s: its trial request succeeded",
			"outlier_ejected: worker a is ejected for 5s: 2 connect errors in a row",
		}
		if diff := cmp.Diff(want, events.take()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
}

// TestLateReports: how a request ended that was sent before its worker was
// ejected neither decides the trial nor counts after it.
func TestLateReports(t *testing.T) {
	for _, late := range []Outcome{Success, ServerError, Timeout, Canceled} {
		t.Run(late.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, reg, _ := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
				a := get(t, reg, "a")
				old := admit(t, o, a)
				report(t, o, a, ConnectError, ConnectError)
				e := a.State.Ejection()
				elapse(6 * time.Second)
				o.Report(old, late) // the trial is open
				if a.State.Ejection() != e || !usable(a) {
					t.Fatal("a late report decides a trial that nobody has taken")
				}
				trial := admit(t, o, a)
				o.Report(old, late) // the trial is running
				if a.State.Ejection() != e || usable(a) {
					t.Fatal("a late report decides the trial of another request")
				}
				o.Report(trial, Success)
				if a.State.Ejection() != nil {
					t.Fatal("its own request does not end the ejection")
				}
				for range 10 {
					o.Report(old, late)
				}
				if a.State.Ejection() != nil {
					t.Fatal("late reports eject again")
				}
			})
		})
	}
}

// TestSlowTrials: a trial that takes longer than it may is given to another
// request, but not for nothing: whichever of them ends first decides.
func TestSlowTrials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _ := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		a := get(t, reg, "a")
		report(t, o, a, ConnectError, ConnectError)
		elapse(6 * time.Second)
		left := admit(t, o, a)
		elapse(31 * time.Second)
		slow := admit(t, o, a)
		elapse(31 * time.Second)
		admit(t, o, a)
		o.Report(left, Canceled) // says nothing, least of all of the one that runs
		if usable(a) {
			t.Error("two trials at a time")
		}
		o.Report(slow, Success)
		if a.State.Ejection() != nil {
			t.Error("a slow engine never comes back")
		}
	})
}

// TestTrialsAreDecidedByTheirOwn is any order of requests, ends of requests and
// waits: while a worker is ejected, only a request that was admitted since then
// ends that or ejects again, and once it is back, what was sent before counts
// for nothing.
func TestTrialsAreDecidedByTheirOwn(t *testing.T) {
	seeds := 300
	if testing.Short() {
		seeds = 60
	}
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) {
			o, reg, _ := outliers(t, OutlierOptions{Consecutive: 1, Connects: 1, Trial: 8 * time.Second, MaxPenalty: 10 * time.Second}, "http://a:1,name=a", "http://b:1,name=b")
			a := get(t, reg, "a")
			rng := rand.New(rand.NewPCG(uint64(seed), 1))
			type request struct {
				Admission
				era int // ejections and returns before it was admitted
			}
			var open []request
			era, back, again := 0, 0, 0
			for step := range 120 {
				switch k := rng.IntN(10); {
				case k == 0:
					elapse(time.Duration(rng.IntN(9)) * time.Second)
				case k < 5:
					if adm, ok := o.Admit(a); ok {
						open = append(open, request{adm, era})
					}
				case len(open) > 0:
					i := rng.IntN(len(open))
					q := open[i]
					if rng.IntN(4) > 0 { // else more is reported of it later, as of a stream
						open = slices.Delete(open, i, i+1)
					}
					out := []Outcome{Success, ConnectError, ServerError, Timeout, ClientError, Canceled}[rng.IntN(6)]
					before, onTrial := a.State.Ejection(), usable(a)
					o.Report(q.Admission, out)
					after := a.State.Ejection()
					decides := q.era == era && (out.Failure() || before != nil && out == Success)
					if changed := before != after; changed != decides {
						t.Fatalf("seed %d, step %d: a %s of a request of era %d in era %d: changed %v", seed, step, out, q.era, era, changed)
					}
					if q.era != era && before != nil && usable(a) != onTrial {
						t.Fatalf("seed %d, step %d: an older request's %s gave the trial away", seed, step, out)
					}
					if decides {
						if era++; before != nil && after == nil {
							back++
						} else if before != nil {
							again++
						}
					}
				}
			}
			if seed == 0 && (back == 0 || again == 0) {
				t.Errorf("%d returns, %d failed trials", back, again)
			}
		})
	}
}

func TestTheLastUsableWorkerStays(t *testing.T) {
	tests := []struct {
		name    string
		workers []string
		down    string
		stays   bool
	}{
		{"alone", []string{"http://a:1,name=a,role=decode"}, "", true},
		{"the other has another role", []string{"http://a:1,name=a,role=decode", "http://b:1,name=b,role=prefill"}, "", true},
		{"the other is down", []string{"http://a:1,name=a,role=prefill", "http://b:1,name=b,role=prefill"}, "b", true},
		{"the other has another model", []string{"http://a:1,name=a,model=x", "http://b:1,name=b,model=y"}, "", true},
		{"one of two models is elsewhere", []string{"http://a:1,name=a,model=x;y", "http://b:1,name=b,model=y"}, "", true},
		{"an aggregated one decodes too", []string{"http://a:1,name=a,role=decode,model=x", "http://b:1,name=b,role=aggregated,model=x;y"}, "", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, reg, events := outliers(t, OutlierOptions{}, tt.workers...)
				if tt.down != "" {
					get(t, reg, tt.down).State.SetCondition(workers.Condition{Health: workers.Unhealthy})
				}
				a := get(t, reg, "a")
				for i := 0; i < 20 && usable(a); i++ {
					report(t, o, a, ServerError)
				}
				if got := a.State.Ejection() == nil; got != tt.stays {
					t.Fatalf("stays: %v", got)
				}
				lines := events.take()
				if tt.stays && (len(lines) != 1 || !strings.HasPrefix(lines[0], "outlier_not_ejected: worker a is not ejected although it had 5 failures in a row")) {
					t.Errorf("events %q", lines)
				}
			})
		})
	}
}

// TestSomeoneIsAlwaysLeft fails everything everywhere at once.
func TestSomeoneIsAlwaysLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _ := outliers(t, OutlierOptions{}, "http://a:1", "http://b:1", "http://c:1", "http://d:1")
		var wg sync.WaitGroup
		for _, w := range reg.Snapshot().Workers {
			for range 4 {
				wg.Go(func() {
					for range 50 {
						if a, ok := o.Admit(w); ok {
							o.Report(a, ConnectError)
						}
					}
				})
			}
		}
		wg.Wait()
		left := 0
		for _, w := range reg.Snapshot().Workers {
			if usable(w) {
				left++
			}
		}
		if left != 1 {
			t.Errorf("%d workers are left", left)
		}
	})
}

// TestTrialFailsAsTheLastOne brings a worker back whose trial failed when the
// others had gone down meanwhile.
func TestTrialFailsAsTheLastOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _ := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		a, b := get(t, reg, "a"), get(t, reg, "b")
		report(t, o, a, ConnectError, ConnectError)
		elapse(6 * time.Second)
		b.State.SetCondition(workers.Condition{Health: workers.Unhealthy})
		report(t, o, a, ServerError)
		if !usable(a) {
			t.Error("nobody is left")
		}
	})
}

func TestForgetsWorkersThatLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _ := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		report(t, o, get(t, reg, "a"), Success)
		report(t, o, get(t, reg, "b"), Success)
		if _, err := reg.Apply("flag", specs(t, "http://b:1,name=b")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		o.mu.Lock()
		defer o.mu.Unlock()
		if len(o.records) != 1 {
			t.Errorf("%d records", len(o.records))
		}
	})
}

func BenchmarkReport(b *testing.B) {
	reg := registry(b, nil, "http://a:1,name=a", "http://b:1,name=b")
	w := get(b, reg, "a")
	o := NewOutliers(reg, OutlierOptions{}, nil)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if a, ok := o.Admit(w); ok {
				o.Report(a, Success)
			}
		}
	})
}

// TestHints: a worker that another router has ejected is ejected one failure earlier, and not on
// hearsay.
func TestHints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _ := outliers(t, OutlierOptions{Hinted: func(w *workers.Worker) bool { return w.Name != "c" }}, "http://a:1,name=a", "http://b:1,name=b", "http://c:1,name=c", "http://d:1,name=d")
		a, b, c := get(t, reg, "a"), get(t, reg, "b"), get(t, reg, "c")
		if !usable(a) {
			t.Fatal("ejected on hearsay")
		}
		report(t, o, a, ConnectError)
		report(t, o, c, ConnectError)
		if usable(a) || !usable(c) {
			t.Errorf("after a connect error: hinted %v, not hinted %v", usable(a), usable(c))
		}
		report(t, o, b, ServerError, ServerError, ServerError)
		if !usable(b) {
			t.Error("ejected by three failures")
		}
		report(t, o, b, ServerError)
		if usable(b) {
			t.Error("not ejected by four failures and a hint")
		}
	})
}
