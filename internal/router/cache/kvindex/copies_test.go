package kvindex

import "testing"

// TestCopiesOutliveTheirRemovals: vLLM keeps two copies of a block that was
// computed twice and publishes the removal of each.
func TestCopiesOutliveTheirRemovals(t *testing.T) {
	x := New(Options{})
	defer x.Close()
	if err := x.AddRank(0, "a/dp0"); err != nil {
		t.Fatal(err)
	}
	names, locals := []uint64{11, 12, 13}, []uint64{1, 2, 3}
	var b Batch
	apply := func(add func()) Result {
		b.Reset()
		add()
		return x.Apply(0, &b)
	}
	depth := func() int {
		var q Query
		x.Overlap(locals, &q)
		return q.Depth(0)
	}
	apply(func() { b.StoreCopies(0, false, names, locals) })
	if r := apply(func() { b.StoreCopies(12, true, names[2:], locals[2:]) }); r.Copied != 1 || r.Duplicate != 1 {
		t.Fatalf("storing the last block again: %+v", r)
	}
	if r := apply(func() { b.Remove(13) }); r.Kept != 1 || r.Removed != 0 || depth() != 3 {
		t.Fatalf("first removal: %+v, overlap %d", r, depth())
	}
	if r := apply(func() { b.Remove(13) }); r.Removed != 1 || depth() != 2 {
		t.Fatalf("second removal: %+v, overlap %d", r, depth())
	}
	// Without copies a store is idempotent and the first removal counts.
	apply(func() { b.Store(11, true, names[1:2], locals[1:2]) })
	if r := apply(func() { b.Remove(12) }); r.Removed != 1 || depth() != 1 {
		t.Fatalf("removal of what was stored twice: %+v, overlap %d", r, depth())
	}
	// A store and a removal in one batch, and a clear.
	apply(func() { b.StoreCopies(0, false, names[:1], locals[:1]); b.Remove(11) })
	if depth() != 1 {
		t.Fatalf("overlap %d after a copy came and went", depth())
	}
	apply(func() { b.StoreCopies(0, false, names[:1], locals[:1]); b.Clear() })
	apply(func() { b.StoreCopies(0, false, names[:1], locals[:1]) })
	if s, _ := x.RankStats(0); s.Copies != 0 {
		t.Fatalf("%d copies after a clear", s.Copies)
	}
	if apply(func() { b.Remove(11) }); depth() != 0 {
		t.Fatalf("overlap %d: a clear must forget copies", depth())
	}
	if err := x.AddRank(1, "b/dp0"); err != nil {
		t.Fatal(err)
	}
	x.RemoveRank(0)
}

// TestReportsOfHitsAreNoCopies: an engine that reports a hit as a store again
// and again is found out, and the first removal counts from then on.
func TestReportsOfHitsAreNoCopies(t *testing.T) {
	x := New(Options{})
	defer x.Close()
	if err := x.AddRank(0, "a/dp0"); err != nil {
		t.Fatal(err)
	}
	names, locals := []uint64{11, 12}, []uint64{1, 2}
	var b Batch
	for range maxCopy + 2 {
		b.Reset()
		b.StoreCopies(0, false, names, locals)
		x.Apply(0, &b)
	}
	if s, _ := x.RankStats(0); s.Copies != 0 || s.Blocks != 2 {
		t.Fatalf("%d copies of %d blocks", s.Copies, s.Blocks)
	}
	b.Reset()
	b.Remove(12, 11)
	if r := x.Apply(0, &b); r.Removed != 2 || r.Kept != 0 {
		t.Fatalf("removal: %+v", r)
	}
}
