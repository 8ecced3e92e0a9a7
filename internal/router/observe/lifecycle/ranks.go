package lifecycle

import (
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// RankCounter counts the requests of ranks.
type RankCounter interface {
	// Began counts a leg, Failed one whose rank is to blame for its failure.
	Began(*workers.Rank)
	Failed(*workers.Rank)
	// Left counts a stream that broke off, Took one that the rank continues.
	Left(*workers.Rank)
	Took(*workers.Rank)
}

// Ranks counts the requests of each rank.
func Ranks(c RankCounter) Subscriber {
	return Subscriber{
		LegSent: func(e *Event) {
			l := e.Leg
			c.Began(l.Peer.Rank)
			if l.Phase == route.Decode && e.Request.Routing.Run.History.Continued > 0 {
				c.Took(l.Peer.Rank)
			}
		},
		LegEnded: func(e *Event) {
			if attempt.Reason(e.Reason).Means().Outcome.Failure() {
				c.Failed(e.Leg.Peer.Rank)
			}
		},
		Continued: func(e *Event) { c.Left(e.Rank) },
	}
}
