package admission

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

// TestPlacesInTurn: a wish for two ranks is not overtaken by those for one of them, wishes
// for other ranks pass it, and one that is dropped makes room.
func TestPlacesInTurn(t *testing.T) {
	var p Places
	one, both, late, other := &Wish{Slots: []uint32{1}, Limit: 1}, &Wish{Slots: []uint32{1, 2}, Limit: 1}, &Wish{Slots: []uint32{2}, Limit: 1}, &Wish{Slots: []uint32{3}, Limit: 1}
	if !p.Take(one.Slots, 1) {
		t.Fatal("nobody has a place, and there is none")
	}
	p.Wait(both)
	if p.Take(late.Slots, 1) || p.Free(2, 1) {
		t.Error("one who came later overtakes")
	}
	p.Wait(late)
	if w := p.Next(); w != nil {
		t.Errorf("%v goes", w)
	}
	p.Wait(other)
	if w := p.Next(); w != other {
		t.Errorf("%v goes, nobody waits for rank 3", w)
	}
	p.Leave(one.Slots)
	if w := p.Next(); w != both || p.Next() != nil || p.Waiting(2) != 1 || p.Taken(1) != 1 || p.Taken(2) != 1 {
		t.Errorf("%v goes", w)
	}
	p.Drop(both) // that has its places, and does not know yet
	if w := p.Next(); w != late {
		t.Errorf("%v goes", w)
	}
	p.Leave(late.Slots)
	p.Leave(other.Slots)
	if p.Drop(both); !p.Idle() {
		t.Errorf("%+v", p)
	}
}

// TestPlaces drives Places at random against a plain model: no rank has more than its
// places, on none is a wish overtaken, none waits that could go, and all is given back.
func TestPlaces(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		draw := func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "n") }
		var p Places
		limit := 1 + draw(3)
		var line, in []*Wish
		taken := map[uint32]int{}
		drain := func() {
			for w := p.Next(); w != nil; w = p.Next() {
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
		give := func(i int) *Wish {
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
				w := &Wish{Slots: []uint32{uint32(draw(3))}, Limit: limit}
				if draw(2) == 0 {
					w.Slots = append(w.Slots, 3+uint32(draw(2)))
				}
				p.Wait(w)
				line = append(line, w)
			case k == 2 && len(in) > 0:
				p.Leave(give(draw(len(in))).Slots)
			case k == 3 && len(line) > 0 && draw(4) == 0:
				i := draw(len(line))
				p.Drop(line[i])
				line = slices.Delete(line, i, i+1)
			case k == 3 && len(in) > 0 && draw(4) == 0:
				p.Drop(give(draw(len(in))))
			}
			drain()
		}
		for len(in) > 0 {
			p.Leave(give(0).Slots)
			drain()
		}
		if len(line) > 0 || !p.Idle() {
			t.Fatalf("%d wait, %+v", len(line), p)
		}
	})
}
