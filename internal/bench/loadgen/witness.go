package loadgen

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/wait"
)

// Starvation is how the client itself fared: a load client that does not run when
// its timers and its connections call measures its own machine. In a closed loop
// nothing else shows it, because the next request is late by as much as the answer.
type Starvation struct {
	// Watched is the time that was looked at, Stopped the part of it in which the
	// client should have run, and did not for longer than StopLimit.
	Watched, Stopped time.Duration
	// Wake is the latest that a timer fired, Read the latest that an event was read
	// after it was there.
	Wake, Read time.Duration
}

const (
	// StopLimit is what a wake-up and the read of an event may take together.
	StopLimit = 10 * time.Millisecond
	// WitnessTick is the time between two looks.
	WitnessTick = 5 * time.Millisecond
)

// Note adds a look that was planned for a time, began when the client woke, and
// ended when it had read the event that it sent itself then.
func (s *Starvation) Note(planned, woke, read time.Duration) {
	s.Watched += WitnessTick + read - planned
	s.Wake, s.Read = max(s.Wake, woke-planned), max(s.Read, read-woke)
	if late := read - planned; late > StopLimit {
		s.Stopped += late
	}
}

// Share is the part of the time in which the client stood still; 0 without any time.
func (s *Starvation) Share() float64 {
	if s.Watched <= 0 {
		return 0
	}
	return s.Stopped.Seconds() / s.Watched.Seconds()
}

// witness looks at the client until ctx ends; nil when it could not. Events come
// through a pipe, whose reader is woken as those of connections are.
func witness(ctx context.Context, now func() time.Duration) *Starvation {
	r, w, err := os.Pipe()
	if err != nil {
		return nil
	}
	defer r.Close()
	var reader sync.WaitGroup
	arrived := make(chan time.Duration, 1)
	reader.Go(func() {
		var b [1]byte
		for {
			if _, err := r.Read(b[:]); err != nil {
				close(arrived)
				return
			}
			arrived <- now()
		}
	})
	s := new(Starvation)
	for planned := now() + WitnessTick; wait.For(ctx, planned-now()); planned = now() + WitnessTick {
		woke := now()
		if _, err := w.Write([]byte{1}); err != nil {
			break
		}
		read, ok := <-arrived
		if !ok {
			break
		}
		s.Note(planned, woke, read)
	}
	w.Close()
	reader.Wait()
	return s
}
