// Package account passes on what happens to one request: to its receipt, the metrics, the
// spans, the event log, a recording, and the watches that learn from requests. The code
// that serves a request reports each step once and knows none of them.
package account

import (
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/question"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// Sinks are where what happens to a router's requests goes. All but Decision and Outcome
// are needed.
type Sinks struct {
	Metrics   *telemetry.Metrics
	Traffic   *traffic.Traffic
	Failures  *watch.Failures
	Slow      *watch.Slow
	Recompute *watch.Recompute
	Ranks     Ranks
	// Untrusted says of the rank with a slot that the index may be wrong about it.
	Untrusted func(slot uint32) bool
	Event     func(eventlog.Event)
	// Decision and Outcome are for a recording, which keeps nothing of what it is given.
	Decision func(asked time.Time, d *trace.Decision)
	Outcome  func(*receipt.Receipt)
}

// Ranks counts the requests of ranks.
type Ranks interface {
	// Began counts a leg, Failed one whose rank is to blame for its failure.
	Began(*workers.Rank)
	Failed(*workers.Rank)
	// Left counts a stream that broke off, Took one that the rank goes on with.
	Left(*workers.Rank)
	Took(*workers.Rank)
}

// Recomputed counts requests whose KV was moved to a worker and computed again.
func Recomputed(t *traffic.Traffic, m *telemetry.Metrics, worker string, requests int) {
	t.Recomputes.Add(uint64(requests))
	for range requests {
		m.SilentRecompute(worker)
	}
}

// Fill copies a decision and what it was made from into a receipt.
func (s *Sinks) Fill(c *receipt.Receipt, q *question.Question) {
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
			k.CacheUnknown = s.Untrusted(k.Slot)
		}
	}
}

// Request is the account of one request, from its first decision on.
type Request struct {
	To   *Sinks
	Live receipt.Live
	// Span is the request's; nil where there are none.
	Span     *telemetry.Span
	Question *question.Question

	ID       string // X-Request-Id
	Endpoint *api.Endpoint
	Model    string
	Stream   bool
	// Key is the name of the API key that was shown, Tenant whose it is.
	Key, Tenant string
	Start       time.Time

	// Path is that of the newest decision; empty while there is none.
	Path string

	Answer Answer
}

// Decided passes on the newest decision.
func (r *Request) Decided() {
	s, d := r.To, r.Question
	p := &d.Run.Plan
	if d.Run.Attempt == 1 {
		r.stages()
	}
	r.Live.Update(func(c *receipt.Receipt) {
		if d.Run.Attempt == 1 {
			r.introduce(c)
		}
		c.Begin(d.Run.Attempt)
		s.Fill(c, d)
	})
	if p.Err == nil {
		r.Path = string(p.Path)
		s.Metrics.Decision(string(p.Path), string(p.Reason))
		if p.Path == decide.Remote {
			s.Traffic.Remote.Add(1)
		} else {
			s.Traffic.Local.Add(1)
		}
		if p.Reason.Degraded() {
			s.Traffic.Fallbacks.Add(1)
			s.Metrics.Fallback(string(p.Reason))
		}
	}
	s.excluded("decode", &d.Run.In.Decode)
	s.excluded("prefill", &d.Run.In.Prefill)
	if s.Decision != nil {
		r.record()
	}
}

func (s *Sinks) excluded(phase string, in *selector.Input) {
	for i := range in.Candidates {
		if code := in.Candidates[i].ExcludedCode; code != "" {
			s.Metrics.Excluded(phase, code)
		}
	}
}

// Undecided begins the receipt of a request that ends before anything was decided.
func (r *Request) Undecided() { r.Live.Update(r.introduce) }

// introduce writes what a receipt says before any decision.
func (r *Request) introduce(c *receipt.Receipt) {
	d := r.Question
	c.RequestID, c.Endpoint, c.Model, c.Stream, c.Key, c.Tenant = r.ID, r.Endpoint.Kind.String(), r.Model, r.Stream, r.Key, r.Tenant
	c.ConfigRevision = d.Settings.Revision
	c.QueuedMS, c.QueuedFor, c.QueuedBehind = ms(d.Took.Queue), d.Took.Why, d.Took.Ahead
	for _, n := range d.Notes() {
		c.Note(n)
	}
}

// recorded is the memory for decisions on their way to a recording.
var recorded = sync.Pool{New: func() any { return new(trace.Decision) }}

// record gives a recording the newest decision.
func (r *Request) record() {
	q := r.Question
	d := recorded.Get().(*trace.Decision)
	*d = trace.Decision{
		ID: r.Live.ID(), RequestID: r.ID, Model: r.Model, Attempt: q.Run.Attempt, Approximate: q.Chunked, Tokens: q.Prompt.IDs,
		Revision: q.Settings.Revision, Settings: &q.Settings.Decisions, Input: &q.Run.In,
	}
	d.Locals, d.BlockSize = q.Blocks()
	d.SetPlan(&q.Run.In, &q.Run.Plan)
	r.To.Decision(q.At, d)
	*d = trace.Decision{} // nothing is kept
	recorded.Put(d)
}

// stages counts how long the stages before the first decision took.
func (r *Request) stages() {
	m, t := r.To.Metrics, &r.Question.Took
	m.Stage("read", t.Read)
	m.Stage("parse", t.Parse)
	m.Stage("tokenize", t.Tokenize)
	m.Stage("hash", t.Hash)
	m.Stage("overlap", t.Overlap)
	m.Stage("plan", t.Plan)
	r.To.Traffic.Overhead.Add(t.Parse + t.Tokenize + t.Hash + t.Overlap + t.Plan)
}

// Note adds plain words to the receipt.
func (r *Request) Note(text string) { r.Live.Update(func(c *receipt.Receipt) { c.Note(text) }) }

// Event logs an event about the request; worth is false for one to leave out.
func (r *Request) Event(e eventlog.Event, worth bool) {
	if worth {
		e.Request = r.Live.ID()
		r.To.Event(e)
	}
}

// Failed logs that a worker failed a leg of the request.
func (r *Request) Failed(phase selector.Phase, w *workers.Worker, reason attempt.Reason, err error) {
	r.Event(r.To.Failures.Failed(w, string(phase), string(reason), err, time.Now()))
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
