package kvgroup

import (
	"bytes"
	"testing"

	"github.com/dynctl/dynctl/internal/kvevent"
)

// kept is an account with two groups, a gap among its blocks and copies.
func kept() *Groups {
	g := New(4)
	g.First = 0
	for _, kind := range []kvevent.CacheKind{kvevent.FullAttention, kvevent.SlidingWindow} {
		g.Store(&Store{Group: int32(kind - 1), Kind: kind, Window: 9 * int(kind-1), Block: 4, Names: []uint64{1, 2, 3}, Locals: []uint64{11, 12, 13}, Whole: true})
	}
	g.Store(&Store{Group: 0, Kind: kvevent.FullAttention, Block: 4, Names: []uint64{3}, Parent: 2, HasParent: true})
	g.Remove(-1, []uint64{2})
	return g
}

// TestKeep: an account that was kept is the account, and nothing else is read as one.
func TestKeep(t *testing.T) {
	raw := kept().Append(nil)
	again, err := Read(4, raw)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(again.Append(nil), raw) || len(again.byName) != 2 || again.groups[1].window != 9 {
		t.Errorf("read as %+v", again)
	}
	again.Remove(0, []uint64{3})
	if again.blocks[again.byName[3]].copies[0] != 1 {
		t.Error("the second copy was lost")
	}
	for n := range raw {
		if _, err := Read(4, raw[:n]); err == nil {
			t.Errorf("the first %d bytes of %d are read", n, len(raw))
		}
	}
	if _, err := Read(4, append(raw, 0)); err == nil {
		t.Error("a byte too many is read")
	}
	if _, err := Read(8, raw); err == nil {
		t.Error("read for another block")
	}
	if _, err := Read(4, []byte{4, 0, 0, 0, 1, 1, byte(kvevent.Mamba), 0, 4, 0}); err == nil {
		t.Error("a group without a finest block is read: lookups divide by it")
	}
}

// FuzzRead: whatever is read is written as it was meant, and can be asked.
func FuzzRead(f *testing.F) {
	f.Add(kept().Append(nil))
	f.Add(New(4).Append(nil))
	f.Add([]byte{4, 0, 0, 0, 1, 1, byte(kvevent.Mamba), 0, 4, 0}) // no finest block
	f.Fuzz(func(t *testing.T, raw []byte) {
		g, err := Read(4, raw)
		if err != nil {
			return
		}
		first := g.Append(nil)
		again, err := Read(4, first)
		if err != nil || !bytes.Equal(again.Append(nil), first) {
			t.Fatalf("read %x, written %x, %v", raw, first, err)
		}
		g.Usable(Prompt{Seq: []uint64{11, 12, 13}, Tokens: 13, Block: 4}, 2)
		g.Remove(-1, []uint64{1, 2, 3})
	})
}
