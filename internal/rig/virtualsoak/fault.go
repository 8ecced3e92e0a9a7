package virtualsoak

import (
	"bytes"
	"encoding/json"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/workers"
)

// strike breaks something for a while.
func (s *stage) strike() {
	if s.chance(0.2) {
		s.changeFleet()
		return
	}
	if s.chance(0.15) {
		s.doomed = 1 + s.rng.IntN(2)
		return
	}
	var list []*node
	for _, n := range s.nodes {
		if n.member && n.well() {
			list = append(list, n)
		}
	}
	if len(list) == 0 {
		return
	}
	n := list[s.rng.IntN(len(list))]
	s.out.Faults++
	for_ := s.between(20*time.Millisecond, 800*time.Millisecond)
	n.hurt()
	switch k := s.rng.IntN(11); k {
	case 0, 1:
		s.note("%s is killed for %v", n.name, for_)
		n.kill("killed")
		s.w.At(s.w.Now()+for_, n.boot)
		return
	case 2:
		s.note("%s restarts at once", n.name)
		n.kill("restarted")
		n.boot()
		return
	case 3:
		s.note("%s hangs for %v", n.name, for_)
		n.hang = true
	case 4:
		n.errors = 0.3 + 0.7*s.rng.Float64()
		s.note("%s answers 5xx to %.2f for %v", n.name, n.errors, for_)
	case 5:
		n.die = 0.3 + 0.7*s.rng.Float64()
		s.note("%s cuts %.2f of its answers for %v", n.name, n.die, for_)
	case 6:
		slow := 2 + 50*s.rng.Float64()
		s.note("%s is %.1f times slower for %v", n.name, slow, for_)
		if c := n.v.Core(); c != nil {
			c.SetSlow(slow)
			n.v.Touch()
		}
	case 10:
		n.full = 0.3 + 0.7*s.rng.Float64()
		s.note("%s refuses %.2f of its requests for want of room for %v", n.name, n.full, for_)
	default:
		n.drop, n.late, n.spoil = 0, 0, 0
		rate := 0.1 + 0.8*s.rng.Float64()
		*[]*float64{&n.drop, &n.late, &n.spoil}[k-7] = rate
		s.note("%s loses %.2f, reorders %.2f, spoils %.2f of its events for %v", n.name, n.drop, n.late, n.spoil, for_)
	}
	inc := n.inc
	s.w.At(s.w.Now()+for_, func() {
		if n.inc == inc {
			n.endFaults()
		}
	})
}

// kind says what a request does to every engine that takes it.
type kind uint8

const (
	harmless kind = iota
	poison        // the engine answers with an error
	deadly        // the engine dies
)

// draw says what a request is.
func (s *stage) draw() kind {
	switch {
	case s.script != nil:
		return s.script.does
	case s.chance(0.03):
		return poison
	case s.chance(0.02):
		return deadly
	}
	return harmless
}

// dies ends the engine of a leg whose request is deadly.
func (l *leg) dies() {
	s, q, n := l.q.s, l.q, l.n
	if l.over || !n.up || n.inc != l.inc {
		return
	}
	if !slices.Contains(q.killed, n) {
		q.killed = append(q.killed, n)
		s.out.Died++
	}
	s.out.Faults++
	s.note("%s dies of %s", n.name, q.id)
	most := attempt.MaxLost
	if s.atOnce() {
		most++ // one has died, and the next attempt reaches two at once
	}
	if len(q.killed) > most {
		s.violate("%d engines died of %s", len(q.killed), q.id)
		return
	}
	n.hurt()
	n.kill("killed by a request")
	s.w.At(s.w.Now()+s.between(20*time.Millisecond, 400*time.Millisecond), n.boot)
}

// acquitted wants no engine to be left out for a request that breaks every engine, once two
// of them have shown it.
func (q *request) acquitted() {
	for _, n := range q.s.nodes {
		if len(n.poisoned) != 1 || !n.poisoned[q.body] || n.faulted || !n.member || n.worker.State.Draining() || n.worker.State.Probed().Health != workers.Healthy {
			continue
		}
		if ok, why := n.worker.State.Usable(); !ok {
			q.s.violate("%s is left out for %s, which breaks every engine: %s", n.name, q.id, why)
		}
	}
}

// doom restarts an engine that has just answered a prefill: the decode engine
// that comes for the KV is well, and fails all the same.
func (s *stage) doom(n *node) {
	s.doomed--
	s.out.Faults++
	s.note("%s restarts before its KV is pulled", n.name)
	n.hurt()
	n.kill("restarted")
	n.boot()
}

// changeFleet adds a worker, drains one, or takes one away.
func (s *stage) changeFleet() {
	var able []*node
	for _, n := range s.nodes {
		if n.member && !n.worker.State.Draining() {
			able = append(able, n)
		}
	}
	decode := 0
	for _, n := range able {
		if n.worker.Role.CanDecode() {
			decode++
		}
	}
	n := able[s.rng.IntN(len(able))]
	switch {
	case len(s.nodes) < 12 && (s.chance(0.4) || n.worker.Role.CanDecode() && decode < 3):
		s.out.Faults++
		s.join([]workers.Role{workers.Prefill, workers.Decode, workers.Aggregated}[s.rng.IntN(3)])
	case s.chance(0.5):
		s.drain(n, s.chance(0.5))
	case !n.worker.Role.CanDecode() || decode >= 3:
		s.out.Faults++
		if s.going == nil && s.chance(0.7) {
			s.replaceLate(n)
			return
		}
		s.note("%s is taken away", n.name)
		s.leave(n)
	}
}

// drain has a worker take no requests for a while; moving says that its streams continue
// elsewhere, those that can.
func (s *stage) drain(n *node, moving bool) {
	s.out.Faults++
	s.note("%s drains, its streams go on elsewhere: %v", n.name, moving)
	if n.worker.State.SetDraining(true); moving {
		n.worker.State.SetMoving()
	}
	n.hurt()
	s.w.At(s.w.Now()+s.between(10*time.Millisecond, 300*time.Millisecond), func() {
		if n.worker.State.Draining() {
			s.note("%s takes requests again", n.name)
			n.worker.State.SetDraining(false)
		}
	})
}

// replaceLate takes a worker away, and puts another one in its slot, between the
// decision of a request that has chosen it and the request's reservation; if
// none chooses it, after a while.
func (s *stage) replaceLate(n *node) {
	s.going = n
	s.w.At(s.w.Now()+200*time.Millisecond, func() {
		if s.going == n {
			s.replace()
		}
	})
}

// replace carries it out.
func (s *stage) replace() {
	n := s.going
	s.going = nil
	s.note("%s is replaced", n.name)
	s.leave(n)
	s.join(n.worker.Role)
}

// saveIndex writes a snapshot, each rank at the moment at which its feed's
// position is true.
func (s *stage) saveIndex() {
	s.note("a snapshot of the index")
	s.promises = map[string]*kept{}
	var file bytes.Buffer
	if err := s.index.Snapshot(&file, func(r kvindex.Rank, _ string, take func()) (note []byte) {
		for _, n := range s.nodes {
			if !n.member || n.silent || n.slot() != r {
				continue
			}
			k, ok := n.feed.keep()
			if ok {
				s.promises[n.name] = &k
			}
			if !ok || s.plant == endFirst {
				break
			}
			if p := s.early[n.feed]; p != nil {
				k.Position = *p
			}
			take()
			note, _ = json.Marshal(k) // numbers and words always can be
		}
		return note
	}); err != nil {
		s.violate("snapshot: %v", err)
	}
	s.file = file.Bytes()
}

// notePositions is for positionsFirst and positionsJustBefore.
func (s *stage) notePositions() {
	s.early = map[*feed]*kvstream.Position{}
	for _, n := range s.nodes {
		if p, ok := n.feed.stream.Position(); ok && n.member {
			s.early[n.feed] = &p
		}
	}
}

// restartRouter cuts what is under way, and goes on with a new router that has
// nothing but the latest snapshot.
func (s *stage) restartRouter() {
	s.out.Restarts++
	s.note("the router restarts with its snapshot")
	for _, q := range s.inOrder() {
		q.leave("the router was restarted")
	}
	s.settle()
	if len(s.open)+len(s.tasks) > 0 {
		s.violate("after a drain: %d requests and %d tasks are left", len(s.open), len(s.tasks))
	}
	if err := s.ledger.Balanced(); err != nil {
		s.violate("after a drain: %v", err)
	}
	if !s.moves.queue.Idle() {
		s.violate("after a drain: places of rests of streams were not given back")
	}
	s.closeRouter()
	s.openLedger()
	s.openRouter()
	for _, n := range s.nodes { // their health is learned again
		n.worker.State.SetEjection(nil)
		n.worker.State.SetGeneration(0)
	}
	restored := map[string]*kept{}
	if err := s.index.Restore(bytes.NewReader(s.file), func(r kvindex.Rank, name string, note []byte) error {
		restored[name] = &kept{slot: r}
		return json.Unmarshal(note, restored[name])
	}); err != nil {
		s.violate("restore: %v", err)
		return
	}
	// Whoever has another place now, or none, starts over.
	for name, k := range restored {
		if !slices.ContainsFunc(s.nodes, func(n *node) bool { return n.member && n.name == name && n.slot() == k.slot }) {
			s.index.RemoveRank(k.slot)
			delete(restored, name)
		}
	}
	for _, n := range s.nodes {
		if !n.member {
			continue
		}
		if err := s.approx.AddRank(n.slot(), n.rank.Number, n.name); err != nil {
			s.violate("%v", err)
		}
		k := restored[n.name]
		if k == nil {
			if err := s.index.AddRank(n.slot(), n.name); err != nil {
				s.violate("%v", err)
			}
		}
		n.feed = n.feed.again(k, s.promises[n.name])
	}
	s.away = true
	s.w.At(s.w.Now()+s.between(0, 100*time.Millisecond), func() {
		s.away = false
		for _, n := range s.nodes {
			if n.member {
				n.feed.connect()
			}
		}
	})
}
