//go:build !race

// The race detector has a pool lose at random what it holds, so that events are made again.

package lifecycle

import (
	"net/http"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/route"
)

// TestEventsAllocateNothing: an event costs no memory with all subscribers of a router. (Those
// that the event log gets have fields of their own.)
func TestEventsAllocateNothing(t *testing.T) {
	s, got := newStand(t, decide.Plan{Path: route.Local}), make(steps, 0, 1<<16)
	s.kinds = make([]Kind, 0, 1<<16)
	l := s.BeginLeg(route.Decode, s.peer, nil, time.Now())
	l.Held = &got
	s.Answer.Of(l)
	now := time.Now()
	if n := testing.AllocsPerRun(100, func() {
		s.Arrived()
		s.Refused("path")
		s.Waited("queue", time.Second)
		s.Tokenized(route.FromIDs)
		s.Retried(route.Decode, attempt.Reset)
		s.Chosen()
		l.Head(http.StatusOK)
		l.Facts(disagg.Checked{})
		s.Prefilled(s.peer.Worker, &disagg.Checked{Groups: 1}, nil)
		l.Streams(now, true)
		l.Runs(1, now)
		for range 32 {
			s.Answer.Piece(now, 1)
		}
		s.Note("a note")
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
