package kvtier

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// kept is an account with blocks in several tiers, of two widths, one of them unresolved,
// and a place that is free.
func kept() *Tiers {
	t := New()
	t.Store(CPU, 1, 11, 1)
	t.Store(Disk, 1, 11, 1)
	t.Store(Remote, 2, 12, 2)
	t.Store(CPU, 3, 0, 1)
	t.Remove(CPU, 3)
	t.Store(Disk, 4, 0, 1)
	t.Store(CPU, 5, 15, 1)
	t.Remove(CPU, 1)
	return t
}

// TestKeep: an account that was kept is the account, and nothing else is read as one.
func TestKeep(t *testing.T) {
	raw := kept().Append(nil)
	again, err := Read(raw)
	if err != nil {
		t.Fatal(err)
	}
	if p := again.Append(nil); !bytes.Equal(p, raw) {
		t.Errorf("written again it is %x, not %x", p, raw)
	}
	if d := cmp.Diff(kept().Blocks(), again.Blocks()); d != "" {
		t.Errorf("blocks (-want +got):\n%s", d)
	}
	if again.widest != 2 || again.unresolved != 1 || again.Seq(2) != 12 {
		t.Errorf("widest %d, want 2; %d unresolved, want 1; block 2 stands for %d, want 12", again.widest, again.unresolved, again.Seq(2))
	}
	again.Learn(4, 14)
	if again.AnyUnresolved() || again.Seq(4) != 14 {
		t.Error("a block that was unresolved is not resolved")
	}
	for n := range raw {
		if _, err := Read(raw[:n]); err == nil {
			t.Errorf("the first %d bytes of %d are read", n, len(raw))
		}
	}
	if _, err := Read(append(bytes.Clone(raw), 0)); err == nil {
		t.Error("a byte too many is read")
	}
	raw[0]++
	if _, err := Read(raw); err == nil {
		t.Error("another version is read")
	}
}

// FuzzRead: whatever is read is written as it was meant, and can be asked and changed.
func FuzzRead(f *testing.F) {
	f.Add(kept().Append(nil))
	f.Add(New().Append(nil))
	f.Fuzz(func(t *testing.T, raw []byte) {
		a, err := Read(raw)
		if err != nil {
			return
		}
		first := a.Append(nil)
		again, err := Read(first)
		if err != nil || !bytes.Equal(again.Append(nil), first) || again.Blocks() != a.Blocks() {
			t.Fatalf("read %x, written %x, %v", raw, first, err)
		}
		a.Extend([]uint64{11, 12, 13}, 0, 3, true)
		for tier := range tiers {
			a.ClearTier(tier)
		}
		if len(a.byName)+len(a.bySeq)+len(a.widths)+a.unresolved+a.widest != 0 {
			t.Fatalf("%+v is left of %x", a, raw)
		}
	})
}
