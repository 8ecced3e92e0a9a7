package admission

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

// TestMovesInOrder: a move to two ranks is not overtaken by those to one of them, moves
// for other ranks pass it, and one that is dropped makes room.
func TestMovesInOrder(t *testing.T) {
	var q MoveQueue
	one, both, late, other := &MoveWaiter{Slots: []uint32{1}, Limit: 1}, &MoveWaiter{Slots: []uint32{1, 2}, Limit: 1}, &MoveWaiter{Slots: []uint32{2}, Limit: 1}, &MoveWaiter{Slots: []uint32{3}, Limit: 1}
	if !q.Take(one.Slots, 1) {
		t.Fatal("nobody has a place, and there is none")
	}
	q.Wait(both)
	if q.Take(late.Slots, 1) || q.Free(2, 1) {
		t.Error("one who came later overtakes")
	}
	q.Wait(late)
	if w := q.Next(); w != nil {
		t.Errorf("%v goes", w)
	}
	q.Wait(other)
	if w := q.Next(); w != other {
		t.Errorf("%v goes, nobody waits for rank 3", w)
	}
	q.Leave(one.Slots)
	if w := q.Next(); w != both || q.Next() != nil {
		t.Errorf("%v goes", w)
	}
	if got := [...]int{q.Waiting(2), q.Taken(1), q.Taken(2)}; got != [...]int{1, 1, 1} {
		t.Errorf("one waits for rank 2, and one has a place at ranks 1 and 2: %v", got)
	}
	q.Drop(both) // that has its places, and does not know yet
	if w := q.Next(); w != late {
		t.Errorf("%v goes", w)
	}
	q.Leave(late.Slots)
	q.Leave(other.Slots)
	if q.Drop(both); !q.Idle() {
		t.Errorf("%+v", q)
	}
}

// TestMoveQueue drives MoveQueue at random against a plain model: no rank has more than its
// places, on none is a wish overtaken, none waits that could go, and all is given back.
func TestMoveQueue(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		draw := func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "n") }
		var q MoveQueue
		limit := 1 + draw(3)
		var line, in []*MoveWaiter
		taken := map[uint32]int{}
		drain := func() {
			for w := q.Next(); w != nil; w = q.Next() {
				i := slices.Index(line, w)
				for _, o := range line[:i] {
					for _, s := range w.Slots {
						if slices.Contains(o.Slots, s) {
							t.Fatalf("%v overtakes %v", w, o)
						}
					}
				}
				line = slices.Delete(line, i, i+1)
				for _, s := range w.Slots {
					if taken[s]++; taken[s] > limit {
						t.Fatalf("%d on rank %d, the limit is %d", taken[s], s, limit)
					}
				}
				in = append(in, w)
			}
			before := map[uint32]bool{}
			for _, w := range line {
				if !slices.ContainsFunc(w.Slots, func(s uint32) bool { return before[s] || taken[s] >= limit }) {
					t.Fatalf("%v waits for nothing", w)
				}
				for _, s := range w.Slots {
					before[s] = true
				}
			}
		}
		give := func(i int) *MoveWaiter {
			w := in[i]
			in = slices.Delete(in, i, i+1)
			for _, s := range w.Slots {
				taken[s]--
			}
			return w
		}
		for range 200 {
			switch k := draw(4); {
			case k < 2:
				w := &MoveWaiter{Slots: []uint32{uint32(draw(3))}, Limit: limit}
				if draw(2) == 0 {
					w.Slots = append(w.Slots, 3+uint32(draw(2)))
				}
				q.Wait(w)
				line = append(line, w)
			case k == 2 && len(in) > 0:
				q.Leave(give(draw(len(in))).Slots)
			case k == 3 && len(line) > 0 && draw(4) == 0:
				i := draw(len(line))
				q.Drop(line[i])
				line = slices.Delete(line, i, i+1)
			case k == 3 && len(in) > 0 && draw(4) == 0:
				q.Drop(give(draw(len(in))))
			}
			drain()
		}
		for len(in) > 0 {
			q.Leave(give(0).Slots)
			drain()
		}
		if len(line) > 0 || !q.Idle() {
			t.Fatalf("%d wait, %+v", len(line), q)
		}
	})
}
