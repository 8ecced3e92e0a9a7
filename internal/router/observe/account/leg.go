package account

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/workers"
)

// Leg is the account of one leg.
type Leg struct {
	// Start is when it began, Meter that of its rank; nil while that is not known.
	Start time.Time
	Meter *pace.Meter

	of    *Request
	phase selector.Phase
	peer  disagg.Peer
	at    int
	first time.Time
	span  *telemetry.Span
	ended bool

	// computes is how many prompt tokens the rank has to compute, -1 when another
	// one does; waiting, that its meter counts the prompt as one without a token.
	computes int
	waiting  bool
	counted  bool // in its meter: that it has answered, or will not
}

// toCompute is how many tokens of the prompt the rank of a phase has to compute, -1
// where KV comes from another rank.
func (r *Request) toCompute(phase selector.Phase) int {
	p := &r.Question.Run.Plan
	switch {
	case phase == selector.Prefill:
		return max(0, r.Question.Prompt.ISL-p.PrefillCached)
	case p.Path == decide.Remote:
		return -1
	}
	return max(0, p.EffISL)
}

// BeginLeg notes that a leg is about to be sent; its headers get the span's.
func (r *Request) BeginLeg(phase selector.Phase, p disagg.Peer, leg *upstream.Leg) *Leg {
	slow, run := r.To.Slow, &r.Question.Run
	l := &Leg{of: r, phase: phase, peer: p, Start: time.Now(), at: -1, Meter: slow.Meter(p.Rank), computes: r.toCompute(phase)}
	// Nobody sees when an answer that is not streamed had its first token.
	if l.computes >= 0 && (phase == selector.Prefill || r.Stream) {
		l.waiting = true
		l.Meter.Begin(slow.Since(l.Start))
	}
	if r.Span != nil {
		leg.Header = leg.Header.Clone()
		l.span = r.Span.Leg(string(phase)+" leg", leg.Header)
		l.span.String("dynctl.worker", p.Worker.Name)
		l.span.Int("dynctl.dp_rank", p.Rank.DP)
		l.span.Int("dynctl.attempt", run.Attempt)
	}
	r.Live.Update(func(c *receipt.Receipt) {
		rec := receipt.NewLeg(string(phase), p.Worker.Name, p.Rank.Label, run.Attempt)
		rec.DispatchMS = c.Since(l.Start)
		l.at = c.AddLeg(rec)
	})
	r.To.Ranks.Began(p.Rank)
	l.Meter.Sent()
	if phase == selector.Decode && run.History.Continued > 0 {
		r.To.Ranks.Took(p.Rank)
	}
	return l
}

// Head notes the status of the answer.
func (l *Leg) Head(status int) {
	l.first = time.Now()
	l.of.Live.Update(func(c *receipt.Receipt) {
		leg := c.Leg(l.at)
		leg.Status, leg.FirstByteMS = status, c.Since(l.first)
	})
}

// Facts notes what a prefill's answer said.
func (l *Leg) Facts(f disagg.Checked) {
	l.of.Live.Update(func(c *receipt.Receipt) {
		leg := c.Leg(l.at)
		leg.PromptTokens, leg.CachedTokens, leg.Blocks = f.PromptTokens, f.CachedTokens, f.Blocks
	})
}

// Streams notes that the head of a decode leg's stream has come, with its first token or
// without.
func (l *Leg) Streams(now time.Time, token bool) {
	a := &l.of.Answer
	a.Streamed = true
	if token {
		if a.FirstToken.IsZero() {
			a.FirstToken = now
		}
		l.token(now)
		l.of.decodeBegan(now)
	}
	l.waited()
	a.Gaps.Tick(now)
}

// token notes the leg's first token; that of a prefill is its answer.
func (l *Leg) token(now time.Time) {
	l.waited()
	l.meterAnswer(true)
	l.Meter.First(now.Sub(l.Start), l.computes)
}

// waited takes the prompt out of those that have no token yet.
func (l *Leg) waited() {
	if l.waiting {
		l.waiting = false
		l.Meter.End(l.of.To.Slow.Since(l.Start))
	}
}

// meterAnswer counts in the meter, once, that the rank has answered, or will not.
func (l *Leg) meterAnswer(answered bool) {
	if !l.counted {
		l.counted = true
		l.Meter.Answered(answered)
	}
}

// End closes the leg, at a time; only the first call counts, and reports true.
func (l *Leg) End(err error, now time.Time) bool {
	if l.ended {
		return false
	}
	l.ended = true
	if l.phase == selector.Prefill && err == nil {
		l.token(now)
	}
	l.waited()
	l.meterAnswer(err == nil)
	outcome := legOutcome(err)
	if attempt.Reason(outcome).Means().Outcome.Failure() {
		l.of.To.Ranks.Failed(l.peer.Rank)
	}
	l.of.Live.Update(func(c *receipt.Receipt) {
		leg := c.Leg(l.at)
		leg.EndMS = c.Since(now)
		if err != nil {
			leg.Error = err.Error()
			leg.RetryReason = outcome
		}
	})
	first := time.Duration(0)
	if !l.first.IsZero() {
		first = l.first.Sub(l.Start)
	}
	l.of.To.Metrics.Leg(string(l.phase), l.peer.Worker.Name, outcome, now.Sub(l.Start), first)
	l.span.End(err)
	return true
}

// legOutcome is what came of a leg: "ok", the reason of a failure, "canceled"
// where the engine is not to blame because nobody waited for it any more, and
// otherwise how the engine broke off.
func legOutcome(err error) string {
	var f *attempt.Error
	var u *upstream.Failure
	var client *upstream.ClientError
	switch {
	case err == nil:
		return "ok"
	case errors.As(err, &f):
		return string(f.Reason)
	case errors.As(err, &client):
		return string(upstream.Canceled)
	case errors.As(err, &u):
		return string(u.Kind)
	}
	return "failed"
}

// Prefilled reports what is odd or wrong with a prefill's good answer: err is why its KV
// cannot move.
func (r *Request) Prefilled(w *workers.Worker, f *disagg.Checked, err error) {
	now := time.Now()
	switch {
	case err == nil:
		if len(f.Odd) > 0 {
			what := strings.Join(f.Odd, "; ")
			r.Note(fmt.Sprintf("the transfer parameters of %s are not as expected and were used (transfer_check=report): %s", w.Name, what))
			r.To.Metrics.OddParams(w.Name)
			r.Event(r.To.Failures.OddParams(w, what, now))
		}
		if f.Groups > 1 {
			r.Event(r.To.Failures.Hybrid(w, f.Groups, now))
		}
	case errors.Is(err, disagg.ErrEnded), errors.Is(err, disagg.ErrRestarted): // nothing is wrong with what it said
	case errors.Is(err, disagg.ErrMissingParams):
		r.Event(eventlog.Event{
			Kind: "prefill_without_params", Severity: eventlog.Error, Worker: w.Name,
			Text: fmt.Sprintf("%s answered a remote prefill with 200 but without transfer parameters, so its KV cannot move; check its --kv-transfer-config", w.Name),
		}, true)
	default:
		r.Event(eventlog.Event{
			Kind: "prefill_bad_params", Severity: eventlog.Error, Worker: w.Name,
			Text: fmt.Sprintf("%s answered a remote prefill with transfer parameters that do not fit the prompt; they were not used: %v", w.Name, err),
		}, true)
	}
}
