package lifecycle

import (
	"log/slog"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/outcome"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/outputs"
	"github.com/dynctl/dynctl/internal/router/request/media"
)

// Consumers are what the subscribers of a router's stream need.
type Consumers struct {
	Slow           *watch.Slow
	Untrusted      func(slot uint32) bool // as in Receipts
	Ranks          RankCounter
	Traffic        *traffic.Traffic
	Metrics        *telemetry.Metrics
	Recompute      *watch.Recompute
	Contradictions *watch.Contradictions // nil for none
	Failures       *watch.Failures
	Event          func(eventlog.Event) // adds to the event log
	Costs          *outcome.Collector
	Lengths        *outputs.Lengths
	Media          *media.Table // nil for none
	AccessLog      *slog.Logger // nil for none
	// Decision and Outcome are as in Recording.
	Decision func(queried time.Time, d *trace.Decision)
	Outcome  func(*receipt.Receipt)
}

// Stream returns the stream of a router, further subscribers last. Its order is that of
// effects: receipts come before counts and logs, so that a reader of those finds the receipt
// written; a recording comes after them and gets complete receipts.
func (c *Consumers) Stream(further ...Subscriber) *Stream {
	return NewStream(append([]Subscriber{
		Pace(c.Slow),
		Receipts(c.Untrusted),
		Ranks(c.Ranks),
		Traffic(c.Traffic),
		Metrics(c.Metrics),
		TokensByTenant(c.Metrics),
		Spans(),
		Recompute(c.Recompute),
		Contradictions(c.Contradictions),
		Failures(c.Failures, c.Event),
		Costs(c.Costs),
		AnswerLengths(c.Lengths),
		MediaLengths(c.Media),
		Progress(),
		AccessLog(c.AccessLog),
		Recording(c.Decision, c.Outcome),
	}, further...)...)
}
