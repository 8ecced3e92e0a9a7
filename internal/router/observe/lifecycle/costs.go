package lifecycle

import (
	"github.com/dynctl/dynctl/internal/router/observe/outcome"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Costs passes to the cost models what legs and answers took. It learns from the legs of plans
// that were reported as Chosen, under every policy, so that the costs are known when they are
// to decide.
func Costs(c *outcome.Collector) Subscriber {
	return Subscriber{
		Chosen: func(e *Event) {
			c.Begins(&e.Request.costs, e.Request.Model, e.Request.Routing.Run.In.Decode.BlockSize)
		},
		LegSent: func(e *Event) {
			if e.Leg.Phase == route.Prefill {
				e.Request.costs.PrefillBegins()
			}
		},
		FirstToken: func(e *Event) {
			if r, l := e.Request, e.Leg; r.costs.Begun() {
				c.Took(&r.costs, &r.Routing.Run.Plan, outcome.LegSample{Model: r.Model, Decision: r.Live.ID(), Phase: l.Phase, Sent: l.Start, First: e.At})
			}
		},
		Runs: func(e *Event) {
			if r := e.Request; r.costs.Begun() {
				c.Runs(&r.costs, r.Model, e.Leg.Peer.Rank, e.Leg.Tokens, e.At)
			}
		},
		Piece: func(e *Event) { e.Request.costs.Ran(e.Leg.Peer.Rank, e.Leg.Tokens, e.At) },
		Answered: func(e *Event) {
			if r := e.Request; r.Answer.Gaps.Count() > 0 {
				r.costs.Ended()
			}
		},
	}
}
