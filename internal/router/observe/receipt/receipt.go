// Package receipt is the record of a request: its routing decisions, one for each
// attempt, and their outcomes.
//
// A Ring keeps a bounded number of receipts. Writing one costs a copy of figures into reused
// memory; text and JSON are made only when they are read.
//
// The JSON form is schema dynctl.receipt/v1, in the conventions of package
// decision. Times of legs and outcome are milliseconds since the receipt's time.
package receipt

import (
	"cmp"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
)

// Schema is the version of the JSON form.
const Schema = "dynctl.receipt/v1"

// Receipt is the record of one request's decisions: one for each attempt.
type Receipt struct {
	Schema string `json:"schema"`
	// ID names the decision (header X-Dynctl-Decision).
	ID string `json:"id"`
	// RequestID is the client's or the router's X-Request-Id.
	RequestID string    `json:"request_id"`
	Time      time.Time `json:"time"`
	// Live says that the request is still running.
	Live     bool   `json:"live"`
	Endpoint string `json:"endpoint"`
	Model    string `json:"model"`
	Stream   bool   `json:"stream"`
	// Key is the name of the API key that was shown, Tenant whose it is; empty for
	// none.
	Key    string `json:"key,omitempty"`
	Tenant string `json:"tenant,omitempty"`
	// QueuedMS is how long the request waited for a place, in turn with other tenants;
	// 0 when there was one. QueuedFor says why, of the last place that it waited for,
	// and QueuedBehind how many waited in its queue when it came.
	QueuedMS     float64 `json:"queued_ms,omitempty"`
	QueuedFor    string  `json:"queued_for,omitempty"`
	QueuedBehind int     `json:"queued_behind,omitempty"`
	// ConfigRevision is the revision of the config that decided.
	ConfigRevision uint64 `json:"config_revision"`

	// Decision is the newest one.
	decision.Decision
	// Earlier are those before it, whose attempts failed or found no worker,
	// oldest first; EarlierOmitted counts those that did not fit.
	Earlier        []decision.Decision `json:"earlier_decisions,omitempty"`
	EarlierOmitted int                 `json:"earlier_decisions_omitted,omitempty"`

	// Legs are the HTTP calls in the order in which they began, LegsOmitted
	// counts those that did not fit.
	Legs        []LegEntry `json:"legs"`
	LegsOmitted int        `json:"legs_omitted,omitempty"`
	// Continued are the places at which the stream continued elsewhere, oldest first.
	Continued []Continuation `json:"continued,omitempty"`
	Outcome   Outcome        `json:"outcome"`
	// Notes are further plain words ("prefill-0 failed: 500, retried").
	Notes []string `json:"notes,omitempty"`

	candidates int // the most that a phase keeps
}

// DryRun is the ID of the receipt of a request that the router only decided and did not
// send.
const DryRun = "dry-run"

// LegEntry is one HTTP call.
type LegEntry struct {
	// Kind is "prefill" or "decode".
	Kind    string `json:"kind"`
	Worker  string `json:"worker"`
	Rank    string `json:"rank"`
	Attempt int    `json:"attempt"`
	// Status is the HTTP status, 0 without one.
	Status int `json:"status"`
	// The times in ms since the receipt's time; -1 for what did not happen.
	QueueMS     float64 `json:"queue_ms"`
	DispatchMS  float64 `json:"dispatch_ms"`
	FirstByteMS float64 `json:"first_byte_ms"`
	EndMS       float64 `json:"end_ms"`
	// RetryReason says why this leg was given up for another one.
	RetryReason string `json:"retry_reason,omitempty"`
	Error       string `json:"error,omitempty"`
	// What a prefill's answer said; -1 when it did not.
	PromptTokens int `json:"prompt_tokens"`
	CachedTokens int `json:"cached_tokens"`
	// Blocks is how many blocks it offered.
	Blocks int `json:"blocks,omitempty"`
}

// Continuation is a place at which a stream continued elsewhere.
type Continuation struct {
	// AtMS is when, in ms since the receipt's time.
	AtMS float64 `json:"at_ms"`
	// From is the worker that broke off, Reason how.
	From   string `json:"from"`
	Reason string `json:"reason"`
	// Tokens is how many of the answer the client had then, Dropped how many more the
	// engine had sent: those of text that the client did not get.
	Tokens  int `json:"tokens"`
	Dropped int `json:"dropped"`
}

// Gaps sums up the times between tokens.
type Gaps struct {
	Count  int     `json:"count"`
	MeanMS float64 `json:"mean_ms"`
	P50MS  float64 `json:"p50_ms"`
	P99MS  float64 `json:"p99_ms"`
	MaxMS  float64 `json:"max_ms"`
}

// Outcome is the outcome of the request. Token counts are the engine's, -1 when
// it did not report them.
type Outcome struct {
	// Status is what the client got; 499 when it left before.
	Status           int     `json:"status"`
	Finish           string  `json:"finish_reason,omitempty"`
	PromptTokens     int     `json:"prompt_tokens"`
	CachedTokens     int     `json:"cached_tokens"`
	CompletionTokens int     `json:"completion_tokens"`
	TTFTMS           float64 `json:"ttft_ms"` // -1 without a first token
	E2EMS            float64 `json:"e2e_ms"`
	ITL              Gaps    `json:"itl"`
	ErrorCode        string  `json:"error_code,omitempty"`
	Error            string  `json:"error,omitempty"`
	// SilentRecompute says that a remote plan's KV did not arrive and the
	// decode engine silently computed the prompt again.
	SilentRecompute bool `json:"silent_recompute"`
	Cancelled       bool `json:"cancelled"`
	// NotContinued is why a stream that broke off did not continue elsewhere, where that
	// was requested (continue.mode).
	NotContinued string `json:"not_continued,omitempty"`
}

// Bounds on one receipt.
const (
	maxLegs    = 16
	maxEarlier = 16
	// earlierCandidates is how many candidates of each phase an earlier
	// decision keeps.
	earlierCandidates = 8
	maxNotes          = 16
	maxText           = 1024 // bytes of one free text
)

// Candidates is how many candidates of each phase the receipt keeps.
func (r *Receipt) Candidates() int { return cmp.Or(r.candidates, decision.Kept) }

// Begin puts the newest decision, if there is one, among the earlier ones, and
// begins that of another attempt.
func (r *Receipt) Begin(attempt int) {
	if r.Attempt > 0 {
		if len(r.Earlier) < maxEarlier {
			d := r.Decision
			d.Decode.Keep(earlierCandidates)
			d.Prefill.Keep(earlierCandidates)
			r.Earlier = append(r.Earlier, d)
		} else {
			r.EarlierOmitted++
		}
	}
	r.Decision = decision.Decision{
		Attempt: attempt, Decode: decision.Phase{Candidates: r.Decode.Candidates[:0]}, Prefill: decision.Phase{Candidates: r.Prefill.Candidates[:0]},
	}
}

// AddLeg begins a leg and gives its place for later changes, or -1 when there
// is no room: it is counted then.
func (r *Receipt) AddLeg(l LegEntry) int {
	if len(r.Legs) >= maxLegs {
		r.LegsOmitted++
		return -1
	}
	r.Legs = append(r.Legs, l)
	return len(r.Legs) - 1
}

// AddContinuation notes that the stream continues elsewhere; the places of a stream are few.
func (r *Receipt) AddContinuation(c Continuation) {
	if len(r.Continued) < maxLegs {
		r.Continued = append(r.Continued, c)
	}
}

// NewLeg is a leg that has not begun.
func NewLeg(kind, worker, rank string, attempt int) LegEntry {
	return LegEntry{
		Kind: kind, Worker: worker, Rank: rank, Attempt: attempt,
		QueueMS: -1, DispatchMS: -1, FirstByteMS: -1, EndMS: -1, PromptTokens: -1, CachedTokens: -1,
	}
}

// KeptBack stands for texts that a reader may not see.
const KeptBack = "(kept back: engines' own words may quote a prompt, and this role does not see them)"

// Redact puts a remark in the place of each text that may quote a prompt.
func (r *Receipt) Redact() {
	for i := range r.Legs {
		if r.Legs[i].Error != "" {
			r.Legs[i].Error = KeptBack
		}
	}
	for i := range r.Notes {
		r.Notes[i] = KeptBack
	}
	if r.Outcome.Error != "" {
		r.Outcome.Error = KeptBack
	}
}

// Leg is the leg at a place that AddLeg gave; changes of the leg at -1 go
// nowhere.
func (r *Receipt) Leg(i int) *LegEntry {
	if i < 0 || i >= len(r.Legs) {
		return new(LegEntry)
	}
	return &r.Legs[i]
}

// Note adds plain words; beyond a small number they are dropped.
func (r *Receipt) Note(text string) {
	if len(r.Notes) < maxNotes {
		r.Notes = append(r.Notes, clip(text))
	}
}

// Since is the time of t in ms since the receipt's.
func (r *Receipt) Since(t time.Time) float64 {
	return float64(t.Sub(r.Time).Microseconds()) / 1000
}

// reset makes r an empty receipt and keeps its memory.
func (r *Receipt) reset(id string, now time.Time, candidates int) {
	clear(r.Decode.Candidates)
	clear(r.Prefill.Candidates)
	clear(r.Legs)
	clear(r.Notes)
	continued := r.Continued[:0]
	*r = Receipt{
		Schema: Schema, ID: id, Time: now, Live: true,
		Decision: decision.Decision{Decode: decision.Phase{Candidates: r.Decode.Candidates[:0]}, Prefill: decision.Phase{Candidates: r.Prefill.Candidates[:0]}},
		Legs:     r.Legs[:0], Notes: r.Notes[:0],
		Outcome:    Outcome{PromptTokens: -1, CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1},
		candidates: candidates, Continued: continued,
	}
}

// clone is a deep copy that is fit for JSON: bounded texts and finite numbers.
func (r *Receipt) clone() *Receipt {
	c := *r
	c.Decision = r.Decision.Clone()
	c.Earlier = slices.Clone(r.Earlier)
	for i := range c.Earlier {
		c.Earlier[i] = c.Earlier[i].Clone()
	}
	c.Legs = append([]LegEntry{}, r.Legs...)
	for i := range c.Legs {
		c.Legs[i].Error, c.Legs[i].RetryReason = clip(c.Legs[i].Error), clip(c.Legs[i].RetryReason)
	}
	c.Notes = slices.Clone(r.Notes)
	c.Continued = slices.Clone(r.Continued)
	c.Outcome.Error = clip(c.Outcome.Error)
	return &c
}

func clip(s string) string {
	if len(s) > maxText {
		return s[:maxText-3] + "..."
	}
	return s
}
