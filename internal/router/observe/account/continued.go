package account

import (
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/workers"
)

// Continued notes that the stream goes on elsewhere: after a leg was cut off a rank, with
// so many tokens that the client has. The engine had sent as many more as were dropped.
func (r *Request) Continued(cut *attempt.Failure, from *workers.Rank, sent, dropped int) {
	s, now, reason := r.To, time.Now(), string(cut.Reason)
	s.Metrics.Continued(cut.Name, reason)
	s.Ranks.Left(from)
	r.Event(s.Failures.Continued(cut.Name, reason, sent, now))
	r.Live.Update(func(c *receipt.Receipt) {
		c.GoesOn(receipt.Continuation{AtMS: c.Since(now), From: cut.Name, Reason: reason, Tokens: sent, Dropped: dropped})
	})
}

// NotContinued notes why a stream that has broken off does not go on elsewhere: in a label
// of a closed set, and in words.
func (r *Request) NotContinued(label, words string) {
	r.Live.Update(func(c *receipt.Receipt) { c.Outcome.NotContinued = words })
	r.To.Metrics.NotContinued(label)
	r.Event(r.To.Failures.NotContinued(label, words, time.Now()))
}
