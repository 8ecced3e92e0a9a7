package kvindex

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/blockhash"
)

// Writers of eight ranks store and evict over the same tree while readers look up, browse, dump and
// snapshot. One more rank stands still: lookups must see exactly what it holds, all the time, though the
// runs that it shares are cut and regrown around it. In the end each rank must hold what its own history
// says, and the tree must be sound.
func TestConcurrent(t *testing.T) {
	t.Parallel()
	const writers, still = 8, Rank(20)
	steps := 1500
	if testing.Short() {
		steps = 300
	}
	x := New(Options{MaxRanks: 32})
	defer x.Close()

	// A few prompts with common heads of several lengths; chains of writers branch off anywhere.
	rnd := rand.New(rand.NewPCG(7, 7))
	var prompts [][]uint64
	for i := range 12 {
		var p []uint64
		if i > 0 {
			p = slices.Clone(prompts[rnd.IntN(i)])
			p = p[:rnd.IntN(len(p))]
		}
		for len(p) < 100 {
			p = append(p, rnd.Uint64N(3))
		}
		prompts = append(prompts, p)
	}
	if err := x.AddRank(still, "still"); err != nil {
		t.Fatal(err)
	}
	want := make([]int, len(prompts))
	one := newModel(1 << 40)
	one.add(still, "still")
	var b Batch
	for i, p := range prompts {
		n := i * 97 % 70
		seq := blockhash.Chain(nil, p[:n])
		b.Store(0, false, seq, p[:n])
	}
	one.apply(still, &b)
	x.Apply(still, &b)
	for i, p := range prompts {
		want[i] = one.overlap(p)[still]
	}

	var wg sync.WaitGroup
	models := make([]*model, writers)
	for w := range writers {
		r := Rank(w)
		m := newModel(1 << 40)
		models[w] = m
		name := fmt.Sprint("rank-", w)
		m.add(r, name)
		if err := x.AddRank(r, name); err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 3))
			var b Batch
			for range steps {
				b.Reset()
				for range 1 + rnd.IntN(4) {
					p := prompts[rnd.IntN(len(prompts))]
					n := rnd.IntN(len(p))
					p = p[:n:n]
					if rnd.IntN(2) == 0 {
						for range rnd.IntN(40) {
							p = append(p, 10+rnd.Uint64N(3))
						}
					}
					seq := blockhash.Chain(nil, p)
					for i, s := range seq {
						seq[i] = nameOf(uint64(w/2), s, false)
					}
					switch k := rnd.IntN(40); {
					case k < 20:
						b.Store(0, false, seq, p)
					case k < 25 && len(seq) > 1:
						n := 1 + rnd.IntN(len(seq)-1)
						b.Store(seq[n-1], true, seq[n:], p[n:])
					case k < 39 && len(seq) > 0:
						slices.Reverse(seq)
						n := rnd.IntN(len(seq))
						b.Remove(seq[n/2 : n]...)
					case k == 39:
						b.Clear()
					}
				}
				if d := cmp.Diff(m.apply(r, &b), x.Apply(r, &b)); d != "" {
					t.Errorf("result of rank %d (-want +got):\n%s", r, d)
					return
				}
				if rnd.IntN(200) == 0 {
					x.RemoveRank(r)
					m.remove(r)
					if err := x.AddRank(r, name); err != nil {
						t.Error(err)
						return
					}
					m.add(r, name)
				}
			}
		})
	}
	var done atomic.Bool
	var readers sync.WaitGroup
	var looks, short atomic.Int64
	for i := range 3 {
		readers.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(i), 4))
			var q Query
			for !done.Load() {
				j := rnd.IntN(len(prompts))
				x.Overlap(prompts[j], &q)
				looks.Add(1)
				switch got := q.Depth(still); {
				case got > want[j]:
					t.Errorf("prompt %d: the rank that stands still holds %d blocks, not %d", j, want[j], got)
					return
				case got < want[j]:
					short.Add(1)
				}
				for rank, depth := range answer(&q) {
					if depth < 1 || depth > len(prompts[j]) || int(rank) > 20 {
						t.Errorf("prompt %d: %d blocks of rank %d", j, depth, rank)
						return
					}
				}
			}
		})
	}
	readers.Go(func() {
		for !done.Load() {
			at := Root
			for {
				out, err := x.Children(at, BrowseOptions{Sort: ByBlocks})
				if err != nil || len(out.Children) == 0 {
					break
				}
				at = out.Children[0].ID
			}
			if err := x.Snapshot(io.Discard, whole); err != nil {
				t.Error(err)
			}
			x.Checksum()
			if s := x.Stats(); s.Memberships < 0 || s.Ranks > writers+1 {
				t.Errorf("stats %+v", s)
			}
		}
	})
	wg.Wait()
	done.Store(true)
	readers.Wait()
	if l, s := looks.Load(), short.Load(); s*100 > l {
		t.Errorf("%d of %d lookups saw less than the rank that stands still holds", s, l)
	}
	all := newModel(1 << 40)
	for _, m := range append(models, one) {
		for r, k := range m.ranks {
			all.ranks[r] = k
		}
		all.total += m.total
	}
	compare(t, x, all, prompts)
	var file bytes.Buffer
	if err := x.Snapshot(&file, whole); err != nil {
		t.Fatal(err)
	}
	y := New(Options{MaxRanks: 32})
	defer y.Close()
	if err := y.Restore(&file, unnoted); err != nil {
		t.Fatal(err)
	}
	compare(t, y, all, prompts)
}
