// Package lifecycle reports what happens to one request. The code that serves a request
// calls a method of [Record] or [LegRecord] at each step; each sends one [Event] to the
// [Subscriber]s of a [Stream]: the receipt, metrics, spans, the event log, a recording,
// and the watches that learn from requests. A new consumer is a file with a Subscriber,
// and a line in [Consumers.Stream].
//
// Events only report. What a request holds (reservations, admissions, retry budget,
// memory) its owners take and give back themselves.
package lifecycle

import (
	"cmp"
	"net/http"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/observe/outcome"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/routing"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// Record is the record of one request, which its events carry. With To alone it reports
// that a request arrives, is refused and ends; from its first decision on it needs Live,
// Routing and Endpoint, too. With a nil To nothing is reported.
type Record struct {
	To   *Stream
	Live receipt.Live
	// Span is the request's; nil without tracing.
	Span    *telemetry.Span
	Routing *routing.Request

	ID       string // X-Request-Id
	Client   *http.Request
	Endpoint *api.Endpoint
	// Model is the engines' name of the model, RequestedModel the client's.
	Model, RequestedModel string
	Stream                bool
	begun                 bool // see Recompute
	// Key is the name of the client's API key, Tenant its owner.
	Key, Tenant string
	Start       time.Time

	// Path is that of the newest decision; empty before one.
	Path string

	Answer  Answer
	Outcome Outcome // set when the request ends

	costs outcome.RequestSamples // see Costs
	first *LegRecord             // the first decode leg
}

// Outcome is how a request ended, apart from its answer.
type Outcome struct {
	Status int
	// Err is the error that the client got; nil for none.
	Err *api.Error
	// Cause is the error that ended the request, which may say more than Err.
	Cause error
	// Cut reports that the answer had begun and broke off.
	Cut bool
	// Path is that of the attempt that counts, "none" before a decision; Ended sets it.
	Path string
	Took time.Duration
	// Recomputed reports that KV was moved and the decode engine computed it again; Finish
	// sets it.
	Recomputed bool
}

// gone reports whether the client left before the end.
func (o *Outcome) gone() bool { return o.Status == api.StatusClientClosed }

func (r *Record) send(e Event) {
	e.Request = r
	r.To.send(&e)
}

// Arrived reports that the router received the request.
func (r *Record) Arrived() { r.send(Event{Kind: Arrived}) }

// Refused reports that the router refuses the request before routing it.
func (r *Record) Refused(reason string) { r.send(Event{Kind: Refused, Reason: reason}) }

// Waited reports how long the request waited in a stage of the metrics: "queue", "move" for a
// stream that another engine is to continue, or "held" for a decode leg.
func (r *Record) Waited(stage string, d time.Duration) {
	r.send(Event{Kind: Waited, Reason: stage, Took: d})
}

// Tokenized reports the source of the prompt's tokens.
func (r *Record) Tokenized(source route.Source) {
	r.send(Event{Kind: Tokenized, Reason: string(source)})
}

// Undecided begins the receipt of a request that ends before its first decision.
func (r *Record) Undecided() { r.send(Event{Kind: Introduced}) }

// Decided reports the newest decision.
func (r *Record) Decided() {
	if p := &r.Routing.Run.Plan; p.Err == nil {
		r.Path = string(p.Path)
	}
	r.send(Event{Kind: Decided})
}

// Chosen reports that the newest decision's plan is carried out: its place is taken, and
// its legs follow. From then on costs are learned from this attempt's legs.
func (r *Record) Chosen() { r.send(Event{Kind: Chosen}) }

// Retried reports that a leg of another attempt is sent, after a failure of a phase.
func (r *Record) Retried(phase route.Phase, reason attempt.Reason) {
	r.send(Event{Kind: Retried, Phase: phase, Reason: string(reason)})
}

// Note adds a text to the receipt.
func (r *Record) Note(text string) { r.send(Event{Kind: Noted, Text: text}) }

// Failed reports that a worker failed a leg of the request.
func (r *Record) Failed(phase route.Phase, w *workers.Worker, reason attempt.Reason, err error) {
	r.send(Event{Kind: Failed, Phase: phase, Worker: w, Reason: string(reason), Err: err, At: time.Now()})
}

// RequestFaulty reports that several engines broke on the request, and the router counts that
// against no engine.
func (r *Record) RequestFaulty(text string) {
	r.send(Event{Kind: RequestFaulty, Text: text, At: time.Now()})
}

// Prefilled reports how a prefill's good answer was judged: err is why its KV cannot move,
// with which f is not looked at.
func (r *Record) Prefilled(w *workers.Worker, f *disagg.Checked, err error) {
	e := Event{Kind: Prefilled, Worker: w, Err: err, At: time.Now()}
	if err == nil {
		e.Count, e.Text = f.Groups, strings.Join(f.Odd, "; ")
	}
	r.send(e)
}

// Unkept reports that from now on the stream cannot be continued elsewhere, and why.
func (r *Record) Unkept(why string) {
	r.send(Event{Kind: Unkept, Text: "from here on it could not be continued elsewhere: " + why})
}

// EngineError reports that the engine's stream ended with an error event.
func (r *Record) EngineError(text string) {
	r.Answer.Finish = "error"
	r.Note("the engine's stream ended with an error: " + text)
}

// Continued reports that another engine continues the stream after a leg was cut off a
// rank. sent counts the tokens that the client has, dropped those that the engine had sent
// beyond them.
func (r *Record) Continued(cut *attempt.Failure, from *workers.Rank, sent, dropped int) {
	r.send(Event{Kind: Continued, Text: cut.Name, Reason: string(cut.Reason), Rank: from, Count: sent, Dropped: dropped, At: time.Now()})
}

// NotContinued reports why no engine continues a stream that broke off: in a label of a
// closed set, and in words.
func (r *Record) NotContinued(label, words string) {
	r.send(Event{Kind: NotContinued, Reason: label, Text: words, At: time.Now()})
}

// Aborted reports that the request ends early, and who ended it.
func (r *Record) Aborted(reason string) { r.send(Event{Kind: Aborted, Reason: reason}) }

// Ended reports, once, how the request ended, and finishes its receipt if it has one.
func (r *Record) Ended(end Outcome) {
	end.Path = cmp.Or(r.Path, "none")
	r.Outcome = end
	switch {
	case end.gone():
		r.Aborted("client_gone")
	case end.Cut:
		r.Aborted("upstream_broke")
	}
	r.send(Event{Kind: Ended, Err: end.Cause})
	r.Finish(end)
}

// Finish closes the receipt with the outcome of the request. Only the first call counts.
func (r *Record) Finish(end Outcome) {
	r.Live.Finish(func(c *receipt.Receipt) {
		r.Outcome = end
		if end.Err == nil {
			r.Outcome.Recomputed = r.recomputed(c.Inputs.BlockSize)
			r.send(Event{Kind: Answered})
		}
		r.send(Event{Kind: Finished, Receipt: c})
	})
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
