// Package cache is the paged KV cache of one simulated rank.
//
// It keeps blocks the way vLLM's block pool does (0.32, v1 core): block 0 is a null block that
// no request gets. A free queue holds every block without a user, in the order in which blocks
// will be handed out. A block keeps its name and its content while it waits there, and loses the
// name only when it is handed out again (eviction: one removal event per physical block, even
// when another block has the same name). Users count references; a user's blocks are freed last
// first, so that the tail of a prompt is evicted before its head. Blocks are not deduplicated:
// two requests that compute the same block at the same time each store one under the same name.
//
// A block is known by its sequence hash (package blockhash). The name that
// events carry is that hash mixed with the seed of the incarnation, so names
// are opaque and change at a restart, as with PYTHONHASHSEED unset.
//
// Beside its name a block has a content: a digest of the keys and values that
// a real block would hold, with the number of slots that were written. The
// engine computes its output from contents, never from names; so a block that
// was overwritten, or pulled from the wrong place, shows as wrong text.
package cache

import (
	"fmt"
	"maps"
	"slices"
)

// Content stands for the keys and values of one block.
type Content struct {
	// Digest is a digest of what was written.
	Digest uint64
	// Fill is the number of slots written, 0 to the block size.
	Fill int
}

// Kind is what an event reports.
type Kind uint8

// The kinds of event, in vLLM's words BlockStored, BlockRemoved and
// AllBlocksCleared.
const (
	Stored Kind = iota
	Removed
	Cleared
)

// Event is one change of the set of named blocks.
type Event struct {
	Kind Kind
	// Tier is where the blocks are; what is published of other tiers than the device has
	// nothing but names.
	Tier Tier
	// Names are the engine's names of the blocks: a run of consecutive blocks
	// for Stored, one block for Removed.
	Names []uint64
	// Parent is the name of the block before the run; meaningless unless HasParent.
	Parent    uint64
	HasParent bool
	// Tokens are the token ids of the run. The slice is shared and read only.
	Tokens []uint32
	// LoRA and Salt are what the names depend on in addition to the tokens. Salt is set
	// only when the run starts at the first block.
	LoRA, Salt string
}

// Config sizes a cache.
type Config struct {
	// Blocks is the number of physical blocks, the null block included; at least 2.
	Blocks int
	// BlockSize is the number of tokens of a block; at least 1.
	BlockSize int
	// NameSeed makes the names of this incarnation its own.
	NameSeed uint64
	// Quiet drops events instead of queueing them.
	Quiet bool
	// Unique gives a block that is known by its content no second place, as
	// SGLang's radix tree does; vLLM keeps both.
	Unique bool
}

type block struct {
	content Content
	seq     uint64
	named   bool
	ref     int32
	// Neighbours in the free queue; meaningful while ref is 0.
	prev, next int32
	// Ring of the blocks of one name, in the order in which they were stored.
	dupPrev, dupNext int32
}

// Cache is the block pool of one rank. It is not safe for concurrent use.
type Cache struct {
	cfg    Config
	blocks []block // index 0 is both the null block and the free queue's root
	free   int
	index  map[uint64]int32
	events []Event
}

// New returns an empty cache.
func New(cfg Config) (*Cache, error) {
	if cfg.Blocks < 2 || cfg.Blocks > 1<<30 {
		return nil, fmt.Errorf("cache of %d blocks: want 2 to 2^30", cfg.Blocks)
	}
	if cfg.BlockSize < 1 {
		return nil, fmt.Errorf("cache with a block size of %d tokens: want at least 1", cfg.BlockSize)
	}
	c := &Cache{cfg: cfg, blocks: make([]block, cfg.Blocks), index: make(map[uint64]int32)}
	c.blocks[0].prev, c.blocks[0].next = 0, 0
	for i := 1; i < cfg.Blocks; i++ {
		c.push(int32(i))
	}
	return c, nil
}

// Free is the number of blocks without a user, named or not.
func (c *Cache) Free() int { return c.free }

// Capacity is the number of blocks that can have a user at a time.
func (c *Cache) Capacity() int { return len(c.blocks) - 1 }

// Usage is the share of the blocks that have a user, 0 to 1.
func (c *Cache) Usage() float64 {
	return 1 - float64(c.free)/float64(c.Capacity())
}

// Lookup appends to dst the blocks that hold the longest known prefix of the
// chain of sequence hashes. It takes no reference.
func (c *Cache) Lookup(dst []int, seqs []uint64) []int {
	for _, s := range seqs {
		b, ok := c.index[s]
		if !ok {
			break
		}
		dst = append(dst, int(b))
	}
	return dst
}

// Idle counts the blocks among ids that have no user: as many free blocks will
// be gone once they are taken.
func (c *Cache) Idle(ids []int) int {
	n := 0
	for _, id := range ids {
		if c.blocks[id].ref == 0 {
			n++
		}
	}
	return n
}

// Take adds a user to each block.
func (c *Cache) Take(ids []int) {
	for _, id := range ids {
		b := &c.blocks[id]
		if b.ref == 0 {
			c.unlink(int32(id))
		}
		b.ref++
	}
}

// Alloc appends n blocks with one user and no content to dst. It returns false
// and takes nothing when fewer than n blocks are free.
func (c *Cache) Alloc(dst []int, n int) ([]int, bool) {
	if n > c.free {
		return dst, false
	}
	for range n {
		id := c.blocks[0].next
		c.unlink(id)
		c.evict(id)
		b := &c.blocks[id]
		b.ref = 1
		b.content = Content{}
		dst = append(dst, int(id))
	}
	return dst, true
}

// Release removes a user from each block, last block first. A block without a
// user goes to the end of the free queue and keeps its name and content.
func (c *Cache) Release(ids []int) {
	for i := len(ids) - 1; i >= 0; i-- {
		b := &c.blocks[ids[i]]
		b.ref--
		if b.ref < 0 {
			panic(fmt.Sprintf("cache: block %d released more often than taken", ids[i]))
		}
		if b.ref == 0 {
			c.push(int32(ids[i]))
		}
	}
}

// Run is a run of consecutive full blocks of one chain, ready to be named.
type Run struct {
	// Blocks and Seqs are the physical blocks and their sequence hashes.
	Blocks []int
	Seqs   []uint64
	// Parent is the sequence hash of the block before; meaningless unless HasParent.
	Parent    uint64
	HasParent bool
	// Tokens are the token ids of the run. The cache keeps the slice.
	Tokens     []uint32
	LoRA, Salt string
}

// Commit names the blocks of a run, so that others can find them, and queues
// one Stored event for all of them.
func (c *Cache) Commit(r Run) {
	if c.cfg.Unique {
		c.commitUnique(r)
		return
	}
	c.commit(r)
}

// commitUnique names only what is not there yet, in runs of its own.
func (c *Cache) commitUnique(r Run) {
	from := 0
	part := func(to int) {
		if from < to {
			p := r
			p.Blocks, p.Seqs, p.Tokens = r.Blocks[from:to], r.Seqs[from:to], r.Tokens[from*c.cfg.BlockSize:to*c.cfg.BlockSize]
			if from > 0 {
				p.Parent, p.HasParent = r.Seqs[from-1], true
			}
			c.commit(p)
		}
		from = to + 1
	}
	for i, s := range r.Seqs {
		if _, ok := c.index[s]; ok {
			part(i)
		}
	}
	part(len(r.Seqs))
}

func (c *Cache) commit(r Run) {
	if len(r.Blocks) == 0 {
		return
	}
	for i, id := range r.Blocks {
		b := &c.blocks[id]
		b.seq, b.named = r.Seqs[i], true
		head, ok := c.index[b.seq]
		if !ok {
			c.index[b.seq] = int32(id)
			b.dupPrev, b.dupNext = int32(id), int32(id)
			continue
		}
		last := c.blocks[head].dupPrev
		b.dupPrev, b.dupNext = last, head
		c.blocks[last].dupNext, c.blocks[head].dupPrev = int32(id), int32(id)
	}
	if c.cfg.Quiet {
		return
	}
	e := Event{Kind: Stored, Names: make([]uint64, len(r.Seqs)), Tokens: r.Tokens, LoRA: r.LoRA}
	for i, s := range r.Seqs {
		e.Names[i] = c.Name(s)
	}
	if r.HasParent {
		e.Parent, e.HasParent = c.Name(r.Parent), true
	} else {
		e.Salt = r.Salt
	}
	c.events = append(c.events, e)
}

// Clear forgets every name, as vLLM's reset_prefix_cache does. It returns
// false and changes nothing while a block has a user.
func (c *Cache) Clear() bool {
	if c.free != c.Capacity() {
		return false
	}
	for i := range c.blocks {
		c.blocks[i].named = false
	}
	clear(c.index)
	if !c.cfg.Quiet {
		c.events = append(c.events, Event{Kind: Cleared})
	}
	return true
}

// Events returns the events since the last call, in order.
func (c *Cache) Events() []Event {
	e := c.events
	c.events = nil
	return e
}

// Name is the engine's name of the block with a sequence hash.
func (c *Cache) Name(seq uint64) uint64 {
	// The finisher of MurmurHash3: a bijection, so distinct blocks keep
	// distinct names.
	x := seq ^ c.cfg.NameSeed
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// Seqs appends the sequence hashes of all named blocks to dst, in no order and
// each once.
func (c *Cache) Seqs(dst []uint64) []uint64 {
	return slices.AppendSeq(dst, maps.Keys(c.index))
}

// Content is what the block holds. A freed block keeps its content until it is
// handed out again. It panics on an id outside the cache; see Valid.
func (c *Cache) Content(id int) Content { return c.blocks[id].content }

// SetContent writes the block.
func (c *Cache) SetContent(id int, v Content) { c.blocks[id].content = v }

// Valid reports whether id is the number of a block other than the null block.
func (c *Cache) Valid(id int) bool { return id > 0 && id < len(c.blocks) }

// evict takes the name from a block that is handed out again.
func (c *Cache) evict(id int32) {
	b := &c.blocks[id]
	if !b.named {
		return
	}
	b.named = false
	if b.dupNext == id {
		delete(c.index, b.seq)
	} else {
		c.blocks[b.dupPrev].dupNext = b.dupNext
		c.blocks[b.dupNext].dupPrev = b.dupPrev
		if c.index[b.seq] == id {
			c.index[b.seq] = b.dupNext
		}
	}
	if !c.cfg.Quiet {
		c.events = append(c.events, Event{Kind: Removed, Names: []uint64{c.Name(b.seq)}})
	}
}

func (c *Cache) push(id int32) {
	last := c.blocks[0].prev
	c.blocks[id].prev, c.blocks[id].next = last, 0
	c.blocks[last].next, c.blocks[0].prev = id, id
	c.free++
}

func (c *Cache) unlink(id int32) {
	b := &c.blocks[id]
	c.blocks[b.prev].next, c.blocks[b.next].prev = b.next, b.prev
	c.free--
}
