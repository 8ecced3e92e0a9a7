// Package receipt is the record of a routing decision: what the router knew,
// what each candidate would have cost, what was excluded and why, what was
// chosen, what was predicted and what came of it.
//
// A Ring keeps a bounded number of receipts. Writing one costs a copy of
// figures into reused memory; text and JSON are made only when somebody asks.
//
// The JSON form is schema dynctl.receipt/v1: numbers are numbers, units are in
// the keys, a figure that nobody told is -1 or absent. Times of legs and
// outcome are milliseconds since the receipt's time.
package receipt

import (
	"math"
	"slices"
	"time"
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
	// ConfigRevision is the revision of the config that decided.
	ConfigRevision uint64 `json:"config_revision"`

	// Decision is the newest one.
	Decision
	// Earlier are those before it, whose attempts failed or found nobody,
	// oldest first; EarlierOmitted counts those that did not fit.
	Earlier        []Decision `json:"earlier_decisions,omitempty"`
	EarlierOmitted int        `json:"earlier_decisions_omitted,omitempty"`

	// Legs are the HTTP calls in the order in which they began, LegsOmitted
	// counts those that did not fit.
	Legs        []Leg   `json:"legs"`
	LegsOmitted int     `json:"legs_omitted,omitempty"`
	Outcome     Outcome `json:"outcome"`
	// Notes are further plain words ("prefill-0 failed: 500, retried").
	Notes []string `json:"notes,omitempty"`

	candidates int // the most that a phase keeps
}

// Decision is what one attempt was made from.
type Decision struct {
	// Attempt is its number from 1 on, 0 before there is one. The legs tell
	// theirs.
	Attempt int    `json:"attempt,omitempty"`
	Inputs  Inputs `json:"inputs"`
	// Path is "local" or "remote", empty when nothing could be done; Reason
	// is its code and ReasonText the same in plain words.
	Path       string `json:"path"`
	Reason     string `json:"reason"`
	ReasonText string `json:"reason_text"`
	EffISL     int    `json:"eff_isl_tokens"`
	Connector  string `json:"connector,omitempty"`

	Decode  Phase `json:"decode"`
	Prefill Phase `json:"prefill"`

	Predicted Prediction `json:"predicted"`
}

// Inputs are the figures that the decision depends on, besides the candidates.
type Inputs struct {
	ISL int `json:"isl_tokens"`
	// ISLSource is "ids", "engine", "local", "estimate" or "none".
	ISLSource    string `json:"isl_source"`
	BlockSize    int    `json:"block_size_tokens"`
	HashedBlocks int    `json:"hashed_blocks"`
	// Approximate says that overlaps come from text chunks, not from blocks.
	Approximate bool   `json:"approximate,omitempty"`
	SessionKey  uint64 `json:"session_key_hash,omitempty,string"`
	Threshold   int    `json:"threshold_tokens"`
	// ThresholdOn is "eff_isl" or "isl".
	ThresholdOn string `json:"threshold_on"`
	// Force is the path that the client asked for, if any.
	Force string `json:"force,omitempty"`
	// Draw and the turns are the decision's random number and its places in
	// the round-robin sequences. Draw and SessionKey use all 64 bits and are
	// strings in JSON, where many readers round large numbers.
	Draw        uint64 `json:"draw,string"`
	DecodeTurn  uint64 `json:"decode_turn"`
	PrefillTurn uint64 `json:"prefill_turn"`
}

// Phase is the choice of one rank.
type Phase struct {
	// Policy is the one that was applied; empty when the phase was not
	// ranked.
	Policy string `json:"policy,omitempty"`
	// Verdict is "chosen", "no_candidates", "all_excluded" or "all_busy".
	Verdict string `json:"verdict,omitempty"`
	// Chosen and RunnerUp are rank labels.
	Chosen   string `json:"chosen,omitempty"`
	RunnerUp string `json:"runner_up,omitempty"`
	// MarginBlocks is by how much the runner-up costs more.
	MarginBlocks float64 `json:"margin_blocks"`
	Eligible     int     `json:"eligible_ranks"`
	// Tied ranks shared the best cost; TieBreak told the chosen one apart.
	Tied     int    `json:"tied_ranks,omitempty"`
	TieBreak string `json:"tie_break,omitempty"`
	Sampled  bool   `json:"sampled,omitempty"`
	// Candidates are in the order of the ranking, excluded ones last; Omitted
	// counts those that did not fit.
	Candidates []Candidate `json:"candidates"`
	Omitted    int         `json:"candidates_omitted,omitempty"`
}

// Candidate is one rank as the decision saw it.
type Candidate struct {
	Rank          string  `json:"rank"`
	Slot          uint32  `json:"slot"`
	OverlapBlocks int     `json:"overlap_blocks"`
	Cost          float64 `json:"cost_blocks"`
	// The terms of the cost, see the selector's.
	PrefillTerm   float64 `json:"prefill_blocks"`
	OverlapCredit float64 `json:"overlap_credit_blocks"`
	QueueTerm     float64 `json:"queue_blocks"`
	DecodeTerm    float64 `json:"decode_blocks"`
	SpreadTerm    float64 `json:"spread_blocks"`
	RequestTerm   float64 `json:"request_blocks"`
	// The router's own account of the rank.
	ActiveRequests int    `json:"active_requests"`
	PrefillTokens  int    `json:"active_prefill_tokens"`
	DecodeBlocks   int    `json:"active_decode_blocks"`
	FreshTokens    int    `json:"fresh_tokens"`
	LastTurn       uint64 `json:"last_turn"`
	ResidentBlocks int    `json:"resident_blocks"`
	KVBlocks       int    `json:"kv_blocks,omitempty"`
	// What the engine told; KVUsage is -1 when it did not.
	HasLoad bool    `json:"has_load"`
	Running int     `json:"running_requests"`
	Waiting int     `json:"waiting_requests"`
	KVUsage float64 `json:"kv_usage_ratio"`
	// Excluded says why the rank could not be chosen; ExcludedCode is "given"
	// or the metric that was over its limit.
	Excluded     string `json:"excluded,omitempty"`
	ExcludedCode string `json:"excluded_code,omitempty"`
}

// Work is what a path would cost.
type Work struct {
	Compute  int `json:"compute_tokens"`
	Queued   int `json:"queued_tokens"`
	Transfer int `json:"transfer_tokens"`
}

// Prediction is what the plan expected.
type Prediction struct {
	// CachedTokens is what the decode rank should find in its cache,
	// PrefillCachedTokens what the prefill rank should; RemoteTokens is how
	// many tokens' KV should move.
	CachedTokens        int `json:"cached_tokens"`
	PrefillCachedTokens int `json:"prefill_cached_tokens"`
	RemoteTokens        int `json:"remote_tokens"`
	// Local and Remote are both paths' work; HasRemote tells whether remote
	// was possible. The path that was not taken is the what-if.
	Local     Work `json:"local"`
	Remote    Work `json:"remote"`
	HasRemote bool `json:"has_remote"`
}

// Leg is one HTTP call.
type Leg struct {
	// Kind is "prefill" or "decode".
	Kind    string `json:"kind"`
	Worker  string `json:"worker"`
	Rank    string `json:"rank"`
	Attempt int    `json:"attempt"`
	// Status is the HTTP status, 0 when there was none.
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

// Gaps sums up the times between tokens.
type Gaps struct {
	Count  int     `json:"count"`
	MeanMS float64 `json:"mean_ms"`
	P50MS  float64 `json:"p50_ms"`
	P99MS  float64 `json:"p99_ms"`
	MaxMS  float64 `json:"max_ms"`
}

// Outcome is what came of the request. Token counts are the engine's, -1 when
// it did not tell.
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
	// decode engine computed the prompt again without telling.
	SilentRecompute bool `json:"silent_recompute"`
	Cancelled       bool `json:"cancelled"`
}

// Bounds on one receipt.
const (
	// DefaultCandidates is how many candidates of each phase are kept: with
	// 4096 receipts and larger fleets, about 50 MB.
	DefaultCandidates = 32
	maxLegs           = 16
	maxEarlier        = 16
	// earlierCandidates is how many candidates of each phase an earlier
	// decision keeps.
	earlierCandidates = 8
	maxNotes          = 16
	maxText           = 1024 // bytes of one free text
)

// AddCandidate keeps a candidate if there is room and counts it if not. Add
// the ranked ones first, best first.
func (r *Receipt) AddCandidate(p *Phase, c Candidate) {
	limit := r.candidates
	if limit == 0 {
		limit = DefaultCandidates
	}
	if len(p.Candidates) >= limit {
		p.Omitted++
		return
	}
	p.Candidates = append(p.Candidates, c)
}

// Begin puts the newest decision, if there is one, among the earlier ones, and
// begins that of another attempt.
func (r *Receipt) Begin(attempt int) {
	if r.Attempt > 0 {
		if len(r.Earlier) < maxEarlier {
			d := r.Decision
			d.Decode.keep(earlierCandidates)
			d.Prefill.keep(earlierCandidates)
			r.Earlier = append(r.Earlier, d)
		} else {
			r.EarlierOmitted++
		}
	}
	r.Decision = Decision{
		Attempt: attempt, Decode: Phase{Candidates: r.Decode.Candidates[:0]}, Prefill: Phase{Candidates: r.Prefill.Candidates[:0]},
	}
}

// keep makes the candidates a copy of the first n.
func (p *Phase) keep(n int) {
	if more := len(p.Candidates) - n; more > 0 {
		p.Omitted += more
		p.Candidates = p.Candidates[:n]
	}
	p.Candidates = append([]Candidate{}, p.Candidates...)
}

// AddLeg begins a leg and gives its place for later changes, or -1 when there
// is no room: it is counted then.
func (r *Receipt) AddLeg(l Leg) int {
	if len(r.Legs) >= maxLegs {
		r.LegsOmitted++
		return -1
	}
	r.Legs = append(r.Legs, l)
	return len(r.Legs) - 1
}

// NewLeg is a leg of which nothing has happened yet.
func NewLeg(kind, worker, rank string, attempt int) Leg {
	return Leg{
		Kind: kind, Worker: worker, Rank: rank, Attempt: attempt,
		QueueMS: -1, DispatchMS: -1, FirstByteMS: -1, EndMS: -1, PromptTokens: -1, CachedTokens: -1,
	}
}

// Leg is the leg at a place that AddLeg gave; changes of the leg at -1 go
// nowhere.
func (r *Receipt) Leg(i int) *Leg {
	if i < 0 || i >= len(r.Legs) {
		return new(Leg)
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
	*r = Receipt{
		Schema: Schema, ID: id, Time: now, Live: true,
		Decision: Decision{Decode: Phase{Candidates: r.Decode.Candidates[:0]}, Prefill: Phase{Candidates: r.Prefill.Candidates[:0]}},
		Legs:     r.Legs[:0], Notes: r.Notes[:0],
		Outcome:    Outcome{PromptTokens: -1, CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1},
		candidates: candidates,
	}
}

// clone is a deep copy that is fit for JSON: bounded texts and finite numbers.
func (r *Receipt) clone() *Receipt {
	c := *r
	c.Decision = r.Decision.clone()
	c.Earlier = slices.Clone(r.Earlier)
	for i := range c.Earlier {
		c.Earlier[i] = c.Earlier[i].clone()
	}
	c.Legs = append([]Leg{}, r.Legs...)
	for i := range c.Legs {
		c.Legs[i].Error, c.Legs[i].RetryReason = clip(c.Legs[i].Error), clip(c.Legs[i].RetryReason)
	}
	c.Notes = slices.Clone(r.Notes)
	c.Outcome.Error = clip(c.Outcome.Error)
	return &c
}

func (d Decision) clone() Decision {
	for _, p := range [...]*Phase{&d.Decode, &d.Prefill} {
		p.Candidates, p.MarginBlocks = cloneCandidates(p.Candidates), finite(p.MarginBlocks)
	}
	return d
}

func cloneCandidates(in []Candidate) []Candidate {
	out := append([]Candidate{}, in...)
	for i := range out {
		c := &out[i]
		for _, f := range [...]*float64{&c.Cost, &c.PrefillTerm, &c.OverlapCredit, &c.QueueTerm, &c.DecodeTerm, &c.SpreadTerm, &c.RequestTerm, &c.KVUsage} {
			*f = finite(*f)
		}
	}
	return out
}

// finite is v, or -1 for what JSON has no number for.
func finite(v float64) float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return -1
	}
	return v
}

func clip(s string) string {
	if len(s) > maxText {
		return s[:maxText-3] + "..."
	}
	return s
}
