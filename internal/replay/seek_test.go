package replay

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// TestStageSeeks plays a recording with a record in every second: its clock goes on
// between records, it goes to any place and finds the same index there from both sides,
// a pause stays one, and speeds are kept.
func TestStageSeeks(t *testing.T) {
	rec := newRecording(t).run(200)
	for i := range rec.recs {
		rec.recs[i].Time = time.Duration(i) * time.Second
	}
	total := rec.recs[len(rec.recs)-1].Time
	raw := rec.file()
	synctest.Test(t, func(t *testing.T) {
		stage := newStage(t, raw, PlayerOptions{}, 1)
		if p := stage.Status().Replay; p.TotalUS != nil {
			t.Errorf("the length is %d before the trace was read", *p.TotalUS)
		}
		if stage.Seek("50%") == nil {
			t.Error("a share of an unknown length")
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- stage.Run(ctx) }()
		pass := func(d time.Duration) {
			<-time.After(d)
			synctest.Wait()
		}
		at := func(when string, want time.Duration) {
			t.Helper()
			p := stage.Status().Replay
			if got := time.Duration(p.AtUS) * time.Microsecond; got < want || got > want+100*time.Millisecond || p.Seeking {
				t.Errorf("%s: at %s, want %s: %+v", when, got, want, p)
			} else if want < total && p.Records != int64(got/time.Second)+1 {
				t.Errorf("%s: %d records at %s", when, p.Records, got)
			}
		}
		seek := func(to string) {
			t.Helper()
			if err := stage.Seek(to); err != nil {
				t.Error(err)
			}
			synctest.Wait()
			pass(time.Millisecond)
		}
		pass(5500 * time.Millisecond)
		at("played", 5450*time.Millisecond)
		if p := stage.Status().Replay; p.TotalUS == nil || *p.TotalUS != total.Microseconds() {
			t.Errorf("length %+v", p)
		}
		if err := stage.Control("pause", 0); err != nil {
			t.Fatal(err)
		}
		seek("100s")
		at("100s", 100*time.Second)
		sum := stage.p.index.Checksum()
		seek("+10s")
		at("+10s", 110*time.Second)
		if stage.p.index.Checksum() == sum {
			t.Error("ten seconds change nothing")
		}
		seek("end")
		at("end", total)
		if p := stage.Status().Replay; !p.Ended && p.Records != int64(len(rec.recs)) || !p.Paused {
			t.Errorf("end: %+v", p)
		}
		seek("100s")
		at("100s from the end", 100*time.Second)
		if stage.p.index.Checksum() != sum {
			t.Error("another index at the same place")
		}
		seek("50%")
		at("50%", total/2)
		seek("-1000h")
		at("before the beginning", 0)
		pass(time.Minute)
		at("paused", 0)
		for _, do := range []string{"faster", "faster", "play"} {
			if err := stage.Control(do, 0); err != nil {
				t.Fatal(err)
			}
		}
		pass(5 * time.Second)
		at("four times as fast", 20*time.Second)
		for _, bad := range []string{"", "moon", "101%", "-1%", "NaN%"} {
			if stage.Seek(bad) == nil {
				t.Errorf("%q is a place", bad)
			}
		}
		for range 40 {
			_ = stage.Control("slower", 0)
		}
		if s := stage.Status().Replay.Speed; s != minSpeed {
			t.Errorf("slowest %g", s)
		}
		for range 40 {
			_ = stage.Control("faster", 0)
			if stage.Status().Replay.Speed == 0 {
				break
			}
		}
		if s := stage.Status().Replay.Speed; s != 0 {
			t.Errorf("fastest %g", s)
		}
		_ = stage.Control("slower", 0)
		if s := stage.Status().Replay.Speed; s != maxSpeed {
			t.Errorf("below the fastest %g", s)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestStageTimes: TTFT and E2E are those of the recorded outcomes, of the last minute of
// the recording, and unknown without an outcome.
func TestStageTimes(t *testing.T) {
	rec := newRecording(t)
	rec.decide(rec.prompt())
	id := rec.recs[len(rec.recs)-1].Decision.ID
	rec.add(trace.Record{Kind: trace.KindOutcome, Outcome: &trace.Outcome{ID: id, Result: receipt.Outcome{Status: 200, TTFTMS: 120, E2EMS: 900}}})
	rec.add(trace.Record{Kind: trace.KindOutcome, Outcome: &trace.Outcome{ID: "cut", Result: receipt.Outcome{Status: 502, TTFTMS: -1, E2EMS: -1}}})
	at := len(rec.recs)
	rec.decide(rec.prompt())
	rec.recs[len(rec.recs)-1].Time += 2 * time.Minute
	stage := newStage(t, rec.file(), PlayerOptions{}, 0)
	if tr := stage.Status().Traffic; tr.TTFT != nil || tr.E2E != nil {
		t.Errorf("times before any outcome: %+v", tr)
	}
	if err := stage.Control("step", at); err != nil {
		t.Fatal(err)
	}
	tr := stage.Status().Traffic
	if tr.TTFT == nil || tr.TTFT.Count != 1 || tr.TTFT.Max != 120 {
		t.Errorf("TTFT %+v, want one of 120 ms", tr.TTFT)
	}
	if tr.E2E == nil || tr.E2E.Max != 900 {
		t.Errorf("whole answers %+v, want 900 ms", tr.E2E)
	}
	if err := stage.Control("step", 100); err != nil {
		t.Fatal(err)
	}
	if tr := stage.Status().Traffic; tr.TTFT != nil {
		t.Errorf("two minutes later %+v", tr.TTFT)
	}
}
