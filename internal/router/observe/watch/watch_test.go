package watch

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestFailuresBecomeEventsOnceInAWhile: the first failure of a kind is an event at once,
// the next ones are counted in one, and other kinds are not held back by it.
func TestFailuresBecomeEventsOnceInAWhile(t *testing.T) {
	var f Failures
	w, now := &workers.Worker{Name: "d0"}, time.Unix(100, 0)
	failed := func(phase string) (eventlog.Event, bool) {
		return f.Failed(w, phase, "timeout", errors.New("no answer"), now)
	}
	if e, ok := failed("decode"); !ok || e.Text != "d0 failed the decode leg of a request: no answer" || e.Worker != "d0" || e.Fields["more"] != 0 {
		t.Errorf("the first: %+v, %v", e, ok)
	}
	for range 3 {
		if _, ok := failed("decode"); ok {
			t.Error("the like is an event again at once")
		}
	}
	if _, ok := failed("prefill"); !ok {
		t.Error("another kind is no event")
	}
	now = now.Add(failureEvery)
	if e, ok := failed("decode"); !ok || e.Fields["more"] != 3 {
		t.Errorf("after a while: %+v, %v", e, ok)
	}
	for i := range 2 * maxFailures {
		f.Failed(&workers.Worker{Name: fmt.Sprint("w", i)}, "decode", "reset", errors.New("x"), now)
	}
	if len(f.lately) > maxFailures {
		t.Errorf("%d kinds are remembered", len(f.lately))
	}
	now = now.Add(failureEvery)
	if _, ok := f.Failed(&workers.Worker{Name: "late"}, "decode", "reset", errors.New("x"), now); !ok {
		t.Error("old kinds make no room")
	}
}

// TestPanicsBecomeEventsOnceInAWhile: panics that follow each other are counted in one event.
func TestPanicsBecomeEventsOnceInAWhile(t *testing.T) {
	var f Failures
	now := time.Unix(100, 0)
	if e, ok := f.Panicked("boom", now); !ok || e.Kind != "panic" || e.Severity != eventlog.Error || e.Text != "boom" {
		t.Errorf("the first: %+v, %v", e, ok)
	}
	for range 3 {
		if _, ok := f.Panicked("boom", now); ok {
			t.Error("the next is an event at once")
		}
	}
	if e, ok := f.Panicked("boom", now.Add(failureEvery)); !ok || e.Fields["more"] != 3 {
		t.Errorf("after a while: %+v, %v", e, ok)
	}
}

// TestWhyARankIsNotSlowAnyMore: the event names the reason, and what is not measured has no
// figures.
func TestWhyARankIsNotSlowAnyMore(t *testing.T) {
	for end, want := range map[pace.End]string{
		pace.Recovered: "w/dp0 is not slow any more: TTFT 1.2 times the median of its peers",
		pace.Silent:    "w/dp0 was slow; nothing is measured of it any more",
		pace.Unjudged:  "w/dp0 was slow; slow ranks are not looked for any more (health.slow_factor is 0)",
	} {
		e := slowEvent(&pace.Change[*workers.Rank]{
			Key:     &workers.Rank{WorkerName: "w", Label: "w/dp0"},
			Verdict: pace.Verdict{Finding: pace.Finding{Figure: pace.TTFT, Times: 1.2}, End: end},
		})
		if e.Kind != "rank_slow_ended" || e.Text != want || e.Rank != "w/dp0" {
			t.Errorf("%d: %+v, want %q", end, e, want)
		}
	}
}

// TestRecompute: a rank whose counter does not grow although KV was moved to it is
// reported once, and once more when the counter grows again; one without a counter is not
// blamed.
func TestRecompute(t *testing.T) {
	k := &workers.Rank{Label: "d0/dp0", WorkerName: "d0"}
	silent := &workers.Rank{Label: "d1/dp0", WorkerName: "d1"}
	live := []*workers.Rank{k, silent}
	var kinds []string
	found := 0
	w := NewRecompute(RecomputeOptions{
		Ranks: func() []*workers.Rank { return live },
		Found: func(worker string, n int) {
			if found += n; worker != "d0" {
				t.Errorf("%s is blamed", worker)
			}
		},
		Event: func(e eventlog.Event) { kinds = append(kinds, e.Kind) },
	})
	now := time.Unix(100, 0)
	scrape := func(hits float64) {
		now = now.Add(time.Second)
		l := workers.UnknownLoad(now)
		l.ExternalHits, l.Asked = hits, now
		k.SetLoad(&l)
		u := workers.UnknownLoad(now)
		silent.SetLoad(&u)
		w.compare()
	}
	end := func(n int) {
		sent := now.Add(time.Millisecond)
		now = sent.Add(time.Millisecond)
		for range n {
			w.Answered(k, 100, 100, sent, now)
			w.Answered(silent, 100, 100, sent, now)
		}
	}
	end(recomputeProof) // nothing is known yet of the counter
	scrape(0)
	end(recomputeProof - 1)
	scrape(0)
	if scrape(0); len(kinds) != 0 {
		t.Fatalf("reported after too little: %q", kinds)
	}
	end(1)
	scrape(0)
	scrape(0)
	if !slices.Equal(kinds, []string{"silent_recompute"}) || found != recomputeProof || !slices.Equal(w.Alarms(), []string{"d0/dp0"}) {
		t.Fatalf("%q, %d found, alarms %q", kinds, found, w.Alarms())
	}
	end(recomputeProof)
	scrape(0)
	if scrape(0); len(kinds) != 1 || found != 2*recomputeProof {
		t.Errorf("while it lasts: %q, %d found", kinds, found)
	}
	end(1)
	if scrape(100); !slices.Equal(kinds, []string{"silent_recompute", "silent_recompute_ended"}) || len(w.Alarms()) != 0 {
		t.Errorf("after KV was used: %q, alarms %q", kinds, w.Alarms())
	}
	live = nil
	if scrape(100); len(w.ranks) != 0 {
		t.Errorf("%d ranks are kept that left", len(w.ranks))
	}
}
