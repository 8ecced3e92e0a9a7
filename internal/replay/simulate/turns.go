package simulate

import (
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
)

// turns are the requests of a closed loop that wait for an answer.
type turns struct {
	// held are the turns of each session that have no time of arrival yet, in the order
	// of the trace.
	held map[uint64][]turn
	// due has the arrivals of the turns that wait for nothing but their thinking time,
	// in rising order.
	due []time.Duration
}

// turn is a later request of a session and its thinking time, before Speedup.
type turn struct {
	q     *arrivals.Request
	think time.Duration
}

// hold keeps the later turns of all sessions and returns the other requests.
func (t *turns) hold(src arrivals.Source, s *Setup) (arrivals.Source, error) {
	t.held = map[uint64][]turn{}
	var first []arrivals.Request
	arrived := map[uint64]time.Duration{} // a session's newest request in the trace
	for q, err := range src {
		if err != nil {
			return nil, err
		}
		if !s.simulates(q) {
			continue
		}
		before, later := arrived[q.SessionKey]
		if q.SessionKey == 0 || !later {
			first = append(first, *q)
		} else {
			think := max(q.At-before, 0)
			if q.ThinkUS != nil {
				think = time.Duration(*q.ThinkUS) * time.Microsecond
			}
			t.held[q.SessionKey] = append(t.held[q.SessionKey], turn{q, think})
		}
		arrived[q.SessionKey] = q.At
	}
	return arrivals.FromSlice(first), nil
}

// follow has the turn after q arrive when its thinking time is over.
func (r *run) follow(q *arrivals.Request) {
	held := r.turns.held[q.SessionKey]
	if len(held) == 0 {
		return
	}
	next := held[0]
	r.turns.held[q.SessionKey] = held[1:]
	at, err := r.due(next.q, r.world.Now(), next.think)
	if err != nil {
		r.err = err
		return
	}
	i, _ := slices.BinarySearch(r.turns.due, at)
	r.turns.due = slices.Insert(r.turns.due, i, at)
	r.world.At(at, func() {
		r.turns.due = slices.Delete(r.turns.due, 0, 1) // calls come in the order of their times
		r.route(next.q)
	})
}

// upcoming is when the next request arrives, as far as that is known. It reports false
// when no more arrive until an open one ends.
func (r *run) upcoming() (time.Duration, bool) {
	switch due := r.turns.due; {
	case len(due) == 0:
		return r.coming, !r.ended
	case r.ended:
		return due[0], true
	default:
		return min(r.coming, due[0]), true
	}
}
