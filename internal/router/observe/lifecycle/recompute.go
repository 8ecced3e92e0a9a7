package lifecycle

import (
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Recompute reports to the watch on recomputed prompts, once for a request, that the
// decode rank of a remote plan has made a token: by then its engine has counted what it
// loaded. Engines that report in their usage what was moved need no watch.
func Recompute(w *watch.Recompute) Subscriber {
	began := func(r *Record, now time.Time) {
		in, p, l := &r.Routing.Run.In, &r.Routing.Run.Plan, r.Answer.leg
		if r.begun || l == nil || p.Path != route.Remote || p.DecodeIndex < 0 || disagg.CountsTransfers(p.Connector) || p.Remote.Transfer < in.Decode.BlockSize {
			return
		}
		r.begun = true
		w.Answered(in.DecodePeers[p.DecodeIndex].Rank, p.Remote.Transfer, l.Start, now)
	}
	return Subscriber{
		FirstToken: func(e Event) {
			if e.Leg.Phase == route.Decode {
				began(e.Request, e.At)
			}
		},
		Answered: func(e Event) {
			if e.Request.Answer.Finish != "error" {
				began(e.Request, time.Now())
			}
		},
	}
}
