package decide

import (
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/workers"
)

// DecodingOn is what a rank does now by a ledger whose blocks have so many tokens.
func DecodingOn(l *ledger.Ledger, k *workers.Rank, blockSize int) cost.Decoding {
	load := l.Load(k)
	prompts, computed := l.Computed(k)
	tokens := func(blocks int) int { return blocks * blockSize * load.Answering / max(load.Requests, 1) }
	return cost.Decoding{
		Running: load.Answering, Held: tokens(load.DecodeBlocks - load.CachedBlocks), HeldCached: tokens(load.CachedBlocks),
		Prompts: prompts, Computed: computed, Times: k.Times(),
	}
}
