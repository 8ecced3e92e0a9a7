package health

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/workers"
)

// outliers starts a detector over healthy workers, inside a synctest bubble.
func outliers(t *testing.T, opts OutlierOptions, texts ...string) (o *Outliers, reg *workers.Registry, events *log, stop func()) {
	t.Helper()
	events = &log{}
	reg = registry(t, nil, texts...)
	for _, w := range reg.Snapshot().Workers {
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	}
	o = NewOutliers(reg, opts, events.sink)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- o.Run(ctx) }()
	return o, reg, events, func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
}

func report(o *Outliers, w *workers.Worker, outs ...Outcome) {
	for _, out := range outs {
		o.Report(w, out)
	}
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
		o, reg, _, stop := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		defer stop()
		a := get(t, reg, "a")
		for range 30 { // each is taken back before the next
			report(o, a, ServerError)
			o.Excuse(a.State)
		}
		report(o, a, ServerError, Timeout, ServerError, Timeout)
		if !usable(a) {
			t.Fatal("ejected by failures that do not count")
		}
		report(o, a, ServerError)
		if usable(a) {
			t.Fatal("not ejected by five failures")
		}
		o.Excuse(a.State)
		if !usable(a) {
			t.Fatal("ejected by four failures")
		}
		report(o, a, ServerError)
		if usable(a) {
			t.Fatal("the four others are forgotten")
		}
		time.Sleep(6 * time.Second) // the penalty of a first ejection
		if !o.Admit(a) {
			t.Fatal("no trial")
		}
		report(o, a, ServerError)
		if o.Admit(a) {
			t.Fatal("a trial at once after one that failed")
		}
		o.Excuse(a.State)
		if !o.Admit(a) {
			t.Fatal("the trial that a request has spoilt is not given again")
		}
		report(o, a, Success)
		if !usable(a) {
			t.Fatal("not back after a good trial")
		}
		// A success has forgiven what is taken back after it.
		report(o, a, ServerError, Success)
		o.Excuse(a.State)
		o.Excuse(&workers.State{}) // has left
		report(o, a, ServerError, ServerError, ServerError, ServerError)
		if !usable(a) {
			t.Fatal("ejected by four failures")
		}
		// Ten of twenty eject; nine do not.
		report(o, a, Success)
		for range 20 {
			report(o, a, Success, ServerError)
		}
		if usable(a) {
			t.Fatal("not ejected by half of the requests")
		}
	})
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
				o, reg, _, stop := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
				defer stop()
				a := get(t, reg, "a")
				report(o, a, tt.outs...)
				c := a.State.Condition()
				if tt.reason == "" && c.Health != workers.Healthy || tt.reason != "" && (c.Health != workers.Ejected || c.Reason != tt.reason) {
					t.Errorf("condition %s %q, want %q", c.Health, c.Reason, tt.reason)
				}
			})
		})
	}
}

func TestWindowForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _, stop := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		defer stop()
		a := get(t, reg, "a")
		for range 9 {
			report(o, a, Timeout, Success)
		}
		elapse(11 * time.Second)
		report(o, a, Timeout, Success)
		if h := a.State.Condition().Health; h != workers.Healthy {
			t.Errorf("%s for failures of another window", h)
		}
	})
}

func TestPenaltyAndTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, events, stop := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		defer stop()
		a := get(t, reg, "a")
		if !o.Admit(a) {
			t.Fatal("a good worker is not admitted")
		}
		report(o, a, ConnectError, ConnectError)
		if o.Admit(a) || usable(a) {
			t.Error("admitted within the penalty")
		}
		report(o, a, Success, ServerError) // late ends of older requests
		elapse(4900 * time.Millisecond)
		if usable(a) {
			t.Error("usable before the penalty is over")
		}
		elapse(200 * time.Millisecond)
		if !usable(a) {
			t.Fatal("not usable after the penalty")
		}
		if !o.Admit(a) || o.Admit(a) || usable(a) {
			t.Error("not exactly one trial")
		}
		report(o, a, ClientError) // tells nothing: another may try
		if !usable(a) || !o.Admit(a) {
			t.Error("a client's error used the trial up")
		}
		report(o, a, Timeout) // the second penalty is twice as long
		elapse(9900 * time.Millisecond)
		if usable(a) {
			t.Error("the penalty did not grow")
		}
		elapse(200 * time.Millisecond)
		if !o.Admit(a) {
			t.Fatal("no second trial")
		}
		elapse(31 * time.Second) // nobody reports
		if !usable(a) || !o.Admit(a) {
			t.Error("an unreported trial blocks the worker for ever")
		}
		report(o, a, Success)
		if c := a.State.Condition(); c.Health != workers.Healthy {
			t.Errorf("condition %+v after a good trial", c)
		}
		elapse(6 * time.Minute)
		report(o, a, ConnectError, ConnectError)
		if e := a.State.Ejection(); e == nil || e.Until.Sub(e.Since) != 5*time.Second {
			t.Errorf("ejection %+v after a long good time", e)
		}
		synctest.Wait()
		want := []string{
			"outlier.ejected: worker a is ejected for 5s: 2 connect errors in a row",
			"outlier.trial: worker a gets one trial request",
			"outlier.ejected: worker a is ejected for 10s: the trial request ended with a timeout",
			"outlier.trial: worker a gets one trial request",
			"outlier.reinstated: worker a is back after 41.1s: its trial request succeeded",
			"outlier.ejected: worker a is ejected for 5s: 2 connect errors in a row",
		}
		if diff := cmp.Diff(want, events.take()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
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
				o, reg, events, stop := outliers(t, OutlierOptions{}, tt.workers...)
				defer stop()
				if tt.down != "" {
					get(t, reg, tt.down).State.SetCondition(workers.Condition{Health: workers.Unhealthy})
				}
				a := get(t, reg, "a")
				for range 20 {
					report(o, a, ServerError)
				}
				if got := a.State.Ejection() == nil; got != tt.stays {
					t.Fatalf("stays: %v", got)
				}
				lines := events.take()
				if tt.stays && (len(lines) != 1 || !strings.HasPrefix(lines[0], "outlier.spared: worker a is not ejected although it had 5 failures in a row")) {
					t.Errorf("events %q", lines)
				}
			})
		})
	}
}

// TestSomeoneIsAlwaysLeft fails everything everywhere at once.
func TestSomeoneIsAlwaysLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _, stop := outliers(t, OutlierOptions{}, "http://a:1", "http://b:1", "http://c:1", "http://d:1")
		defer stop()
		var wg sync.WaitGroup
		for _, w := range reg.Snapshot().Workers {
			for range 4 {
				wg.Go(func() {
					for range 50 {
						if o.Admit(w) {
							o.Report(w, ConnectError)
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
		o, reg, _, stop := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		defer stop()
		a, b := get(t, reg, "a"), get(t, reg, "b")
		report(o, a, ConnectError, ConnectError)
		elapse(6 * time.Second)
		b.State.SetCondition(workers.Condition{Health: workers.Unhealthy})
		if !o.Admit(a) {
			t.Fatal("no trial")
		}
		report(o, a, ServerError)
		if !usable(a) {
			t.Error("nobody is left")
		}
	})
}

func TestForgetsWorkersThatLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reg, _, stop := outliers(t, OutlierOptions{}, "http://a:1,name=a", "http://b:1,name=b")
		defer stop()
		report(o, get(t, reg, "a"), Success)
		report(o, get(t, reg, "b"), Success)
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
			if o.Admit(w) {
				o.Report(w, Success)
			}
		}
	})
}
