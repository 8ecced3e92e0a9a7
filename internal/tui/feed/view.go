// Package feed turns the answers of routers' admin APIs into the view: the
// plain values that the screen draws and that dynctl top --once prints. Rates
// are differences of two answers, so a view is complete from the second on.
//
// The JSON form of View is schema "dynctl.top/v1" (docs/schema/top-v1.json):
// numbers are numbers, units are in the keys, what is not known is null.
package feed

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/route"
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

	Name            string   `json:"name"`
	Version         string   `json:"version"`
	Schema          string   `json:"admin_schema"`
	State           string   `json:"state"`
	Reasons         []string `json:"reasons"`
	UptimeSeconds   Num      `json:"uptime_seconds"`
	Models          []string `json:"models"`
	Policy          string   `json:"policy"`
	ThresholdTokens Num      `json:"threshold_tokens"`
	ThresholdOn     string   `json:"threshold_on"`
	// ThresholdAuto says that costs choose the path where Costs knows enough of them.
	ThresholdAuto  bool               `json:"threshold_auto"`
	Costs          []admin.ModelCosts `json:"costs,omitempty"`
	Tokenizer      string             `json:"tokenizer"`
	BlockSize      int                `json:"block_size_tokens"`
	ConfigRevision uint64             `json:"config_revision"`
	Workers        admin.WorkerCounts `json:"worker_counts"`
	// Replay is where a recording stands; nil for a running router.
	Replay *admin.Replay `json:"replay,omitempty"`

	// RateWindow is the time that rates and shares are taken over,
	// TroubleWindow the longer one of the counts of what went wrong.
	RateWindow    Num     `json:"rate_window_seconds"`
	TroubleWindow Num     `json:"trouble_window_seconds"`
	Traffic       Traffic `json:"traffic"`
	// Queues are those in which requests wait.
	Queues  []admin.Queue `json:"queues,omitempty"`
	Index   Index         `json:"index"`
	Process Process       `json:"process"`

	Attention  []Attention   `json:"attention"`
	Ranks      []Rank        `json:"ranks"` // worst first
	WorkerList []Worker      `json:"workers"`
	Decisions  []Decision    `json:"decisions"` // newest first
	Events     []admin.Event `json:"events"`    // oldest first

	// Cause is Error as an error, for exit codes.
	Cause error `json:"-"`
}

// Condition is the state of the router in words; while it does not answer, it is
// the one it had last, and says so.
func (r *Router) Condition() string {
	if r.Link == Down && r.State != "" {
		return "was " + r.State
	}
	return r.State
}

// Traffic is what goes through a router.
type Traffic struct {
	Requests         Num `json:"requests_total"`
	RequestRate      Num `json:"requests_per_second"`
	CompletedRate    Num `json:"completed_per_second"`
	FailedRate       Num `json:"failed_per_second"`
	CancelledRate    Num `json:"cancelled_per_second"`
	RejectedRate     Num `json:"rejected_per_second"`
	PromptRate       Num `json:"prompt_tokens_per_second"`
	CompletionRate   Num `json:"completion_tokens_per_second"`
	Inflight         Num `json:"inflight_requests"`
	Queued           Num `json:"queued_requests"`
	LocalShare       Num `json:"local_share"`
	RemoteShare      Num `json:"remote_share"`
	HitShare         Num `json:"cached_tokens_share"`
	PredictedShare   Num `json:"predicted_cached_tokens_share"`
	EngineHitShare   Num `json:"engine_prefix_hit_share"` // of the ranks that decode
	EnginePromptRate Num `json:"engine_prompt_tokens_per_second"`
	Failed           Num `json:"recent_failed"`
	Fallbacks        Num `json:"recent_fallbacks"`
	FallbackShare    Num `json:"recent_fallback_share"`
	Retries          Num `json:"recent_retries"`
	RetryShare       Num `json:"recent_retry_share"`
	Recomputes       Num `json:"recent_silent_recomputes"`
	TTFTP50          Num `json:"ttft_p50_ms"`
	TTFTP90          Num `json:"ttft_p90_ms"`
	TTFTP99          Num `json:"ttft_p99_ms"`
	ITLP50           Num `json:"itl_p50_ms"`
	ITLP90           Num `json:"itl_p90_ms"`
	ITLP99           Num `json:"itl_p99_ms"`
	E2EP50           Num `json:"e2e_p50_ms"`
	E2EP99           Num `json:"e2e_p99_ms"`
	OverheadP50      Num `json:"overhead_p50_us"`
	OverheadP99      Num `json:"overhead_p99_us"`
	ActiveRequests   Num `json:"ledger_active_requests"`
	ActivePrefill    Num `json:"ledger_prefill_tokens"`
	ActiveDecode     Num `json:"ledger_decode_blocks"`
	OpenReservations Num `json:"ledger_open_reservations"`
}

// Index is the router's picture of the caches.
type Index struct {
	Blocks        Num    `json:"blocks"`
	Memberships   Num    `json:"memberships"`
	MaxBlocks     Num    `json:"max_memberships"`
	Nodes         Num    `json:"nodes"`
	Bytes         Num    `json:"memory_bytes"`
	StoredRate    Num    `json:"stored_blocks_per_second"`
	RemovedRate   Num    `json:"removed_blocks_per_second"`
	LookupRate    Num    `json:"lookups_per_second"`
	EventRate     Num    `json:"events_per_second"`
	Refused       Num    `json:"recent_refused_blocks"`
	Orphaned      Num    `json:"recent_orphaned_blocks"`
	Gaps          Num    `json:"recent_gaps"`
	Untrusted     Num    `json:"untrusted_ranks"`
	HottestShare  Num    `json:"hottest_prefix_share"`
	HottestPrefix string `json:"hottest_prefix,omitempty"`
}

// Process is the router as a process.
type Process struct {
	CPU        Num `json:"cpu_cores"`
	HeapBytes  Num `json:"heap_bytes"`
	RSSBytes   Num `json:"rss_bytes"`
	Goroutines Num `json:"goroutines"`
	OpenFiles  Num `json:"open_files"`
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

// Attention is one thing that somebody should know, in plain words.
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

// Worker is one engine process.
type Worker struct {
	Name      string   `json:"name"`
	URL       string   `json:"url"`
	Engine    string   `json:"engine"`
	Version   string   `json:"version"`
	Role      string   `json:"role"`
	Connector string   `json:"connector"`
	Models    []string `json:"models"`
	DP        int      `json:"dp"`
	BlockSize int      `json:"block_size_tokens"`
	KVBlocks  int      `json:"kv_blocks_per_rank"`
	Source    string   `json:"source"`
	Health    string   `json:"health"`
	Reason    string   `json:"reason"`
	Draining  bool     `json:"draining"`
	Usable    bool     `json:"usable"`
	Conflict  string   `json:"conflict,omitempty"`
	// Troubles are what is wrong with it although it answers.
	Troubles []admin.Trouble `json:"troubles,omitempty"`
}

// trouble is one that a rank of the worker has, or the worker with all of them; nil
// for none.
func (w *Worker) trouble(rank string) *admin.Trouble {
	for i := range w.Troubles {
		if t := &w.Troubles[i]; t.Rank == "" || t.Rank == rank {
			return t
		}
	}
	return nil
}

// Rank is one data-parallel rank: the router's view and the engine's own.
type Rank struct {
	Label    string   `json:"label"`
	Worker   string   `json:"worker"`
	DP       int      `json:"dp_rank"`
	Role     string   `json:"role"`
	Status   string   `json:"status"` // one word, see attention.go
	Severity Severity `json:"severity"`
	Reason   string   `json:"reason,omitempty"`
	Usable   bool     `json:"usable"`
	Health   string   `json:"health"`
	Model    string   `json:"model"`

	// What the engine says.
	Running     Num `json:"engine_running_requests"`
	Waiting     Num `json:"engine_waiting_requests"`
	KVUsage     Num `json:"engine_kv_usage_share"`
	EngineUsed  Num `json:"engine_kv_used_blocks"` // usage of capacity, in router blocks
	HitShare    Num `json:"engine_prefix_hit_share"`
	LifeHit     Num `json:"engine_prefix_hit_lifetime_share"`
	PromptRate  Num `json:"engine_prompt_tokens_per_second"`
	ExternalHit Num `json:"engine_external_hit_tokens_per_second"`
	LoadAge     Num `json:"engine_load_age_seconds"`

	// What the router's own account says.
	Active        int   `json:"router_active_requests"`
	PrefillTokens int64 `json:"router_prefill_tokens"`
	DecodeBlocks  int64 `json:"router_decode_blocks"`
	RequestRate   Num   `json:"router_requests_per_second"`
	Failures      Num   `json:"router_recent_failures"`
	IndexBlocks   int64 `json:"index_blocks"`
	Capacity      int64 `json:"capacity_blocks"`
	// IndexRoom is the most that IndexBlocks can truly be, 0 when unknown.
	IndexRoom int64 `json:"index_room_blocks"`

	// Moves are the streams that went on elsewhere.
	Moves Moves `json:"moves"`

	// How fast it answers, as the router measured it in the last seconds.
	TTFT       Num `json:"router_ttft_ms"`
	ITL        Num `json:"router_itl_ms"`
	OutputRate Num `json:"router_output_tokens_per_second"`
	// SlowAt is "ITL" or "TTFT" for a rank that is slow at it, SlowTimes how many
	// times the median of its peers that is. SpeedJudged says that enough is known of it
	// and of its peers to judge it.
	SlowAt      string `json:"slow_at,omitempty"`
	SlowTimes   Num    `json:"slow_times"`
	SpeedJudged bool   `json:"speed_judged"`
	slowAlways  bool   // it was hardly faster before

	// The differences, engine minus router.
	RequestDiff Num `json:"requests_difference"`
	BlockDiff   Num `json:"blocks_difference"`

	Feed Feed `json:"feed"`

	// Pressure orders ranks that are equally bad; it has no unit.
	Pressure float64 `json:"pressure"`

	// Folded is of how many ranks this is the row, see Fold, and Of how many the worker
	// has; 0 for a rank.
	Folded int `json:"-"`
	Of     int `json:"-"`
}

// Moves are streams that went on elsewhere: those that a rank had, rests that it was asked
// for (each attempt), and those that wait now for a place on it.
type Moves struct {
	Away    Num `json:"away_total"`
	Onto    Num `json:"onto_total"`
	Waiting Num `json:"waiting"`
}

// None says that a rank is known to have had none of them.
func (m *Moves) None() bool { return m.Away == 0 && m.Onto == 0 && !(m.Waiting > 0) }

// Feed is the state of a rank's KV events.
type Feed struct {
	State         string  `json:"state"`
	Trusted       bool    `json:"trusted"`
	Reason        string  `json:"reason,omitempty"`
	Endpoint      string  `json:"endpoint,omitempty"`
	Replay        *string `json:"replay_endpoint,omitempty"` // nil: not known
	LastSeq       *uint64 `json:"last_seq"`                  // nil before the first batch
	AgeSeconds    Num     `json:"age_seconds"`               // of the newest batch
	SinceSeconds  Num     `json:"state_seconds"`
	EventRate     Num     `json:"events_per_second"`
	BlockRate     Num     `json:"blocks_per_second"`
	Gaps          uint64  `json:"gaps_total"`
	RecentGaps    Num     `json:"recent_gaps"`
	RecentLost    Num     `json:"recent_lost_batches"`
	RecentDropped Num     `json:"recent_dropped"`
	Replayed      uint64  `json:"replayed_batches_total"`
	Lost          uint64  `json:"lost_batches_total"`
	Dropped       uint64  `json:"dropped_total"`
	Restarts      uint64  `json:"restarts_total"`
	Errors        uint64  `json:"decode_errors_total"`
	Orphans       uint64  `json:"orphaned_blocks_total"`
	// Tiers are the engine's blocks outside the device, TiersReported says that events have
	// named one there and the rank is followed.
	Tiers         route.Tiers `json:"tiers,omitzero"`
	TiersReported bool        `json:"tiers_told,omitempty"`
	// CacheGroups are those of a rank whose events name several.
	CacheGroups []admin.CacheGroup `json:"cache_groups,omitempty"`
	// CopiesDisbelieved says that copies of blocks are not counted any more.
	CopiesDisbelieved bool `json:"copies_disbelieved,omitempty"`
	// HashDiffers says that the engine names its blocks otherwise than was stated.
	HashDiffers bool `json:"hash_differs,omitempty"`
}

// Caches says in one line what the rank has beside one cache on its device, "" for
// nothing.
func (f *Feed) Caches() string {
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
	if f.CopiesDisbelieved {
		parts = append(parts, "copies disbelieved")
	}
	if f.HashDiffers {
		parts = append(parts, "hash differs")
	}
	return strings.Join(parts, "; ")
}

// Decision is the short form of a receipt.
type Decision struct {
	ID         string    `json:"id"`
	Request    string    `json:"request_id"`
	At         time.Time `json:"at"`
	Live       bool      `json:"live"`
	Model      string    `json:"model"`
	Path       string    `json:"path"`
	Reason     string    `json:"reason"`
	ReasonText string    `json:"reason_text"`
	ISL        int       `json:"isl_tokens"`
	EffISL     int       `json:"eff_isl_tokens"`
	Predicted  int       `json:"predicted_cached_tokens"`
	Cached     Num       `json:"cached_tokens"`
	Decode     string    `json:"decode_rank"`
	Prefill    string    `json:"prefill_rank"`
	RunnerUp   string    `json:"runner_up_rank"`
	Margin     Num       `json:"margin_blocks"`
	Eligible   int       `json:"eligible_ranks"`
	TTFT       Num       `json:"ttft_ms"`
	E2E        Num       `json:"e2e_ms"`
	Tokens     Num       `json:"completion_tokens"`
	Status     int       `json:"status"`
	Legs       int       `json:"legs"`
	Error      string    `json:"error,omitempty"`
	Recompute  bool      `json:"silent_recompute"`
	Cancelled  bool      `json:"cancelled"`
}

// Rule is in words from where on prompts are prefilled remotely; empty while unknown.
func (r *Router) Rule() string {
	if !r.ThresholdTokens.Known() || r.ThresholdOn == "" {
		return ""
	}
	if r.ThresholdAuto && r.Replay != nil && len(r.Costs) == 0 {
		// A recording does not say how much was known of the costs.
		return fmt.Sprintf("auto, %s %d until costs are known", r.ThresholdOn, int(r.ThresholdTokens))
	}
	return admin.Rule(int(r.ThresholdTokens), r.ThresholdOn, r.ThresholdAuto, r.Costs)
}

// Threshold is the threshold in force in few signs, "auto" where costs choose.
func (r *Router) Threshold() string {
	switch {
	case r.ThresholdAuto:
		return "auto"
	case !r.ThresholdTokens.Known():
		return "-"
	default:
		return strconv.Itoa(int(r.ThresholdTokens))
	}
}
