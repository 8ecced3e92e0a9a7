package kvstream

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// Applier turns the events of one rank into operations on the index: engine
// blocks of any size become router blocks with local hashes, and what the index
// cannot hold exactly is left out and counted. It has no socket, no clock and
// no index; the same events always make the same operations.
//
// What it does with each shape of event:
//
//   - A stored event's blocks follow one another, and the first one follows the
//     parent: that is what the event says by definition, and no router can check
//     it, because names are opaque. (A simulator is known that lists the refilled
//     holes of a chain in one event. Its blocks are put where the event says;
//     such a chain matches no prompt that the engine would recompute.)
//   - An engine block of k router blocks becomes k blocks of the index. The last
//     one carries the engine's name, so that children find their parent by it;
//     the others may be shared by engine blocks that begin alike and go with the
//     last of them. A k that changes empties the rank first, so no part of an old
//     size stays behind.
//   - An engine block that is not a whole number of router blocks cannot be held.
//     The rank is emptied and Mismatch says why until blocks that fit arrive.
//   - Blocks smaller than the engine's block size are partial entries, kept by
//     the engine beside the full block; nothing routes on them.
//   - The index holds the device's blocks. Those of other tiers are accounted for by
//     the Stream, see [Stream.Tiers]; here they are only noticed.
//   - The index holds one group with full attention
//     (sinks included): the first that stores. Removals that name no group or tier
//     count for that one. From the first event of another group on, all are
//     accounted for in Groups, too, which says how far they can go on together.
//     While only groups of other kinds have stored, Mismatch says so.
//   - A cache kind that is not known here makes every answer doubtful: an engine
//     reuses only what all its groups can continue from. The rank is emptied and
//     Mismatch names the kind until the publisher starts over.
//   - Pairs of tokens (EAGLE) give blocks by their first tokens. Such a block
//     depends on one token more than it holds, see [Shape.Usable].
type Applier struct {
	size   int // router block size in tokens
	engine int // engine block size in tokens, 0 = not seen yet
	parts  int // router blocks per engine block, 0 = mismatch or not seen yet
	ahead  int // tokens after a block that its name covers
	group  int32
	bigram bool
	// unknown are the names of cache kinds that nothing is known of, at most
	// maxKinds of them; aside is the latest kind that is known and not used.
	unknown []string
	aside   kvevent.CacheKind
	groups  *kvgroup.Groups // nil while only one group was reported
	// placeholder is what stands for media in the engine's prompts.
	placeholder kvevent.Placeholder
	spans       spans

	split                parts
	names, locals, extra []uint64
	gone, seqs           []uint64
	loras                map[int64]string

	kvgroup.Traits
	// Counters only grow.
	Counters Applied
}

// Applied counts what an Applier met. Blocks are router blocks in Stored and
// Removed, engine blocks elsewhere.
type Applied struct {
	Events  uint64 `json:"events"`
	Stored  uint64 `json:"stored_blocks"`
	Removed uint64 `json:"removed_blocks"`
	Clears  uint64 `json:"clears"`
	// Partial blocks hold fewer tokens than the engine's block size.
	Partial uint64 `json:"partial_blocks"`
	// Tokenless blocks came without token ids.
	Tokenless uint64 `json:"tokenless_blocks"`
	// Tiered counts events of tiers other than the device, OtherTier those of
	// them that are not used, OtherGroup events of cache groups other than the
	// one in the index.
	Tiered     uint64 `json:"tier_events"`
	OtherTier  uint64 `json:"other_tier_events"`
	OtherGroup uint64 `json:"other_group_events"`
	// Misfit blocks came with a number of tokens that says nothing about which
	// token belongs to which block.
	Misfit uint64 `json:"misfit_blocks"`
	// Mismatched blocks are not a whole number of router blocks.
	Mismatched uint64 `json:"mismatched_blocks"`
	// Crowded blocks came when too many blocks of several parts, or of several
	// groups, were held.
	Crowded uint64 `json:"crowded_blocks"`
	// Resized counts changes of the engine's block size.
	Resized uint64 `json:"resized"`
}

// maxLoRAs bounds the remembered names of numbered adapters, maxKinds those of
// unknown cache kinds, and maxKindName one of these in bytes.
const (
	maxLoRAs    = 1024
	maxKinds    = 4
	maxKindName = 64
)

// NewApplier makes an Applier for router blocks of blockSize tokens, at least 1.
func NewApplier(blockSize int) *Applier {
	if blockSize < 1 {
		panic("kvfeed: block size below 1")
	}
	a := &Applier{size: blockSize}
	a.Reset()
	return a
}

// Reset forgets what was learned from the events of a publisher that started
// again. Counters stay.
func (a *Applier) Reset() {
	a.engine, a.parts, a.ahead, a.group, a.bigram = 0, 0, 0, -1, false
	a.unknown, a.aside, a.groups, a.placeholder = nil, kvevent.CacheAbsent, nil, kvevent.Placeholder{}
	a.split.reset()
}

// Emptied notes that the rank's blocks were dropped from the index by
// something other than the operations made here.
func (a *Applier) Emptied() {
	a.split.reset()
	if a.groups != nil {
		a.groups.Lock()
		a.groups.Clear()
		a.groups.Unlock()
	}
}

// Shape is what one must know of a rank's blocks to read its overlap.
type Shape struct {
	// EngineBlock is the engine's block in tokens, 0 when no event has said yet.
	EngineBlock int `json:"engine_block_tokens"`
	// Parts is the number of router blocks in an engine block, 0 when unknown.
	Parts int `json:"parts"`
	// Bigram says that blocks are made of pairs of tokens.
	Bigram bool `json:"bigram,omitempty"`
	// Drops is as in [kvgroup.Traits].
	Drops bool `json:"last_block_dropped,omitempty"`
	// Ahead is how many tokens after a block its name covers, 0 for none (vLLM 0.33 with EAGLE
	// or MTP and without a connector). A prompt's blocks have to be named with as many.
	Ahead int `json:"lookahead_tokens,omitempty"`
}

// Usable returns how many of overlap leading router blocks of a prompt the engine is
// sure to reuse. Engines reuse whole engine blocks only. A block of pairs depends on
// the token after its last one, so the last block that matches by its own
// tokens may still differ. An engine that drops the last block of a hit does so
// after it left out the prompt's last token.
func (s Shape) Usable(overlap int, p *kvgroup.Prompt) int {
	parts := max(s.Parts, 1)
	if s.Drops {
		overlap = min(overlap, (p.Tokens-1)/p.Block)
	}
	overlap -= overlap % parts
	if s.Bigram || s.Drops {
		overlap -= parts
	}
	return max(overlap, 0)
}

// Shape returns the shape learned so far.
func (a *Applier) Shape() Shape {
	// An engine whose names cover the tokens that its drafter reads ahead drops no block.
	return Shape{EngineBlock: a.engine, Parts: a.parts, Bigram: a.bigram, Drops: a.Drops && a.ahead == 0, Ahead: a.ahead}
}

// Mismatch returns why the rank's blocks cannot be held, or "" if they can.
func (a *Applier) Mismatch() string {
	switch {
	case len(a.unknown) > 0:
		return fmt.Sprintf("the engine has a cache of kind %s, which this version does not know, so what it reuses is unknown: use a newer dynctl, or route to it without KV events", strings.Join(a.unknown, " and "))
	case a.engine == 0 && a.aside != kvevent.CacheAbsent && (a.groups == nil || !a.groups.NamesSuffice()):
		return fmt.Sprintf("the engine has reported a cache of kind %s only, whose blocks are not followed", a.aside)
	case a.groups != nil && a.groups.Mismatch() != "":
		return a.groups.Mismatch()
	case a.engine == 0 || a.parts > 0:
		return ""
	}
	return fmt.Sprintf("the engine's block of %d tokens is not a multiple of the router's block of %d tokens", a.engine, a.size)
}

// Apply appends the operations for the events of b to ops, in their order.
func (a *Applier) Apply(b *kvevent.Batch, ops *kvindex.Batch) {
	if a.groups == nil {
		a.each(b, ops)
		return
	}
	a.groups.Lock()
	defer a.groups.Unlock()
	clear(a.spans)
	for i := range b.Events { // of all groups, before the first one's blocks get names
		a.spans.see(&b.Events[i])
	}
	a.each(b, ops)
}

func (a *Applier) each(b *kvevent.Batch, ops *kvindex.Batch) {
	for i := range b.Events {
		e := &b.Events[i]
		a.Counters.Events++
		if e.Medium != kvevent.GPU || e.Locality == kvevent.Remote {
			a.Counters.Tiered++
			continue
		}
		switch e.Kind {
		case kvevent.Stored:
			if p := &e.Placeholder; p.Known {
				a.placeholder.See(p.Token)
				a.placeholder.Mixed = a.placeholder.Mixed || p.Mixed
			}
			a.store(e, ops)
		case kvevent.Removed:
			a.remove(e, ops)
		case kvevent.Cleared:
			a.Counters.Clears++
			a.clear(ops)
		}
		if a.groups != nil {
			a.noteGroups(e)
		}
	}
}

func (a *Applier) store(e *kvevent.Event, ops *kvindex.Batch) {
	switch e.CacheKind {
	case kvevent.CacheAbsent, kvevent.FullAttention:
	case kvevent.OtherCache:
		a.Counters.OtherGroup++
		a.meet(e.CacheName, ops)
		return
	default:
		a.Counters.OtherGroup++
		a.aside = e.CacheKind
		return
	}
	if len(a.unknown) > 0 {
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
	if ahead := int(e.Ahead); ahead != a.ahead {
		if a.engine != 0 { // what is held was named otherwise
			a.Counters.Resized++
			a.clear(ops)
		}
		a.ahead = ahead
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
	a.locals = a.hash(e, full, bs)
	a.Counters.Stored += uint64(len(a.locals))
	if a.parts == 1 {
		if e.Group >= 0 && !a.IgnoreCopies {
			// vLLM (the only one with cache groups) keeps a block that it computed
			// twice in two places, as with requests that arrive together with a
			// common head, and publishes the removal of each.
			ops.StoreCopies(e.Parent, e.HasParent, e.Hashes[:full], a.locals)
		} else {
			ops.Store(e.Parent, e.HasParent, e.Hashes[:full], a.locals)
		}
		return
	}
	a.storeParts(e, full, ops)
}

// meet takes note of a cache kind that nothing is known of.
func (a *Applier) meet(name string, ops *kvindex.Batch) {
	name = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, name[:min(len(name), maxKindName)])
	if len(a.unknown) >= maxKinds || slices.Contains(a.unknown, name) {
		return
	}
	if len(a.unknown) == 0 {
		a.clear(ops)
	}
	a.unknown = append(a.unknown, name)
}

// storeParts stores engine blocks of several router blocks.
func (a *Applier) storeParts(e *kvevent.Event, full int, ops *kvindex.Batch) {
	parent := uint64(rootName)
	if e.HasParent {
		parent = e.Parent
	}
	names := a.names[:0]
	for i, h := range e.Hashes[:full] {
		from := len(names)
		names = a.split.names(names, h, parent, a.locals[i*a.parts:(i+1)*a.parts])
		var room bool
		if a.gone, room = a.split.add(names[from:], a.gone[:0]); !room {
			a.Counters.Crowded += uint64(full - i)
			names = names[:from]
			break
		}
		if len(a.gone) > 0 {
			ops.Remove(a.gone...)
		}
		parent = h
	}
	ops.Store(e.Parent, e.HasParent, names, a.locals[:len(names)])
	a.names = names
}

func (a *Applier) clear(ops *kvindex.Batch) {
	a.split.reset()
	ops.Clear()
}

// learn handles an engine block size other than the one known. It returns
// false for the smaller blocks of partial entries.
func (a *Applier) learn(bs int, ops *kvindex.Batch) bool {
	if bs < a.engine {
		return false
	}
	if a.engine != 0 {
		// What was taken for full blocks were partial ones, or the engine
		// changed its mind: nothing that is held can be removed part by part
		// any more.
		a.Counters.Resized++
		a.clear(ops)
	}
	a.engine, a.parts = bs, 0
	if bs%a.size == 0 {
		a.parts = bs / a.size
	} else {
		a.clear(ops)
	}
	return true
}

func (a *Applier) remove(e *kvevent.Event, ops *kvindex.Batch) {
	if e.Group >= 0 && a.group >= 0 && e.Group != a.group {
		a.Counters.OtherGroup++
		return
	}
	gone := e.Hashes
	if a.parts > 1 {
		a.gone = a.gone[:0]
		for _, h := range e.Hashes {
			a.gone = a.split.remove(h, a.gone)
		}
		gone = a.gone
	}
	a.Counters.Removed += uint64(len(gone))
	ops.Remove(gone...)
}

// spread repeats each engine block's digest for its parts.
func (a *Applier) spread(extra []uint64, parts int) []uint64 {
	dst := a.extra[:0]
	for _, x := range extra {
		for range parts {
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
