package lifecycle

import (
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// Recording passes decisions and finished receipts to a recording, which must not keep
// them. Either function may be nil.
func Recording(decision func(queried time.Time, d *trace.Decision), outcome func(*receipt.Receipt)) Subscriber {
	s := Subscriber{}
	if decision != nil {
		s[Decided] = func(e *Event) { e.Request.record(decision) }
	}
	if outcome != nil {
		s[Finished] = func(e *Event) { outcome(e.Receipt) }
	}
	return s
}

// recorded is the memory for decisions on their way to a recording.
var recorded = sync.Pool{New: func() any { return new(trace.Decision) }}

// record passes the newest decision to a recording.
func (r *Record) record(to func(queried time.Time, d *trace.Decision)) {
	q := r.Routing
	d := recorded.Get().(*trace.Decision)
	*d = trace.Decision{
		ID: r.Live.ID(), RequestID: r.ID, Model: r.Model, Attempt: q.Run.Attempt, Approximate: q.Chunked, Tokens: q.Prompt.IDs,
		Revision: q.Settings.Revision, Settings: &q.Settings.Decisions, Input: &q.Run.In,
	}
	d.Locals, d.BlockSize = q.Blocks()
	d.SetPlan(&q.Run.In, &q.Run.Plan)
	to(q.At, d)
	*d = trace.Decision{} // nothing is kept
	recorded.Put(d)
}
