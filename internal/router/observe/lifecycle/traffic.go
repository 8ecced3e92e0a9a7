package lifecycle

import (
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Traffic keeps the live figures of the admin API.
func Traffic(t *traffic.Traffic) Subscriber {
	return Subscriber{
		Arrived: func(*Event) { t.Requests.Add(1) },
		Decided: func(e *Event) {
			q := e.Request.Routing
			if took := &q.Took; q.Run.Attempt == 1 {
				t.Overhead.Add(took.Parse + took.Tokenize + took.Hash + took.Overlap + took.Plan)
			}
			p := &q.Run.Plan
			if p.Err != nil {
				return
			}
			if p.Path == route.Remote {
				t.Remote.Add(1)
			} else {
				t.Local.Add(1)
			}
			if p.Reason.Degraded() {
				t.Fallbacks.Add(1)
			}
		},
		Retried: func(*Event) { t.Retries.Add(1) },
		Ended: func(e *Event) {
			o := &e.Request.Outcome
			t.Ended(o.Status, o.Cut, o.gone(), o.Took)
		},
		Answered: func(e *Event) {
			r, a := e.Request, &e.Request.Answer
			t.Prompt.Add(uint64(max(0, a.Prompt)))
			t.Cached.Add(uint64(max(0, a.Cached)))
			t.Completion.Add(uint64(max(0, a.Completion)))
			if r.Endpoint.Streamable {
				t.Predicted.Add(uint64(r.Routing.Run.Plan.CachedTokens))
				t.Planned.Add(uint64(max(0, r.Routing.Prompt.ISL)))
			}
			if !a.FirstToken.IsZero() {
				t.TTFT.Add(a.FirstToken.Sub(r.Start))
			}
			if a.Gaps.Count() > 0 {
				t.ITL.Add(a.Gaps.Mean())
			}
			if r.Outcome.Recomputed {
				t.Recomputes.Add(1)
			}
		},
	}
}
