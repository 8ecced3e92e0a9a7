package decide

import (
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Judgement is what a choice was worth by one measure for all policies: kv_blocks' cost
// function with its default weights and no limits.
type Judgement struct {
	// RegretBlocks is by how much the rank that computes the prompt costs more than
	// the best one would.
	RegretBlocks float64
	// CachedTokens is what that rank should find of the prompt in its cache,
	// MostTokens what the rank should that holds most of it.
	CachedTokens, MostTokens int
}

// Judge judges the newest plan, whose candidates have the measure's costs and exclusions from
// then on. ok is false for a plan with an error or one that was compacted, and where no rank may
// be chosen.
func (r *Run) Judge() (j Judgement, ok bool) {
	p := &r.Plan
	if r.memory == nil || p.Err != nil {
		return Judgement{}, false
	}
	in, chosen := r.In.DecodePhase(), p.DecodeIndex
	if p.Path == route.Remote {
		in, chosen = r.In.Prefill, p.PrefillIndex
	}
	in.Policy, in.Weights, in.Busy, in.Siblings = selector.KVBlocks, selector.DefaultWeights(), selector.Busy{}, nil
	selector.Pick(&in, &r.memory.judged)
	best, ok := r.memory.judged.Best()
	if !ok {
		return Judgement{}, false
	}
	most, held := 0, func(i int) int { return int(in.Weights.Held(&in.Candidates[i])) }
	for i := range in.Candidates {
		most = max(most, held(i))
	}
	return Judgement{
		RegretBlocks: in.Candidates[chosen].Cost - in.Candidates[best].Cost,
		CachedTokens: selector.CachedTokens(in.ISL, held(chosen), in.BlockSize), MostTokens: selector.CachedTokens(in.ISL, most, in.BlockSize),
	}, true
}
