package kvindex

import (
	"math/rand/v2"
	"testing"
)

// Memory that is handed out is nobody else's, comes zeroed from grab, stays within the limit, and what was
// given back is handed out again before the host gives more.
func TestPages(t *testing.T) {
	t.Parallel()
	m := &memory{limit: 24 << 20}
	rnd := rand.New(rand.NewPCG(1, 2))
	var held [][]uint64
	refused := false
	for step := range 2000 {
		if i := rnd.IntN(10); i < 4 && len(held) > 0 || refused && len(held) > 100 {
			i := rnd.IntN(len(held))
			for j := 0; j < len(held[i]); j += 61 {
				if held[i][j] != held[i][0] {
					t.Fatalf("step %d: memory that is in use has changed", step)
				}
			}
			m.drop(held[i])
			held[i] = held[len(held)-1]
			held = held[:len(held)-1]
			continue
		}
		w := m.grab(1 + rnd.IntN(40000))
		if w == nil {
			refused = true
			continue
		}
		for i := 0; i < len(w); i += 61 {
			if w[i] != 0 {
				t.Fatalf("step %d: word %d of %d is %d", step, i, len(w), w[i])
			}
			w[i] = uint64(step + 1)
		}
		held = append(held, w)
	}
	if m.bytes.Load() > m.limit || !refused {
		t.Fatalf("%d bytes, limit %d, refused %v", m.bytes.Load(), m.limit, refused)
	}
	was := m.bytes.Load()
	for _, w := range held {
		m.drop(w)
	}
	for _, r := range m.regions {
		if r.low != 0 || r.find(r.given) != 0 {
			t.Errorf("all is given back, but of %d units in a region the first free one is %d", r.given, r.find(r.given))
		}
	}
	if m.grab(m.regions[0].given*unitWords) == nil || m.bytes.Load() != was {
		t.Errorf("%d bytes instead of %d for what fits in one region", m.bytes.Load(), was)
	}
	if err := m.close(); err != nil || m.bytes.Load() != 0 {
		t.Errorf("close: %v, %d bytes left", err, m.bytes.Load())
	}
}

// A piece that is larger than a region has one of its own.
func TestPagesLarge(t *testing.T) {
	t.Parallel()
	m := &memory{limit: 1 << 40}
	small, large := m.grab(10), m.grab(hugeUnits*unitWords+1)
	if small == nil || large == nil || len(large) != hugeUnits*unitWords+1 {
		t.Fatalf("%d and %d words", len(small), len(large))
	}
	large[len(large)-1] = 1
	if err := m.close(); err != nil {
		t.Error(err)
	}
}
