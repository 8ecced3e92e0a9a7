package lifecycle

import (
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Pace measures how fast ranks answer, for the watch on slow ranks.
func Pace(slow *watch.Slow) Subscriber {
	// waited takes the prompt out of those that have no token yet.
	waited := func(l *LegRecord) {
		if l.pace.waiting {
			l.pace.waiting = false
			l.pace.meter.End(slow.Since(l.Start))
		}
	}
	// answered counts, once, that the rank has answered, or will not.
	answered := func(l *LegRecord, ok bool) {
		if !l.pace.counted {
			l.pace.counted = true
			l.pace.meter.Answered(ok)
		}
	}
	return Subscriber{
		LegSent: func(e *Event) {
			l := e.Leg
			l.pace.meter, l.pace.computes = slow.Meter(l.Peer.Rank), e.Request.toCompute(l.Phase)
			l.pace.answer = pace.NewAnswer(l.pace.meter, slow.Since(l.Start))
			// The router does not see when an answer that is not streamed had its first token.
			if l.pace.computes >= 0 && (l.Phase == route.Prefill || e.Request.Stream) {
				l.pace.waiting = true
				l.pace.meter.Begin(slow.Since(l.Start))
			}
			l.pace.meter.Sent()
		},
		FirstToken: func(e *Event) {
			waited(e.Leg)
			answered(e.Leg, true)
			e.Leg.pace.meter.First(e.At.Sub(e.Leg.Start), e.Leg.pace.computes)
		},
		Streams: func(e *Event) { waited(e.Leg) },
		Runs:    func(e *Event) { e.Leg.pace.answer.Came(slow.Since(e.At), e.Leg.Tokens) },
		Piece:   func(e *Event) { e.Leg.pace.answer.Came(slow.Since(e.At), e.Count) },
		LegEnded: func(e *Event) {
			waited(e.Leg)
			answered(e.Leg, e.Err == nil)
		},
		Answered: func(e *Event) {
			if a := &e.Request.Answer; !a.Streamed && a.leg != nil {
				a.leg.pace.meter.Tokens(a.Completion)
			}
		},
	}
}

// toCompute is how many tokens of the prompt the rank of a phase has to compute, -1
// where KV comes from another rank.
func (r *Record) toCompute(phase route.Phase) int {
	p := &r.Routing.Run.Plan
	switch {
	case phase == route.Prefill:
		return max(0, r.Routing.Prompt.ISL-p.PrefillCached)
	case p.Path == route.Remote:
		return -1
	}
	return max(0, p.EffISL)
}
