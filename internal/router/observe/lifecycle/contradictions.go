package lifecycle

import (
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Contradictions reports to the watch on wrong predictions, nil for none, what the index said of each prompt that
// its rank computes, and how many tokens the engine found in its cache. Of a remote plan's decode
// rank the engine's figure has what was moved, too, so that the prefill rank's counts.
func Contradictions(c *watch.Contradictions) Subscriber {
	if c == nil {
		return Subscriber{}
	}
	return Subscriber{
		LegSent: func(e *Event) {
			q, l := e.Request.Routing, e.Leg
			if q.Chunked || q.Run.Criteria.Facts.PromptLogprobs {
				return
			}
			tokens := 0
			switch p := &q.Run.Plan; {
			case l.Phase == route.Prefill:
				tokens = p.PrefillCached
			case p.Path == route.Local:
				tokens = p.CachedTokens
			}
			if locals, block := q.Blocks(); block > 0 && tokens >= block && tokens/block <= len(locals) {
				l.predicted = c.Sent(l.Peer.Rank, tokens, block, locals[tokens/block-1])
			}
		},
		Facts: func(e *Event) { c.Found(e.Leg.predicted, e.Leg.Cached) },
		Answered: func(e *Event) {
			if a := &e.Request.Answer; a.leg != nil {
				c.Found(a.leg.predicted, a.Cached)
			}
		},
	}
}
