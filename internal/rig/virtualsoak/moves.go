package virtualsoak

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/admission"
)

// moves are the places on each rank that the rests of streams have their prompt computed
// on, and the soak's own books of them: [admission.Moves] without its goroutines and timers.
type moves struct {
	s     *stage
	queue admission.MoveQueue
	line  []*wish        // who waits, oldest first
	on    map[uint32]int // who has a place, by slot
}

// wish is a task that waits for places.
type wish struct {
	admission.MoveWaiter
	t   *task
	has bool
}

// pace has so many rests begin on a rank at once.
func (s *stage) pace(atOnce int) {
	s.settings.Continue.PerRank = atOnce
	s.moves = moves{s: s, on: map[uint32]int{}}
}

// crowd draws how many rests a rank takes at once, and in some seeds many streams at one
// time, most of which one engine has when it is killed or drained. It has numbers of its own: the
// rest of the seed does not depend on it.
func (s *stage) crowd() {
	rng := rand.New(rand.NewPCG(s.out.Seed, 0x6d6f7665))
	s.pace(1 + rng.IntN(3))
	if rng.IntN(4) > 0 {
		return
	}
	at := time.Duration(rng.Int64N(int64(schedule)))
	for range 6 + rng.IntN(10) {
		s.total++
		s.w.At(at+time.Duration(rng.Int64N(int64(10*time.Millisecond))), s.request)
	}
	drains := rng.IntN(2) == 0
	s.w.At(at, func() { s.strikeMost(drains, s.w.Now()+100*time.Millisecond) })
}

// strikeMost kills an engine as soon as it has some streams in the middle, if that is
// before a time, or drains it and has the streams continue elsewhere.
func (s *stage) strikeMost(drains bool, until time.Duration) {
	var most *node
	streams := map[*node]int{}
	for _, q := range s.inOrder() {
		l := q.decoding
		if l == nil || l.over || !l.begun || q.stream == nil {
			continue
		}
		n := l.n
		if streams[n]++; n.well() && n.member && (most == nil || streams[n] > streams[most]) {
			most = n
		}
	}
	switch {
	case streams[most] >= 3 && drains:
		s.drain(most, true)
	case streams[most] >= 3:
		s.out.Faults++
		s.note("%s is killed with %d streams", most.name, streams[most])
		most.hurt()
		most.kill("killed")
		s.w.At(s.w.Now()+s.between(20*time.Millisecond, 800*time.Millisecond), most.boot)
	case s.w.Now() < until:
		s.w.At(s.w.Now()+time.Millisecond, func() { s.strikeMost(drains, until) })
	}
}

// limit is how many places a rank has, as the bug that may be planted has it.
func (m *moves) limit(n int) int {
	if m.s.plant == oneTooMany {
		n++
	}
	return n
}

// Enter is for resumed.Moves.
func (m *moves) Enter(ctx context.Context, slots []uint32, limit int, every time.Duration, beat func() error) error {
	s, t := m.s, m.s.running
	if m.Try(slots, limit) {
		return nil
	}
	s.note("%s waits for a place on %v", t.q.id, slots)
	s.out.MovesWaited++
	t.q.late = true
	w := &wish{MoveWaiter: admission.MoveWaiter{Slots: slots, Limit: m.limit(limit)}, t: t}
	m.queue.Wait(&w.MoveWaiter)
	m.line = append(m.line, w)
	m.next()
	give := func(err error) error {
		m.line = slices.DeleteFunc(m.line, func(o *wish) bool { return o == w })
		if w.has {
			m.leave(slots)
		} else {
			m.queue.Drop(&w.MoveWaiter)
			m.next()
		}
		return err
	}
	for next := s.w.Now() + every; !w.has; {
		if err := ctx.Err(); err != nil {
			return give(err)
		}
		if s.w.Now() >= next {
			if err := beat(); err != nil {
				return give(err)
			}
			next += every
		}
		s.w.At(next, func() {
			if !w.has {
				s.wake(t)
			}
		})
		s.block(ctx)
	}
	return nil
}

// Try is for resumed.Moves.
func (m *moves) Try(slots []uint32, limit int) bool {
	if !m.queue.Take(slots, m.limit(limit)) {
		return false
	}
	m.admit(slots, 0)
	return true
}

// Free is for resumed.Moves.
func (m *moves) Free(slot uint32, limit int) bool { return m.queue.Free(slot, m.limit(limit)) }

// Leave is for resumed.Moves.
func (m *moves) Leave(slots []uint32) {
	if s := m.s; s.plant == keepPlace && s.chance(0.2) {
		s.note("PLANTED: %s does not give its places back", s.running.q.id)
		for _, slot := range slots {
			m.on[slot]--
		}
		return
	}
	m.leave(slots)
}

func (m *moves) leave(slots []uint32) {
	for _, slot := range slots {
		m.on[slot]--
	}
	m.queue.Leave(slots)
	if m.s.plant != forgetNext {
		m.next()
	}
}

// admit books the places that a request has got, before which so many wait.
func (m *moves) admit(slots []uint32, before int) {
	s := m.s
	for _, o := range m.line[:before] {
		if slices.ContainsFunc(slots, func(slot uint32) bool { return slices.Contains(o.Slots, slot) }) {
			s.violate("somebody gets its places on %v before %s, which waits longer", slots, o.t.q.id)
		}
	}
	for _, slot := range slots {
		if m.on[slot]++; m.on[slot] > s.settings.Continue.PerRank {
			s.violate("%d rests of streams at once on the rank of slot %d, the limit is %d", m.on[slot], slot, s.settings.Continue.PerRank)
		}
	}
}

// next lets those go on whose turn it is.
func (m *moves) next() {
	for p := m.queue.Next(); p != nil; p = m.queue.Next() {
		i := slices.IndexFunc(m.line, func(w *wish) bool { return &w.MoveWaiter == p })
		w := m.line[i]
		m.admit(w.Slots, i)
		m.line = slices.Delete(m.line, i, i+1)
		w.has = true
		m.s.wake(w.t)
	}
}

// moved is the invariant: what is taken is what requests have, and nobody waits but for a
// rank that is full, or that somebody wants who came before.
func (s *stage) moved() {
	m := &s.moves
	for _, n := range s.nodes {
		slot := n.rank.Slot
		if got, want := m.queue.Taken(slot), m.on[slot]; got != want {
			s.violate("%d places of %s are taken, %d requests have one", got, n.name, want)
			return
		}
	}
	before := map[uint32]bool{}
	for _, w := range m.line {
		if !slices.ContainsFunc(w.Slots, func(slot uint32) bool { return before[slot] || m.on[slot] >= s.settings.Continue.PerRank }) {
			s.violate("%s waits for a place on %v although there is one", w.t.q.id, w.Slots)
			return
		}
		for _, slot := range w.Slots {
			before[slot] = true
		}
	}
}
