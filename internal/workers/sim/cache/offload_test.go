package cache

import (
	"slices"
	"testing"
)

// TestOffloadRoom: what is being copied or is pinned stays, the rest goes in the order of
// its last use, a chain's end first, and a chain for which there is no room changes nothing.
func TestOffloadRoom(t *testing.T) {
	t.Parallel()
	c, err := New(Config{Blocks: 4, BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	o := NewOffload(c, 4, false)
	content := func(i int) Content { return Content{Digest: uint64(i)} }
	prepare := func(want []uint64, gone []uint64, seqs ...uint64) []uint64 {
		t.Helper()
		o.Events()
		got := o.Prepare(seqs, content)
		var names []uint64
		for _, e := range o.Events() {
			names = append(names, e.Names...)
		}
		var expect []uint64
		for _, s := range gone {
			expect = append(expect, c.Name(s))
		}
		if !slices.Equal(got, want) || !slices.Equal(names, expect) {
			t.Fatalf("%v: %v are copied and %v go; want %v and %v", seqs, got, names, want, expect)
		}
		return got
	}
	o.Done(prepare([]uint64{1, 2, 3}, nil, 1, 2, 3))
	if n := o.Lookup([]uint64{1, 2, 3, 4}); n != 3 {
		t.Fatalf("%d blocks are found", n)
	}
	half := prepare([]uint64{4}, nil, 1, 4)
	if n := o.Lookup([]uint64{4}); n != 0 {
		t.Error("a block is found before it is copied")
	}
	o.Used([]uint64{1, 2, 3}) // 3 goes first now, then 2
	o.Pin([]uint64{2})
	prepare(nil, nil, 11, 12, 13)
	prepare([]uint64{11, 12}, []uint64{3, 1}, 11, 12)
	prepare(nil, nil, 13)
	o.Unpin([]uint64{2})
	o.Done(half)
	prepare([]uint64{13}, []uint64{4}, 2, 13) // 2 went before, and is wanted
}
