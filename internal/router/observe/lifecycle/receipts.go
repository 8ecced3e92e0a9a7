package lifecycle

import (
	"errors"
	"fmt"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/routing"
)

// Receipts writes the receipts of requests. untrusted reports whether the index may be
// wrong about the rank with a slot.
func Receipts(untrusted func(slot uint32) bool) Subscriber {
	add := func(r *Record, text string) { r.Live.Update(func(c *receipt.Receipt) { c.Note(text) }) }
	note := func(e *Event) { add(e.Request, e.Text) }
	return Subscriber{
		Introduced: func(e *Event) { e.Request.Live.Update(e.Request.introduce) },
		Decided: func(e *Event) {
			q := e.Request.Routing
			e.Request.Live.Update(func(c *receipt.Receipt) {
				if q.Run.Attempt == 1 {
					e.Request.introduce(c)
				}
				c.Begin(q.Run.Attempt)
				Fill(c, q, untrusted)
			})
		},
		LegSent: func(e *Event) {
			l := e.Leg
			l.at = -1
			e.Request.Live.Update(func(c *receipt.Receipt) {
				leg := receipt.NewLeg(string(l.Phase), l.Peer.Worker.Name, l.Peer.Rank.Label, e.Request.Routing.Run.Attempt)
				leg.DispatchMS = c.Since(l.Start)
				l.at = c.AddLeg(leg)
			})
		},
		Head: func(e *Event) {
			e.Request.Live.Update(func(c *receipt.Receipt) {
				leg := c.Leg(e.Leg.at)
				leg.Status, leg.FirstByteMS = e.Count, c.Since(e.At)
			})
		},
		Facts: func(e *Event) {
			e.Request.Live.Update(func(c *receipt.Receipt) {
				leg := c.Leg(e.Leg.at)
				leg.PromptTokens, leg.CachedTokens, leg.Blocks = e.Leg.Prompt, e.Leg.Cached, e.Leg.Blocks
			})
		},
		LegEnded: func(e *Event) {
			e.Request.Live.Update(func(c *receipt.Receipt) {
				leg := c.Leg(e.Leg.at)
				leg.EndMS = c.Since(e.At)
				if e.Err != nil {
					leg.Error, leg.RetryReason = e.Err.Error(), e.Reason
				}
			})
		},
		Prefilled: func(e *Event) {
			if errors.Is(e.Err, disagg.ErrNoBootstrap) {
				add(e.Request, e.Worker.Name+" cannot send KV: "+e.Err.Error())
			}
			if e.Text != "" {
				add(e.Request, fmt.Sprintf("the transfer parameters of %s are not as expected and were used (transfer_check=report): %s", e.Worker.Name, e.Text))
			}
		},
		Noted:         note,
		Unkept:        note,
		RequestFaulty: note,
		Continued: func(e *Event) {
			e.Request.Live.Update(func(c *receipt.Receipt) {
				c.AddContinuation(receipt.Continuation{AtMS: c.Since(e.At), From: e.Text, Reason: e.Reason, Tokens: e.Count, Dropped: e.Dropped})
			})
		},
		NotContinued: func(e *Event) {
			e.Request.Live.Update(func(c *receipt.Receipt) { c.Outcome.NotContinued = e.Text })
		},
		Finished: func(e *Event) { e.Request.result(e.Receipt) },
	}
}

// introduce writes what a receipt says before any decision.
func (r *Record) introduce(c *receipt.Receipt) {
	q := r.Routing
	c.RequestID, c.Endpoint, c.Model, c.Stream, c.Key, c.Tenant = r.ID, r.Endpoint.Kind.String(), r.Model, r.Stream, r.Key, r.Tenant
	c.ConfigRevision = q.Settings.Revision
	c.QueuedMS, c.QueuedFor, c.QueuedBehind = ms(q.Took.Queue), q.Took.Why, q.Took.Ahead
	for n := range q.Notes() {
		c.Note(n)
	}
}

// Fill copies a decision and what it was made from into a receipt.
func Fill(c *receipt.Receipt, q *routing.Request, untrusted func(slot uint32) bool) {
	q.Run.Plan.Fill(&c.Decision, &q.Run.In, c.Candidates())
	blocks, _ := q.Blocks()
	c.Inputs.HashedBlocks = len(blocks)
	c.Inputs.Approximate = q.Chunked
	if q.Chunked {
		return
	}
	for _, p := range [...]*decision.Phase{&c.Decode, &c.Prefill} {
		for i := range p.Candidates {
			k := &p.Candidates[i]
			k.CacheUnknown = untrusted(k.Slot)
		}
	}
}

// result writes the outcome of the request.
func (r *Record) result(c *receipt.Receipt) {
	a, end, o := &r.Answer, &r.Outcome, &c.Outcome
	o.Status, o.E2EMS = end.Status, ms(end.Took)
	o.Finish, o.PromptTokens, o.CachedTokens, o.CompletionTokens = a.Finish, a.Prompt, a.Cached, a.Completion
	if !a.FirstToken.IsZero() {
		o.TTFTMS = c.Since(a.FirstToken)
	}
	if g := &a.Gaps; g.Count() > 0 {
		o.ITL = receipt.Gaps{Count: g.Count(), MeanMS: ms(g.Mean()), P50MS: ms(g.Quantile(.5)), P99MS: ms(g.Quantile(.99)), MaxMS: ms(g.Max())}
	}
	o.Cancelled, o.SilentRecompute = end.gone(), end.Recomputed
	if e := end.Err; e != nil {
		o.ErrorCode, o.Error = string(e.Code), e.Error()
	}
}
