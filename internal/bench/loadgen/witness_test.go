package loadgen

import (
	"context"
	"testing"
	"time"
)

// TestStarvationAddsUp: what counts is the time in which the client should have run.
func TestStarvationAddsUp(t *testing.T) {
	const ms = time.Millisecond
	var s Starvation
	s.Note(5*ms, 6*ms, 7*ms)    // well
	s.Note(12*ms, 52*ms, 53*ms) // the timer was late
	s.Note(58*ms, 59*ms, 99*ms) // the event was read late
	s.Note(104*ms, 109*ms, 114*ms)
	if s.Watched != 114*ms || s.Stopped != 82*ms || s.Wake != 40*ms || s.Read != 40*ms {
		t.Errorf("%+v", s)
	}
	if got := s.Share(); got < 0.719 || got > 0.72 {
		t.Errorf("share %v", got)
	}
	if new(Starvation).Share() != 0 {
		t.Error("nothing was watched, and a share of it was lost")
	}
}

// TestWitnessSeesAStop: the clock that it is given stands for one that goes on while
// the process stands still.
func TestWitnessSeesAStop(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	start := time.Now()
	looks, gone := 0, time.Duration(0)
	now := func() time.Duration { return time.Since(start) + gone }
	stopped := func() time.Duration {
		if looks++; looks%20 == 0 {
			gone += 40 * time.Millisecond
		}
		if looks == 400 {
			cancel()
		}
		return now()
	}
	// The clock is asked by the witness and by its reader, in turns.
	if s := witness(ctx, stopped); s == nil || s.Share() < 0.2 || s.Wake+s.Read < 30*time.Millisecond {
		t.Errorf("stopped for 40 ms again and again: %+v", s)
	}
}
