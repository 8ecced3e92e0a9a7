package kvtier

import (
	"testing"

	"github.com/dynctl/dynctl/internal/router/decision"
)

// TestWidestShrinks: a large block that is gone hides no smaller ones any more.
func TestWidestShrinks(t *testing.T) {
	tiers := New()
	seq := []uint64{11, 12, 13, 14}
	tiers.Store(CPU, 1, 12, 1)
	tiers.Store(CPU, 2, 13, 1)
	if d := tiers.Extend(seq, 1, len(seq)); d != (decision.Tiers{CPU: 2}) {
		t.Fatalf("two blocks: %+v", d)
	}
	tiers.Store(Disk, 3, 99, 8)
	if d := tiers.Extend(seq, 1, len(seq)); d != (decision.Tiers{}) {
		t.Errorf("less than one of the largest is loaded: %+v", d)
	}
	tiers.Remove(Disk, 3)
	if d := tiers.Extend(seq, 1, len(seq)); d != (decision.Tiers{CPU: 2}) {
		t.Errorf("the large block is gone: %+v", d)
	}
	tiers.Store(CPU, 2, 13, 4) // the name is of another block now
	tiers.Store(CPU, 2, 13, 1)
	if d := tiers.Extend(seq, 1, len(seq)); d != (decision.Tiers{CPU: 2}) {
		t.Errorf("a block that became smaller: %+v", d)
	}
	tiers.ClearTier(CPU)
	if tiers.widest != 0 || len(tiers.widths) != 0 {
		t.Errorf("of no blocks the widest has %d", tiers.widest)
	}
}
