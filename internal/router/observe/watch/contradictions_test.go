package watch

import (
	"testing"

	"github.com/dynctl/dynctl/internal/workers"
)

// TestContradictions: a rank is rebuilt after three different prefixes in a row that its engine
// does not have, where nothing else explains it.
func TestContradictions(t *testing.T) {
	type found struct {
		prefix  uint64
		cached  int    // of 160 tokens, in blocks of 16
		removed uint64 // blocks, meanwhile
	}
	good := found{9, 160, 0}
	for _, c := range []struct {
		name  string
		found []found
		want  int
	}{
		{"three in a row", []found{good, {1, 0, 0}, {2, 16, 0}, {3, 0, 0}}, 1},
		{"two", []found{good, {1, 0, 0}, {2, 0, 0}}, 0},
		{"one of them again, which has been computed since", []found{good, {1, 0, 0}, {1, 160, 0}, {2, 0, 0}, {2, 160, 0}, {3, 0, 0}}, 1},
		{"one agrees in between", []found{good, {1, 0, 0}, {2, 0, 0}, good, {3, 0, 0}}, 0},
		{"figures that never agree", []found{{1, 0, 0}, {2, 0, 0}, {3, 0, 0}, {4, 0, 0}}, 0},
		{"no figures", []found{good, {1, -1, 0}, {2, -1, 0}, {3, -1, 0}}, 0},
		{"its events explain it", []found{good, {1, 0, 10}, {2, 0, 10}, {3, 0, 10}}, 0},
		{"its events explain a part", []found{good, {1, 0, 3}, {2, 0, 3}, {3, 0, 3}}, 1},
		{"more than half is there", []found{good, {1, 96, 0}, {2, 96, 0}, {3, 96, 0}}, 0},
		{"once, until figures agree again", []found{good, {1, 0, 0}, {2, 0, 0}, {3, 0, 0}, {4, 0, 0}, {5, 0, 0}, {6, 0, 0}}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			k, removed, distrusted := &workers.Rank{}, uint64(7), 0
			w := NewContradictions(ContradictionsOptions{
				Removed:  func(*workers.Rank) (uint64, bool) { return removed, true },
				Distrust: func(*workers.Rank, string) { distrusted++ },
			})
			for _, f := range c.found {
				p := w.Sent(k, 160, 16, f.prefix)
				removed += f.removed
				w.Found(p, f.cached)
			}
			w.Found(w.Sent(k, 16, 16, 8), 0) // too short to say anything
			if distrusted != c.want {
				t.Errorf("distrusted %d times, want %d", distrusted, c.want)
			}
		})
	}
}
