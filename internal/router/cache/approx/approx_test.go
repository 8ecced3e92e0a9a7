package approx

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
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
		if err := x.AddRank(r, 1, "w/dp"+string('0'+rune(r))); err != nil {
			t.Fatal(err)
		}
	}
	return x
}

func TestPredictionsExpireAndAreRefreshed(t *testing.T) {
	x := newIndex(t, Options{TTL: time.Minute})
	now := time.Unix(1000, 0)
	l, s := chain(1, 2, 3, 4)
	x.Sent(0, 1, l, s, now)
	if got := depth(x, 0, l); got != 4 {
		t.Fatalf("overlap %d", got)
	}
	if got := depth(x, 1, l); got != 0 {
		t.Fatalf("overlap of another rank %d", got)
	}
	// The head is sent again half a minute later; the tail is not.
	x.Sent(0, 1, l[:2], s[:2], now.Add(30*time.Second))
	other, otherSeq := chain(9)
	x.Sent(1, 1, other, otherSeq, now.Add(61*time.Second))
	if got := depth(x, 0, l); got != 2 {
		t.Fatalf("overlap after the tail expired: %d", got)
	}
	x.Sent(1, 1, other, otherSeq, now.Add(91*time.Second))
	if got := depth(x, 0, l); got != 0 || x.Blocks() != 1 {
		t.Fatalf("overlap %d, %d predicted blocks", got, x.Blocks())
	}
}

// TestRefused: what an engine refused is not predicted for it; what it had before is, and
// what others were sent meanwhile.
func TestRefused(t *testing.T) {
	now := time.Unix(1000, 0)
	later := now.Add(time.Second)
	head, headSeq := chain(1, 2)
	l, s := chain(1, 2, 3, 4)
	longer, longerSeq := chain(1, 2, 3, 4, 5)
	for name, c := range map[string]struct {
		do   func(x *Index)
		want int
	}{
		"a new prompt": {func(x *Index) { x.Sent(0, 1, l, s, now); x.Refused(0, 1, s, now) }, 0},
		"behind a known head": {func(x *Index) {
			x.Sent(0, 1, head, headSeq, now)
			x.Sent(0, 1, l, s, later)
			x.Refused(0, 1, s, later)
		}, 2},
		"a known prompt": {func(x *Index) {
			x.Sent(0, 1, l, s, now)
			x.Sent(0, 1, l, s, later)
			x.Refused(0, 1, s, later)
		}, 4},
		"sent again meanwhile": {func(x *Index) {
			x.Sent(0, 1, l, s, now)
			x.Sent(0, 1, l, s, later)
			x.Refused(0, 1, s, now)
		}, 4},
		"grown meanwhile": {func(x *Index) {
			x.Sent(0, 1, l, s, now)
			x.Sent(0, 1, longer, longerSeq, later)
			x.Refused(0, 1, s, now)
		}, 4},
		"shared in part meanwhile": {func(x *Index) {
			x.Sent(0, 1, l, s, now)
			x.Sent(0, 1, head, headSeq, later)
			x.Refused(0, 1, s, now)
		}, 2},
		"by another rank":  {func(x *Index) { x.Sent(0, 1, l, s, now); x.Refused(1, 1, s, now) }, 4},
		"of another life":  {func(x *Index) { x.Sent(0, 1, l, s, now); x.Refused(0, 2, s, now) }, 4},
		"forgotten before": {func(x *Index) { x.Sent(0, 1, l, s, now); x.RemoveRank(0); x.Refused(0, 1, s, now) }, 0},
	} {
		x := newIndex(t, Options{TTL: time.Minute})
		c.do(x)
		if got := depth(x, 0, l); got != c.want {
			t.Errorf("%s: %d blocks are predicted, want %d", name, got, c.want)
		}
		var blocks int
		for at := x.list.next; at != &x.list; at = at.next {
			blocks += len(at.names)
		}
		if blocks != x.Blocks() || x.idx.Blocks(0) != blocks {
			t.Errorf("%s: %d blocks in segments, %d counted, %d in the index", name, blocks, x.Blocks(), x.idx.Blocks(0))
		}
	}
}

func TestPredictionsAreBounded(t *testing.T) {
	x := newIndex(t, Options{TTL: time.Hour, MaxBlocks: 100})
	now := time.Unix(0, 0)
	for i := range uint64(1000) {
		l, s := chain(i*10+1, i*10+2, i*10+3)
		x.Sent(kvindex.Rank(i%2), 1, l, s, now.Add(time.Duration(i)))
		if n := x.Blocks(); n > 100 {
			t.Fatalf("%d predicted blocks", n)
		}
	}
	l, s := chain(1, 2, 3)
	for i := range 100_000 {
		x.Sent(0, 1, l, s, now.Add(time.Second+time.Duration(i)))
	}
	if n := x.segments(); n > 100 {
		t.Fatalf("repeating one prompt left %d segments", n)
	}
	long := make([]uint64, 250) // more than fits: its head is kept
	for i := range long {
		long[i] = uint64(1e6 + i)
	}
	long, s = chain(long...)
	x.Sent(1, 1, long, s, now.Add(time.Minute))
	if got := depth(x, 1, long); got != 100 || x.Blocks() != 100 {
		t.Fatalf("of a prompt longer than the bound %d blocks are kept, %d in all", got, x.Blocks())
	}
}

func TestRemovedRanksAreForgotten(t *testing.T) {
	x := newIndex(t, Options{})
	l, s := chain(1, 2)
	x.Sent(0, 1, l, s, time.Unix(0, 0))
	x.Sent(1, 1, l, s, time.Unix(0, 0))
	x.RemoveRank(0)
	if depth(x, 0, l) != 0 || depth(x, 1, l) != 2 {
		t.Fatal("removing one rank must remove that one only")
	}
	x.RemoveRank(1)
	if x.Blocks() != 0 {
		t.Fatalf("%d predicted blocks left", x.Blocks())
	}
}

func TestClearedRanksStay(t *testing.T) {
	x := newIndex(t, Options{})
	l, s := chain(1, 2)
	x.Sent(0, 1, l, s, time.Unix(0, 0))
	x.Sent(1, 1, l, s, time.Unix(0, 0))
	x.Clear(0)
	if depth(x, 0, l) != 0 || depth(x, 1, l) != 2 {
		t.Fatal("clearing one rank must clear that one only")
	}
	x.Sent(0, 1, l, s, time.Unix(0, 0))
	if depth(x, 0, l) != 2 {
		t.Fatal("a cleared rank is predicted nothing any more")
	}
}

// TestLateSends: what was sent to a rank that has left is not predicted to be in
// the cache of the one that has its slot.
func TestLateSends(t *testing.T) {
	x := newIndex(t, Options{})
	l, s := chain(1, 2)
	now := time.Unix(0, 0)
	x.RemoveRank(0)
	x.Sent(0, 1, l, s, now)
	if err := x.AddRank(0, 2, "other/dp0"); err != nil {
		t.Fatal(err)
	}
	x.Sent(0, 1, l, s, now)
	if depth(x, 0, l) != 0 || x.Blocks() != 0 {
		t.Fatalf("%d predicted blocks of the rank that has the slot", x.Blocks())
	}
	x.Sent(0, 2, l, s, now)
	x.Sent(0, 1, l, s, now) // takes nothing away either
	if depth(x, 0, l) != 2 {
		t.Fatal("what was sent to the rank itself is not noted")
	}
}

func (x *Index) segments() int { return len(x.starts) }

// TestLikeAListOfBlocks compares with the plain form: each block of each rank
// with the time at which it was last sent.
func TestLikeAListOfBlocks(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		const ttl = 10 * time.Second
		x := New(Options{TTL: ttl})
		defer func() { _ = x.Close() }()
		for r := range kvindex.Rank(2) {
			if err := x.AddRank(r, 1, "w/dp"+string('0'+rune(r))); err != nil {
				t.Fatal(err)
			}
		}
		type block struct {
			rank kvindex.Rank
			name uint64
		}
		model := map[block]time.Time{}
		now := time.Unix(1000, 0)
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 4).Draw(t, "seconds")) * time.Second)
			rank := kvindex.Rank(rapid.IntRange(0, 1).Draw(t, "rank"))
			locals, seq := chain(rapid.SliceOfN(rapid.Uint64Range(1, 3), 1, 8).Draw(t, "prompt")...)
			if rapid.IntRange(0, 9).Draw(t, "clear") == 0 {
				x.RemoveRank(rank)
				if err := x.AddRank(rank, 1, "w/dp"+string('0'+rune(rank))); err != nil {
					t.Fatal(err)
				}
				for b := range model {
					if b.rank == rank {
						delete(model, b)
					}
				}
			}
			x.Sent(rank, 1, locals, seq, now)
			for _, s := range seq {
				model[block{rank, s}] = now
			}
			for b, at := range model {
				if now.Sub(at) >= ttl {
					delete(model, b)
				}
			}
			if x.Blocks() != len(model) {
				t.Fatalf("%d predicted blocks, want %d", x.Blocks(), len(model))
			}
			probe, names := chain(rapid.SliceOfN(rapid.Uint64Range(1, 3), 1, 8).Draw(t, "probe")...)
			for r := range kvindex.Rank(2) {
				want := 0
				for _, s := range names {
					if _, ok := model[block{r, s}]; !ok {
						break
					}
					want++
				}
				if got := depth(x, r, probe); got != want {
					t.Fatalf("rank %d holds %d blocks of %v, want %d", r, got, probe, want)
				}
			}
		}
		now = now.Add(time.Hour)
		locals, seq := chain(9)
		x.Sent(0, 1, locals, seq, now)
		if x.Blocks() != 1 || x.segments() != 1 {
			t.Fatalf("%d predicted blocks in %d segments left after all expired", x.Blocks(), x.segments())
		}
	})
}

// BenchmarkSent is a prompt of 860 blocks (220 KB of text) of which all but the
// last block was sent before, and one of which nothing was.
func BenchmarkSent(b *testing.B) {
	for _, kind := range []string{"again", "new"} {
		b.Run(kind, func(b *testing.B) {
			x := New(Options{MaxBlocks: 1 << 18})
			defer x.Close()
			if err := x.AddRank(0, 1, "w/dp0"); err != nil {
				b.Fatal(err)
			}
			locals := make([]uint64, 860)
			seq := make([]uint64, 0, 860)
			now := time.Unix(0, 0)
			b.ReportAllocs()
			for i := uint64(1); b.Loop(); i++ {
				b.StopTimer()
				head := i%64 + 1
				if kind == "new" {
					head = i << 20
				}
				for j := range locals {
					locals[j] = head<<10 + uint64(j)
				}
				locals[859] = i << 40
				seq = blockhash.Chain(seq[:0], locals)
				b.StartTimer()
				x.Sent(0, 1, locals, seq, now.Add(time.Duration(i)*time.Millisecond))
			}
		})
	}
}
