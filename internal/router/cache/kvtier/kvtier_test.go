package kvtier

import (
	"testing"

	"github.com/dynctl/dynctl/internal/router/route"
)

// TestWidestShrinks: a large block that is gone hides no smaller ones any more.
func TestWidestShrinks(t *testing.T) {
	tiers := New()
	seq := []uint64{11, 12, 13, 14}
	tiers.Store(CPU, 1, 12, 1)
	tiers.Store(CPU, 2, 13, 1)
	if d := tiers.Extend(seq, 1, len(seq), false); d != (route.Tiers{CPU: 2}) {
		t.Fatalf("two blocks: %+v", d)
	}
	tiers.Store(Disk, 3, 99, 8)
	if d := tiers.Extend(seq, 1, len(seq), false); d != (route.Tiers{}) {
		t.Errorf("less than one of the largest is loaded: %+v", d)
	}
	tiers.Remove(Disk, 3)
	if d := tiers.Extend(seq, 1, len(seq), false); d != (route.Tiers{CPU: 2}) {
		t.Errorf("the large block is gone: %+v", d)
	}
	tiers.Store(CPU, 2, 13, 4) // the name is of another block now
	tiers.Store(CPU, 2, 13, 1)
	if d := tiers.Extend(seq, 1, len(seq), false); d != (route.Tiers{CPU: 2}) {
		t.Errorf("a block that became smaller: %+v", d)
	}
	tiers.ClearTier(CPU)
	if tiers.widest != 0 || len(tiers.widths) != 0 {
		t.Errorf("of no blocks the widest has %d", tiers.widest)
	}
}

// TestLastBlockDropped: the last block is taken from the tier that has it, with its whole
// width, and what is left must be as long as one of the largest.
func TestLastBlockDropped(t *testing.T) {
	seq := []uint64{11, 12, 13, 14, 15}
	of := func(blocks ...func(*Tiers)) route.Tiers {
		tiers := New()
		for _, store := range blocks {
			store(tiers)
		}
		return tiers.Extend(seq, 1, len(seq), true)
	}
	block := func(tier Tier, seq uint64, width int) func(*Tiers) {
		return func(t *Tiers) { t.Store(tier, seq, seq, width) }
	}
	for name, tt := range map[string]struct{ got, want route.Tiers }{
		"none":              {of(), route.Tiers{}},
		"one":               {of(block(CPU, 12, 1)), route.Tiers{}},
		"of another tier":   {of(block(CPU, 12, 1), block(Disk, 13, 1)), route.Tiers{CPU: 1}},
		"of the same":       {of(block(CPU, 12, 1), block(CPU, 13, 1), block(CPU, 14, 1)), route.Tiers{CPU: 2}},
		"a large one":       {of(block(CPU, 13, 2), block(CPU, 15, 2)), route.Tiers{CPU: 2}},
		"less than a large": {of(block(CPU, 12, 1), block(CPU, 14, 2)), route.Tiers{}},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: %+v, want %+v", name, tt.got, tt.want)
		}
	}
}
