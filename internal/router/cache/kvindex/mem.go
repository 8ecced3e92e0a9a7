package kvindex

import (
	"sync"
	"sync/atomic"
	"unsafe"
)

// Blocks live in chunks of 16. A block reference (ref) is chunk<<4 | index, of 28 bits; chunk 0 is never
// used, so ref 0 means none. The parts of a chunk that different paths need lie in different slabs: readers
// touch local hashes only, removals names only.
const (
	chunkLen   = 16
	slabChunks = 1 << 11 // chunks in a slab: 536 KiB
	refBits    = 28
	refMask    = 1<<refBits - 1
	maxChunks  = 1 << refBits / chunkLen
	nodeSlab   = 1 << 12 // nodes in a slab: 256 KiB
	arenaUnit  = 2       // words in an arena unit
	arenaSlab  = 1 << 14 // units in a slab: 256 KiB
	arenaPage  = 1 << 10 // units handed to a cache at a time: 16 KiB
	maxUnits   = 1 << 28
	maxClass   = 12 // largest array of the arena: 8,192 words
)

type chunkMeta struct {
	node  uint32 // the run it belongs to
	kids  uint32 // runs that leave at one of its blocks; under the node's lock
	index uint16 // place in the run: the offset of its first block is 16 times that
	high  uint16 // blocks below this one have been visible to readers; under the node's lock
}

type chunkSlab struct {
	locals [slabChunks][chunkLen]uint64
	names  [slabChunks][chunkLen]uint64
	meta   [slabChunks]chunkMeta
}

// kinds of things that are allocated and retired: chunks, nodes, and arena arrays by class.
type kind uint8

const (
	kindChunk kind = iota
	kindNode
	kindArena // + class
	kinds     = kindArena + maxClass + 1
)

// memory hands out chunks, nodes and arrays. What is freed is reused, never unmapped before close, so
// that a reader with an old reference may read nonsense but nothing else.
type memory struct {
	limit int64
	bytes atomic.Int64

	chunks []*chunkSlab
	nodes  []*[nodeSlab]node
	arena  []*[arenaSlab * arenaUnit]uint64

	mu      sync.Mutex
	free    [kinds][]uint32
	next    [3]uint32 // first never-used chunk, node, arena unit
	regions []*region
}

func (m *memory) init(limit int64) {
	m.limit = limit
	slabs := func(size, most int64) int64 { return min(limit/size+1, most) }
	m.chunks = make([]*chunkSlab, slabs(int64(unsafe.Sizeof(chunkSlab{})), maxChunks/slabChunks))
	m.nodes = make([]*[nodeSlab]node, slabs(nodeSlab*64, 1<<32/nodeSlab))
	m.arena = make([]*[arenaSlab * arenaUnit]uint64, slabs(arenaSlab*arenaUnit*8, maxUnits/arenaSlab))
	m.next = [3]uint32{1, 0, 1}
}

// fresh returns up to n never-used ids of a kind, as [from, to). The caller holds mu.
func (m *memory) fresh(k kind, n uint32) (from, to uint32) {
	switch k {
	case kindChunk:
		if from = m.next[0]; !slab(m, m.chunks, from/slabChunks, false) {
			return 0, 0
		}
		to = min(from+n, (from/slabChunks+1)*slabChunks)
		m.next[0] = to
	case kindNode:
		if from = m.next[1]; !slab(m, m.nodes, from/nodeSlab, true) {
			return 0, 0
		}
		to = min(from+n, (from/nodeSlab+1)*nodeSlab)
		m.next[1] = to
	default:
		// n counts units here; a request never straddles slabs, as sizes divide them.
		if from = (m.next[2] + n - 1) / n * n; !slab(m, m.arena, from/arenaSlab, false) {
			return 0, 0
		}
		to = from + n
		m.next[2] = to
	}
	return from, to
}

// slab takes memory for slab s, unless that was done; false without room. The caller holds mu.
func slab[T any](m *memory, slabs []*T, s uint32, zero bool) bool {
	if s >= uint32(len(slabs)) {
		return false
	}
	if slabs[s] == nil {
		w := m.take(int(unsafe.Sizeof(*slabs[s]) / 8))
		if w == nil {
			return false
		}
		if zero {
			clear(w)
		}
		slabs[s] = (*T)(unsafe.Pointer(&w[0]))
	}
	return true
}

func (m *memory) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var first error
	for _, r := range m.regions {
		m.bytes.Add(-int64(r.given) * unitWords * 8)
		if err := unmapRegion(r.raw); err != nil && first == nil {
			first = err
		}
	}
	m.regions = nil
	return first
}

func (m *memory) node(id uint32) *node { return &m.nodes[id/nodeSlab][id%nodeSlab] }

func (m *memory) meta(chunk uint32) *chunkMeta {
	return &m.chunks[chunk/slabChunks].meta[chunk%slabChunks]
}

func (m *memory) locals(chunk uint32) *[chunkLen]uint64 {
	return &m.chunks[chunk/slabChunks].locals[chunk%slabChunks]
}

func (m *memory) names(chunk uint32) *[chunkLen]uint64 {
	return &m.chunks[chunk/slabChunks].names[chunk%slabChunks]
}

// name returns the name under which the block was first stored.
func (m *memory) name(ref uint32) uint64 { return m.names(ref / chunkLen)[ref%chunkLen] }

// An array of the arena is named by a handle, class<<28 | unit; class c has 2<<c words. 0 = none.
func (m *memory) array(h uint32) []uint64 {
	u := h & (maxUnits - 1)
	at := u % arenaSlab * arenaUnit
	return m.arena[u/arenaSlab][at : at+2<<(h>>28) : at+2<<(h>>28)]
}

// at returns the run and the offset of a block.
func (m *memory) at(ref uint32) (n, off uint32) {
	c := m.meta(ref / chunkLen)
	return c.node, uint32(c.index)*chunkLen + ref%chunkLen
}

func (m *memory) dir(h uint32) []uint32 {
	a := m.array(h)
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(a))), 2*len(a))
}

// limbo is something unlinked that readers may still look at.
type limbo struct {
	epoch uint64
	id    uint32
	kind  kind
}

// cache is the allocator of one Apply at a time, and its scratch memory.
type cache struct {
	mu     sync.Mutex
	m      *memory
	ep     *epochs
	stripe uint32
	free   [kinds][]uint32
	limbo  []limbo // oldest first from head
	head   int
	page   [2]uint32 // unused arena units
	pend   []pending
	blocks int64 // distinct blocks added less removed, since the last Apply
	nodes  int64
	touch  uint64 // sum of touched words, so that touching is not optimised away
	_      [64]byte
}

const spill = 1024 // ids of a kind that a cache keeps for itself

func (c *cache) alloc(k kind) (uint32, bool) {
	if l := len(c.free[k]); l > 0 {
		id := c.free[k][l-1]
		c.free[k] = c.free[k][:l-1]
		return id, true
	}
	c.reclaim()
	if len(c.free[k]) == 0 {
		c.refill(k)
	}
	if l := len(c.free[k]); l > 0 {
		id := c.free[k][l-1]
		c.free[k] = c.free[k][:l-1]
		return id, true
	}
	return 0, false
}

func (c *cache) refill(k kind) {
	if k >= kindArena {
		if n := uint32(1) << (k - kindArena); n < arenaPage/4 {
			at := (c.page[0] + n - 1) / n * n
			if at+n <= c.page[1] {
				c.page[0] = at + n
				c.free[k] = append(c.free[k], at)
				return
			}
		}
	}
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if g := &c.m.free[k]; len(*g) > 0 {
		n := min(len(*g), 64)
		c.free[k] = append(c.free[k], (*g)[len(*g)-n:]...)
		*g = (*g)[:len(*g)-n]
		return
	}
	switch {
	case k < kindArena:
		from, to := c.m.fresh(k, 64)
		for id := to; id > from; id-- {
			c.free[k] = append(c.free[k], id-1)
		}
	case uint32(1)<<(k-kindArena) >= arenaPage/4:
		if from, to := c.m.fresh(k, 1<<(k-kindArena)); from < to {
			c.free[k] = append(c.free[k], from)
		}
	default:
		if from, to := c.m.fresh(k, arenaPage); from < to {
			n := uint32(1) << (k - kindArena)
			c.page = [2]uint32{from + n, to} // from is a multiple of the page, so of n
			c.free[k] = append(c.free[k], from)
		}
	}
}

// newArray returns a zeroed array of a class, 0 when there is no memory.
func (c *cache) newArray(class uint32) uint32 {
	if class > maxClass {
		return 0
	}
	u, ok := c.alloc(kindArena + kind(class))
	if !ok {
		return 0
	}
	h := class<<28 | u
	clear(c.m.array(h))
	return h
}

// retire frees id once no reader can still see it.
func (c *cache) retire(k kind, id uint32) {
	c.limbo = append(c.limbo, limbo{c.ep.now.Load(), id, k})
}

func (c *cache) retireArray(h uint32) {
	if h != 0 {
		c.retire(kindArena+kind(h>>28), h&(maxUnits-1))
	}
}

// reclaim moves what no reader can see any more to the free lists.
func (c *cache) reclaim() {
	now := c.ep.now.Load()
	for c.head < len(c.limbo) && c.limbo[c.head].epoch+2 <= now {
		l := &c.limbo[c.head]
		c.free[l.kind] = append(c.free[l.kind], l.id)
		c.head++
	}
	if c.head == len(c.limbo) {
		c.limbo, c.head = c.limbo[:0], 0
	} else if c.head > 4096 && c.head > len(c.limbo)/2 {
		n := copy(c.limbo, c.limbo[c.head:])
		c.limbo, c.head = c.limbo[:n], 0
	}
}

// endApply ends an Apply: it lets the epoch advance and gives surplus memory to the
// others.
func (c *cache) endApply() {
	if len(c.limbo)-c.head > 64 {
		c.ep.advance()
		c.reclaim()
	}
	for k := range c.free {
		if f := &c.free[k]; len(*f) > spill {
			c.m.mu.Lock()
			c.m.free[k] = append(c.m.free[k], (*f)[spill/2:]...)
			c.m.mu.Unlock()
			*f = (*f)[:spill/2]
		}
	}
}

// epochs show when memory that was unlinked can be reused. A reader counts itself in under the
// epoch's parity; the epoch moves from e to e+1 only when no reader of e-1 is left. So what was
// unlinked in epoch e is out of every reader's sight once the epoch is e+2.
type epochs struct {
	now     atomic.Uint64
	_       [56]byte
	stripes [stripes]struct {
		readers [2]atomic.Int64
		lookups atomic.Uint64
		_       [40]byte
	}
}

const stripes = 8

// Words that readers see without a lock are loaded and stored through these.
func loadWord(p *uint64) uint64     { return atomic.LoadUint64(p) }
func storeWord(p *uint64, v uint64) { atomic.StoreUint64(p, v) }
func loadHalf(p *uint32) uint32     { return atomic.LoadUint32(p) }
func storeHalf(p *uint32, v uint32) { atomic.StoreUint32(p, v) }

func (e *epochs) enter(stripe uint32) uint64 {
	s := &e.stripes[stripe%stripes]
	for {
		v := e.now.Load()
		s.readers[v&1].Add(1)
		if e.now.Load() == v {
			return v
		}
		s.readers[v&1].Add(-1)
	}
}

func (e *epochs) exit(stripe uint32, v uint64) {
	e.stripes[stripe%stripes].readers[v&1].Add(-1)
}

func (e *epochs) advance() {
	v := e.now.Load()
	for i := range e.stripes {
		if e.stripes[i].readers[(v+1)&1].Load() != 0 {
			return
		}
	}
	e.now.CompareAndSwap(v, v+1)
}
