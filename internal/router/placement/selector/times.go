package selector

import (
	"cmp"
	"math"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Pricing is what the candidates of a phase are priced by.
type Pricing struct {
	Model *cost.Model
	Quote cost.Quote
	// Prefill is the cost on the prefill rank that would be chosen for any decode rank; it is
	// only there with Remote.
	Prefill decision.Times
	Remote  bool
}

// Work is what a request asks of candidate i, and what stands before it there. tokens are
// computed, or taken over from a prefill rank; context is the prompt's length where it is
// computed.
func (in *Input) Work(i, tokens, context int) cost.Work {
	c := &in.Candidates[i]
	return cost.Work{
		Tokens: tokens, Context: context, Queued: c.PrefillTokens, Running: c.ActiveRequests,
		Answering: small(c.Answering), Held: small((c.DecodeBlocks - c.CachedBlocks) * in.BlockSize), HeldCached: small(c.CachedBlocks * in.BlockSize), Times: c.Times,
	}
}

// Found is how many tokens of the prompt the candidate that has most of them holds on its device.
func (in *Input) Found() int32 {
	most := 0
	for i := range in.Candidates {
		most = max(most, in.Candidates[i].OverlapBlocks)
	}
	return small(CachedTokens(in.ISL, most, in.BlockSize))
}

// small is n in 32 bits, or the most there.
func small(n int) int32 { return int32(max(min(n, math.MaxInt32), 0)) }

// Usual is the mean load of the candidates that are not kept out.
func (in *Input) Usual() (l cost.Load) {
	n, running, blocks, cached := 0, 0, 0, 0
	for i := range in.Candidates {
		if c := &in.Candidates[i]; c.KeptOut == "" {
			n, running, blocks, cached = n+1, running+c.ActiveRequests, blocks+c.DecodeBlocks, cached+c.CachedBlocks
		}
	}
	if n == 0 {
		return l
	}
	of := func(sum int) float64 { return float64(sum) / float64(n) }
	return cost.Load{Running: of(running), Held: of((blocks - cached) * in.BlockSize), HeldCached: of(cached * in.BlockSize)}
}

// Uncached is how many tokens of the prompt candidate i does not hold.
func (in *Input) Uncached(i int) int {
	return in.ISL - CachedTokens(in.ISL, int(in.Weights.Held(&in.Candidates[i])), in.BlockSize)
}

// price writes what candidate i would cost into its terms, and returns the sum.
func (in *Input) price(i int) float64 {
	c, p := &in.Candidates[i], in.Pricing
	w, t := in.Work(i, in.Uncached(i), in.ISL), &c.Terms.Times
	if in.Phase == route.Prefill {
		return p.Quote.Prefill(&w, t)
	}
	switch {
	case !p.Remote || c.Way == decision.LocalOnly:
		return p.Quote.Local(&w, t)
	case c.Way == decision.RemoteOnly:
		return p.Quote.Remote(&p.Prefill, &w, t)
	}
	return p.Quote.Cheaper(&p.Prefill, &w, t)
}

// rankTimes orders by prices. Those that are no further from the best than prices are sure of
// are equal, and in the order of kv_blocks.
func rankTimes(in *Input, out *Ranking) {
	out.InTime = true
	best := 0.0
	for n, i := range out.Order {
		cost := in.price(i)
		in.Candidates[i].Cost = cost
		if n == 0 || cost < best {
			best = cost
		}
	}
	equal := in.Pricing.Model.Equal(best)
	order(out.Order, in.sorted(), func(a, b int) int { return compareTimes(in, equal, a, b) })
	for _, i := range out.Order {
		if in.Candidates[i].Cost <= equal {
			out.Tied++
		}
	}
	switch {
	case in.Weights.Temperature > 0:
		sample(in, out)
	case out.Tied > 1:
		_, out.TieBreak = compareTies(in, out.Order[0], out.Order[1])
	}
}

// compareTimes is the order of policy kv by times, of which those up to equal are.
func compareTimes(in *Input, equal float64, a, b int) int {
	x, y := &in.Candidates[a], &in.Candidates[b]
	switch {
	case x.Cost < y.Cost && y.Cost > equal: // nearly always this or the next
		return -1
	case y.Cost < x.Cost && x.Cost > equal:
		return 1
	case x.Cost <= equal && y.Cost <= equal:
		c, _ := compareTies(in, a, b)
		return c
	}
	return cmp.Or(cmp.Compare(x.Cost, y.Cost), cmp.Compare(x.Rank, y.Rank))
}
