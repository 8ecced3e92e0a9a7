package decide

import (
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/workers"
)

// DecodingOn is what a rank does now by a ledger with blocks of blockSize tokens.
func DecodingOn(l *ledger.Ledger, k *workers.Rank, blockSize int) cost.Decoding {
	load := l.Load(k)
	prompts, computed := l.Computed(k)
	tokens := func(blocks int) int32 { return int32(blocks * blockSize * load.Answering / max(load.Requests, 1)) }
	return cost.Decoding{
		Running: int32(load.Answering), Held: tokens(load.DecodeBlocks - load.CachedBlocks), HeldCached: tokens(load.CachedBlocks),
		Prompts: uint32(prompts), Computed: uint32(computed), Times: float32(k.Times()),
	}
}
