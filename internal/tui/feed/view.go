// Package feed turns the answers of routers' admin APIs into the view: the
// plain values that the screen draws and that dynctl top --once prints. Rates
// are differences of two answers, so a view is complete from the second on.
//
// The JSON form of View is schema "dynctl.top/v1" (docs/schema/top-v1.json). It prints
// what routers answer in the types of the admin API; what is made of several answers
// stands beside them, under "derived". Numbers are numbers, units are in the keys, what is
// not known is null.
package feed

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
)

// Schema names the JSON form of View.
const Schema = "dynctl.top/v1"

// Num is a figure that may be unknown: NaN, null in JSON.
type Num float64

// Unknown is a figure that nobody reported.
var Unknown = Num(math.NaN())

// Known reports whether there is a figure.
func (n Num) Known() bool { return !math.IsNaN(float64(n)) && !math.IsInf(float64(n), 0) }

// F is the figure as a float, NaN when unknown.
func (n Num) F() float64 { return float64(n) }

// MarshalJSON writes null for what is unknown.
func (n Num) MarshalJSON() ([]byte, error) {
	if !n.Known() {
		return []byte("null"), nil
	}
	return json.Marshal(float64(n))
}

// UnmarshalJSON reads null as unknown.
func (n *Num) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		*n = Unknown
		return nil
	}
	return json.Unmarshal(b, (*float64)(n))
}

// unknown makes every figure of a struct Unknown.
func unknown(v any) {
	var walk func(reflect.Value)
	walk = func(s reflect.Value) {
		for i := range s.NumField() {
			switch f := s.Field(i); {
			case f.Type() == reflect.TypeFor[Num]():
				f.SetFloat(math.NaN())
			case f.Kind() == reflect.Struct && f.Type() != reflect.TypeFor[time.Time]():
				walk(f)
			}
		}
	}
	walk(reflect.ValueOf(v).Elem())
}

// View is everything at one moment.
type View struct {
	Schema  string    `json:"schema"`
	At      time.Time `json:"at"`
	Fleet   Fleet     `json:"fleet"`
	Routers []Router  `json:"routers"`
}

// Fleet sums up the routers that answer. Replicas share workers, so workers
// are counted by address.
type Fleet struct {
	Routers                   int `json:"routers"`
	RoutersUp                 int `json:"routers_up"`
	Workers                   int `json:"workers"`
	Ranks                     int `json:"ranks"`
	Requests                  Num `json:"requests_per_second"`
	PromptTokensPerSecond     Num `json:"prompt_tokens_per_second"`
	CompletionTokensPerSecond Num `json:"completion_tokens_per_second"`
	Inflight                  Num `json:"inflight_requests"`
	Queued                    Num `json:"queued_requests"`
	Errors                    int `json:"attention_errors"`
	Warnings                  int `json:"attention_warnings"`
}

// Link says how fresh a router's figures are.
type Link string

// The links. The names are in capitals because they stand on the screen so.
const (
	Waiting Link = "WAIT"  // no answer yet
	Live    Link = "LIVE"  // younger than two intervals and at least 2 s
	Lag     Link = "LAG"   // younger than 10 s
	Stale   Link = "STALE" // older
	Down    Link = "DOWN"  // the last question failed
)

// Router is one replica.
type Router struct {
	URL  string `json:"url"`
	Link Link   `json:"link"`
	// Error says in plain words why the link is down.
	Error      string `json:"error,omitempty"`
	AgeSeconds Num    `json:"age_seconds"`
	// AnswerMS is how long the router took to answer.
	AnswerMS Num `json:"answer_ms"`

	// Status is the newest answer; zero, and absent in JSON, before the first.
	admin.Status `json:"status,omitzero"`
	Derived      `json:"derived"`

	Attention  []Attention    `json:"attention"`
	Ranks      []Rank         `json:"ranks"`   // worst first
	WorkerList []admin.Worker `json:"workers"` // without their ranks
	Decisions  []Decision     `json:"decisions"`
	Events     []admin.Event  `json:"events"` // oldest first

	// Cause is Error as an error, for exit codes.
	Cause error `json:"-"`
}

// Answered reports whether the router has ever answered.
func (r *Router) Answered() bool { return r.Schema != "" }

// Condition is the state of the router in words; while it does not answer, it is
// the one it had last, and says so.
func (r *Router) Condition() string {
	if r.Link == Down && r.State != "" {
		return "was " + r.State
	}
	return r.State
}

// Reported is a figure of the router's Status, Unknown before the first answer.
func Reported[T int | int64 | uint64](r *Router, n T) Num {
	if !r.Answered() {
		return Unknown
	}
	return Num(n)
}

// Figure is a figure that the admin API leaves null where it is not known.
func Figure[T int | float64](n *T) Num {
	if n == nil {
		return Unknown
	}
	return Num(*n)
}

// Derived is what top makes of the answers of a router: rates from two and more of them,
// and what one of them shows in another form.
type Derived struct {
	UptimeSeconds Num `json:"uptime_seconds"`
	// RateWindow is the time that rates and shares are taken over,
	// TroubleWindow the longer one of what is recent.
	RateWindow    Num `json:"rate_window_seconds"`
	TroubleWindow Num `json:"trouble_window_seconds"`

	RequestRate      Num `json:"requests_per_second"`
	CompletedRate    Num `json:"completed_per_second"`
	FailedRate       Num `json:"failed_per_second"`
	CancelledRate    Num `json:"cancelled_per_second"`
	RejectedRate     Num `json:"rejected_per_second"`
	PromptRate       Num `json:"prompt_tokens_per_second"`
	CompletionRate   Num `json:"completion_tokens_per_second"`
	LocalShare       Num `json:"local_share"`
	RemoteShare      Num `json:"remote_share"`
	HitShare         Num `json:"cached_tokens_share"`
	PredictedShare   Num `json:"predicted_cached_tokens_share"`
	EngineHitShare   Num `json:"engine_prefix_hit_share"` // of the ranks that decode
	EnginePromptRate Num `json:"engine_prompt_tokens_per_second"`

	RecentFailed     Num `json:"recent_failed"`
	RecentFallbacks  Num `json:"recent_fallbacks"`
	FallbackShare    Num `json:"recent_fallback_share"`
	RecentRetries    Num `json:"recent_retries"`
	RetryShare       Num `json:"recent_retry_share"`
	RecentRecomputes Num `json:"recent_silent_recomputes"`

	StoredRate     Num    `json:"stored_blocks_per_second"`
	RemovedRate    Num    `json:"removed_blocks_per_second"`
	LookupRate     Num    `json:"lookups_per_second"`
	EventRate      Num    `json:"feed_events_per_second"`
	RecentRefused  Num    `json:"recent_refused_blocks"`
	RecentOrphaned Num    `json:"recent_orphaned_blocks"`
	RecentGaps     Num    `json:"recent_gaps"`
	HottestShare   Num    `json:"hottest_prefix_share"`
	HottestPrefix  string `json:"hottest_prefix,omitempty"`

	CPU Num `json:"cpu_cores"`
}

// Quantiles are those of the admin API, NaN where it has none.
func Quantiles(q *admin.Quantiles) admin.Quantiles {
	if q == nil {
		return admin.Quantiles{P50: math.NaN(), P90: math.NaN(), P99: math.NaN()}
	}
	return *q
}

// Severity orders attention and ranks; it is a word in JSON.
type Severity int

// The severities.
const (
	OK Severity = iota
	Info
	Warn
	Error
)

var severityNames = [...]string{"ok", "info", "warn", "error"}

// String is the word.
func (s Severity) String() string { return severityNames[min(max(int(s), 0), len(severityNames)-1)] }

// MarshalText writes the word.
func (s Severity) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads the word; one that is not known is a warning.
func (s *Severity) UnmarshalText(b []byte) error {
	*s = ParseSeverity(string(b))
	return nil
}

// ParseSeverity reads a word of the API or of this package.
func ParseSeverity(word string) Severity {
	for i, n := range severityNames {
		if n == word {
			return Severity(i)
		}
	}
	return Warn
}

// Attention is one thing that an operator should know, in plain words.
type Attention struct {
	Severity Severity `json:"severity"`
	// Code is a closed set: see attention.go.
	Code    string `json:"code"`
	Subject string `json:"subject"`
	Text    string `json:"text"`
	// Since is when this screen saw it first.
	Since  time.Time `json:"since"`
	Worker string    `json:"worker,omitempty"`
	Rank   string    `json:"rank,omitempty"`
}

// trouble is one that a rank of the worker has, or the worker with all of them; nil
// for none.
func trouble(w *admin.Worker, rank string) *admin.Trouble {
	for i := range w.Troubles {
		if t := &w.Troubles[i]; t.Rank == "" || t.Rank == rank {
			return t
		}
	}
	return nil
}

// Rank is one data-parallel rank: what the router says of it, and what is made of that.
type Rank struct {
	admin.Rank
	RankDerived `json:"derived"`

	// Folded is of how many ranks this is the row, see Fold, and Of how many the worker
	// has; 0 for a rank.
	Folded int `json:"-"`
	Of     int `json:"-"`
}

// RankDerived is what top makes of the answers about a rank: rates from two and more of
// them, and what one of them shows in another form.
type RankDerived struct {
	Status   string   `json:"status"` // one word, see attention.go
	Severity Severity `json:"severity"`
	// Model is the first name that its worker answers to.
	Model string `json:"model"`

	// Of the engine's figures.
	EngineUsed  Num `json:"engine_kv_used_blocks"` // usage of capacity, in router blocks
	HitShare    Num `json:"engine_prefix_hit_share"`
	LifeHit     Num `json:"engine_prefix_hit_lifetime_share"`
	PromptRate  Num `json:"engine_prompt_tokens_per_second"`
	ExternalHit Num `json:"engine_external_hit_tokens_per_second"`
	LoadAge     Num `json:"engine_load_age_seconds"`

	// Of the router's.
	RequestRate    Num `json:"requests_per_second"`
	RecentFailures Num `json:"recent_failures"`

	// The differences, engine minus router.
	RequestDiff Num `json:"requests_difference"`
	BlockDiff   Num `json:"blocks_difference"`

	// Of its KV events.
	FeedAge       Num `json:"feed_age_seconds"`   // of the newest batch
	FeedFor       Num `json:"feed_state_seconds"` // since when the feed is in its state
	EventRate     Num `json:"feed_events_per_second"`
	BlockRate     Num `json:"feed_blocks_per_second"`
	RecentGaps    Num `json:"recent_gaps"`
	RecentLost    Num `json:"recent_lost_batches"`
	RecentDropped Num `json:"recent_dropped"`

	// Pressure orders ranks that are equally bad; it has no unit.
	Pressure float64 `json:"pressure"`
}

// engine has the figures of the rank's engine, none where it reports none.
func (k *Rank) engine() admin.EngineLoad {
	if k.Engine == nil {
		return admin.EngineLoad{}
	}
	return *k.Engine
}

// Running is how many requests the engine runs.
func (k *Rank) Running() Num { return Figure(k.engine().Running) }

// Waiting is how many requests wait in the engine.
func (k *Rank) Waiting() Num { return Figure(k.engine().Waiting) }

// KVUsage is the used share of the engine's KV cache.
func (k *Rank) KVUsage() Num { return Figure(k.engine().KVUsage) }

// Room is the most that IndexBlocks can truly be, 0 when unknown. A recording has the
// capacity only.
func (k *Rank) Room() int64 { return max(k.IndexRoom, k.CapacityBlock) }

// SlowAt is "ITL" or "TTFT" for a rank that is slow at it.
func (k *Rank) SlowAt() string {
	if k.Slow == nil {
		return ""
	}
	return k.Slow.Figure
}

// Moves are a rank's streams that continued elsewhere, see admin.Moves.
type Moves struct{ Away, Onto, Waiting Num }

// Streams are the rank's Moves.
func (k *Rank) Streams() Moves {
	if k.Moves == nil {
		return Moves{Unknown, Unknown, Unknown}
	}
	return Moves{Num(k.Moves.Away), Num(k.Moves.Onto), Figure(k.Moves.Waiting)}
}

// None says that a rank is known to have had no such streams.
func (m *Moves) None() bool { return m.Away == 0 && m.Onto == 0 && !(m.Waiting > 0) }

// Caches says in one line what the rank has beside one cache on its device, "" for
// nothing.
func (k *Rank) Caches() string {
	f := &k.Feed
	var parts []string
	if len(f.CacheGroups) > 0 {
		var groups []string
		for _, g := range f.CacheGroups {
			text := g.Kind
			if g.Window > 0 {
				text += fmt.Sprintf(" %d", g.Window)
			}
			groups = append(groups, fmt.Sprintf("%s (%d)", text, g.Block))
		}
		parts = append(parts, "cache groups (block): "+strings.Join(groups, ", "))
	}
	if f.TiersReported {
		parts = append(parts, fmt.Sprintf("outside the device: %d blocks cpu, %d disk, %d remote", f.Tiers.CPU, f.Tiers.Disk, f.Tiers.Remote))
	}
	if f.CopiesImplausible {
		parts = append(parts, "copies implausible")
	}
	if f.HashDiffers {
		parts = append(parts, "hash differs")
	}
	return strings.Join(parts, "; ")
}

// Decision is a receipt, in JSON as the admin API gave it.
type Decision struct {
	*receipt.Receipt
	raw json.RawMessage
}

// PrefillRank is the rank that computes the prompt for another, "" for none.
func (d *Decision) PrefillRank() string {
	if d.Path == "local" {
		return ""
	}
	return d.Prefill.Chosen
}

// Margin is by how many blocks the decode rank beats the runner-up.
func (d *Decision) Margin() Num {
	if d.Decode.RunnerUp == "" {
		return Unknown
	}
	return Num(d.Decode.MarginBlocks)
}

// TTFT is the time to the first token in ms.
func (d *Decision) TTFT() Num { return known(d.Outcome.TTFTMS) }

// E2E is the time to the last token in ms.
func (d *Decision) E2E() Num { return known(d.Outcome.E2EMS) }

// MarshalJSON writes the receipt.
func (d Decision) MarshalJSON() ([]byte, error) { return d.raw.MarshalJSON() }

// UnmarshalJSON reads a receipt.
func (d *Decision) UnmarshalJSON(raw []byte) error {
	var ok bool
	if *d, ok = ParseDecision(bytes.Clone(raw)); !ok {
		return errors.New("a decision that is no receipt")
	}
	return nil
}

// Rule is in words from where on prompts are prefilled remotely; empty while unknown.
func (r *Router) Rule() string {
	if r.ThresholdOn == "" {
		return ""
	}
	if r.ThresholdAuto && r.Replay != nil && len(r.Costs) == 0 {
		// A recording does not say how much was known of the costs.
		return fmt.Sprintf("remote from auto, %s %d until costs are known", r.ThresholdOn, r.ThresholdTokens)
	}
	return admin.Rule(r.ThresholdTokens, r.ThresholdOn, r.ThresholdAuto, r.Costs)
}

// Threshold is the threshold in force in few signs, "auto" where costs choose.
func (r *Router) Threshold() string {
	switch {
	case r.ThresholdAuto:
		return "auto"
	case !r.Answered():
		return "-"
	default:
		return strconv.Itoa(r.ThresholdTokens)
	}
}
