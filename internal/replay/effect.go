package replay

import (
	"slices"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Ranks are what matters about ranks, and about the run, to which settings have an effect.
type Ranks struct {
	// Split says that there are prefill ranks, Alone that a decode rank may have to do without
	// them: they are missing, they end, or they are at a limit.
	Split, Alone bool
	// Offload says that ranks keep blocks outside their devices.
	Offload bool
	// Limits says that requests have limits to keep, Slow that ranks are judged and may differ
	// in speed. Both matter to constants only.
	Limits, Slow bool
}

// Idle reports of each change whether it cannot alter a decision under settings s and the
// router's constants over such ranks, the other changes being made: as where the policy does not
// look at a weight. A change to the value that is set already is not idle.
func Idle(s decide.Options, list []Change, ranks Ranks) []bool {
	with := made(s, list)
	idle := make([]bool, len(list))
	for i := range list {
		without := made(s, slices.Delete(slices.Clone(list), i, i+1))
		idle[i] = with != without && !ranks.matters(&with, &without)
	}
	return idle
}

// variant is settings of decisions, and constants.
type variant struct {
	decide.Options
	constants cost.Constants
}

// made is a variant with changes.
func made(s decide.Options, list []Change) variant {
	return variant{Changed(s, list), ChangedConstants(cost.Tuned, list)}
}

// matters reports whether two variants can decide differently.
func (r Ranks) matters(a, b *variant) bool {
	switch {
	case a.Decode != b.Decode || a.Busy != b.Busy:
		return true
	case r.teaches(a, b):
		return true
	case r.Alone && r.weighs(a.Decode, route.Aggregated, a, b):
		return true
	case !r.Split:
		return false
	case a.Prefill != b.Prefill || a.Rule != b.Rule:
		return true
	case a.Rule.Auto && r.compares(a, b):
		return true
	case r.Offload && held(&a.Weights) != held(&b.Weights): // a threshold counts what is held
		return true
	}
	return r.weighs(a.Decode, route.Decode, a, b) || r.weighs(a.Prefill, route.Prefill, a, b)
}

// teaches reports whether two variants differ in what requests teach, or in when times are known.
func (r Ranks) teaches(a, b *variant) bool {
	auto := r.Split && a.Rule.Auto
	c, d := &a.constants, &b.constants
	priced := auto || a.Decode == selector.KV || r.Split && a.Prefill == selector.KV
	return c.Stretches != d.Stretches && priced ||
		c.Stale != d.Stale && auto ||
		(c.TeachEvery != d.TeachEvery || c.TeachWithin != d.TeachWithin) && (auto || r.Slow && avoidsSlow(a.Decode))
}

// avoidsSlow reports whether a policy chooses slow ranks less.
func avoidsSlow(p selector.Policy) bool {
	switch p {
	case selector.KV, selector.KVBlocks, selector.LeastLoaded, selector.PowerOfTwo, selector.Session:
		return true
	}
	return false
}

// elsewhere are blocks in every tier outside the device.
var elsewhere = route.Tiers{CPU: 8, Disk: 8, Remote: 8}

// held is what a rank holds that has blocks outside its device only.
func held(w *selector.Weights) float64 { return w.Held(&decision.Candidate{Tiers: elsewhere}) }

// someTimes are times that a router could have learned, by constants.
func (r Ranks) someTimes(c *cost.Constants) *cost.Model {
	m := &cost.Model{
		Local: cost.LegModel{20, 20}, Prefill: cost.LegModel{20, 20},
		Prices: cost.Prices{Step: cost.StepModel{5, 1, 1, 1, 10, 10}, Others: 1, Answer: 1, Length: 100, Constants: *c},
	}
	if r.Limits {
		m.Limit, m.GapLimit = 500, 10
		m.Loss = m.Lose()
	}
	return m
}

// compares reports whether the paths of a request can cost otherwise by two variants.
func (r Ranks) compares(a, b *variant) bool {
	costs := func(v *variant) cost.Costs {
		return r.someTimes(&v.constants).Compare(&cost.Request{ISL: 4096, Others: v.Weights.Others, Usual: usual}, &cost.Paths{
			Local:    cost.Work{Tokens: 3072, Context: 4096, Running: 5, Answering: 3, Held: 8192, HeldCached: 1024},
			Prefill:  cost.Work{Tokens: 3072, Context: 4096, Queued: 512, Running: 2},
			Transfer: cost.Work{Tokens: 3072, Running: 5},
		})
	}
	return costs(a) != costs(b)
}

// usual is a load that the candidates do not have.
var usual = cost.Load{Running: 2, Held: 4096, HeldCached: 512}

// weighs reports whether a policy ranks a phase differently by two variants. It ranks
// candidates that differ in all that a policy can look at: one holds the whole prompt, one a
// part of it, one nothing, and each has other work.
func (r Ranks) weighs(p selector.Policy, phase route.Phase, a, b *variant) bool {
	const blocks, size = 64, 64
	rank := func(v *variant) (seen []float64) {
		w, times := &v.Weights, r.someTimes(&v.constants)
		in := selector.Input{Phase: phase, Policy: p, Weights: *w, ISL: blocks * size, BlockSize: size, Candidates: make([]decision.Candidate, 3)}
		for i := range in.Candidates {
			c := &in.Candidates[i]
			c.Rank, c.OverlapBlocks = string(rune('a'+i)), []int{blocks, 16, 0}[i]
			c.PrefillTokens, c.DecodeBlocks, c.ActiveRequests, c.FreshTokens = 640*(i+1), 256*(i+1), 3*(i+1), 1280*(i+1)
			c.Answering = 2 * (i + 1)
			if r.Offload && i == 1 {
				c.Tiers = elsewhere
			}
		}
		var out selector.Ranking
		// Policy kv ranks by blocks at first, and by times when it knows them.
		for _, known := range []*selector.Pricing{nil, {Model: times, Quote: times.Quote(&cost.Request{ISL: in.ISL, Others: w.Others, Usual: usual})}} {
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
