package kvfeed

import (
	"fmt"
	"strconv"

	"github.com/dynctl/dynctl/internal/router/blockhash"
	"github.com/dynctl/dynctl/internal/router/kvevent"
	"github.com/dynctl/dynctl/internal/router/kvindex"
)

// Applier turns the events of one rank into operations on the index: engine
// blocks of any size become router blocks with local hashes, and what the index
// cannot hold truthfully is left out and counted. It has no socket, no clock
// and no index; the same events always make the same operations.
//
// What it does with each shape of event:
//
//   - A stored event's blocks follow one another, and the first one follows the
//     parent: that is what the event says by definition, and no router can check
//     it, because names are opaque. (A simulator is known that lists the refilled
//     holes of a chain in one event. Its blocks are put where the event says;
//     such a chain matches no prompt that the engine would recompute.)
//   - An engine block of k router blocks has k names: the last part carries the
//     engine's name, so that children find their parent by it, the others names
//     derived from it. A removal removes all k. A k that changes empties the rank
//     first, so no part of an old size stays behind.
//   - An engine block that is not a whole number of router blocks cannot be held.
//     The rank is emptied and Mismatch says why until blocks that fit arrive.
//   - Blocks smaller than the engine's block size are partial entries, kept by
//     the engine beside the full block; nothing routes on them.
//   - Only the device tier is used, and only one group with full attention: the
//     first that stores. Removals that name no group or tier count for that one.
//   - Pairs of tokens (EAGLE) give blocks by their first tokens. Such a block
//     depends on one token more than it holds, see [Shape.Usable].
type Applier struct {
	size   int // router block size in tokens
	engine int // engine block size in tokens, 0 = not seen yet
	parts  int // router blocks per engine block, 0 = mismatch or not seen yet
	group  int32
	bigram bool

	names, locals, extra []uint64
	loras                map[int64]string

	// Counters only grow.
	Counters Counters
}

// Counters count what an Applier met. Blocks are router blocks in Stored and
// Removed, engine blocks elsewhere.
type Counters struct {
	Events  uint64 `json:"events"`
	Stored  uint64 `json:"stored_blocks"`
	Removed uint64 `json:"removed_blocks"`
	Clears  uint64 `json:"clears"`
	// Partial blocks hold fewer tokens than the engine's block size.
	Partial uint64 `json:"partial_blocks"`
	// Tokenless blocks came without token ids.
	Tokenless uint64 `json:"tokenless_blocks"`
	// OtherTier and OtherGroup count events of tiers and cache groups that are
	// not used.
	OtherTier  uint64 `json:"other_tier_events"`
	OtherGroup uint64 `json:"other_group_events"`
	// Misfit blocks came with a number of tokens that says nothing about which
	// token belongs to which block.
	Misfit uint64 `json:"misfit_blocks"`
	// Mismatched blocks are not a whole number of router blocks.
	Mismatched uint64 `json:"mismatched_blocks"`
	// Resized counts changes of the engine's block size.
	Resized uint64 `json:"resized"`
}

// maxLoRAs bounds the remembered names of numbered adapters.
const maxLoRAs = 1024

// NewApplier makes an Applier for router blocks of blockSize tokens, at least 1.
func NewApplier(blockSize int) *Applier {
	if blockSize < 1 {
		panic("kvfeed: block size below 1")
	}
	a := &Applier{size: blockSize}
	a.Reset()
	return a
}

// Reset forgets what was learned from the events of a publisher that began
// anew. Counters stay.
func (a *Applier) Reset() {
	a.engine, a.parts, a.group, a.bigram = 0, 0, -1, false
}

// Shape is what one must know of a rank's blocks to read its overlap.
type Shape struct {
	// EngineBlock is the engine's block in tokens, 0 when no event told yet.
	EngineBlock int `json:"engine_block_tokens"`
	// Parts is the number of router blocks in an engine block, 0 when unknown.
	Parts int `json:"parts"`
	// Bigram says that blocks are made of pairs of tokens.
	Bigram bool `json:"bigram,omitempty"`
}

// Usable returns how many of overlap leading router blocks the engine is sure
// to reuse. Engines reuse whole engine blocks only. A block of pairs depends on
// the token after its last one, so the last block that matches by its own
// tokens may still differ.
func (s Shape) Usable(overlap int) int {
	parts := max(s.Parts, 1)
	overlap -= overlap % parts
	if s.Bigram {
		overlap -= parts
	}
	return max(overlap, 0)
}

// Shape returns the shape learned so far.
func (a *Applier) Shape() Shape {
	return Shape{EngineBlock: a.engine, Parts: a.parts, Bigram: a.bigram}
}

// Mismatch returns why the rank's blocks cannot be held, or "" if they can.
func (a *Applier) Mismatch() string {
	if a.engine == 0 || a.parts > 0 {
		return ""
	}
	return fmt.Sprintf("the engine's block of %d tokens is not a multiple of the router's block of %d tokens", a.engine, a.size)
}

// Apply appends the operations for the events of b to ops, in their order.
func (a *Applier) Apply(b *kvevent.Batch, ops *kvindex.Batch) {
	for i := range b.Events {
		e := &b.Events[i]
		a.Counters.Events++
		if e.Medium != kvevent.GPU || e.Locality == kvevent.Remote {
			a.Counters.OtherTier++
			continue
		}
		switch e.Kind {
		case kvevent.Stored:
			a.store(e, ops)
		case kvevent.Removed:
			a.remove(e, ops)
		case kvevent.Cleared:
			a.Counters.Clears++
			ops.Clear()
		}
	}
}

func (a *Applier) store(e *kvevent.Event, ops *kvindex.Batch) {
	switch e.CacheKind {
	case kvevent.CacheAbsent, kvevent.FullAttention:
	default:
		a.Counters.OtherGroup++
		return
	}
	if e.Group >= 0 && a.group >= 0 && e.Group != a.group {
		a.Counters.OtherGroup++
		return
	}
	n := len(e.Hashes)
	if n == 0 {
		return
	}
	if len(e.Tokens) == 0 {
		a.Counters.Tokenless += uint64(n)
		return
	}
	bs := int(e.BlockSize)
	if bs == 0 {
		bs = len(e.Tokens) / n
	}
	full := n
	if bs == 0 || len(e.Tokens) != n*bs {
		// Only the end of a chain can be short of tokens.
		if bs == 0 || len(e.Tokens) > n*bs || len(e.Tokens) <= (n-1)*bs {
			a.Counters.Misfit += uint64(n)
			return
		}
		a.Counters.Partial++
		if full--; full == 0 {
			return
		}
	}
	if bs != a.engine && !a.learn(bs, ops) {
		a.Counters.Partial += uint64(full)
		return
	}
	if a.parts == 0 {
		a.Counters.Mismatched += uint64(full)
		return
	}
	if e.Group >= 0 {
		a.group = e.Group
	}
	a.bigram = a.bigram || e.Bigram

	first := 0
	if e.HasParent {
		first = 1 // any block but 0: the salt is in block 0 only
	}
	names, extra := e.Hashes[:full], e.ExtraKeys
	if a.parts > 1 {
		names, extra = a.split(names), a.spread(extra)
	}
	key := blockhash.Key{LoRA: a.lora(e), Salt: e.Salt}
	a.locals = blockhash.LocalsAt(a.locals[:0], e.Tokens[:full*bs], a.size, first, extra, key)
	a.Counters.Stored += uint64(len(names))
	ops.Store(e.Parent, e.HasParent, names, a.locals)
}

// learn meets an engine block size other than the one known. It returns false
// for the smaller blocks of partial entries.
func (a *Applier) learn(bs int, ops *kvindex.Batch) bool {
	if bs < a.engine {
		return false
	}
	if a.engine != 0 {
		// What was taken for full blocks were partial ones, or the engine
		// changed its mind: nothing that is held can be removed part by part
		// any more.
		a.Counters.Resized++
		ops.Clear()
	}
	a.engine, a.parts = bs, 0
	if bs%a.size == 0 {
		a.parts = bs / a.size
	} else {
		ops.Clear()
	}
	return true
}

func (a *Applier) remove(e *kvevent.Event, ops *kvindex.Batch) {
	if e.Group >= 0 && a.group >= 0 && e.Group != a.group {
		a.Counters.OtherGroup++
		return
	}
	names := e.Hashes
	if a.parts > 1 {
		names = a.split(names)
		// Leaves first, as engines evict.
		for i, j := 0, len(names)-1; i < j; i, j = i+1, j-1 {
			names[i], names[j] = names[j], names[i]
		}
	}
	a.Counters.Removed += uint64(len(names))
	ops.Remove(names...)
}

// split returns the names of the router blocks of the named engine blocks.
func (a *Applier) split(hashes []uint64) []uint64 {
	dst := a.names[:0]
	for _, h := range hashes {
		for i := 1; i < a.parts; i++ {
			dst = append(dst, partName(h, i))
		}
		dst = append(dst, h)
	}
	a.names = dst
	return dst
}

// partName is the name of the part number i, from 1, of the engine block h. The
// last part is named h itself.
func partName(h uint64, i int) uint64 {
	return mix64(h ^ mix64(uint64(i)*0x9e3779b97f4a7c15))
}

// spread repeats each engine block's digest for its router blocks.
func (a *Applier) spread(extra []uint64) []uint64 {
	dst := a.extra[:0]
	for _, x := range extra {
		for range a.parts {
			dst = append(dst, x)
		}
	}
	a.extra = dst
	return dst
}

// lora names the adapter that the blocks belong to. An adapter that only has a
// number gets a name that no request can have, so its blocks match no prompt
// but never pass for those of the base model.
func (a *Applier) lora(e *kvevent.Event) string {
	if e.LoRAName != "" || !e.HasLoRAID || e.LoRAID == 0 {
		return e.LoRAName
	}
	if s, ok := a.loras[e.LoRAID]; ok {
		return s
	}
	s := "\x00id " + strconv.FormatInt(e.LoRAID, 10)
	if a.loras == nil || len(a.loras) >= maxLoRAs {
		a.loras = make(map[int64]string)
	}
	a.loras[e.LoRAID] = s
	return s
}
