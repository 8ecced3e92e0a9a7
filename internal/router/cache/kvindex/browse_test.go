package kvindex

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func seqOf(from, n uint64) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = from + uint64(i)
	}
	return out
}

func TestChildren(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxRanks: 100})
	defer x.Close()
	var b Batch
	store := func(r Rank, chains ...[]uint64) {
		t.Helper()
		if _, ok := x.RankStats(r); !ok {
			if err := x.AddRank(r, "r"); err != nil {
				t.Fatal(err)
			}
		}
		for _, c := range chains {
			names := make([]uint64, len(c))
			h := uint64(r) + 1
			for i, l := range c {
				h = h*31 + l
				names[i] = h
			}
			b.Reset()
			b.Store(0, false, names, c)
			x.Apply(r, &b)
		}
	}
	head := seqOf(1, 40)
	with := func(at int, tail ...uint64) []uint64 { return append(head[:at:at], tail...) }
	store(0, head, with(20, 101, 102, 103), with(40, 201, 202))
	store(1, with(30))
	store(2, with(20, 301), seqOf(1000, 3))
	for r := Rank(3); r < 90; r++ {
		store(r, seqOf(1000, 2))
	}
	var q Query
	for range 5 {
		x.Overlap(with(20, 301, 9), &q)
	}
	x.Overlap(seqOf(1000, 2), &q)

	get := func(n NodeID, o BrowseOptions) Browse {
		t.Helper()
		out, err := x.Children(n, o)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	noID := cmpopts.IgnoreFields(Child{}, "ID")
	top := get(Root, BrowseOptions{Sort: ByBlocks})
	mask := make([]Rank, 64)
	for i := range mask {
		mask[i] = Rank(i + 2)
	}
	want := []Child{
		{Depth: 0, Local: 1, Length: 20, Children: 3, Blocks: 46, Exact: true, Ranks: 3, Longest: 20, Hits: 5, HitsExact: true, Mask: []Rank{0, 1, 2}},
		{Depth: 0, Local: 1000, Length: 3, Blocks: 3, Exact: true, Ranks: 88, Longest: 3, Hits: 1, HitsExact: true, Mask: mask},
	}
	if d := cmp.Diff(want, top.Children, noID); d != "" {
		t.Errorf("top by blocks (-want +got):\n%s", d)
	}
	if top = get(Root, BrowseOptions{Sort: ByRanks, Limit: 1}); top.Total != 2 || len(top.Children) != 1 || top.Children[0].Local != 1000 {
		t.Errorf("top by ranks, one of them: %+v", top)
	}
	one := Rank(1)
	if top = get(Root, BrowseOptions{Rank: &one}); top.Total != 1 || top.Children[0].Local != 1 {
		t.Errorf("top of rank 1: %+v", top)
	}
	if top = get(Root, BrowseOptions{MinDepth: 4}); top.Total != 1 || top.Children[0].Local != 1 {
		t.Errorf("top of at least 4 blocks: %+v", top)
	}
	below := get(top.Children[0].ID, BrowseOptions{Sort: ByHits})
	want = []Child{
		{Depth: 20, Local: 301, Length: 1, Blocks: 1, Exact: true, Ranks: 1, Longest: 1, Hits: 5, HitsExact: true, Mask: []Rank{2}},
		{Depth: 20, Local: 21, Length: 22, Blocks: 22, Exact: true, Ranks: 2, Longest: 22, HitsExact: true, Mask: []Rank{0, 1}},
		{Depth: 20, Local: 101, Length: 3, Blocks: 3, Exact: true, Ranks: 1, Longest: 3, HitsExact: true, Mask: []Rank{0}},
	}
	if d := cmp.Diff(want, below.Children, noID); d != "" {
		t.Errorf("below by hits (-want +got):\n%s", d)
	}
	if len(below.Node.Mask) != 3 || below.Node.Blocks != 46 || !below.Node.Exact {
		t.Errorf("node is %+v, want 46 blocks", below.Node)
	}
	// Lookups that end in the run may have ended above or in its later part, which is
	// not known.
	x.Overlap(with(25), &q)
	below = get(below.Node.ID, BrowseOptions{Sort: ByRanks})
	if c := below.Children[0]; below.Node.Hits != 6 || c.Local != 21 || c.Hits != 0 || c.HitsExact {
		t.Errorf("after a lookup that ends in the rest: %+v, rest %+v", below.Node, c)
	}
	if wide := get(get(Root, BrowseOptions{Sort: ByRanks}).Children[0].ID, BrowseOptions{}).Node; len(wide.Mask) != 88 {
		t.Errorf("%d holders of %d are named", len(wide.Mask), wide.Ranks)
	}
	gone := top.Children[0].ID
	for r := range Rank(3) {
		x.RemoveRank(r)
	}
	for name, id := range map[string]NodeID{"gone": gone, "never there": 1 << 31, "huge": 1<<64 - 1} {
		if _, err := x.Children(id, BrowseOptions{}); !errors.Is(err, ErrUnknownNode) {
			t.Errorf("children of a node that is %s: %v, want ErrUnknownNode", name, err)
		}
	}
	if _, err := x.Children(Root, BrowseOptions{Sort: "size"}); err == nil {
		t.Error("unknown sort: no error")
	}
}

// A node with more children than are looked at, and a subtree larger than is counted.
func TestChildrenBounds(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxRanks: 1})
	defer x.Close()
	if err := x.AddRank(0, "r"); err != nil {
		t.Fatal(err)
	}
	var b Batch
	const n = 20000
	name := uint64(1)
	for i := range uint64(n) {
		b.Store(0, false, []uint64{name, name + 1}, []uint64{7, 10 + i})
		b.Store(0, false, []uint64{name + 2}, []uint64{10 + i})
		name += 3
	}
	x.Apply(0, &b)
	top, err := x.Children(Root, BrowseOptions{Sort: ByBlocks, Limit: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	if !top.Partial || top.Total != browseChildren || len(top.Children) != browseMost {
		t.Errorf("partial %v, total %d, %d returned", top.Partial, top.Total, len(top.Children))
	}
	var id NodeID
	for n := uint32(1); id == 0; n++ {
		if nd := x.m.node(n); nd.first == 7 {
			id = x.id(n, nd, 0)
		}
	}
	below, err := x.Children(id, BrowseOptions{Limit: 3})
	if err != nil {
		t.Fatal(err)
	}
	if below.Node.Exact || below.Node.Blocks < browseChildren || below.Node.Blocks > browseSubtrees+3 || below.Node.Children != browseChildren+1 {
		t.Errorf("node with %d children: %+v", n, below.Node)
	}
}

// Thirty prompts with the same first block and heads of their own of 256 blocks, each with several
// tails: every head is a run, whoever came first.
func TestChildrenDistinguishHeads(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxRanks: 1})
	defer x.Close()
	if err := x.AddRank(0, "r"); err != nil {
		t.Fatal(err)
	}
	const heads, tails, head, tail = 30, 4, 256, 1792
	var b Batch
	for h := range uint64(heads) {
		for i := range uint64(tails) {
			locals := append([]uint64{7}, seqOf(1e6*(h+1), head-1)...)
			locals = append(locals, seqOf(1e6*(h+1)+1e4*(i+1), tail)...)
			names, name := make([]uint64, len(locals)), uint64(0)
			for j, l := range locals {
				name = name*31 + l
				names[j] = name
			}
			b.Reset()
			b.Store(0, false, names, locals)
			x.Apply(0, &b)
		}
	}
	top, err := x.Children(Root, BrowseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(top.Children) != 1 || top.Children[0].Length != 1 || top.Children[0].Children != heads {
		t.Fatalf("at the root: %+v, want one block that is common", top.Children)
	}
	list, err := x.Children(top.Children[0].ID, BrowseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Children) != heads {
		t.Errorf("%d heads, want %d", len(list.Children), heads)
	}
	for _, c := range list.Children {
		if c.Length != head-1 || c.Children != tails || c.Blocks != head-1+tails*tail || !c.Exact {
			t.Errorf("a head is %+v, want %d blocks and %d tails below", c, head-1, tails)
		}
	}
}

// The flat list is what a walk over all levels finds with hits.
func TestHottest(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxRanks: 4})
	defer x.Close()
	if err := x.AddRank(0, "r"); err != nil {
		t.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	var b Batch
	var q Query
	var prompts [][]uint64
	for i := range uint64(200) {
		p := append(seqOf(1, 1+rnd.Uint64N(20)), seqOf(1000*(1+i%9), 1+rnd.Uint64N(30))...)
		p = append(p, seqOf(1e6+1000*i, 5)...)
		names, name := make([]uint64, len(p)), uint64(0)
		for j, l := range p {
			name = name*1_000_003 + l
			names[j] = name
		}
		b.Reset()
		b.Store(0, false, names, p)
		x.Apply(0, &b)
		prompts = append(prompts, p)
	}
	for range 500 {
		p := prompts[rnd.IntN(len(prompts))]
		x.Overlap(p[:1+rnd.IntN(len(p))], &q)
	}
	want := map[NodeID]Child{}
	var walk func(n NodeID)
	walk = func(n NodeID) {
		out, err := x.Children(n, BrowseOptions{Limit: browseMost})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range out.Children {
			if c.Hits > 0 {
				want[c.ID] = c
			}
			if c.Children > 0 {
				walk(c.ID)
			}
		}
	}
	walk(Root)
	got := x.Hottest(browseMost)
	if got.Partial || got.Total != len(want) || len(want) < 50 {
		t.Errorf("%d runs, partial %v, want %d", got.Total, got.Partial, len(want))
	}
	last := uint64(math.MaxUint64)
	for _, c := range got.Children {
		w := want[c.ID]
		if w.Exact && (c.Hits != w.Hits || c.HitsExact != w.HitsExact) || c.Hits < w.Hits {
			t.Errorf("run %v has %d hits, exact %v; in the tree %d, %v", c.ID, c.Hits, c.HitsExact, w.Hits, w.HitsExact)
		}
		type shape struct{ Depth, Length, Children, Local, Ranks any }
		if d := cmp.Diff(shape{w.Depth, w.Length, w.Children, w.Local, w.Ranks}, shape{c.Depth, c.Length, c.Children, c.Local, c.Ranks}); d != "" {
			t.Errorf("run %v (-tree +got):\n%s", c.ID, d)
		}
		if c.Hits > last {
			t.Errorf("%d hits stand below %d", c.Hits, last)
		}
		last = c.Hits
	}
	if few := x.Hottest(3); len(few.Children) != 3 || few.Total != len(want) {
		t.Errorf("of three: %d of %d", len(few.Children), few.Total)
	}
}
