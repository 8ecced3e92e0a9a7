package replay

import (
	"slices"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Ranks are what matters about ranks to which settings have an effect on them.
type Ranks struct {
	// Split says that there are prefill ranks, Alone that a decode rank may have to do without
	// them: they are missing, they end, or they are at a limit.
	Split, Alone bool
	// Offload says that ranks keep blocks outside their devices.
	Offload bool
}

// Idle reports of each change whether it cannot alter a decision under settings s over such
// ranks, the other changes being made: as where the policy does not look at a weight. A
// change to the value that is set already is not idle.
func Idle(s decide.Options, list []Change, ranks Ranks) []bool {
	with := Changed(s, list)
	idle := make([]bool, len(list))
	for i := range list {
		without := Changed(s, slices.Delete(slices.Clone(list), i, i+1))
		idle[i] = with != without && !ranks.matters(&with, &without)
	}
	return idle
}

// matters reports whether two settings can decide differently.
func (r Ranks) matters(a, b *decide.Options) bool {
	switch {
	case a.Decode != b.Decode || a.Busy != b.Busy:
		return true
	case r.Alone && r.weighs(a.Decode, route.Aggregated, &a.Weights, &b.Weights):
		return true
	case !r.Split:
		return false
	case a.Prefill != b.Prefill || a.Rule != b.Rule:
		return true
	case r.Offload && held(&a.Weights) != held(&b.Weights): // a threshold counts what is held
		return true
	}
	return r.weighs(a.Decode, route.Decode, &a.Weights, &b.Weights) || r.weighs(a.Prefill, route.Prefill, &a.Weights, &b.Weights)
}

// elsewhere are blocks in every tier outside the device.
var elsewhere = route.Tiers{CPU: 8, Disk: 8, Remote: 8}

// held is what a rank holds that has blocks outside its device only.
func held(w *selector.Weights) float64 { return w.Held(&decision.Candidate{Tiers: elsewhere}) }

// someTimes are times that a router could have learned.
var someTimes = cost.Model{
	Local: cost.LegModel{20, 20}, Prefill: cost.LegModel{20, 20},
	Prices: cost.Prices{Step: cost.StepModel{5, 1, 1, 1, 10, 10}, Others: 1, Answer: 1, Length: 100, Constants: cost.Tuned},
}

// weighs reports whether a policy ranks a phase differently by two weights. It ranks
// candidates that differ in all that a policy can look at: one holds the whole prompt, one a
// part of it, one nothing, and each has other work.
func (r Ranks) weighs(p selector.Policy, phase route.Phase, a, b *selector.Weights) bool {
	const blocks, size = 64, 64
	rank := func(w *selector.Weights) (seen []float64) {
		in := selector.Input{Phase: phase, Policy: p, Weights: *w, ISL: blocks * size, BlockSize: size, Candidates: make([]decision.Candidate, 3)}
		for i := range in.Candidates {
			c := &in.Candidates[i]
			c.Rank, c.OverlapBlocks = string(rune('a'+i)), []int{blocks, 16, 0}[i]
			c.PrefillTokens, c.DecodeBlocks, c.ActiveRequests, c.FreshTokens = 640*(i+1), 256*(i+1), 3*(i+1), 1280*(i+1)
			if r.Offload && i == 1 {
				c.Tiers = elsewhere
			}
		}
		var out selector.Ranking
		// Policy kv ranks by blocks at first, and by times when it knows them.
		for _, known := range []*selector.Pricing{nil, {Model: &someTimes, Quote: someTimes.Quote(&cost.Request{ISL: in.ISL, Others: w.Others})}} {
			in.Pricing = known
			selector.Pick(&in, &out)
			for i := range in.Candidates {
				seen = append(seen, in.Candidates[i].Cost)
			}
			if out.Sampled {
				seen = append(seen, w.Temperature)
			}
		}
		return seen
	}
	return !slices.Equal(rank(a), rank(b))
}
