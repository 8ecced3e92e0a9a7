package kvindex

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/dynctl/dynctl/internal/positive"
	"github.com/dynctl/dynctl/internal/router/blockhash"
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

// id names a live node; the hash of its place tells it from another one that is put there later.
func (x *Index) id(n uint32, nd *node) NodeID {
	h := blockhash.Next(nd.first, uint64(nd.parent)<<32|uint64(nd.off))
	return NodeID(h&^0xffffffff | uint64(n))
}

// resolve returns the node that id names. The caller is inside an epoch.
func (x *Index) resolve(id NodeID) (uint32, *node, error) {
	n := uint32(id)
	if id == Root {
		return 0, x.m.node(0), nil
	}
	x.m.mu.Lock()
	known := n != 0 && n < x.m.next[1]
	x.m.mu.Unlock()
	if known {
		nd := x.m.node(n)
		nd.mu.Lock()
		live := nd.mem.Load() != dead && nd.len.Load() > 0
		nd.mu.Unlock()
		// A live node cannot come into use for another run inside this epoch.
		if live && x.id(n, nd) == id {
			return n, nd, nil
		}
	}
	return 0, nil, fmt.Errorf("node %x: %w", uint64(id), ErrUnknownNode)
}

// Children returns the runs that leave node, or the first runs when node is [Root]. The work is bounded:
// at most 4,096 children are looked at (Partial tells when there are more) and at most 16,384 runs below
// them, so that sizes of large subtrees are lower bounds. No lock is held for longer than 128 steps.
func (x *Index) Children(node NodeID, o BrowseOptions) (Browse, error) {
	less, err := order(o.Sort)
	if err != nil {
		return Browse{}, err
	}
	o.Limit = min(positive.Or(o.Limit, browseLimit), browseMost)
	s := x.stripe.Add(1) % stripes
	v := x.ep.enter(s)
	defer x.ep.exit(s, v)
	n, nd, err := x.resolve(node)
	if err != nil {
		return Browse{}, err
	}
	out := Browse{}
	if n != 0 {
		out.Node, _ = x.describe(n, nd, nil, true)
	}
	ids, partial := x.kidsOf(nil, nd, browseChildren)
	out.Partial = partial
	kids := make([]Child, 0, min(len(ids), browseChildren))
	for _, id := range ids {
		c, holds := x.describe(id, x.m.node(id), o.Rank, false)
		if c.Length > 0 && holds && c.Depth+c.Length >= o.MinDepth {
			kids = append(kids, c)
		}
	}
	out.Total = len(kids)
	if o.Sort == ByBlocks || o.Sort == ByHits {
		x.measure(kids)
		slices.SortFunc(kids, less)
		kids = kids[:min(len(kids), o.Limit)]
	} else {
		slices.SortFunc(kids, less)
		kids = kids[:min(len(kids), o.Limit)]
		x.measure(kids)
	}
	for i := range kids {
		n := uint32(kids[i].ID)
		// A child that is gone by now keeps an empty mask.
		c, _ := x.describe(n, x.m.node(n), nil, true)
		kids[i].Mask = c.Mask
	}
	out.Children = kids
	if n != 0 {
		one := []Child{out.Node}
		x.measure(one)
		out.Node = one[0]
	}
	return out, nil
}

func order(by SortBy) (func(a, b Child) int, error) {
	place := func(a, b Child) int { return cmp.Or(cmp.Compare(a.Offset, b.Offset), cmp.Compare(a.Local, b.Local)) }
	switch by {
	case "", ByOffset:
		return place, nil
	case ByBlocks:
		return func(a, b Child) int { return cmp.Or(cmp.Compare(b.Blocks, a.Blocks), place(a, b)) }, nil
	case ByRanks:
		return func(a, b Child) int { return cmp.Or(cmp.Compare(b.Ranks, a.Ranks), place(a, b)) }, nil
	case ByHits:
		return func(a, b Child) int { return cmp.Or(cmp.Compare(b.Hits, a.Hits), place(a, b)) }, nil
	}
	return nil, fmt.Errorf("sort %q: must be one of %s, %s, %s, %s", by, ByOffset, ByBlocks, ByRanks, ByHits)
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

// describe returns what is known of one run without its subtree, and whether the rank, if any is
// given, holds some of it. A run that is gone has length 0. The mask is filled in if asked for.
func (x *Index) describe(n uint32, nd *node, by *Rank, mask bool) (c Child, holds bool) {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	h := nd.mem.Load()
	if h == dead {
		return Child{}, false
	}
	c = Child{
		ID: x.id(n, nd), Offset: int(nd.off), Depth: int(nd.depth), Local: nd.first,
		Length: int(nd.len.Load()), Children: int(nd.kids), Hits: uint64(nd.hits.Load()),
	}
	holds = by == nil
	if h == 0 {
		return c, holds
	}
	a := x.m.array(h)
	for i := 1; i <= int(loadWord(&a[0])); i++ {
		e := loadWord(&a[i])
		if e&rankMask == noRank {
			continue
		}
		r := Rank(e & rankMask)
		holds = holds || r == *by
		if cut := int(e >> 32); cut > 0 {
			c.Ranks++
			c.Longest = max(c.Longest, cut)
			if mask {
				c.Mask = append(c.Mask, r)
			}
		}
	}
	slices.Sort(c.Mask)
	c.Mask = c.Mask[:min(len(c.Mask), browseMask)]
	return c, holds
}

// measure fills in the subtrees' blocks and hits.
func (x *Index) measure(kids []Child) {
	if len(kids) == 0 {
		return
	}
	budget := max(1, browseSubtrees/len(kids))
	var todo []uint32
	for i := range kids {
		c := &kids[i]
		c.Exact = true
		c.Blocks = c.Length
		left := budget
		n := uint32(c.ID)
		todo, _ = x.kidsOf(todo[:0], x.m.node(n), left)
		c.Exact = len(todo) <= left && len(todo) >= c.Children
		left -= len(todo)
		for len(todo) > 0 {
			n := todo[len(todo)-1]
			todo = todo[:len(todo)-1]
			nd := x.m.node(n)
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
	}
}
