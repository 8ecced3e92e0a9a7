package admission

import "slices"

// Wish is a request that waits for a place on each of some ranks, all at once.
type Wish struct {
	// Slots are those of the ranks, Limit how many places each of them has.
	Slots []uint32
	Limit int

	has bool
}

// Places counts the few places on each rank, and says which request that waits is next.
// It is pure, as Turns is: its caller calls Next after each Wait, Leave and Drop until that
// is nil. On each rank it is first come, first served: no request gets a place on a rank
// that an earlier one waits for, so that one which wants several does not wait for ever.
// The zero value is ready.
type Places struct {
	on   map[uint32]int // taken, by slot
	wait map[uint32]int // those that wait, by slot of each rank that they want
	line []*Wish        // oldest first
	held map[uint32]struct{}
}

// Take takes the places now, or none of them.
func (p *Places) Take(slots []uint32, limit int) bool {
	for _, s := range slots {
		if !p.Free(s, limit) {
			return false
		}
	}
	p.take(slots)
	return true
}

// Free reports whether a request that comes now gets a place on a rank.
func (p *Places) Free(slot uint32, limit int) bool { return p.on[slot] < limit && p.wait[slot] == 0 }

func (p *Places) take(slots []uint32) {
	if p.on == nil {
		p.on = map[uint32]int{}
	}
	for _, s := range slots {
		p.on[s]++
	}
}

// Wait puts w at the end of the line.
func (p *Places) Wait(w *Wish) {
	if p.wait == nil {
		p.wait, p.held = map[uint32]int{}, map[uint32]struct{}{}
	}
	for _, s := range w.Slots {
		p.wait[s]++
	}
	p.line = append(p.line, w)
}

// Next gives the first wish that can have its places those, and returns it; nil for none,
// until something changes.
func (p *Places) Next() *Wish {
	clear(p.held)
	for i, w := range p.line {
		free := true
		for _, s := range w.Slots {
			if _, before := p.held[s]; before || p.on[s] >= w.Limit {
				free = false
				break
			}
		}
		if free {
			p.remove(i)
			p.take(w.Slots)
			w.has = true
			return w
		}
		for _, s := range w.Slots {
			p.held[s] = struct{}{}
		}
		if len(p.held) == len(p.wait) { // all ranks that are waited for
			return nil
		}
	}
	return nil
}

func (p *Places) remove(i int) {
	for _, s := range p.line[i].Slots {
		if p.wait[s]--; p.wait[s] == 0 {
			delete(p.wait, s)
		}
	}
	p.line = slices.Delete(p.line, i, i+1)
}

// Drop takes w out of the line, or gives its places back if it has just got them.
func (p *Places) Drop(w *Wish) {
	if i := slices.Index(p.line, w); i >= 0 {
		p.remove(i)
	} else if w.has {
		p.Leave(w.Slots)
	}
	w.has = false
}

// Leave gives the places back.
func (p *Places) Leave(slots []uint32) {
	for _, s := range slots {
		if p.on[s]--; p.on[s] == 0 {
			delete(p.on, s)
		}
	}
}

// Taken is how many places of a rank are taken.
func (p *Places) Taken(slot uint32) int { return p.on[slot] }

// Waiting is how many wait for a place on a rank.
func (p *Places) Waiting(slot uint32) int { return p.wait[slot] }

// Idle reports whether no place is taken and none is waited for.
func (p *Places) Idle() bool { return len(p.on) == 0 && len(p.line) == 0 }
