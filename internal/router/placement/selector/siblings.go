package selector

import (
	"math"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
)

// Siblings is what a choice depends on where other routers choose among the same ranks. With
// equal views all of them would take the same one.
type Siblings struct {
	// Router is a hash of this router's name; 0 without other routers.
	Router uint64
	// Unseen is how many decisions of the others are expected that this one does not see,
	// Tokens the mean uncached tokens of a decision.
	Unseen, Tokens float64
}

// spread draws the first rank where other routers may take the same one at this moment:
// among ranks that cost the same and hold as much of the prompt, and among those of nearly
// the same cost as many as unseen decisions warrant. The draw follows from the router and
// its request's turn. Policies that draw, or that follow a session, need none.
func spread(in *Input, out *Ranking) {
	s := in.Siblings
	if s == nil || s.Router == 0 || len(out.Order) < 2 || out.Sampled || out.Policy != KV && out.Policy != KVBlocks && (out.Policy != LeastLoaded || in.Policy == Session && in.SessionKey != 0) {
		return
	}
	best := &in.Candidates[out.Order[0]]
	unseen, most := in.unseenCost(out), 1+int(math.Ceil(min(s.Unseen, float64(len(out.Order)))))
	first, least, among, sum := 0, uint64(math.MaxUint64), 0, 0.0
	for k, i := range out.Order {
		c := &in.Candidates[i]
		if c.OverlapBlocks != best.OverlapBlocks || c.Tiers != best.Tiers {
			continue
		}
		// The unseen work would raise the ranks before this one to its cost, as water fills a
		// vessel; where it does not reach that, this one stays dearer.
		if c.Cost != best.Cost && (among >= most || !(float64(c.Cost*float64(among))-sum <= unseen)) {
			break
		}
		among++
		sum += c.Cost
		if h := in.drawOf(c); h < least {
			first, least = k, h
		}
	}
	if among < 2 {
		return
	}
	moveToFront(out.Order, first)
	out.Tied, out.TieBreak = among, TieRouter
}

// sorted is how many ranks need their order, 0 for all: a draw needs them all, by temperature
// and beside other routers.
func (in *Input) sorted() int {
	if in.Weights.Temperature > 0 || in.Siblings != nil && in.Siblings.Router != 0 {
		return 0
	}
	return in.Limit
}

// drawOf is what this router draws for a rank in this turn; the least is first.
func (in *Input) drawOf(c *decision.Candidate) uint64 {
	return mix(in.Siblings.Router ^ mix(in.Turn) ^ fnv(c.Rank))
}

// unseenCost is what the unseen decisions add to the cost of the first rank if all of them take it.
func (in *Input) unseenCost(out *Ranking) float64 {
	s, c := in.Siblings, &in.Candidates[out.Order[0]]
	switch {
	case out.InTime:
		was := *c
		c.ActiveRequests += int(math.Ceil(s.Unseen))
		c.PrefillTokens += int(s.Unseen * s.Tokens)
		then := in.price(out.Order[0])
		*c = was
		return max(then-c.Cost, 0)
	case out.Policy == LeastLoaded:
		return s.Unseen
	}
	return float64(s.Unseen * in.Weights.Queue * s.Tokens / float64(max(in.BlockSize, 1)))
}
