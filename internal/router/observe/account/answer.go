package account

import (
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/observe/pace"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// Answer is what was seen of the answer while it was forwarded.
type Answer struct {
	Streamed   bool
	FirstToken time.Time
	Finish     string
	// Prompt, Cached and Completion are tokens as the engine reports them; -1 when it
	// does not.
	Prompt, Cached, Completion int
	Gaps                       traffic.Gaps

	sent  time.Time   // the decode leg's request
	meter *pace.Meter // of the rank that answers
	begun bool        // see decodeBegan
}

// Of begins the answer to a decode leg. What an earlier engine has reported does not count.
func (a *Answer) Of(l *Leg) { a.sent, a.meter = l.Start, l.Meter }

// Unknown forgets the usage that an engine has reported.
func (a *Answer) Unknown() { a.Prompt, a.Cached, a.Completion = -1, -1, -1 }

// Learn keeps what an answer said of itself.
func (a *Answer) Learn(s sse.Summary) {
	a.Finish = s.FinishReason
	a.Prompt, a.Cached, a.Completion = int(s.Usage.PromptTokens), int(s.Usage.CachedTokens), int(s.Usage.CompletionTokens)
}

// Piece notes that another piece of the stream has come, with so many tokens.
func (a *Answer) Piece(now time.Time, tokens int) { a.meter.Gap(a.Gaps.Tick(now), tokens) }

// Outcome is how a request has ended, besides its answer.
type Outcome struct {
	Status int
	// Err is the error that the client got; nil for none.
	Err *api.Error
	// Path is that of the attempt that counts.
	Path string
	Took time.Duration
}

// Finish closes the receipt with what came of the request, and counts it everywhere else.
func (r *Request) Finish(end Outcome) {
	r.Live.Finish(func(c *receipt.Receipt) { r.outcome(c, &end) })
}

func (r *Request) outcome(c *receipt.Receipt, end *Outcome) {
	a, o := &r.Answer, &c.Outcome
	o.Status, o.E2EMS = end.Status, ms(end.Took)
	o.Finish, o.PromptTokens, o.CachedTokens, o.CompletionTokens = a.Finish, a.Prompt, a.Cached, a.Completion
	if !a.FirstToken.IsZero() {
		o.TTFTMS = c.Since(a.FirstToken)
	}
	if g := &a.Gaps; g.Count() > 0 {
		o.ITL = receipt.Gaps{Count: g.Count(), MeanMS: ms(g.Mean()), P50MS: ms(g.Quantile(.5)), P99MS: ms(g.Quantile(.99)), MaxMS: ms(g.Max())}
	}
	o.Cancelled = end.Status == api.StatusClientClosed
	if e := end.Err; e != nil {
		o.ErrorCode, o.Error = string(e.Code), e.Error()
	} else {
		// An engine that counts transferred tokens as cached and reports fewer
		// than were sent has computed them again. NIXL's do not count them; the
		// watch on the engine's own counters is for those.
		p := &r.Question.Run.Plan
		o.SilentRecompute = p.Path == decide.Remote && a.Cached >= 0 && countsTransfers(p) && a.Cached+c.Inputs.BlockSize < p.Remote.Transfer
		r.addUsage(end.Path)
		if o.SilentRecompute {
			Recomputed(r.To.Traffic, r.To.Metrics, r.Question.Run.In.DecodePeers[p.DecodeIndex].Worker.Name, 1)
		}
	}
	if r.To.Outcome != nil {
		r.To.Outcome(c)
	}
}

// addUsage adds the engine's figures of a good request to the router's.
func (r *Request) addUsage(path string) {
	a, p, t, m := &r.Answer, &r.Question.Run.Plan, r.To.Traffic, r.To.Metrics
	t.Prompt.Add(uint64(max(0, a.Prompt)))
	t.Cached.Add(uint64(max(0, a.Cached)))
	t.Completion.Add(uint64(max(0, a.Completion)))
	m.Usage(r.Model, a.Prompt, a.Cached, a.Completion)
	if r.Endpoint.Streamable {
		t.Predicted.Add(uint64(p.CachedTokens))
		t.Planned.Add(uint64(max(0, r.Question.Prompt.ISL)))
		if a.Cached >= 0 {
			m.Cached(p.CachedTokens, a.Cached)
		}
	}
	if !a.FirstToken.IsZero() {
		t.TTFT.Add(a.FirstToken.Sub(r.Start))
		m.FirstToken(r.Model, path, a.FirstToken.Sub(r.Start))
	}
	if g := &a.Gaps; g.Count() > 0 {
		t.ITL.Add(g.Mean())
		m.InterToken(r.Model, g.Mean())
	}
	if !a.Streamed {
		a.meter.Tokens(a.Completion)
	}
	if a.Finish != "error" {
		r.decodeBegan(time.Now())
	}
}

// decodeBegan passes to the watch on recomputed prompts, once, that the decode rank of a
// remote plan has made a token: what it loaded, it has counted by then.
func (r *Request) decodeBegan(now time.Time) {
	a, in, p := &r.Answer, &r.Question.Run.In, &r.Question.Run.Plan
	if a.begun || p.Path != decide.Remote || p.DecodeIndex < 0 || countsTransfers(p) || p.Remote.Transfer < in.Decode.BlockSize {
		return
	}
	a.begun = true
	r.To.Recompute.Answered(in.DecodePeers[p.DecodeIndex].Rank, p.Remote.Transfer, a.sent, now)
}

// countsTransfers reports whether engines count tokens that came over the
// plan's connector among the cached tokens of usage.
func countsTransfers(p *decide.Plan) bool { return disagg.CountsTransfers(p.Connector) }
