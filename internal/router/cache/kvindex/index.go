// Package kvindex answers how many leading blocks of a prompt each rank holds in its KV cache.
//
// The index is a tree of runs of blocks, found by local hashes, so the identity of a block is its
// whole prefix (what [blockhash] calls its sequence hash). Beside it each rank has a table from its
// engine's own names to blocks, because removals and parents come by name. A name means something for
// its rank only; where the name that the first rank gave to a block is also what a later rank calls
// that same block (same parent, same tokens), it is kept once.
//
//	root ─┬─ run 1: a b c d ─┬─ run 2: e f          an edge is found by (run, offset, local hash)
//	      │    rank 0: 4     └─ run 3: g h i
//	      │    rank 1: 2          rank 0: 3         a member of a run: how many of its first
//	      └─ run 4: k …                             blocks the rank holds
//
//	table of rank 0:  name 101 → block 0 of run 1,  name 102 → block 1 of run 1,  …
//
// The index may know less than the ranks hold, never more. A block counts for a rank only under
// blocks that the rank holds too: when an engine evicts from the middle, what hangs below is kept but
// not counted until the gap is filled again. A chain whose parent the rank does not hold is not stored
// but reported. An engine that stores a block twice and removes one copy is taken to have none.
//
// Lookups take no lock and do not wait for writers. Writers of different ranks run side by side: the
// lock of a rank is held for a batch, that of a run for a few blocks. See docs/adr/0001-kvindex.md.
package kvindex

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
)

// Index is the per-rank prefix overlap index. Its methods are safe for concurrent use.
//
// Locks, in order: Index.mu, rankState.mu, cache.mu, node.mu or edgeShard.mu (one at a time, except
// that nothing else is locked under an edgeShard), extras.mu, memory.mu.
type Index struct {
	o      Options
	m      memory
	ep     epochs
	edges  edges
	extra  [64]extras
	caches [stripes]cache

	held   atomic.Int64 // memberships
	blocks atomic.Int64
	nodes  atomic.Int64
	stripe atomic.Uint32

	mu    sync.Mutex // serialises AddRank and RemoveRank
	ranks []atomic.Pointer[rankState]
	sizes []atomic.Int64 // blocks of each rank; one beside the other, because a decision reads them all
	gone  counters       // of ranks that were removed
	live  atomic.Int64
}

// rankState is what belongs to one rank.
type rankState struct {
	slot Rank
	name string
	counters
	lost atomic.Bool

	mu           sync.Mutex
	removed      bool
	tab          table
	copies       map[uint64]uint32                // further copies of held blocks, by name; few
	extra        atomic.Int64                     // sum of copies
	ignoreCopies bool                             // copies are not counted: the engine reports hits as stores
	hints        [16]struct{ node, index uint32 } // indices of the rank in runs used lately
}

// counters are those of [RankStats].
type counters struct {
	stored, evicted, orphaned, refused atomic.Uint64
}

func (c *counters) add(r *Result) {
	for _, p := range [...]struct {
		c *atomic.Uint64
		n int
	}{
		{&c.stored, r.Stored},
		{&c.evicted, r.Removed},
		{&c.orphaned, r.Orphaned},
		{&c.refused, r.Refused},
	} {
		if p.n != 0 {
			p.c.Add(uint64(p.n))
		}
	}
}

// New returns an empty index.
func New(o Options) *Index {
	x := &Index{o: o.withDefaults()}
	x.m.init(x.o.MaxBytes)
	x.edges.m, x.edges.seed = &x.m, rand.Uint64()
	for i := range x.caches {
		c := &x.caches[i]
		c.m, c.ep, c.stripe = &x.m, &x.ep, uint32(i)
	}
	x.ranks, x.sizes = make([]atomic.Pointer[rankState], x.o.MaxRanks), make([]atomic.Int64, x.o.MaxRanks)
	// Node 0 is the root: an empty run that never dies.
	x.m.mu.Lock()
	if x.m.fresh(kindNode, 1); x.m.nodes[0] == nil {
		x.m.nodes[0] = new([nodeSlab]node) // the host maps nothing; stores will say so
		x.m.next[1] = 1
	}
	x.m.mu.Unlock()
	return x
}

// Close frees the index's memory. No method may be running or called afterwards.
func (x *Index) Close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	for i := range x.ranks {
		if k := x.ranks[i].Swap(nil); k != nil {
			k.tab.reset()
		}
	}
	return x.m.close()
}

// AddRank gives slot r to the rank called name.
func (x *Index) AddRank(r Rank, name string) error {
	if int64(r) >= int64(len(x.ranks)) {
		return fmt.Errorf("add rank %s in slot %d of %d: %w", name, r, len(x.ranks), ErrRankRange)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if k := x.ranks[r].Load(); k != nil {
		return fmt.Errorf("add rank %s in slot %d of %s: %w", name, r, k.name, ErrRankInUse)
	}
	k := &rankState{slot: r, name: name}
	k.tab.m, k.tab.seed = &x.m, rand.Uint64()
	x.ranks[r].Store(k)
	x.live.Add(1)
	return nil
}

// RemoveRank drops all that rank r holds and frees its slot. A free slot is left as it is.
func (x *Index) RemoveRank(r Rank) {
	if int64(r) >= int64(len(x.ranks)) {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	k := x.ranks[r].Load()
	if k == nil {
		return
	}
	var b Batch
	b.Clear()
	x.apply(k, &b, true)
	x.ranks[r].Store(nil)
	x.live.Add(-1)
	for _, p := range [...][2]*atomic.Uint64{
		{&x.gone.stored, &k.stored},
		{&x.gone.evicted, &k.evicted},
		{&x.gone.orphaned, &k.orphaned},
		{&x.gone.refused, &k.refused},
	} {
		p[0].Add(p[1].Load())
	}
}

// ClearRank drops all that rank r holds and trusts it again.
func (x *Index) ClearRank(r Rank) {
	var b Batch
	b.Clear()
	x.Apply(r, &b)
}

// Apply performs the batch's events for rank r, in order. The batch may be reused afterwards.
func (x *Index) Apply(r Rank, b *Batch) Result {
	var k *rankState
	if int64(r) < int64(len(x.ranks)) {
		k = x.ranks[r].Load()
	}
	if k == nil {
		return refuse(b)
	}
	return x.apply(k, b, false)
}

// ApplySteps is Apply with a call of seen before the first step of the batch and after
// each one: a reader beside Apply, which takes no lock, may find the rank in any of
// these states, and within a step with some of its blocks.
func (x *Index) ApplySteps(r Rank, b *Batch, seen func()) (res Result) {
	one := Batch{names: b.names, locals: b.locals}
	seen()
	for i := range b.ops {
		one.ops = b.ops[i : i+1]
		step := x.Apply(r, &one)
		res.Lost = res.Lost && b.ops[i].kind != opClear
		res.add(&step)
		seen()
	}
	return res
}

// refuse is the result of a batch for a rank that is not there.
func refuse(b *Batch) (res Result) {
	for i := range b.ops {
		switch o := &b.ops[i]; o.kind {
		case opStore:
			res.Refused += int(o.n) + int(o.short)
		case opRemove:
			res.Unknown += int(o.n)
		}
	}
	res.Lost = res.Refused > 0
	return res
}

func (x *Index) apply(k *rankState, b *Batch, last bool) (res Result) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.removed {
		return refuse(b)
	}
	k.removed = last
	c := x.cache(k.slot)
	defer c.mu.Unlock()
	v := x.ep.enter(c.stripe)
	for i := range b.ops {
		o := &b.ops[i]
		switch o.kind {
		case opStore:
			bad := res.Orphaned + res.Refused + res.Renamed
			x.store(k, c, o, b, &res)
			if res.Orphaned+res.Refused+res.Renamed > bad {
				res.Lost = true
				k.lost.Store(true)
			}
		case opRemove:
			x.remove(k, c, b.names[o.from:o.from+o.n], &res)
		case opClear:
			res.Cleared += k.tab.count
			x.clear(k, c)
			res.Lost = false
			k.lost.Store(false)
		}
	}
	x.ep.exit(c.stripe, v)
	c.endApply()
	x.count(k, 0)
	k.counters.add(&res)
	if c.blocks != 0 {
		x.blocks.Add(c.blocks)
		c.blocks = 0
	}
	if c.nodes != 0 {
		x.nodes.Add(c.nodes)
		c.nodes = 0
	}
	return res
}

// count brings the number of memberships up to date and gives back reserved ones.
func (x *Index) count(k *rankState, reserved int64) {
	n, size := int64(k.tab.count), &x.sizes[k.slot]
	if d := n - size.Load() - reserved; d != 0 {
		x.held.Add(d)
	}
	size.Store(n)
}

// cache locks and returns an allocator, that of the rank if it is free.
func (x *Index) cache(r Rank) *cache {
	for i := range uint32(stripes) {
		if c := &x.caches[(uint32(r)+i)%stripes]; c.mu.TryLock() {
			return c
		}
	}
	c := &x.caches[r%stripes]
	c.mu.Lock()
	return c
}

func (x *Index) store(k *rankState, c *cache, o *op, b *Batch, res *Result) {
	names := b.names[o.from : o.from+o.n]
	locals := b.locals[o.lfrom : o.lfrom+o.n]
	res.Refused += int(o.short)
	n, off := uint32(0), uint32(0)
	if o.hasParent {
		ref := k.tab.find(o.parent)
		if ref == 0 {
			res.Orphaned += len(names)
			return
		}
		n, off = x.m.at(ref)
		off++
	}
	if len(names) == 0 {
		return
	}
	if !k.tab.reserve(len(names)) {
		res.Refused += len(names)
		return
	}
	x.count(k, 0)
	// Take room for all of it first and give back what was not needed.
	want := int64(len(names))
	budget := want
	if over := x.held.Add(want) - x.o.MaxBlocks; over > 0 {
		budget = max(0, want-over)
	}
	c.pend = c.pend[:0]
	done, fresh := x.walk(k, c, n, off, names, locals, uint32(budget))
	res.Stored += int(fresh)
	res.Duplicate += int(done - fresh)
	res.Refused += len(names) - int(done)
	if o.copies && done > fresh && !k.ignoreCopies {
		k.copy(names[:done], res)
	}
	x.name(k, c, names, res)
	x.count(k, want)
}

// maxCopies bounds the blocks of one rank of which copies are counted.
const maxCopies = 1 << 16

// maxCopy bounds the copies of one block. An engine cannot compute a block that often before it is
// found in the cache; one that reports hits as stores (vLLM's kv_cache_report_mode "full") soon gets
// there, and copies of that rank are not counted from then on.
const maxCopy = 64

// copy counts one more copy of every block of a store that the rank held before. The pending ones are
// new and have no name yet.
func (k *rankState) copy(names []uint64, res *Result) {
	for _, name := range names {
		if k.tab.find(name) == 0 {
			continue
		}
		n, known := k.copies[name]
		if n >= maxCopy {
			k.ignoreCopies = true
			k.forgetCopies(0, true)
			return
		}
		if !known && len(k.copies) >= maxCopies {
			continue
		}
		if k.copies == nil {
			k.copies = map[uint64]uint32{}
		}
		k.copies[name] = n + 1
		k.extra.Add(1)
		res.Copied++
	}
}

// recopy gives a block that is held and has no further copies n of them, and reports whether it could.
func (k *rankState) recopy(name uint64, n uint32) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.copies[name] > 0 || len(k.copies) >= maxCopies || k.tab.find(name) == 0 {
		return false
	}
	if k.copies == nil {
		k.copies = map[uint64]uint32{}
	}
	k.copies[name] = n
	k.extra.Add(int64(n))
	return true
}

// uncopy takes one copy off a block that is removed, and reports whether another is left.
func (k *rankState) uncopy(name uint64) bool {
	n, ok := k.copies[name]
	if !ok {
		return false
	}
	if n == 1 {
		delete(k.copies, name)
	} else {
		k.copies[name] = n - 1
	}
	k.extra.Add(-1)
	return true
}

// forgetCopies drops the copies of one block, or of all.
func (k *rankState) forgetCopies(name uint64, all bool) {
	if all {
		clear(k.copies)
		k.extra.Store(0)
	} else if n, ok := k.copies[name]; ok {
		delete(k.copies, name)
		k.extra.Add(-int64(n))
	}
}

// name puts the names of the pending blocks into the rank's table.
func (x *Index) name(k *rankState, c *cache, names []uint64, res *Result) {
	seen := uint32(0)
	for i := range c.pend {
		p := &c.pend[i]
		if p.at+uint32(p.n) > seen {
			k.tab.prefetch(names[max(p.at, seen):min(int(p.at)+ahead, len(names))])
			seen = p.at + ahead
		}
		for j := range uint32(p.n) {
			name, ref := names[p.at+j], p.ref+j
			own := p.own && x.m.name(ref) != name
			if was := k.tab.put(name, ref, own); was != 0 {
				res.Renamed++
				if len(k.copies) > 0 {
					k.forgetCopies(name, false)
				}
				n, off := x.m.at(was)
				x.release(k, c, n, off, off+1)
			}
		}
	}
}

func (x *Index) remove(k *rankState, c *cache, names []uint64, res *Result) {
	var n, lo, hi uint32 // blocks taken from the table and not yet from the tree
	chunk := uint32(0)   // of the last block
	// Engines evict tails first. So the next block is likely to be next, the one before the last, which
	// is in the same chunk as that one; named are the names of its chunk.
	next, named := uint32(0), &[chunkLen]uint64{}
	for i, name := range names {
		if i%ahead == 0 {
			k.tab.prefetch(names[i:min(i+ahead, len(names))])
		}
		if len(k.copies) > 0 && k.uncopy(name) {
			res.Kept++
			continue
		}
		if next != 0 && named[next%chunkLen] == name && k.tab.take(name, next) != 0 {
			res.Removed++
			lo--
			if next--; next%chunkLen == chunkLen-1 {
				next = 0
			}
			continue
		}
		ref := k.tab.take(name, 0)
		if ref == 0 {
			res.Unknown++
			continue
		}
		res.Removed++
		m, off := x.m.at(ref)
		if ref/chunkLen != chunk {
			chunk = ref / chunkLen
			x.prefetch(k, m, off)
		}
		next = 0
		switch {
		case m == n && off == hi && hi > 0:
			hi = off + 1
			continue
		case m == n && off+1 == lo && hi > 0:
			lo = off
		default:
			if hi > 0 {
				x.release(k, c, n, lo, hi)
			}
			n, lo, hi = m, off, off+1
		}
		if ref%chunkLen != 0 && k.tab.alias == nil {
			next, named = ref-1, x.m.names(chunk)
		}
	}
	if hi > 0 {
		x.release(k, c, n, lo, hi)
	}
}

// prefetch touches the names of the chunk before the one of a block that the rank removes: engines
// evict tails first, so they are needed next.
func (x *Index) prefetch(k *rankState, n, off uint32) {
	if off < chunkLen {
		return
	}
	nd := x.m.node(n)
	// What the rank holds does not change under our eyes; what it does not hold is not ours to read.
	if _, e := x.member(k, n, nd); uint32(e>>32) >= off {
		ch := x.chunkAt(nd, off-chunkLen)
		names := x.m.names(ch)
		k.tab.touch += names[0] + names[chunkLen/2] + uint64(x.m.meta(ch).node)
	}
}

func (x *Index) clear(k *rankState, c *cache) {
	last := uint32(0)
	k.tab.all(func(ref uint32) bool {
		// A block whose run was given up already may be free by now, but not in use again: the epoch
		// cannot end before this Apply.
		if n, _ := x.m.at(ref); n != last {
			x.abandon(k, c, n)
			last = n
		}
		return true
	})
	k.forgetCopies(0, true)
	k.tab.reset()
}
