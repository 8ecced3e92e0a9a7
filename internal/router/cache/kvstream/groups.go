package kvstream

import (
	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvtier"
	"github.com/dynctl/dynctl/internal/router/route"
)

// several reports whether a batch is about a cache group other than the one that
// is in the index, or will be.
func (a *Applier) several(b *kvevent.Batch) bool {
	group := a.group
	for i := range b.Events {
		e := &b.Events[i]
		if e.Kind != kvevent.Stored || e.Medium != kvevent.GPU || e.Locality == kvevent.Remote {
			continue // of removals nothing can be learned
		}
		switch {
		case e.CacheKind == kvevent.OtherCache:
		case e.CacheKind > kvevent.FullAttention, e.Group >= 0 && group >= 0 && e.Group != group:
			return true
		case e.Group >= 0:
			group = e.Group
		}
	}
	return false
}

// beginGroups begins the account of the rank's groups, with the blocks that the index
// has of the first one. Only one copy of each is known for certain.
func (s *Stream) beginGroups() {
	a := s.app
	a.groups = kvgroup.New(a.size)
	a.groups.Know(a.traits())
	if a.engine == 0 {
		return
	}
	// It is one of them, even if the index could hold none of its blocks.
	a.groups.Store(&kvgroup.Store{Group: a.group, Kind: kvevent.FullAttention, Block: a.engine})
	// An error says that the rank has no slot in the index, and then no blocks.
	_ = s.index.RankBlocks(s.rank, func(seq, name uint64) bool {
		if _, whole := a.split.tail[name]; whole || a.parts == 1 {
			a.groups.Seed(a.group, seq, name)
		}
		return true
	})
}

// traits are those that the rank's groups go by: names that cover what the drafter reads ahead
// cannot be computed, and no block is dropped then.
func (a *Applier) traits() kvgroup.Traits {
	t := a.Traits
	if a.ahead > 0 {
		t.Drops, t.HashAlgorithm, t.HashSeed = false, "", ""
	}
	return t
}

// noteGroups keeps account of an event for all groups of a rank with several.
func (a *Applier) noteGroups(e *kvevent.Event) {
	g := a.groups
	switch {
	case e.Kind == kvevent.Cleared || len(a.unknown) > 0:
		g.Clear()
	case e.Kind == kvevent.Removed:
		g.Remove(e.Group, e.Hashes)
	case e.Kind == kvevent.Stored && !e.Bigram:
		g.First = a.group
		n, bs := len(e.Hashes), int(e.BlockSize)
		if bs == 0 && n > 0 {
			bs = len(e.Tokens) / n
		}
		if bs == 0 {
			return
		}
		st := kvgroup.Store{
			Group: e.Group, Kind: e.CacheKind, Window: int(e.SlidingWindow), Block: bs,
			Parent: e.Parent, HasParent: e.HasParent, IgnoreCopies: e.Group < 0,
		}
		if bs%a.size == 0 { // else it is a part of a block, too small to be distinguished
			st.Names = e.Hashes
			// Events may have the tokens of more blocks than they name: which of them
			// the names stand for is then known only if the engine's names can be
			// computed.
			st.Whole = n > 0 && len(e.Tokens) == n*bs
			if blocks := len(e.Tokens) / bs; st.Whole || g.Computes() && blocks > 0 {
				a.locals = a.hash(e, blocks, bs)
				st.Locals, st.Tokens, st.Salt = a.locals, e.Tokens, e.Salt
				// vLLM names an adapter by its path, too, which is in no event.
				st.Foreign = a.lora(e) != "" || e.ExtraKeys != nil
			}
		}
		a.Counters.Crowded += uint64(g.Store(&st))
	}
}

// Usable is how many of overlap leading router blocks, as the index counts
// them, the engine will reuse for a prompt; beyond gets what tiers hold behind
// them.
func Usable(shape Shape, groups *kvgroup.Groups, tiers *kvtier.Tiers, overlap int, p *kvgroup.Prompt, beyond *route.Tiers) int {
	switch {
	case groups == nil:
		n := shape.Usable(overlap, p)
		switch {
		case tiers == nil || shape.Bigram: // which block another pair of tokens spoils is not known
		case shape.Drops:
			// vLLM drops a block behind the device, too, where its drafter has a cache
			// group of its own; where it has not, this is one too few. The block that is
			// dropped may be the prompt's last.
			*beyond = tiers.Extend(p.Seq, n, len(p.Seq), true)
		default:
			*beyond = tiers.Extend(p.Seq, n, (p.Tokens-1)/p.Block, false)
		}
		return n
	case shape.Bigram:
		return 0 // no engine is known that has pairs of tokens and several groups
	}
	shape.Drops = false // the groups see to it
	return groups.Usable(*p, shape.Usable(overlap, p))
}

// Usable returns how many of overlap leading router blocks of a prompt, as the
// index counts them, the engine will reuse, and what its other tiers hold behind
// them.
func (s *Stream) Usable(overlap int, p kvgroup.Prompt) (n int, beyond route.Tiers) {
	p.Block = s.app.size
	n = Usable(s.app.Shape(), s.app.groups, s.tiers, overlap, &p, &beyond)
	return n, beyond
}

// hash returns the local hashes of the router blocks in the first n blocks of bs
// tokens of an event, in the memory of a.locals.
func (a *Applier) hash(e *kvevent.Event, n, bs int) []uint64 {
	first := 0
	if e.HasParent {
		first = 1 // any block but 0: the salt is in block 0 only
	}
	extra := e.ExtraKeys
	switch parts := bs / a.size; {
	case parts <= 1:
	case a.groups != nil && len(e.Items) > 0: // prompts have names by the router's blocks
		a.extra = a.spans.extras(a.extra[:0], e, bs, n*parts, a.size)
		extra = a.extra
	default:
		extra = a.spread(extra, parts)
	}
	key := blockhash.Key{LoRA: a.lora(e), Salt: e.Salt}
	return blockhash.LocalsAt(a.locals[:0], e.Tokens[:n*bs], a.size, first, extra, key)
}
