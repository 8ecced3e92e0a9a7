package lifecycle

import (
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Recompute reports to the watch on recomputed prompts, once for a request, that the
// decode rank of a remote plan has made a token: by then its engine has counted what it
// loaded. Engines that report in their usage what was moved need no watch. Of other requests
// it reports what the engine had in its cache.
func Recompute(w *watch.Recompute) Subscriber {
	began := func(r *Record, now time.Time) {
		in, p, l := &r.Routing.Run.In, &r.Routing.Run.Plan, r.Answer.leg
		if r.begun || l == nil || p.Path != route.Remote || p.DecodeIndex < 0 || disagg.CountsTransfers(p.Connector) || p.Remote.Transfer < in.Decode.BlockSize {
			return
		}
		r.begun = true
		w.Answered(in.DecodePeers[p.DecodeIndex].Rank, p.Remote.Transfer, r.uncomputed(), l.Start, now)
	}
	return Subscriber{
		FirstToken: func(e *Event) {
			if e.Leg.Phase == route.Decode {
				began(e.Request, e.At)
			}
		},
		Answered: func(e *Event) {
			r := e.Request
			now := r.Start.Add(r.Outcome.Took)
			if r.Answer.Finish != "error" {
				began(r, now)
			}
			if l := r.Answer.leg; l != nil && r.Routing.Run.Plan.Path == route.Local && r.Answer.Cached > 0 {
				w.Cached(l.Peer.Rank, r.Answer.Cached, l.Start, now)
			}
		},
	}
}

// uncomputed is how many tokens of a remote prompt the decode engine need not compute, at least:
// all but those of a block. It is 0 where that is not known, because the prompt was not counted or
// the connector moves a part of it.
func (r *Record) uncomputed() int {
	switch r.Routing.Prompt.Source {
	case route.FromIDs, route.FromEngine, route.FromLocal:
	default:
		return 0
	}
	if !disagg.FetchesAll(r.Routing.Run.Plan.Connector) {
		return 0
	}
	return max(0, r.Routing.Prompt.ISL-max(r.Routing.Run.In.Decode.BlockSize, 1))
}
