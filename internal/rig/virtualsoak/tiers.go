package virtualsoak

import (
	"math/rand/v2"
	"slices"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
)

// spill draws whether engines have room outside their devices, with numbers of its own: a
// seed without has the history that it had before there was any.
func (s *stage) spill() {
	rng := rand.New(rand.NewPCG(s.out.Seed, 0x74696572))
	if rng.IntN(3) == 0 {
		s.group.HostBlocks, s.group.Storage = 6+rng.IntN(40), rng.IntN(3) == 0
	}
}

// outside is what an engine holds in each tier beside the device, by its own names.
type outside [cache.Storage + 1]map[uint64]bool

// take adds an event of a tier.
func (o *outside) take(e *cache.Event) {
	if o[e.Tier] == nil {
		o[e.Tier] = map[uint64]bool{}
	}
	for _, name := range e.Names {
		if e.Kind == cache.Stored {
			o[e.Tier][name] = true
		} else {
			delete(o[e.Tier], name)
		}
	}
}

// checkPrompts looks, after batch seq, at what the rank is taken to have of prompts: no
// block counts as outside the device that the engine does not have there.
func (f *feed) checkPrompts(seq uint64) {
	n, s := f.n, f.n.s
	if n.recorded != nil {
		n.recorded.look(f, seq)
		return
	}
	core := n.v.Core()
	if s.group.HostBlocks == 0 || f.inc != n.inc || core == nil {
		return
	}
	if s.hashed == nil {
		for _, tokens := range s.prompts {
			locals := blockhash.Locals(nil, tokens, s.group.BlockSize, blockhash.Key{})
			s.hashed = append(s.hashed, hashed{locals, kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(tokens)}})
		}
	}
	var q kvindex.Query
	for _, p := range s.hashed {
		s.index.Overlap(p.locals, &q)
		here, beyond := f.stream.Usable(q.Depth(n.slot()), p.Prompt)
		count := int(beyond.CPU + beyond.Disk + beyond.Remote)
		s.out.Outside += count
		for _, b := range p.Seq[here : here+count] {
			if name := core.Cache().Name(b); !f.outside[cache.Host][name] && !f.outside[cache.Storage][name] {
				s.violate("block %x counts as outside the device of %s, where the engine does not have it", b, n.name)
			}
		}
	}
}

// hashed is a prompt as the index is asked about it.
type hashed struct {
	locals []uint64
	kvgroup.Prompt
}

// recorded is an engine whose batches are those of a recording.
type recorded interface {
	// look compares what the feed would count for prompts after batch seq with what the
	// engine found.
	look(f *feed, seq uint64)
}

// lacking is a batch as it reaches the stream: whole, unless a bug is planted that does
// not hear of some of its events.
func (f *feed) lacking(m batch) batch {
	var lacks func(e *kvevent.Event) bool
	switch f.n.s.plant {
	case keepOutside:
		lacks = func(e *kvevent.Event) bool { return e.Medium != kvevent.GPU && e.Kind == kvevent.Removed }
	case firstGroupOnly:
		lacks = func(e *kvevent.Event) bool { return e.Group > 0 && e.Kind == kvevent.Removed }
	default:
		return m
	}
	var d kvevent.Decoder
	var b kvevent.Batch
	if d.Decode(m.payload, &b) == nil {
		b.Events = slices.DeleteFunc(b.Events, func(e kvevent.Event) bool { return lacks(&e) })
		m.payload = kvevent.AppendBatch(nil, &b, kvevent.Encoding{Form: kvevent.VLLMMap})
	}
	return m
}
