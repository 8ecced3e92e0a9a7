package admin

import (
	"fmt"
	"time"
)

// Status is the router at one glance (GET /admin/v1/status).
type Status struct {
	Schema  string    `json:"schema"`
	Version string    `json:"version"`
	Name    string    `json:"name"` // of this replica; host:port of the data plane by default
	Now     time.Time `json:"now"`
	Started time.Time `json:"started"`
	// State is "starting", "ready", "degraded" or "draining"; Reasons say why
	// it is not "ready", in plain words.
	State   string   `json:"state"`
	Reasons []string `json:"reasons"`
	// Drain is null unless the router drains.
	Drain *DrainState `json:"drain,omitempty"`

	ConfigRevision uint64   `json:"config_revision"`
	FleetRevision  uint64   `json:"fleet_revision"`
	Listen         string   `json:"listen"`
	Models         []string `json:"models"`

	Policy          string `json:"policy"`
	PrefillPolicy   string `json:"prefill_policy"`
	DecodePolicy    string `json:"decode_policy"`
	ThresholdTokens int    `json:"threshold_tokens"`
	ThresholdOn     string `json:"threshold_on"`
	// ThresholdAuto says that costs choose the path and ThresholdTokens decides only
	// while too little is known of them; Costs shows how much is.
	ThresholdAuto   bool         `json:"threshold_auto,omitempty"`
	Costs           []ModelCosts `json:"costs,omitempty"`
	PrefillFallback string       `json:"prefill_fallback"`
	Tokenizer       string       `json:"tokenizer"` // "local", "engine", "estimate", with its state in Reasons
	BlockSizeTokens int          `json:"block_size_tokens"`

	Workers WorkerCounts `json:"workers"`
	Traffic Traffic      `json:"traffic"`
	// Queues are those in which requests wait.
	Queues   []Queue      `json:"queues,omitempty"`
	Index    IndexTotals  `json:"index"`
	Ledger   LedgerTotals `json:"ledger"`
	Runtime  Runtime      `json:"runtime"`
	Recorder *Recorder    `json:"recorder,omitempty"`
	// Access is of a running router; a recording has none.
	Access ListenerAccesses `json:"access,omitzero"`
	// Kubernetes is there when pods are looked for.
	Kubernetes *Kubernetes `json:"kubernetes,omitempty"`
	// Replicas is there when the router shares its load with others.
	Replicas *Replicas `json:"replicas,omitempty"`
	// Replay is of a recording that is shown; a running router has none.
	Replay *Replay `json:"replay,omitempty"`
}

// Replay is where a recording that is shown stands.
type Replay struct {
	Records int64 `json:"records"` // played so far
	// AtUS is the time since the recording began, TotalUS its length; that is absent
	// until the recording has been read through once.
	AtUS    int64  `json:"t_us"`
	TotalUS *int64 `json:"total_us,omitempty"`
	// Speed is how many seconds of the recording pass in one; 0 is as many as can.
	Speed  float64 `json:"speed"`
	Paused bool    `json:"paused"`
	Ended  bool    `json:"ended"`
	// Seeking says that all up to the requested place is being played.
	Seeking bool `json:"seeking"`
}

// WorkerCounts counts workers by role and condition.
type WorkerCounts struct {
	Total      int `json:"total"`
	Prefill    int `json:"prefill"`
	Decode     int `json:"decode"`
	Aggregated int `json:"aggregated"`
	Either     int `json:"either,omitempty"`
	Usable     int `json:"usable"`
	Ranks      int `json:"ranks"`
}

// Traffic holds counters since the start; rates are differences of two
// answers divided by the difference of their "now".
type Traffic struct {
	Requests   uint64 `json:"requests_total"`
	Completed  uint64 `json:"completed_total"`
	Failed     uint64 `json:"failed_total"`    // answered 5xx or cut
	Cancelled  uint64 `json:"cancelled_total"` // the client left
	Rejected   uint64 `json:"rejected_total"`  // 4xx of the router
	Inflight   int    `json:"inflight_requests"`
	Queued     int    `json:"queued_requests"`
	Local      uint64 `json:"local_total"`
	Remote     uint64 `json:"remote_total"`
	Fallbacks  uint64 `json:"fallback_total"`
	Retries    uint64 `json:"retry_total"`
	Recomputes uint64 `json:"silent_recompute_total"`
	// Tokens as engines reported them in usage.
	PromptTokens     uint64 `json:"prompt_tokens_total"`
	CachedTokens     uint64 `json:"cached_tokens_total"`
	PredictedTokens  uint64 `json:"predicted_cached_tokens_total"`
	CompletionTokens uint64 `json:"completion_tokens_total"`
	// TTFT and ITL are quantiles over the last minute; absent without samples.
	TTFT *Quantiles `json:"ttft_ms,omitempty"`
	ITL  *Quantiles `json:"itl_ms,omitempty"`
	E2E  *Quantiles `json:"e2e_ms,omitempty"`
	// Overhead is the router's own time for a decision, read to dispatch.
	Overhead *Quantiles `json:"overhead_us,omitempty"`
}

// Queue is where requests wait.
type Queue struct {
	// Model is whose ranks they wait for; empty for those that wait for a place in
	// progress (limits.inflight).
	Model string `json:"model,omitempty"`
	// High, Normal and Low are how many wait, by priority, and Tenants in how many names.
	High    int `json:"high"`
	Normal  int `json:"normal"`
	Low     int `json:"low"`
	Tenants int `json:"tenants"`
	// OldestMS is how long the first to come has waited, WaitMS how long one that came now
	// would, by how fast the queue went recently; absent where that is not known.
	OldestMS float64  `json:"oldest_ms"`
	WaitMS   *float64 `json:"wait_ms,omitempty"`
}

// Waiting is how many wait.
func (q *Queue) Waiting() int { return q.High + q.Normal + q.Low }

// Text is the queue in words.
func (q *Queue) Text() string {
	what := "a request to end: limits.inflight is reached"
	if q.Model != "" {
		what = fmt.Sprintf("a rank of %s: all are at a routing.busy_… limit", q.Model)
	}
	wait := "unknown"
	if q.WaitMS != nil {
		wait = fmt.Sprintf("%.1f s", *q.WaitMS/1000)
	}
	return fmt.Sprintf("%d request(s) of %d tenant(s) wait for %s; the first for %.1f s, a wait now would be: %s", q.Waiting(), q.Tenants, what, q.OldestMS/1000, wait)
}

// Quantiles of a sample.
type Quantiles struct {
	Count uint64  `json:"count"`
	P50   float64 `json:"p50"`
	P90   float64 `json:"p90"`
	P99   float64 `json:"p99"`
	Max   float64 `json:"max"`
}

// LedgerTotals are the router's own account of work in flight.
type LedgerTotals struct {
	Requests      int   `json:"active_requests"`
	PrefillTokens int64 `json:"prefill_tokens"`
	DecodeBlocks  int64 `json:"decode_blocks"`
	Reservations  int64 `json:"open_reservations"`
}

// Runtime is the process.
type Runtime struct {
	Goroutines int     `json:"goroutines"`
	HeapBytes  uint64  `json:"heap_bytes"`
	RSSBytes   uint64  `json:"rss_bytes"`
	CPUSeconds float64 `json:"cpu_seconds"`
	OpenFiles  int     `json:"open_files"`
}

// Recorder is the state of a running recording.
type Recorder struct {
	Path    string `json:"path"`
	Bytes   int64  `json:"bytes"`
	Records uint64 `json:"records"`
	Dropped uint64 `json:"dropped"`
	Error   string `json:"error,omitempty"`
}
