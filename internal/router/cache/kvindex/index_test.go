package kvindex

import (
	"fmt"
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/rig/property"
)

func answer(q *Query) map[Rank]int {
	out := map[Rank]int{}
	for _, r := range q.touched {
		out[Rank(r)] = q.Depth(Rank(r))
	}
	return out
}

func rankBlocks(t rapid.TB, x *Index, r Rank) map[uint64]uint64 {
	t.Helper()
	out := map[uint64]uint64{}
	if err := x.RankBlocks(r, func(seq, name uint64) bool {
		if was, ok := out[seq]; ok {
			t.Fatalf("rank %d lists block %x twice, as %x and %x", r, seq, was, name)
		}
		out[seq] = name
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

// compare fails the test when the index and the model differ in anything that can be asked.
func compare(t rapid.TB, x *Index, m *model, prompts [][]uint64) {
	t.Helper()
	var q Query
	for _, p := range prompts {
		x.Overlap(p, &q)
		if want, got := m.overlap(p), answer(&q); !maps.Equal(want, got) {
			t.Fatalf("overlap of %x (-want +got):\n%s", p, cmp.Diff(want, got))
		}
	}
	for r, k := range m.ranks {
		if got := rankBlocks(t, x, r); !maps.Equal(k.held, got) {
			t.Fatalf("blocks of rank %d, sequence hash to name (-want +got):\n%s", r, cmp.Diff(k.held, got))
		}
		s, ok := x.RankStats(r)
		if !ok || s.Blocks != int64(len(k.held)) || s.Lost != k.lost || s.Name != k.name {
			t.Fatalf("stats of rank %d are %+v, want %d blocks, lost %v, name %s", r, s, len(k.held), k.lost, k.name)
		}
	}
	if s := x.Stats(); s.Memberships != m.total || s.Ranks != len(m.ranks) {
		t.Fatalf("stats are %+v, want %d memberships of %d ranks", s, m.total, len(m.ranks))
	}
	checkTree(t, x)
}

// checkTree verifies the invariants of an index that nobody writes to.
func checkTree(t rapid.TB, x *Index) {
	t.Helper()
	var blocks, nodes int64
	kids := map[uint32]uint32{} // by chunk
	var visit func(n uint32)
	visit = func(n uint32) {
		nd := x.m.node(n)
		count := uint32(0)
		for c, prev := nd.kid, uint32(0); c != 0; c = x.m.node(c).next {
			cd := x.m.node(c)
			if cd.parent != n || cd.prev != prev || cd.depth != nd.depth+cd.off || cd.off > nd.len.Load() {
				t.Fatalf("child %d of node %d: parent %d, prev %d, depth %d, off %d of %d", c, n, cd.parent, cd.prev, cd.depth, cd.off, nd.len.Load())
			}
			if got := x.edges.find(n, cd.off, cd.first); got != c {
				t.Fatalf("edge of child %d of node %d leads to %d", c, n, got)
			}
			if n != 0 {
				kids[x.chunkAt(nd, cd.off-1)]++
			}
			count++
			prev = c
			nodes++
			blocks += int64(cd.len.Load())
			if cd.len.Load() == 0 {
				t.Fatalf("node %d is empty", c)
			}
			visit(c)
		}
		if count != nd.kids {
			t.Fatalf("node %d has %d children, counts %d", n, count, nd.kids)
		}
		for off := uint32(0); off < nd.len.Load(); off += chunkLen {
			ch := x.chunkAt(nd, off)
			m := x.m.meta(ch)
			if m.node != n || uint32(m.index) != off/chunkLen || m.kids != kids[ch] {
				t.Fatalf("chunk %d at %d of node %d: %+v, %d children counted", ch, off, n, *m, kids[ch])
			}
		}
		if l := nd.len.Load(); n != 0 && l > x.keeps(n, nd) && x.m.meta(x.chunkAt(nd, l-1)).kids == 0 {
			t.Fatalf("node %d has %d blocks, %d needed", n, l, x.keeps(n, nd))
		}
	}
	visit(0)
	if s := x.Stats(); s.Blocks != blocks || s.Nodes != nodes {
		t.Fatalf("counted %d blocks in %d nodes, stats say %d in %d", blocks, nodes, s.Blocks, s.Nodes)
	}
}

// chain draws a prompt: few different blocks, so that prompts share beginnings, and long equal
// stretches, so that runs have several chunks.
func drawChain(t *rapid.T) []uint64 {
	var out []uint64
	for range rapid.IntRange(1, 4).Draw(t, "stretches") {
		l := uint64(rapid.IntRange(1, 3).Draw(t, "local"))
		n := rapid.SampledFrom([]int{1, 2, 3, 15, 16, 17, 33}).Draw(t, "length")
		for range n {
			out = append(out, l)
			l += 16
		}
	}
	return out
}

// nameOf is the engine's name of a block: equal for ranks of one group, and shortened sometimes, so
// that names clash within and across ranks.
func nameOf(group, seq uint64, short bool) uint64 {
	if short {
		return seq%7 + 1
	}
	return blockhash.Next(seq, group)
}

func TestModel(t *testing.T) {
	t.Parallel()
	property.Check(t, func(t *rapid.T) {
		limit := int64(rapid.SampledFrom([]int{1 << 20, 1 << 20, 60}).Draw(t, "limit"))
		short := rapid.IntRange(0, 3).Draw(t, "clashing names") == 0
		x := New(Options{MaxRanks: 8, MaxBlocks: limit})
		defer x.Close()
		m := newModel(limit)
		groups := []uint64{1, 1, 2, 3}
		for r := range groups {
			name := fmt.Sprint("rank-", r)
			if err := x.AddRank(Rank(r), name); err != nil {
				t.Fatal(err)
			}
			m.add(Rank(r), name)
		}
		var prompts [][]uint64
		var b Batch
		for range rapid.IntRange(1, 40).Draw(t, "batches") {
			r := Rank(rapid.IntRange(0, len(groups)-1).Draw(t, "rank"))
			if rapid.IntRange(0, 30).Draw(t, "replace") == 0 {
				x.RemoveRank(r)
				m.remove(r)
				if err := x.AddRank(r, "again"); err != nil {
					t.Fatal(err)
				}
				m.add(r, "again")
			}
			b.Reset()
			for range rapid.IntRange(1, 4).Draw(t, "events") {
				switch rapid.IntRange(0, 9).Draw(t, "kind") {
				case 0, 1, 2, 3, 4:
					p := drawChain(t)
					prompts = append(prompts, p)
					seq := blockhash.Chain(nil, p)
					names := make([]uint64, len(seq))
					for i, s := range seq {
						names[i] = nameOf(groups[r], s, short)
					}
					// From the root or from the middle of the chain, whether or not the parent is known.
					from := rapid.SampledFrom([]int{0, 0, 0, 1, 15, 16, 17}).Draw(t, "from")
					if from >= len(p) {
						from = 0
					}
					parent := uint64(0)
					if from > 0 {
						parent = names[from-1]
					}
					b.Store(parent, from > 0, names[from:], p[from:])
				case 5, 6, 7, 8:
					// Some of what is held, tail first, head first or mixed, and a name that is not.
					p := drawChain(t)
					if len(prompts) > 0 && rapid.Bool().Draw(t, "known") {
						p = prompts[rapid.IntRange(0, len(prompts)-1).Draw(t, "prompt")]
					}
					seq := blockhash.Chain(nil, p)
					lo := rapid.IntRange(0, len(seq)-1).Draw(t, "lo")
					hi := rapid.IntRange(lo, len(seq)-1).Draw(t, "hi")
					order := rapid.IntRange(0, 2).Draw(t, "order")
					for i := range hi - lo + 1 {
						j := lo + i
						switch order {
						case 1:
							j = hi - i
						case 2:
							j = lo + i*7%(hi-lo+1)
						}
						b.Remove(nameOf(groups[r], seq[j], short))
					}
				case 9:
					if rapid.IntRange(0, 3).Draw(t, "clear") == 0 {
						b.Clear()
					} else {
						b.Remove(12345)
					}
				}
			}
			if d := cmp.Diff(m.apply(r, &b), x.Apply(r, &b)); d != "" {
				t.Fatalf("result for rank %d (-want +got):\n%s", r, d)
			}
			compare(t, x, m, prompts[max(0, len(prompts)-6):])
		}
		compare(t, x, m, prompts)
		for r := range groups {
			x.RemoveRank(Rank(r))
		}
		if s := x.Stats(); s.Blocks != 0 || s.Nodes != 0 || s.Memberships != 0 {
			t.Fatalf("all ranks removed, but stats are %+v", s)
		}
	})
}
