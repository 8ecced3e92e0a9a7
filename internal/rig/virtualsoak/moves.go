package virtualsoak

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/request/admission"
)

// moves are the places on each rank that the rests of streams have their prompt computed
// on, and the soak's own books of them.
type moves struct {
	places admission.Places
	atOnce int
	waits  map[*admission.Wish]*request
	line   []*request     // who waits, oldest first
	on     map[uint32]int // who has a place, by slot
}

// crowd draws how many rests a rank takes at once, and in some seeds many streams at one
// time, most of which one engine has when it is killed. It has numbers of its own: the
// rest of the seed does not depend on it.
func (s *stage) crowd() {
	rng := rand.New(rand.NewPCG(s.out.Seed, 0x6d6f7665))
	s.moves = moves{atOnce: 1 + rng.IntN(3), waits: map[*admission.Wish]*request{}, on: map[uint32]int{}}
	if rng.IntN(4) > 0 {
		return
	}
	at := time.Duration(rng.Int64N(int64(schedule)))
	for range 6 + rng.IntN(10) {
		s.total++
		s.w.At(at+time.Duration(rng.Int64N(int64(10*time.Millisecond))), s.request)
	}
	s.w.At(at, func() { s.killMost(s.w.Now() + 100*time.Millisecond) })
}

// killMost kills an engine as soon as it has some streams in the middle, if that is
// before a time.
func (s *stage) killMost(until time.Duration) {
	var most *node
	streams := map[*node]int{}
	for _, q := range s.inOrder() {
		if len(q.current) == 0 || q.stream == nil || len(q.got) == 0 {
			continue
		}
		n := q.current[len(q.current)-1].n
		if streams[n]++; n.well() && n.member && (most == nil || streams[n] > streams[most]) {
			most = n
		}
	}
	switch {
	case streams[most] >= 3:
		s.out.Faults++
		s.note("%s is killed with %d streams", most.name, streams[most])
		most.hurt()
		most.kill("killed")
		s.w.At(s.w.Now()+s.between(20*time.Millisecond, 800*time.Millisecond), most.boot)
	case s.w.Now() < until:
		s.w.At(s.w.Now()+time.Millisecond, func() { s.killMost(until) })
	}
}

// enterMove takes a place on each rank of the plan, or lets the request wait for them.
func (q *request) enterMove() (ok bool) {
	s, in, p := q.s, &q.run.In, &q.run.Plan
	slots := []uint32{in.DecodePeers[p.DecodeIndex].Rank.Slot}
	if p.Path == decide.Remote {
		slots = append(slots, in.PrefillPeers[p.PrefillIndex].Rank.Slot)
	}
	limit := s.moves.atOnce
	if s.plant == oneTooMany {
		limit++
	}
	if s.moves.places.Take(slots, limit) {
		q.place(slots, 0)
		return true
	}
	s.note("%s waits for a place on %v", q.id, slots)
	s.out.MovesWaited++
	q.wish = &admission.Wish{Slots: slots, Limit: limit}
	s.moves.places.Wait(q.wish)
	s.moves.waits[q.wish] = q
	s.moves.line = append(s.moves.line, q)
	return false
}

// place books the places that a request has got, before which so many wait.
func (q *request) place(slots []uint32, before int) {
	s := q.s
	for _, o := range s.moves.line[:before] {
		if slices.ContainsFunc(slots, func(slot uint32) bool { return slices.Contains(o.wish.Slots, slot) }) {
			s.violate("%s gets its places on %v before %s, which waits longer", q.id, slots, o.id)
		}
	}
	q.places = slots
	for _, slot := range slots {
		if s.moves.on[slot]++; s.moves.on[slot] > s.moves.atOnce {
			s.violate("%d rests of streams at once on the rank of slot %d, the limit is %d", s.moves.on[slot], slot, s.moves.atOnce)
		}
	}
}

// leaveMove gives the places of a request back, or its place in line.
func (q *request) leaveMove() {
	s := q.s
	switch {
	case q.wish != nil:
		w := q.wish
		q.outOfMoves()
		s.moves.places.Drop(w)
	case len(q.places) > 0:
		slots := q.places
		q.places = nil
		for _, slot := range slots {
			s.moves.on[slot]--
		}
		if s.plant == keepPlace && s.chance(0.2) {
			s.note("PLANTED: %s does not give its places back", q.id)
			slots = nil
		}
		s.moves.places.Leave(slots)
	default:
		return
	}
	if s.plant != forgetNext {
		s.nextMoves()
	}
	s.moved()
}

func (q *request) outOfMoves() {
	m := &q.s.moves
	delete(m.waits, q.wish)
	m.line = slices.DeleteFunc(m.line, func(o *request) bool { return o == q })
	q.wish = nil
}

// nextMoves lets those go on whose turn it is.
func (s *stage) nextMoves() {
	for w := s.moves.places.Next(); w != nil; w = s.moves.places.Next() {
		q := s.moves.waits[w]
		before := slices.Index(s.moves.line, q)
		q.place(w.Slots, before)
		q.outOfMoves()
		s.w.At(s.w.Now(), func() {
			if q.ended == 0 {
				q.send(true)
			}
		})
	}
}

// moved is the invariant: what is taken is what requests have, and nobody waits but for a
// rank that is full, or that somebody wants who came before.
func (s *stage) moved() {
	for _, n := range s.nodes {
		slot := n.rank.Slot
		if got, want := s.moves.places.Taken(slot), s.moves.on[slot]; got != want {
			s.violate("%d places of %s are taken, %d requests have one", got, n.name, want)
			return
		}
	}
	before := map[uint32]bool{}
	for _, q := range s.moves.line {
		if !slices.ContainsFunc(q.wish.Slots, func(slot uint32) bool { return before[slot] || s.moves.on[slot] >= s.moves.atOnce }) {
			s.violate("%s waits for a place on %v although there is one", q.id, q.wish.Slots)
			return
		}
		for _, slot := range q.wish.Slots {
			before[slot] = true
		}
	}
}
