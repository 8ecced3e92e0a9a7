package router

import (
	"errors"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/question"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// record writes the newest plan into the receipt and the metrics.
func (x *exchange) record() {
	r, d := x.r, &x.d
	p := &d.Run.Plan
	reason := p.Reason
	if d.Run.Attempt == 1 {
		x.observeStages()
	}
	x.live.Update(func(c *receipt.Receipt) {
		if d.Run.Attempt == 1 {
			x.introduce(c)
		}
		c.Begin(d.Run.Attempt)
		r.fillPlan(c, d)
	})
	if p.Err == nil {
		r.metrics.Decision(string(p.Path), string(reason))
		if p.Path == decide.Remote {
			r.traffic.Remote.Add(1)
		} else {
			r.traffic.Local.Add(1)
		}
		if reason.Degraded() {
			r.traffic.Fallbacks.Add(1)
			r.metrics.Fallback(string(reason))
		}
	}
	for _, in := range [...]*selector.Input{&d.Run.In.Decode, &d.Run.In.Prefill} {
		name := "decode"
		if in == &d.Run.In.Prefill {
			name = "prefill"
		}
		for i := range in.Candidates {
			if code := in.Candidates[i].ExcludedCode; code != "" {
				r.metrics.Excluded(name, code)
			}
		}
	}
	if r.opts.Observer.Decision != nil {
		x.observe()
	}
}

// introduce writes what a receipt says before any decision.
func (x *exchange) introduce(c *receipt.Receipt) {
	d := &x.d
	c.RequestID, c.Endpoint, c.Model, c.Stream = x.id, x.ep.Kind.String(), x.model, x.view.Stream
	c.ConfigRevision = d.Settings.Revision
	c.QueuedMS, c.QueuedFor, c.QueuedBehind = float64(d.Took.Queue.Microseconds())/1000, d.Took.Why, d.Took.Ahead
	if x.key != nil {
		c.Key, c.Tenant = x.key.Name, x.key.Tenant
	}
	if d.Prompt.Note != "" {
		c.Note(d.Prompt.Note)
	}
}

// recorded is the memory of what an observer is told.
var recorded = sync.Pool{New: func() any { return new(trace.Decision) }}

// observe tells the observer of the newest decision.
func (x *exchange) observe() {
	q := &x.d
	d := recorded.Get().(*trace.Decision)
	*d = trace.Decision{
		ID: x.decision, RequestID: x.id, Model: x.model, Attempt: q.Run.Attempt, Approximate: q.Chunked, Tokens: q.Prompt.IDs,
		Revision: q.Settings.Revision, Settings: &q.Settings.Decisions, Input: &q.Run.In,
	}
	d.Locals, d.BlockSize = q.Blocks()
	d.SetPlan(&q.Run.In, &q.Run.Plan)
	x.r.opts.Observer.Decision(q.At, d)
	*d = trace.Decision{} // nothing is kept
	recorded.Put(d)
}

func (x *exchange) observeStages() {
	m, t := x.r.metrics, &x.d.Took
	m.Stage("read", t.Read)
	m.Stage("parse", t.Parse)
	m.Stage("tokenize", t.Tokenize)
	m.Stage("hash", t.Hash)
	m.Stage("overlap", t.Overlap)
	m.Stage("plan", t.Plan)
	x.r.traffic.Overhead.Add(t.Parse + t.Tokenize + t.Hash + t.Overlap + t.Plan)
}

// fillPlan copies a plan and what it was made from into a receipt.
func (r *Router) fillPlan(c *receipt.Receipt, q *question.Question) {
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
			k.CacheUnknown = r.feeds.Untrusted(kvindex.Rank(k.Slot))
		}
	}
}

// note adds plain words to the receipt.
func (x *exchange) note(text string) { x.live.Update(func(c *receipt.Receipt) { c.Note(text) }) }

// legRecord is one leg in the receipt, the metrics and the trace.
type legRecord struct {
	x     *exchange
	phase selector.Phase
	peer  disagg.Peer
	at    int
	start time.Time
	first time.Time
	span  *telemetry.Span
	once  sync.Once

	meter *pace.Meter // of the rank; nil while it is not known
	// computes is how many prompt tokens the rank has to compute, -1 when another
	// one does; waiting, that its meter counts the prompt as one without a token.
	computes int
	waiting  bool
	told     bool // that it has answered, or will not
}

// toCompute is how many tokens of the prompt the rank of a phase has to compute, -1
// where KV comes from another rank.
func (x *exchange) toCompute(phase selector.Phase) int {
	p := &x.d.Run.Plan
	switch {
	case phase == selector.Prefill:
		return max(0, x.d.Prompt.ISL-p.PrefillCached)
	case p.Path == decide.Remote:
		return -1
	}
	return max(0, p.EffISL)
}

func (x *exchange) beginLeg(phase selector.Phase, p disagg.Peer, leg *upstream.Leg) *legRecord {
	l := &legRecord{x: x, phase: phase, peer: p, start: time.Now(), at: -1, meter: x.r.slow.Meter(p.Rank), computes: x.toCompute(phase)}
	if phase == selector.Prefill && x.d.Settings.Decisions.Rule.Auto {
		x.prefilled.Store(0)
	}
	// When an answer that is not streamed had its first token, nobody is told.
	if l.computes >= 0 && (phase == selector.Prefill || x.view.Stream) {
		l.waiting = true
		l.meter.Begin(x.r.slow.Since(l.start))
	}
	if x.span != nil {
		leg.Header = leg.Header.Clone()
		l.span = x.span.Leg(string(phase)+" leg", leg.Header)
		l.span.String("dynctl.worker", p.Worker.Name)
		l.span.Int("dynctl.dp_rank", p.Rank.DP)
		l.span.Int("dynctl.attempt", x.d.Run.Attempt)
	}
	x.live.Update(func(c *receipt.Receipt) {
		rec := receipt.NewLeg(string(phase), p.Worker.Name, p.Rank.Label, x.d.Run.Attempt)
		rec.DispatchMS = c.Since(l.start)
		l.at = c.AddLeg(rec)
	})
	x.r.fleet.Began(p.Rank)
	l.meter.Sent()
	if phase == selector.Decode && x.d.Run.History.Continued > 0 {
		x.r.fleet.Took(p.Rank)
	}
	return l
}

// head notes the status of the answer.
func (l *legRecord) head(status int) {
	l.first = time.Now()
	l.x.live.Update(func(c *receipt.Receipt) {
		leg := c.Leg(l.at)
		leg.Status, leg.FirstByteMS = status, c.Since(l.first)
	})
}

// facts notes what a prefill's answer said.
func (l *legRecord) facts(f disagg.Checked) {
	l.x.live.Update(func(c *receipt.Receipt) {
		leg := c.Leg(l.at)
		leg.PromptTokens, leg.CachedTokens, leg.Blocks = f.PromptTokens, f.CachedTokens, f.Blocks
	})
}

// token notes the leg's first token; that of a prefill is its answer.
func (l *legRecord) token(now time.Time) {
	l.waited()
	l.settled(true)
	l.meter.First(now.Sub(l.start), l.computes)
	if l.x.d.Settings.Decisions.Rule.Auto {
		l.x.legTook(l.phase, l.start, now)
	}
}

// waited takes the prompt out of those that have no token yet.
func (l *legRecord) waited() {
	if l.waiting {
		l.waiting = false
		l.meter.End(l.x.r.slow.Since(l.start))
	}
}

// settled tells the meter, once, whether the rank has answered.
func (l *legRecord) settled(answered bool) {
	if !l.told {
		l.told = true
		l.meter.Settled(answered)
	}
}

// end closes the leg; only the first call counts.
func (l *legRecord) end(err error) {
	l.once.Do(func() {
		now := time.Now()
		if l.phase == selector.Prefill && err == nil {
			l.token(now)
		}
		l.waited()
		l.settled(err == nil)
		outcome := legOutcome(err)
		if attempt.Reason(outcome).Means().Outcome.Failure() {
			l.x.r.fleet.Failed(l.peer.Rank)
		}
		l.x.live.Update(func(c *receipt.Receipt) {
			leg := c.Leg(l.at)
			leg.EndMS = c.Since(now)
			if err != nil {
				leg.Error = err.Error()
				leg.RetryReason = outcome
			}
		})
		first := time.Duration(0)
		if !l.first.IsZero() {
			first = l.first.Sub(l.start)
		}
		l.x.r.metrics.Leg(string(l.phase), l.peer.Worker.Name, outcome, now.Sub(l.start), first)
		l.span.End(err)
	})
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

// answerFacts is what was seen of the answer while it was forwarded.
type answerFacts struct {
	stream     bool
	sent       time.Time // the decode leg's request
	cut        bool      // the stream broke off after the client had got the beginning of an event
	firstToken time.Time
	begun      bool // see decodeBegan
	finish     string
	prompt     int // tokens as the engine reports them; -1 when it does not
	cached     int
	completion int
	gaps       traffic.Gaps
	meter      *pace.Meter  // of the rank that answers
	ran        cost.Running // for a threshold that is auto
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// outcome writes what came of the request into the receipt.
func (x *exchange) outcome(c *receipt.Receipt, status int, e *api.Error, took time.Duration) {
	a := &x.answer
	o := &c.Outcome
	o.Status, o.E2EMS = status, ms(took)
	o.Finish, o.PromptTokens, o.CachedTokens, o.CompletionTokens = a.finish, a.prompt, a.cached, a.completion
	if !a.firstToken.IsZero() {
		o.TTFTMS = c.Since(a.firstToken)
	}
	if g := &a.gaps; g.Count() > 0 {
		o.ITL = receipt.Gaps{Count: g.Count(), MeanMS: ms(g.Mean()), P50MS: ms(g.Quantile(.5)), P99MS: ms(g.Quantile(.99)), MaxMS: ms(g.Max())}
	}
	o.Cancelled = status == api.StatusClientClosed
	if e != nil {
		o.ErrorCode, o.Error = string(e.Code), e.Error()
	}
	p := &x.d.Run.Plan
	// An engine that counts transferred tokens as cached and reports fewer
	// than were sent has computed them again. NIXL's do not count them; the
	// watch on the engine's own counters is for those.
	if e == nil && p.Path == decide.Remote && a.cached >= 0 && countsTransfers(p) && a.cached+c.Inputs.BlockSize < p.Remote.Transfer {
		o.SilentRecompute = true
	}
	if e == nil {
		x.r.settle(x, c)
	}
	if x.r.opts.Observer.Outcome != nil {
		x.r.opts.Observer.Outcome(c)
	}
}

// settle adds the engine's figures of a good request to the router's.
func (r *Router) settle(x *exchange, c *receipt.Receipt) {
	a, p, t := &x.answer, &x.d.Run.Plan, &r.traffic
	if a.prompt >= 0 {
		t.Prompt.Add(uint64(a.prompt))
	}
	if a.cached > 0 {
		t.Cached.Add(uint64(a.cached))
	}
	if a.completion > 0 {
		t.Completion.Add(uint64(a.completion))
	}
	r.metrics.Usage(x.model, a.prompt, a.cached, a.completion)
	if x.ep.Streamable {
		t.Predicted.Add(uint64(p.CachedTokens))
		t.Planned.Add(uint64(max(0, x.d.Prompt.ISL)))
		if a.cached >= 0 {
			r.metrics.Cached(p.CachedTokens, a.cached)
		}
	}
	if !a.firstToken.IsZero() {
		t.TTFT.Add(a.firstToken.Sub(x.start))
		r.metrics.FirstToken(x.model, x.path, a.firstToken.Sub(x.start))
	}
	if g := &a.gaps; g.Count() > 0 {
		gap := g.Mean()
		t.ITL.Add(gap)
		if x.d.Settings.Decisions.Rule.Auto {
			x.ended()
		}
		r.metrics.InterToken(x.model, gap)
	}
	if !a.stream {
		a.meter.Tokens(a.completion)
	}
	if c.Outcome.SilentRecompute {
		r.recomputed(x.d.Run.In.DecodePeers[p.DecodeIndex].Worker.Name, 1)
	}
	if a.finish != "error" {
		x.decodeBegan(time.Now())
	}
}

// decodeBegan tells the watch on recomputed prompts, once, that the decode rank
// has made a token of a remote plan: what it loaded, it has counted by then.
func (x *exchange) decodeBegan(now time.Time) {
	a, p := &x.answer, &x.d.Run.Plan
	if a.begun || p.Path != decide.Remote || p.DecodeIndex < 0 || countsTransfers(p) || p.Remote.Transfer < x.d.Run.In.Decode.BlockSize {
		return
	}
	a.begun = true
	x.r.compute.Answered(x.d.Run.In.DecodePeers[p.DecodeIndex].Rank, p.Remote.Transfer, a.sent, now)
}

// failed tells that a worker failed a leg of the request.
func (x *exchange) failed(phase selector.Phase, w *workers.Worker, reason attempt.Reason, err error) {
	if e, ok := x.r.failures.Failed(w, string(phase), string(reason), err, time.Now()); ok {
		e.Request = x.decision
		x.r.event(e)
	}
}

// countsTransfers reports whether engines count tokens that came over the
// plan's connector among the cached tokens of usage.
func countsTransfers(p *decide.Plan) bool { return disagg.CountsTransfers(p.Connector) }
