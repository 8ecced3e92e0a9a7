package kvindex

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/blockhash"
)

func newTest(t testing.TB, o Options, ranks ...Rank) *Index {
	t.Helper()
	x := New(o)
	t.Cleanup(func() {
		if err := x.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, r := range ranks {
		if err := x.AddRank(r, "r"); err != nil {
			t.Fatal(err)
		}
	}
	return x
}

// step is one event and what is expected of it and of a lookup of the chain 1, 2, … 40 after it.
type step struct {
	name string
	rank Rank
	do   func(b *Batch)
	want Result
	then map[Rank]int
}

func TestBehaviour(t *testing.T) {
	t.Parallel()
	chain := seqOf(1, 40)
	a := seqOf(1000, 40) // names of rank 0
	o := seqOf(5000, 40) // names of rank 1
	for name, steps := range map[string][]step{
		"names are opaque per rank": {
			{"rank 0 stores", 0, func(b *Batch) { b.Store(0, false, a, chain) }, Result{Stored: 40}, map[Rank]int{0: 40}},
			{"rank 1 stores under its names", 1, func(b *Batch) { b.Store(0, false, o[:30], chain[:30]) }, Result{Stored: 30}, map[Rank]int{0: 40, 1: 30}},
			{"rank 1 goes on", 1, func(b *Batch) { b.Store(o[29], true, o[30:35], chain[30:35]) }, Result{Stored: 5}, map[Rank]int{0: 40, 1: 35}},
			{"rank 0's name means nothing for rank 1", 1, func(b *Batch) { b.Remove(a[10]) }, Result{Unknown: 1}, map[Rank]int{0: 40, 1: 35}},
			{"rank 1's name means nothing for rank 0", 0, func(b *Batch) { b.Store(o[5], true, a[:1], chain[:1]) }, Result{Orphaned: 1, Lost: true}, map[Rank]int{0: 40, 1: 35}},
			{"rank 1 removes by its own", 1, func(b *Batch) { b.Remove(o[34], o[33]) }, Result{Removed: 2}, map[Rank]int{0: 40, 1: 33}},
			{"rank 0 leaves", 0, func(b *Batch) { b.Clear() }, Result{Cleared: 40}, map[Rank]int{1: 33}},
			{"rank 1 removes the rest", 1, func(b *Batch) { b.Remove(o[:33]...) }, Result{Removed: 33}, map[Rank]int{}},
		},
		"eviction from the middle": {
			{"store", 0, func(b *Batch) { b.Store(0, false, a, chain) }, Result{Stored: 40}, map[Rank]int{0: 40}},
			{"evict block 10", 0, func(b *Batch) { b.Remove(a[10]) }, Result{Removed: 1}, map[Rank]int{0: 10}},
			{"evict block 20", 0, func(b *Batch) { b.Remove(a[20]) }, Result{Removed: 1}, map[Rank]int{0: 10}},
			{"a child of an evicted block", 0, func(b *Batch) { b.Store(a[10], true, a[:1], chain[:1]) }, Result{Orphaned: 1, Lost: true}, map[Rank]int{0: 10}},
			{"block 10 again", 0, func(b *Batch) { b.Store(a[9], true, a[10:11], chain[10:11]) }, Result{Stored: 1}, map[Rank]int{0: 20}},
			{"evict what hangs below", 0, func(b *Batch) { b.Remove(a[39], a[38], a[30]) }, Result{Removed: 3}, map[Rank]int{0: 20}},
			{"the whole prompt again", 0, func(b *Batch) { b.Store(0, false, a, chain) }, Result{Stored: 4, Duplicate: 36}, map[Rank]int{0: 40}},
		},
		"orphans are never stored": {
			{"unknown parent", 0, func(b *Batch) { b.Store(77, true, a, chain) }, Result{Orphaned: 40, Lost: true}, map[Rank]int{}},
			{"a clear mends it", 0, func(b *Batch) { b.Clear(); b.Store(0, false, a, chain) }, Result{Stored: 40}, map[Rank]int{0: 40}},
		},
		"a block stored twice and removed once is gone": {
			{"store", 0, func(b *Batch) { b.Store(0, false, a, chain) }, Result{Stored: 40}, map[Rank]int{0: 40}},
			{"again", 0, func(b *Batch) { b.Store(a[38], true, a[39:], chain[39:]) }, Result{Duplicate: 1}, map[Rank]int{0: 40}},
			{"again under another name", 0, func(b *Batch) { b.Store(a[38], true, o[39:], chain[39:]) }, Result{Duplicate: 1}, map[Rank]int{0: 40}},
			{"that name was not taken", 0, func(b *Batch) { b.Remove(o[39]) }, Result{Unknown: 1}, map[Rank]int{0: 40}},
			{"remove", 0, func(b *Batch) { b.Remove(a[39]) }, Result{Removed: 1}, map[Rank]int{0: 39}},
			{"remove the copy", 0, func(b *Batch) { b.Remove(a[39]) }, Result{Unknown: 1}, map[Rank]int{0: 39}},
		},
		"tails first, over a hole": {
			{"store", 0, func(b *Batch) { b.Store(0, false, a, chain) }, Result{Stored: 40}, map[Rank]int{0: 40}},
			{"a hole", 0, func(b *Batch) { b.Remove(a[20]) }, Result{Removed: 1}, map[Rank]int{0: 20}},
			{"tails first", 0, func(b *Batch) { b.Remove(a[22], a[21], a[20], a[19], a[19]) }, Result{Removed: 3, Unknown: 2}, map[Rank]int{0: 19}},
		},
		"tails first, over a name that means another block by now": {
			{"store", 0, func(b *Batch) { b.Store(0, false, a, chain) }, Result{Stored: 40}, map[Rank]int{0: 40}},
			{"name of block 20 for another one", 0, func(b *Batch) { b.Store(0, false, a[20:21], []uint64{999}) }, Result{Stored: 1, Renamed: 1, Lost: true}, map[Rank]int{0: 20}},
			{"tails first", 0, func(b *Batch) { b.Remove(a[22], a[21], a[20], a[19], a[18]) }, Result{Removed: 5}, map[Rank]int{0: 18}},
			{"the rest", 0, func(b *Batch) { b.Remove(a[17], a[20], a[16]) }, Result{Removed: 2, Unknown: 1}, map[Rank]int{0: 16}},
		},
		"a name given to another block": {
			{"store", 0, func(b *Batch) { b.Store(0, false, a, chain) }, Result{Stored: 40}, map[Rank]int{0: 40}},
			{"name of block 5 for another one", 0, func(b *Batch) { b.Store(0, false, a[5:6], []uint64{999}) }, Result{Stored: 1, Renamed: 1, Lost: true}, map[Rank]int{0: 5}},
		},
		"order of events within a batch": {
			{"store, remove, store", 0, func(b *Batch) {
				b.Store(0, false, a[:20], chain[:20])
				b.Remove(a[19], a[18])
				b.Store(a[17], true, a[18:], chain[18:])
			}, Result{Stored: 42, Removed: 2}, map[Rank]int{0: 40}},
		},
		"names and locals of different length": {
			{"more names", 0, func(b *Batch) { b.Store(0, false, a[:5], chain[:3]) }, Result{Stored: 3, Refused: 2, Lost: true}, map[Rank]int{0: 3}},
			{"more locals", 0, func(b *Batch) { b.Store(0, false, a[:3], chain[:5]) }, Result{Duplicate: 3, Refused: 2, Lost: true}, map[Rank]int{0: 3}},
			{"nothing", 0, func(b *Batch) { b.Store(0, false, nil, nil); b.Remove() }, Result{}, map[Rank]int{0: 3}},
		},
		"free slots": {
			{"rank 5 is not there", 5, func(b *Batch) { b.Store(0, false, a, chain); b.Remove(1, 2); b.Clear() }, Result{Refused: 40, Unknown: 2, Lost: true}, map[Rank]int{}},
			{"slot 99 neither", 99, func(b *Batch) { b.Store(0, false, a, chain) }, Result{Refused: 40, Lost: true}, map[Rank]int{}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := newTest(t, Options{MaxRanks: 8}, 0, 1)
			var q Query
			for _, s := range steps {
				var b Batch
				s.do(&b)
				if d := cmp.Diff(s.want, x.Apply(s.rank, &b)); d != "" {
					t.Fatalf("%s: result (-want +got):\n%s", s.name, d)
				}
				x.Overlap(chain, &q)
				if d := cmp.Diff(s.then, answer(&q)); d != "" {
					t.Fatalf("%s: overlap (-want +got):\n%s", s.name, d)
				}
				checkTree(t, x)
			}
		})
	}
}

func TestRanks(t *testing.T) {
	t.Parallel()
	x := newTest(t, Options{MaxRanks: 2}, 0)
	if err := x.AddRank(0, "other"); !errors.Is(err, ErrRankInUse) {
		t.Errorf("slot in use: %v", err)
	}
	if err := x.AddRank(2, "other"); !errors.Is(err, ErrRankRange) {
		t.Errorf("slot out of range: %v", err)
	}
	x.RemoveRank(1)
	x.RemoveRank(77)
	x.ClearRank(77)
	if err := x.RankBlocks(1, nil); !errors.Is(err, ErrUnknownRank) {
		t.Errorf("blocks of a free slot: %v", err)
	}
	var b Batch
	b.Store(9, true, []uint64{1}, []uint64{1})
	x.Apply(0, &b)
	if s, ok := x.RankStats(0); !ok || !s.Lost || s.Orphaned != 1 {
		t.Errorf("rank 0 after an orphan: %+v", s)
	}
	x.ClearRank(0)
	if s, ok := x.RankStats(0); !ok || s.Lost {
		t.Errorf("rank 0 after a clear: %+v", s)
	}
	x.RemoveRank(0)
	if s := x.Stats(); s.Orphaned != 1 || s.Ranks != 0 {
		t.Errorf("stats do not remember a removed rank's events: %+v", s)
	}
	if len(x.Ranks()) != 0 {
		t.Errorf("ranks left: %+v", x.Ranks())
	}
}

func TestMaxBlocks(t *testing.T) {
	t.Parallel()
	x := newTest(t, Options{MaxRanks: 2, MaxBlocks: 50}, 0, 1)
	l := seqOf(1, 100)
	var b Batch
	b.Store(0, false, l[:30], l[:30])
	x.Apply(0, &b)
	if got, want := x.Apply(1, &b), (Result{Stored: 20, Refused: 10, Lost: true}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	b.Reset()
	b.Remove(29, 30)
	b.Store(0, false, l, l)
	if got, want := x.Apply(0, &b), (Result{Removed: 2, Duplicate: 28, Stored: 2, Refused: 70, Lost: true}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	checkTree(t, x)
}

// When the memory is used up, stores are refused, nothing breaks, and removals make room again.
func TestMaxBytes(t *testing.T) {
	t.Parallel()
	x := newTest(t, Options{MaxRanks: 4, MaxBytes: 1}, 0, 1)
	rnd := rand.New(rand.NewPCG(1, 1))
	var b Batch
	var stored [][]uint64
	for i := range 20000 {
		n := 1 + rnd.IntN(100)
		l := make([]uint64, n)
		for j := range l {
			l[j] = rnd.Uint64()
		}
		b.Reset()
		b.Store(0, false, l, l)
		res := x.Apply(Rank(i%2), &b)
		if res.Stored+res.Refused != n || res.Lost != (res.Refused > 0) {
			t.Fatalf("%d blocks: %+v", n, res)
		}
		stored = append(stored, l)
		if res.Refused > 0 && len(stored) > 100 && i%2 == 1 {
			break
		}
	}
	s := x.Stats()
	if s.Refused == 0 || s.Bytes > s.MaxBytes {
		t.Fatalf("memory is not bounded: %+v", s)
	}
	checkTree(t, x)
	for i, l := range stored {
		b.Reset()
		b.Remove(l...)
		x.Apply(Rank(i%2), &b)
	}
	checkTree(t, x)
	if s := x.Stats(); s.Memberships != 0 || s.Blocks != 0 {
		t.Fatalf("left after all was removed: %+v", s)
	}
	b.Reset()
	b.Store(0, false, stored[0], stored[0])
	if res := x.Apply(0, &b); res.Refused > 0 {
		t.Errorf("no room after all was removed: %+v", res)
	}
}

// Long runs, large tables, their growth and many ranks in one run, against the model.
func TestLarge(t *testing.T) {
	t.Parallel()
	x := newTest(t, Options{MaxRanks: 4096})
	m := newModel(1 << 40)
	for r := range Rank(300) {
		if err := x.AddRank(r, "r"); err != nil {
			t.Fatal(err)
		}
		m.add(r, "r")
	}
	var b Batch
	apply := func(r Rank) {
		t.Helper()
		if d := cmp.Diff(m.apply(r, &b), x.Apply(r, &b)); d != "" {
			t.Fatalf("rank %d (-want +got):\n%s", r, d)
		}
		b.Reset()
	}
	long := seqOf(1, maxRun+3000)
	names := make([]uint64, len(long))
	for i := range names {
		names[i] = blockhash.Next(7, long[i])
	}
	for r := range Rank(300) {
		n := 100 + int(r)
		b.Store(0, false, names[:n], long[:n])
		apply(r)
	}
	b.Store(0, false, names, long)
	apply(3)
	b.Store(0, false, names, long)
	apply(4)
	fork := append(append([]uint64{}, long[:maxRun]...), 5, 6, 7)
	b.Store(names[maxRun-1], true, seqOf(1, 3), fork[maxRun:])
	apply(4)
	compare(t, x, m, [][]uint64{long, long[:50], long[:250], fork})
	rnd := rand.New(rand.NewPCG(5, 5))
	for _, i := range rnd.Perm(len(names)) {
		if i >= 50 && rnd.IntN(2) == 0 {
			b.Remove(names[i])
		}
	}
	apply(3)
	compare(t, x, m, [][]uint64{long, fork})
	for r := range Rank(300) {
		if r%7 != 0 {
			x.RemoveRank(r)
			m.remove(r)
		}
	}
	compare(t, x, m, [][]uint64{long, fork})
}

func TestNoAllocations(t *testing.T) {
	x := newTest(t, Options{MaxRanks: 128}, 0, 1)
	l := seqOf(1, 512)
	var b Batch
	b.Store(0, false, l, l)
	x.Apply(0, &b)
	x.Apply(1, &b)
	var q Query
	x.Overlap(l, &q)
	if got := testing.AllocsPerRun(100, func() { x.Overlap(l, &q) }); got != 0 {
		t.Errorf("%v allocations per lookup, want 0", got)
	}
	turn := func() {
		b.Reset()
		b.Remove(l[100:]...)
		b.Store(l[99], true, l[100:], l[100:])
		x.Apply(0, &b)
	}
	for range 100 {
		turn()
	}
	if got := testing.AllocsPerRun(100, turn); got != 0 {
		t.Errorf("%v allocations per batch in steady state, want 0", got)
	}
}

func FuzzApply(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 40, 5, 6, 7, 8, 9, 10, 200, 33, 12, 60, 61, 62})
	f.Add([]byte("a chain of blocks, and another chain of blocks, and what was removed"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 400 {
			data = data[:400]
		}
		x := New(Options{MaxRanks: 4, MaxBlocks: 200})
		defer x.Close()
		m := newModel(200)
		for r := range Rank(3) {
			if err := x.AddRank(r, "r"); err != nil {
				t.Fatal(err)
			}
			m.add(r, "r")
		}
		next := func() uint64 {
			if len(data) == 0 {
				return 0
			}
			v := data[0]
			data = data[1:]
			return uint64(v)
		}
		var prompts [][]uint64
		var b Batch
		for len(data) > 0 {
			b.Reset()
			r := Rank(next() % 3)
			for k := next(); ; k /= 4 {
				switch k % 4 {
				case 0, 1:
					var names, locals []uint64
					for n := next() % 40; n > 0; n-- {
						v := next()
						names, locals = append(names, v&31), append(locals, v>>6)
					}
					b.Store(next()&31, k%4 == 1, names, locals)
					prompts = append(prompts, locals)
				case 2:
					for n := next() % 40; n > 0; n-- {
						b.Remove(next() & 31)
					}
				case 3:
					if next()%16 == 0 {
						b.Clear()
					}
				}
				if k < 4 {
					break
				}
			}
			if d := cmp.Diff(m.apply(r, &b), x.Apply(r, &b)); d != "" {
				t.Fatalf("result (-want +got):\n%s", d)
			}
			compare(t, x, m, prompts)
		}
	})
}
