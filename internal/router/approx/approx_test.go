package approx

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/blockhash"
	"github.com/dynctl/dynctl/internal/router/kvindex"
)

func chain(locals ...uint64) (l, s []uint64) { return locals, blockhash.Chain(nil, locals) }

func depth(x *Index, r kvindex.Rank, locals []uint64) int {
	var q kvindex.Query
	x.Overlap(locals, &q)
	return q.Depth(r)
}

func newIndex(t *testing.T, o Options) *Index {
	t.Helper()
	x := New(o)
	t.Cleanup(func() { _ = x.Close() })
	for r := range kvindex.Rank(2) {
		if err := x.AddRank(r, "w/dp"+string('0'+rune(r))); err != nil {
			t.Fatal(err)
		}
	}
	return x
}

func TestGuessesExpireAndAreRefreshed(t *testing.T) {
	x := newIndex(t, Options{TTL: time.Minute})
	now := time.Unix(1000, 0)
	l, s := chain(1, 2, 3, 4)
	x.Sent(0, l, s, now)
	if got := depth(x, 0, l); got != 4 {
		t.Fatalf("overlap %d", got)
	}
	if got := depth(x, 1, l); got != 0 {
		t.Fatalf("overlap of another rank %d", got)
	}
	// The head is sent again half a minute later; the tail is not.
	x.Sent(0, l[:2], s[:2], now.Add(30*time.Second))
	other, otherSeq := chain(9)
	x.Sent(1, other, otherSeq, now.Add(61*time.Second))
	if got := depth(x, 0, l); got != 2 {
		t.Fatalf("overlap after the tail expired: %d", got)
	}
	x.Sent(1, other, otherSeq, now.Add(91*time.Second))
	if got := depth(x, 0, l); got != 0 || x.Blocks() != 1 {
		t.Fatalf("overlap %d, %d guesses", got, x.Blocks())
	}
}

func TestGuessesAreBounded(t *testing.T) {
	x := newIndex(t, Options{TTL: time.Hour, MaxBlocks: 100})
	now := time.Unix(0, 0)
	for i := range uint64(1000) {
		l, s := chain(i*10+1, i*10+2, i*10+3)
		x.Sent(kvindex.Rank(i%2), l, s, now.Add(time.Duration(i)))
		if n := x.Blocks(); n > 100 {
			t.Fatalf("%d guesses", n)
		}
	}
	l, s := chain(1, 2, 3)
	for i := range 100_000 {
		x.Sent(0, l, s, now.Add(time.Second+time.Duration(i)))
	}
	if n := cap(x.entries); n > 1<<15 {
		t.Fatalf("repeating one prompt left room for %d entries", n)
	}
}

func TestClearedAndRemovedRanksAreForgotten(t *testing.T) {
	x := newIndex(t, Options{})
	l, s := chain(1, 2)
	x.Sent(0, l, s, time.Unix(0, 0))
	x.Sent(1, l, s, time.Unix(0, 0))
	x.ClearRank(0)
	if depth(x, 0, l) != 0 || depth(x, 1, l) != 2 {
		t.Fatal("clearing one rank must clear that one only")
	}
	x.RemoveRank(1)
	if x.Blocks() != 0 {
		t.Fatalf("%d guesses left", x.Blocks())
	}
}

func BenchmarkSent(b *testing.B) {
	x := New(Options{})
	defer x.Close()
	if err := x.AddRank(0, "w/dp0"); err != nil {
		b.Fatal(err)
	}
	locals := make([]uint64, 64)
	seq := make([]uint64, 64)
	now := time.Unix(0, 0)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		for j := range locals {
			locals[j] = uint64((i%512)*64 + j + 1)
		}
		seq = blockhash.Chain(seq[:0], locals)
		x.Sent(0, locals, seq, now.Add(time.Duration(i)*time.Millisecond))
	}
}
