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
	// Prefill is the cost on the prefill rank that would be chosen for any decode rank, and Ways
	// has a row for each candidate. They are only there where a prefill rank could be chosen.
	Prefill decision.Times
	Ways    []Way
}

// Way is which paths a request may take over a decode rank.
type Way uint8

// The ways.
const (
	// EitherPath is both: the one that costs less.
	EitherPath Way = iota
	LocalOnly
	RemoteOnly
)

// Work is what a request asks of candidate i, and what stands before it there. tokens are
// computed, or taken over from a prefill rank; context is the prompt's length where it is
// computed.
func (in *Input) Work(i, tokens, context int) (w cost.Work) {
	in.work(i, tokens, context, &w)
	return w
}

// work writes Work into w. A large fleet has many candidates, and the processor waits where words
// that were just written are copied in longer pieces.
func (in *Input) work(i, tokens, context int, w *cost.Work) {
	c := &in.Candidates[i]
	w.Tokens, w.Context = tokens, context
	w.Queued, w.Running, w.Answering, w.Times = c.PrefillTokens, c.ActiveRequests, small(c.Answering), c.Times
	w.Held, w.HeldCached = small((c.DecodeBlocks-c.CachedBlocks)*in.BlockSize), small(c.CachedBlocks*in.BlockSize)
	w.Room = small(c.KVBlocks * in.BlockSize)
}

// Found is how many tokens of the prompt the candidate that has most of them holds on its device.
func (in *Input) Found(of *Ranking) int32 {
	return small(CachedTokens(in.ISL, of.Overlap, in.BlockSize))
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
	t := &c.Terms.Times
	if in.Phase == route.Prefill { // whose price does not depend on answers
		return p.Quote.Prefill(&cost.Work{Tokens: in.Uncached(i), Queued: c.PrefillTokens, Running: c.ActiveRequests, Times: c.Times}, t)
	}
	var w cost.Work
	in.work(i, in.Uncached(i), in.ISL, &w)
	switch {
	case len(p.Ways) == 0 || p.Ways[i] == LocalOnly:
		return p.Quote.Local(&w, t)
	case p.Ways[i] == RemoteOnly:
		return p.Quote.Remote(&p.Prefill, &w, t)
	}
	return p.Quote.Cheaper(&p.Prefill, &w, t)
}

// rankTimes orders by prices, which the candidates have. Those that are no further from the best
// than prices are sure of are equal, and in the order of kv_blocks.
func rankTimes(in *Input, out *Ranking) {
	out.InTime = true
	costs := out.costs // reads what is next to each other, and little of a large fleet's candidates
	best := costs[out.Order[0]]
	for _, i := range out.Order {
		if costs[i] < best {
			best = costs[i]
		}
	}
	equal := in.Pricing.Model.Equal(best)
	order(out.Order, in.sorted(), func(a, b int) int {
		x, y := costs[a], costs[b]
		switch {
		case x < y && y > equal: // nearly always this or the next
			return -1
		case y < x && x > equal:
			return 1
		case x <= equal && y <= equal:
			c, _ := compareTies(in, a, b)
			return c
		}
		return cmp.Or(cmp.Compare(x, y), cmp.Compare(in.Candidates[a].Rank, in.Candidates[b].Rank))
	})
	for _, i := range out.Order {
		if costs[i] <= equal {
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
