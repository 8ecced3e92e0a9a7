package lifecycle

import (
	"errors"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// LegRecord is the record of one leg, which its events carry.
type LegRecord struct {
	Phase route.Phase
	Peer  workers.Peer
	Start time.Time
	// FirstByte is how long after Start the head of its answer came; 0 for none.
	FirstByte time.Duration
	// Prompt and Cached are tokens by a prefill's answer, Blocks those that it offered.
	Prompt, Cached, Blocks int
	// Tokens counts those of its stream so far.
	Tokens int
	// Held gets the number of streamed tokens now and then; nil for none. See Progress.
	Held interface{ Progress(tokens int) }

	of    *Record
	ended bool

	// What subscribers keep of it.
	at       int             // Receipts: its place in the receipt
	span     *telemetry.Span // Spans
	progress int             // Progress: the tokens that Held has got
	// Contradictions: what the index said of the prompt
	predicted watch.Prediction
	pace      struct {
		meter    *pace.Meter // of its rank; nil while that is not known
		answer   pace.Answer
		computes int  // prompt tokens that the rank has to compute, -1 when another one does
		waiting  bool // the meter counts the prompt as one without a token
		counted  bool // the meter knows that the rank has answered, or will not
	}
}

func (l *LegRecord) send(e Event) {
	e.Request, e.Leg = l.of, l
	l.of.To.send(&e)
}

// legs is memory for legs.
var legs = sync.Pool{New: func() any { return new(LegRecord) }}

// Release gives back the memory of a request that has ended. Its record, and that of its first
// decode leg, must not be used then.
func (r *Record) Release() {
	if l := r.first; l != nil {
		r.first, *l = nil, LegRecord{}
		legs.Put(l)
	}
}

// BeginLeg reports that a leg is about to be sent, now. A subscriber may add headers to the call.
func (r *Record) BeginLeg(phase route.Phase, p workers.Peer, call *upstream.Leg, now time.Time) *LegRecord {
	l := legs.Get().(*LegRecord)
	if phase == route.Decode && r.first == nil { // no decode leg begins beside another one
		r.first = l
	}
	l.of, l.Phase, l.Peer, l.Start = r, phase, p, now
	l.send(Event{Kind: LegSent, Call: call})
	return l
}

// Head reports the status of the answer.
func (l *LegRecord) Head(status int) {
	now := time.Now()
	l.FirstByte = now.Sub(l.Start)
	l.send(Event{Kind: Head, At: now, Count: status})
}

// Facts reports the contents of a prefill's answer.
func (l *LegRecord) Facts(f disagg.Checked) {
	l.Prompt, l.Cached, l.Blocks = f.PromptTokens, f.CachedTokens, f.Blocks
	l.send(Event{Kind: Facts})
}

// Streams reports that the head of a decode leg's stream has come, with its first token or
// without.
func (l *LegRecord) Streams(now time.Time, token bool) {
	a := &l.of.Answer
	a.Streamed = true
	if token {
		if a.FirstToken.IsZero() {
			a.FirstToken = now
		}
		l.send(Event{Kind: FirstToken, At: now})
	}
	l.send(Event{Kind: Streams, At: now})
	a.Gaps.Tick(now)
}

// Runs reports that the rest of a decode leg's stream begins; its head had some tokens.
func (l *LegRecord) Runs(tokens int, now time.Time) {
	l.Tokens = tokens
	l.of.Answer.Events += tokens
	l.send(Event{Kind: Runs, At: now})
}

// End closes the leg at a time. Only the first call counts, and returns true.
func (l *LegRecord) End(err error, now time.Time) bool {
	if l.ended {
		return false
	}
	l.ended = true
	if l.Phase == route.Prefill && err == nil {
		l.send(Event{Kind: FirstToken, At: now})
	}
	l.send(Event{Kind: LegEnded, At: now, Err: err, Reason: legOutcome(err)})
	return true
}

// legOutcome is the outcome of a leg: "ok", the reason of a failure, "canceled"
// where the engine is not to blame because no client waited for it any more, and
// otherwise how the engine broke off.
func legOutcome(err error) string {
	if err == nil {
		return "ok"
	}
	if f, ok := errors.AsType[*attempt.Error](err); ok {
		return string(f.Reason)
	}
	if _, ok := errors.AsType[*upstream.ClientError](err); ok {
		return string(upstream.Canceled)
	}
	if u, ok := errors.AsType[*upstream.Failure](err); ok {
		return string(u.Kind)
	}
	return "failed"
}
