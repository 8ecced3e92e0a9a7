package admission

import "slices"

// MoveWaiter is a stream that waits to move to some ranks, to all of them together.
type MoveWaiter struct {
	// Slots are those of the ranks, Limit how many moves each of them takes at a time.
	Slots []uint32
	Limit int

	has bool
}

// MoveQueue counts the moves that each rank takes at a time, and returns the stream that
// moves next. It is pure, as [FairOrder] is: its caller calls Next after each Wait, Leave
// and Drop until that is nil. On each rank it is first come, first served: no stream moves
// to a rank that an earlier one waits for, so that one which wants several ranks does not
// wait for ever. The zero value is ready.
type MoveQueue struct {
	on      map[uint32]int // taken, by slot
	wait    map[uint32]int // those that wait, by slot of each rank that they want
	waiters []*MoveWaiter  // oldest first
	held    map[uint32]struct{}
}

// Take admits a move to all these ranks now, or refuses it.
func (q *MoveQueue) Take(slots []uint32, limit int) bool {
	for _, s := range slots {
		if !q.Free(s, limit) {
			return false
		}
	}
	q.admit(slots)
	return true
}

// Free reports whether a rank takes a move that comes now.
func (q *MoveQueue) Free(slot uint32, limit int) bool { return q.on[slot] < limit && q.wait[slot] == 0 }

func (q *MoveQueue) admit(slots []uint32) {
	if q.on == nil {
		q.on = map[uint32]int{}
	}
	for _, s := range slots {
		q.on[s]++
	}
}

// Wait puts w at the end of the queue.
func (q *MoveQueue) Wait(w *MoveWaiter) {
	if q.wait == nil {
		q.wait, q.held = map[uint32]int{}, map[uint32]struct{}{}
	}
	for _, s := range w.Slots {
		q.wait[s]++
	}
	q.waiters = append(q.waiters, w)
}

// Next admits the first waiter that all its ranks take, and returns it; nil for none, until
// something changes.
func (q *MoveQueue) Next() *MoveWaiter {
	clear(q.held)
	for i, w := range q.waiters {
		free := true
		for _, s := range w.Slots {
			if _, before := q.held[s]; before || q.on[s] >= w.Limit {
				free = false
				break
			}
		}
		if free {
			q.remove(i)
			q.admit(w.Slots)
			w.has = true
			return w
		}
		for _, s := range w.Slots {
			q.held[s] = struct{}{}
		}
		if len(q.held) == len(q.wait) { // all ranks that are waited for
			return nil
		}
	}
	return nil
}

func (q *MoveQueue) remove(i int) {
	for _, s := range q.waiters[i].Slots {
		if q.wait[s]--; q.wait[s] == 0 {
			delete(q.wait, s)
		}
	}
	q.waiters = slices.Delete(q.waiters, i, i+1)
}

// Drop takes w out of the queue, or ends its move if Next has just admitted it.
func (q *MoveQueue) Drop(w *MoveWaiter) {
	if i := slices.Index(q.waiters, w); i >= 0 {
		q.remove(i)
	} else if w.has {
		q.Leave(w.Slots)
	}
	w.has = false
}

// Leave ends a move to these ranks.
func (q *MoveQueue) Leave(slots []uint32) {
	for _, s := range slots {
		if q.on[s]--; q.on[s] == 0 {
			delete(q.on, s)
		}
	}
}

// Taken is how many moves a rank has.
func (q *MoveQueue) Taken(slot uint32) int { return q.on[slot] }

// Waiting is how many wait for a rank.
func (q *MoveQueue) Waiting(slot uint32) int { return q.wait[slot] }

// Idle reports whether no rank has a move and no stream waits.
func (q *MoveQueue) Idle() bool { return len(q.on) == 0 && len(q.waiters) == 0 }
