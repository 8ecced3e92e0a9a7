// Package kvgroup computes how much of a prompt a rank with several cache groups
// reuses. The layers of a hybrid model (window, mamba or chunked attention beside
// full attention) have caches of their own, and the engine reuses a prefix only up
// to a length at which every one of them holds what it needs.
//
// The rule is that of vLLM's cache manager. The usable prefix is the largest length
// below the prompt's that meets all of these conditions:
//
//   - full attention (sinks included) holds every block from the start, each full group
//     looked up by its number no further than those before it hold all,
//   - a sliding window holds the last ceil((window-1)/block) blocks before it, or
//     all from the start,
//   - mamba holds the one block that ends there,
//   - chunked attention holds the blocks from the start of the length's chunk.
//
// Lengths are multiples of the least common multiple of the groups' blocks. There is one
// exception: a mamba group's blocks are larger than the smallest block reported, and all other
// groups are full or have that smallest block. Lengths are then multiples of that block, and full
// groups reach to the end of the longest stored part of the block that follows.
//
// The engine's name of a block stands for its whole prefix and is the same in all groups, so
// blocks are kept by name, with a count of copies for each group. What prefix a name stands for
// is learned from events whose names and tokens match one to one. A block whose prefix is not
// known yet counts for no prompt, unless the engine's names of the prompt's own blocks can be
// computed, and one of them is the block's.
package kvgroup

import (
	"cmp"
	"fmt"
	"slices"
	"sync"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
)

const (
	// maxGroups bounds the groups of a rank, maxBlocks its blocks with a name, and
	// maxLooks the blocks looked up for one answer beyond four for each of the
	// prompt's; with more nothing counts as usable.
	maxGroups = 16
	maxBlocks = 4 << 20
	maxLooks  = 1 << 15
	// maxCopies is more copies than an engine can have of a block. One that gets
	// there reports hits as stores (vLLM's kv_cache_report_mode "full"): copies are
	// not counted from then on, so that the first removal ends a block.
	maxCopies = 64
)

// Groups are the cache groups of one rank. One goroutine writes, between Lock and
// Unlock once others read; Usable may be called by any.
type Groups struct {
	sync.RWMutex
	// First is the number of the group whose overlap callers of Usable know.
	First int32
	// Traits are set by Know.
	Traits
	names *names // nil when the engine's names of blocks are not computed

	size        int // router block in tokens
	groups      []group
	order       []int // places of groups, by the groups' numbers
	finest      int   // smallest block reported that is whole router blocks, in those; 0 = none
	crowd       bool  // a group had no room
	implausible bool  // copies are not counted any more, see CopiesImplausible
	blocks      []block
	free        []uint32
	// unresolved counts blocks whose token prefix is unknown.
	unresolved int
	byName     map[uint64]uint32
	bySeq      map[uint64]uint32
}

type group struct {
	id     int32
	kind   kvevent.CacheKind
	window int // tokens, 0 = not reported
	tokens int // largest block reported, in tokens
	blocks int // the same in router blocks, 0 = not whole ones
}

// block is one name and its copies in each group. seq is the router's hash of the
// prefix that it stands for, 0 while that is not known. before is where the block
// before it was when that was learned; another one may have taken its place.
type block struct {
	name, seq uint64
	before    uint32
	copies    [maxGroups]uint8
}

// New makes the groups of a rank for router blocks of size tokens.
func New(size int) *Groups {
	g := &Groups{First: -1, size: size}
	g.Clear()
	return g
}

// Clear forgets the blocks. What groups there are stays known.
func (g *Groups) Clear() {
	g.blocks, g.free, g.unresolved = nil, nil, 0
	g.byName, g.bySeq = map[uint64]uint32{}, map[uint64]uint32{}
	if g.names != nil {
		g.names.clear()
	}
}

// Group is what a rank's engine has reported about one of its groups.
type Group struct {
	Number int32             `json:"group"`
	Kind   kvevent.CacheKind `json:"kind"`
	// Window is in tokens, 0 when not reported.
	Window int `json:"window_tokens,omitempty"`
	// Block is the size of a block in tokens.
	Block int `json:"block_tokens"`
}

// Reported returns the groups that the engine has reported, in the order in which they
// came.
func (g *Groups) Reported() []Group {
	g.RLock()
	defer g.RUnlock()
	list := make([]Group, 0, len(g.groups))
	for i := range g.groups {
		k := &g.groups[i]
		list = append(list, Group{Number: k.id, Kind: k.kind, Window: k.window, Block: k.tokens})
	}
	return list
}

// Store is an event that stored blocks of a group.
type Store struct {
	Group int32
	Kind  kvevent.CacheKind
	// Window is in tokens, 0 when not reported.
	Window int
	// Block is the size of a block in tokens.
	Block int
	Names []uint64
	// Locals are the local hashes of the event's router blocks, from the first on. They
	// are those of all Names if Whole; else there are more of them, and the event does
	// not say which ones the names stand for.
	Locals []uint64
	Whole  bool
	// Tokens are those of the Locals, Salt the salt of a first block. Foreign says that
	// the names are made of more than these: an adapter, images.
	Tokens  []uint32
	Salt    string
	Foreign bool

	Parent    uint64
	HasParent bool
	// IgnoreCopies is as in Traits, for this event.
	IgnoreCopies bool
}

// Store adds blocks and returns how many there was no room for.
func (g *Groups) Store(e *Store) (crowded int) {
	i := g.meet(e)
	if i < 0 {
		return len(e.Names)
	}
	if g.names != nil && g.names.resolve(e, g.size) {
		return g.storeNamed(i, e)
	}
	parts := 0
	if e.Whole && len(e.Names) > 0 {
		parts = len(e.Locals) / len(e.Names)
	}
	seq, before, known := uint64(0), uint32(0), parts > 0
	if e.HasParent && known {
		at, ok := g.byName[e.Parent]
		if known = ok && g.blocks[at].seq != 0; known {
			seq, before = g.blocks[at].seq, at
		}
	}
	root, sure := !e.HasParent, g.sure(i, e)
	for n, name := range e.Names {
		at, room := g.byName[name]
		if n >= sure {
			if at, room = g.named(name); !room {
				return len(e.Names) - n
			}
		}
		var b *block
		if room {
			b = &g.blocks[at]
		}
		if known {
			for _, l := range e.Locals[n*parts : (n+1)*parts] {
				if root {
					seq, root = l, false
				} else {
					seq = blockhash.Next(seq, l)
				}
			}
			if b != nil {
				g.learn(at, seq)
				b.before, before = before, at
			}
		}
		if n < sure {
			continue
		}
		if g.count(&b.copies[i], e) {
			sure = g.sure(i, e)
		}
	}
	return 0
}

// count adds a copy, and reports whether it was the last one to be counted.
func (g *Groups) count(c *uint8, e *Store) bool {
	if *c != 0 && (e.IgnoreCopies || g.IgnoreCopies || g.implausible) {
		return false
	}
	if *c++; *c < maxCopies {
		return false
	}
	g.ignoreCopies()
	return true
}

// storeNamed is Store for an event of which it was found what its names stand for.
func (g *Groups) storeNamed(i int, e *Store) (crowded int) {
	n, sure := g.names, g.sure(i, e)
	for j, name := range e.Names {
		if j < sure {
			continue
		}
		at, room := g.named(name)
		if !room {
			crowded = len(e.Names) - j
			break
		}
		b := &g.blocks[at]
		g.learn(at, n.seqs[j])
		if before, ok := g.byName[n.before[j]]; ok {
			b.before = before
		}
		if g.count(&b.copies[i], e) {
			sure = g.sure(i, e)
		}
	}
	// The prompt goes on behind the last one, whether it is held or not.
	for _, name := range append(e.Names[:len(e.Names):len(e.Names)], n.last) {
		if _, held := g.byName[name]; !held {
			g.tip(name)
		}
	}
	return crowded
}

// CopiesImplausible reports whether copies are no longer counted because a block had more of them
// than there can be. It is for the goroutine that writes.
func (g *Groups) CopiesImplausible() bool { return g.implausible }

// ignoreCopies ends the count of copies. What groups other than full ones have stored
// may have been the beginnings of hits, which they do not hold.
func (g *Groups) ignoreCopies() {
	g.implausible = true
	for i := range g.blocks {
		for j := range g.groups {
			full := uint8(0)
			if g.groups[j].kind == kvevent.FullAttention {
				full = 1
			}
			g.blocks[i].copies[j] = min(g.blocks[i].copies[j], full)
		}
		if g.blocks[i].name != 0 || g.blocks[i].seq != 0 {
			g.freeUnheld(uint32(i))
		}
	}
}

// sure is the place of the first name of an event that its group has for certain.
// Where hits are reported as stores, events store all blocks from the start in a
// window, which only holds those that the hit needs of it.
func (g *Groups) sure(i int, e *Store) int {
	k := &g.groups[i]
	if !g.IgnoreCopies && !g.implausible || e.HasParent || k.kind == kvevent.FullAttention || e.Block == 0 {
		return 0
	}
	n := len(e.Names)
	switch {
	case k.kind == kvevent.Mamba:
		return n - 1
	case k.kind == kvevent.ChunkedLocal && g.Chunk > 0:
		// The block beyond the hit is the next one of its chunk.
		return n * e.Block / g.Chunk * g.Chunk / e.Block
	case k.kind == kvevent.SlidingWindow && k.window > 0:
		return max(0, n-(k.window-1+e.Block-1)/e.Block)
	}
	return n
}

// Seed adds a block of a known group that was stored before the other groups were
// known.
func (g *Groups) Seed(id int32, seq, name uint64) {
	i := g.indexOf(id)
	if i < 0 {
		return
	}
	if at, room := g.named(name); room {
		g.learn(at, seq)
		g.blocks[at].copies[i] = 1
	}
}

// meet returns the place of an event's group, -1 when there is none.
func (g *Groups) meet(e *Store) int {
	kind := cmp.Or(e.Kind, kvevent.FullAttention)
	i := g.indexOf(e.Group)
	if i < 0 {
		if len(g.groups) == maxGroups {
			g.crowd = true
			return -1
		}
		i = g.add(group{id: e.Group, kind: kind, window: e.Window})
	}
	k := &g.groups[i]
	if k.kind != kind || k.window != e.Window {
		// Another cache under the same number: nothing that was stored counts.
		g.Clear()
		*k = group{id: e.Group, kind: kind, window: e.Window}
	}
	if e.Block > k.tokens {
		k.tokens, k.blocks = e.Block, 0
		if e.Block%g.size == 0 {
			k.blocks = e.Block / g.size
		}
	}
	if e.Block > 0 && e.Block%g.size == 0 {
		if n := e.Block / g.size; g.finest == 0 {
			g.finest = n
		} else {
			g.finest = gcd(g.finest, n)
		}
	}
	return i
}

// add adds a group and returns its place.
func (g *Groups) add(k group) int {
	g.groups = append(g.groups, k)
	i := len(g.groups) - 1
	at, _ := slices.BinarySearchFunc(g.order, k.id, func(i int, id int32) int { return cmp.Compare(g.groups[i].id, id) })
	g.order = slices.Insert(g.order, at, i)
	return i
}

// together reports whether the engine looks two groups up as one: vLLM does so with groups
// of one kind of cache, in which a prompt has a block where all of them have it.
func (g *Groups) together(i, j int) bool {
	a, b := &g.groups[i], &g.groups[j]
	return a.kind == b.kind && a.window == b.window && a.blocks == b.blocks
}

// leads reports whether a group is the first by number of those it is looked up with.
func (g *Groups) leads(i int) bool {
	for j := range g.groups {
		if g.groups[j].id < g.groups[i].id && g.together(i, j) {
			return false
		}
	}
	return true
}

func (g *Groups) indexOf(id int32) int {
	for i := range g.groups {
		if g.groups[i].id == id {
			return i
		}
	}
	return -1
}

// named finds or makes the block of a name, false when there is no room.
func (g *Groups) named(name uint64) (at uint32, room bool) {
	if at, ok := g.byName[name]; ok {
		return at, true
	}
	if n := len(g.free); n > 0 {
		at, g.free = g.free[n-1], g.free[:n-1]
	} else {
		if len(g.blocks) == maxBlocks {
			return 0, false
		}
		at = uint32(len(g.blocks))
		g.blocks = append(g.blocks, block{})
	}
	g.blocks[at] = block{name: name}
	g.byName[name] = at
	g.unresolved++
	return at, true
}

// learn notes the prefix that a block stands for.
func (g *Groups) learn(at uint32, seq uint64) {
	b := &g.blocks[at]
	if b.seq == seq {
		return
	}
	if b.seq == 0 {
		g.unresolved--
	} else if g.bySeq[b.seq] == at {
		delete(g.bySeq, b.seq)
	}
	b.seq = seq
	g.bySeq[seq] = at
}

// Remove takes one copy of each block from a group. Without a group (-1) it takes
// one from each.
func (g *Groups) Remove(id int32, names []uint64) {
	i := g.indexOf(id)
	if i < 0 && id >= 0 {
		return
	}
	for _, name := range names {
		at, ok := g.byName[name]
		if !ok {
			continue
		}
		b := &g.blocks[at]
		for j := range b.copies {
			if (j == i || id < 0) && b.copies[j] > 0 {
				b.copies[j]--
			}
		}
		g.freeUnheld(at)
	}
}

// freeUnheld frees the place of a block that no group holds.
func (g *Groups) freeUnheld(at uint32) {
	b := &g.blocks[at]
	if b.copies != [maxGroups]uint8{} {
		return
	}
	delete(g.byName, b.name)
	if b.seq == 0 {
		g.unresolved--
	} else if g.bySeq[b.seq] == at {
		delete(g.bySeq, b.seq)
	}
	if g.names != nil {
		g.tip(b.name)
	}
	*b = block{}
	g.free = append(g.free, at)
}

// Mismatch returns why nothing can be said of what the rank can continue from, or "".
func (g *Groups) Mismatch() string {
	if g.crowd {
		return fmt.Sprintf("the engine has more than %d cache groups", maxGroups)
	}
	for i := range g.groups {
		if k := &g.groups[i]; k.tokens > 0 && k.blocks == 0 {
			return fmt.Sprintf("the engine's cache group %d has blocks of %d tokens, which is not a multiple of the router's block of %d tokens", k.id, k.tokens, g.size)
		}
	}
	return ""
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
