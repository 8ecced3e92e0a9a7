package kvindex

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/dynctl/dynctl/internal/blockhash"
)

// Bounds of one call of Children. Locks are held for browseStep steps at a time.
const (
	browseStep     = 128
	browseChildren = 4096
	browseSubtrees = 16384 // runs visited below the children, all together
	browseLimit    = 100
	browseMost     = 1000
	browseMask     = 64
)

// id names a stretch of a live run, which begins at block from; the hash of the run's place
// distinguishes it from another one that is put there later.
func (x *Index) id(n uint32, nd *node, from uint32) NodeID {
	h := blockhash.Next(nd.first, uint64(nd.parent)<<32|uint64(nd.off))
	return NodeID(h&^0xffffffffffff | uint64(from)<<32 | uint64(n)) // from is below maxRun
}

func (id NodeID) split() (n, from uint32) { return uint32(id), uint32(id>>32) & 0xffff }

// resolve returns the run that id names and the block where its stretch begins. The caller is inside an
// epoch.
func (x *Index) resolve(id NodeID) (n, from uint32, _ error) {
	if id == Root {
		return 0, 0, nil
	}
	n, from = id.split()
	x.m.mu.Lock()
	known := n != 0 && n < x.m.next[1]
	x.m.mu.Unlock()
	if known {
		nd := x.m.node(n)
		nd.mu.Lock()
		live := nd.mem.Load() != dead && nd.len.Load() > from
		nd.mu.Unlock()
		// A live node cannot come into use for another run inside this epoch.
		if live && x.id(n, nd, from) == id {
			return n, from, nil
		}
	}
	return 0, 0, fmt.Errorf("node %x: %w", uint64(id), ErrUnknownNode)
}

// Children returns the runs that follow on node, or the first runs when node is [Root]. A run ends here
// where another one leaves it, although it is kept in one piece, so that prefixes are distinguished.
// The work is bounded: at most 4,096 children are looked at (Partial says that there are more) and at
// most 16,384 runs below them, so that the figures of large subtrees are lower bounds. No lock is held
// for longer than 128 steps.
func (x *Index) Children(node NodeID, o BrowseOptions) (Browse, error) {
	less, err := order(o.Sort)
	if err != nil {
		return Browse{}, err
	}
	o.Limit = min(cmp.Or(max(o.Limit, 0), browseLimit), browseMost)
	s := x.stripe.Add(1) % stripes
	v := x.ep.enter(s)
	defer x.ep.exit(s, v)
	n, from, err := x.resolve(node)
	if err != nil {
		return Browse{}, err
	}
	var out Browse
	ids, partial := x.kidsOf(nil, x.m.node(n), browseChildren)
	out.Partial = partial
	end := uint32(0)
	if n != 0 {
		// The same children determine where it ends, whatever comes meanwhile.
		out.Node, _ = x.stretch(n, from, ids, partial, browseSubtrees, nil)
		if out.Node.Length == 0 {
			return Browse{}, fmt.Errorf("node %x: %w", uint64(node), ErrUnknownNode)
		}
		out.Node.Mask = x.holders(n, from, maxRanks)
		end = from + uint32(out.Node.Length)
	}
	budget := browseSubtrees / (len(ids) + 1)
	kids := make([]Child, 0, len(ids)+1)
	var below []uint32
	add := func(n, from uint32) {
		var more bool
		below, more = x.kidsOf(below[:0], x.m.node(n), max(1, budget))
		c, holds := x.stretch(n, from, below, more, budget, o.Rank)
		if c.Length > 0 && holds && c.Depth+c.Length >= o.MinDepth {
			kids = append(kids, c)
		}
	}
	for _, id := range ids {
		if x.m.node(id).off == end {
			add(id, 0)
		}
	}
	if n != 0 && end < x.m.node(n).len.Load() {
		add(n, end)
	}
	out.Total = len(kids)
	slices.SortFunc(kids, less)
	kids = kids[:min(len(kids), o.Limit)]
	for i := range kids {
		n, from := kids[i].ID.split()
		// A child that is gone by now keeps an empty mask.
		kids[i].Mask = x.holders(n, from, browseMask)
	}
	out.Children = kids
	return out, nil
}

// Hottest returns the runs of the whole tree with the most hits, flat, under the root. The work is
// bounded: the first 16,384 runs from the root are looked at, level by level (Partial says that there
// are more). Runs without a hit are left out. No lock is held for longer than 128 steps.
func (x *Index) Hottest(limit int) Browse {
	limit = min(cmp.Or(max(limit, 0), browseLimit), browseMost)
	s := x.stripe.Add(1) % stripes
	v := x.ep.enter(s)
	defer x.ep.exit(s, v)
	var out Browse
	runs := []uint32{0}
	kids := make([][2]int, 0, 64) // where the children of each begin and end in runs
	for i := 0; i < len(runs); i++ {
		from, more := len(runs), true
		if left := browseSubtrees - len(runs); left > 0 {
			runs, more = x.kidsOf(runs, x.m.node(runs[i]), left)
		}
		out.Partial = out.Partial || more
		kids = append(kids, [2]int{from, len(runs)})
	}
	type subtree struct {
		at   int // in runs
		from uint32
		hits uint64
	}
	var hot []subtree
	below := make([]uint64, len(runs)) // hits of the subtree
	for i := len(runs) - 1; i > 0; i-- {
		own := uint64(x.m.node(runs[i]).hits.Load())
		list := make([]subtree, 0, kids[i][1]-kids[i][0])
		for k := kids[i][0]; k < kids[i][1]; k++ {
			list = append(list, subtree{i, x.m.node(runs[k]).off, below[k]})
		}
		slices.SortFunc(list, func(a, b subtree) int { return cmp.Compare(b.from, a.from) })
		// From the end up: what left the run further down has passed all above it.
		sum := uint64(0)
		for j, b := range list {
			if j > 0 && sum > 0 && b.from != list[j-1].from {
				hot = append(hot, subtree{i, b.from, sum})
			}
			sum += b.hits
		}
		if below[i] = sum + own; below[i] > 0 {
			hot = append(hot, subtree{i, 0, below[i]})
		}
	}
	slices.SortFunc(hot, func(a, b subtree) int {
		return cmp.Or(cmp.Compare(b.hits, a.hits), cmp.Compare(a.at, b.at), cmp.Compare(a.from, b.from))
	})
	out.Total = len(hot)
	for _, h := range hot[:min(len(hot), limit)] {
		k := kids[h.at]
		c, _ := x.stretch(runs[h.at], h.from, runs[k[0]:k[1]], out.Partial, browseSubtrees/limit, nil)
		if c.Length == 0 {
			continue // gone meanwhile
		}
		c.Hits, c.HitsExact = h.hits, !out.Partial && (h.from == 0 || x.m.node(runs[h.at]).hits.Load() == 0)
		c.Mask = x.holders(runs[h.at], h.from, browseMask)
		out.Children = append(out.Children, c)
	}
	return out
}

func order(by SortBy) (func(a, b Child) int, error) {
	byLocal := func(a, b Child) int { return cmp.Compare(a.Local, b.Local) }
	switch by {
	case "", ByBlocks:
		return func(a, b Child) int { return cmp.Or(cmp.Compare(b.Blocks, a.Blocks), byLocal(a, b)) }, nil
	case ByRanks:
		return func(a, b Child) int { return cmp.Or(cmp.Compare(b.Ranks, a.Ranks), byLocal(a, b)) }, nil
	case ByHits:
		return func(a, b Child) int { return cmp.Or(cmp.Compare(b.Hits, a.Hits), byLocal(a, b)) }, nil
	}
	return nil, fmt.Errorf("sort %q: must be one of %s, %s, %s", by, ByBlocks, ByRanks, ByHits)
}

// kidsOf appends up to limit children of a node to ids. It reports whether there may be more.
func (x *Index) kidsOf(ids []uint32, nd *node, limit int) (_ []uint32, partial bool) {
	at, first := uint32(0), true
	for limit > 0 {
		nd.mu.Lock()
		next := nd.kid
		if !first {
			// A child that was unlinked meanwhile points to itself.
			if next = x.m.node(at).next; next == at {
				nd.mu.Unlock()
				return ids, true
			}
		}
		for i := 0; i < browseStep && next != 0 && limit > 0; i++ {
			ids = append(ids, next)
			at, limit = next, limit-1
			next = x.m.node(next).next
		}
		nd.mu.Unlock()
		first = false
		if next == 0 {
			return ids, false
		}
	}
	return ids, true
}

// stretch describes the blocks of a run from one on to the next one where others leave it, with all that
// is below, and whether the rank, if any is given, holds some of it. kids are the run's children, or
// some of them if there are more. A stretch that is gone has length 0. At most budget runs below are
// looked at.
func (x *Index) stretch(n, from uint32, kids []uint32, more bool, budget int, by *Rank) (c Child, holds bool) {
	end := uint32(maxRun)
	for _, id := range kids {
		if off := x.m.node(id).off; off > from {
			end = min(end, off)
		}
	}
	nd := x.m.node(n)
	nd.mu.Lock()
	length := nd.len.Load()
	if nd.mem.Load() == dead || length <= from {
		nd.mu.Unlock()
		return Child{}, false
	}
	end = min(end, length)
	c = Child{
		ID: x.id(n, nd, from), Depth: int(nd.depth + from), Local: loadWord(&x.m.locals(x.chunkAt(nd, from))[from%chunkLen]),
		Length: int(end - from), Blocks: int(length - from), Exact: !more,
	}
	holds = by == nil
	x.members(nd, func(r Rank, cut uint32) {
		holds = holds || r == *by
		if cut > from {
			c.Ranks++
			c.Longest = max(c.Longest, int(min(cut, end)-from))
		}
	})
	// A lookup counts where it ended, by the run. Of those that ended in this one it is not known
	// whether they came as far as a later stretch.
	own := uint64(nd.hits.Load())
	nd.mu.Unlock()
	c.HitsExact = from == 0 || own == 0
	if from == 0 {
		c.Hits = own
	}
	if end < length {
		c.Children++
	}
	var todo []uint32
	for _, id := range kids {
		off := x.m.node(id).off
		if off == end {
			c.Children++
		}
		if off > from {
			todo = append(todo, id)
		}
	}
	left := budget - len(todo)
	for len(todo) > 0 {
		nd := x.m.node(todo[len(todo)-1])
		todo = todo[:len(todo)-1]
		c.Blocks += int(nd.len.Load())
		c.Hits += uint64(nd.hits.Load())
		had := len(todo)
		var more bool
		todo, more = x.kidsOf(todo, nd, left)
		left -= len(todo) - had
		if more {
			c.Exact = false
		}
	}
	c.HitsExact = c.HitsExact && c.Exact
	return c, holds
}

// members calls yield with every rank that holds something of a run and its leading blocks that the
// rank holds. The caller has the run's lock; a dead run has none.
func (x *Index) members(nd *node, yield func(r Rank, cut uint32)) {
	h := nd.mem.Load()
	if h == 0 || h == dead {
		return
	}
	a := x.m.array(h)
	for i := 1; i <= int(loadWord(&a[0])); i++ {
		if e := loadWord(&a[i]); e&rankMask != noRank {
			yield(Rank(e&rankMask), uint32(e>>32))
		}
	}
}

// holders lists the first ranks, by slot, that hold the run's blocks up to from and that one.
func (x *Index) holders(n, from uint32, limit int) (out []Rank) {
	nd := x.m.node(n)
	nd.mu.Lock()
	x.members(nd, func(r Rank, cut uint32) {
		if cut > from {
			out = append(out, r)
		}
	})
	nd.mu.Unlock()
	slices.Sort(out)
	return out[:min(len(out), limit)]
}
