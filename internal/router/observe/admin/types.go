// Package admin is the router's admin API as its users see it: the JSON types
// under /admin/v1/ and a client for them. The handler lives with the router.
//
// Schema: "dynctl.admin/v1". Keys carry their unit (_tokens, _blocks,
// _seconds, _ms, _bytes, _share between 0 and 1); a share or figure that is
// unknown is null or absent, never 0. New keys may appear within v1; a key
// never changes its meaning.
package admin

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Schema names this version of the API.
const Schema = "dynctl.admin/v1"

// ModelCosts is what is known of the costs of both paths for one model.
type ModelCosts struct {
	Model string `json:"model"`
	// Revision is that of the cost models in force; 0 while too little is known.
	Revision uint64 `json:"revision"`
	// TimesKnown says that policy kv compares times, not blocks, PathsKnown that costs decide
	// instead of a threshold that is auto.
	TimesKnown bool `json:"times_known"`
	PathsKnown bool `json:"paths_known"`
	// Of how many outcomes the cost models are made, older ones counting less: prompts computed
	// on decode and on prefill ranks, and KV that moved.
	LocalOutcomes    float64 `json:"local_outcomes"`
	PrefillOutcomes  float64 `json:"prefill_outcomes"`
	TransferOutcomes float64 `json:"transfer_outcomes"`
	// Crossings are where the cost models change the path, by load; none while too little is
	// known. Unlearned says what is not known, and why.
	Crossings []Crossing  `json:"crossings,omitempty"`
	Unlearned []Unlearned `json:"unlearned,omitempty"`
}

// Unlearned is something of a model's costs that is not known.
type Unlearned struct {
	// Of is OfTimes or OfPaths, Reason one of the reasons below.
	Of     string `json:"of"`
	Reason string `json:"reason"`
	// Overdue says that the settings use it, and that there were enough requests to know it.
	Overdue bool `json:"overdue"`
	// Text says why it is not known, Advice what to do.
	Text   string `json:"text"`
	Advice string `json:"advice"`
}

// Effect is what is not known, and what decides meanwhile.
func (u *Unlearned) Effect() string {
	switch {
	case u.Reason == UnlearnedUnstable:
		return "what both paths cost keeps changing, and the threshold and blocks decide"
	case u.Reason == UnlearnedStale:
		return "what both paths cost now is not known"
	case u.Of == OfTimes:
		return "how long prompts and answers take is not known, and policy kv ranks by blocks"
	}
	return "what both paths cost is not known"
}

// Severity is how much it matters that it is overdue: what only ages, or what no worker can do,
// is no trouble.
func (u *Unlearned) Severity() eventlog.Severity {
	if u.Reason == UnlearnedStale || u.Reason == UnlearnedOnePath {
		return eventlog.Info
	}
	return eventlog.Warn
}

// What is not learned: the times by which policy kv ranks, and the costs of both paths.
const (
	OfTimes = "times"
	OfPaths = "paths"
)

// The reasons.
const (
	UnlearnedUnstable  = "unstable"         // outcomes keep drifting
	UnlearnedSteps     = "no_steps"         // no answer shows how long a token takes
	UnlearnedStretches = "few_steps"        // few answers do
	UnlearnedStreams   = "not_streamed"     // no answer shows its first token
	UnlearnedNever     = "never_taken"      // one path has no outcome
	UnlearnedFew       = "few_samples"      // there are few outcomes
	UnlearnedStale     = "stale"            // the newest outcome of a path is old
	UnlearnedOnePath   = "one_path"         // the fleet has only one path
	UnlearnedFixed     = "threshold_is_set" // a threshold that is not auto keeps requests from one path
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

// Replicas is what a router knows of the other routers of its fleet.
type Replicas struct {
	// Name and Fleet are this router's. Joined says that it shares its load.
	Name   string `json:"name"`
	Fleet  string `json:"fleet"`
	Joined bool   `json:"joined"`
	// Live is how many other routers share theirs.
	Live    int       `json:"live"`
	Routers []Replica `json:"routers"`
	// Ignored are ranks that only others call busy while their engines report none.
	Ignored []string `json:"ignored_ranks,omitempty"`
	// Messages that brought no load: of another fleet, of another router with this one's name,
	// that could not be read, that were known, of an earlier process, of too many routers.
	OtherFleet  uint64 `json:"other_fleet_total"`
	SameName    uint64 `json:"same_name_total"`
	Refused     uint64 `json:"refused_total"`
	Repeated    uint64 `json:"repeated_total"`
	Earlier     uint64 `json:"earlier_process_total"`
	TooMany     uint64 `json:"too_many_routers_total"`
	LastRefused string `json:"last_refused,omitempty"`
	// Failed is how many messages of this router could not be sent.
	Failed      uint64 `json:"send_failures_total"`
	LastFailure string `json:"last_send_failure,omitempty"`
	// IndexCopied is what the index began with; absent until another router was queried.
	IndexCopied *IndexCopied `json:"index_copied,omitempty"`
}

// IndexCopied is what the index of a router began with that another router had.
type IndexCopied struct {
	// Router is where the last copy came from.
	Router string `json:"router,omitempty"`
	// Ranks and Blocks were copied.
	Ranks  int   `json:"ranks"`
	Blocks int64 `json:"blocks"`
	// Missing are the ranks that no other router had, Refused those whose copy was refused,
	// Why is the last reason.
	Missing int    `json:"missing_ranks"`
	Refused int    `json:"refused_ranks"`
	Why     string `json:"why,omitempty"`
}

// Replica is another router as this one knows it.
type Replica struct {
	Name string `json:"name"`
	// State is "live", "silent" (its load no longer counts) or "left".
	State string `json:"state"`
	// SilentMS is the time since its newest message.
	SilentMS float64   `json:"silent_ms"`
	Version  string    `json:"version"`
	Started  time.Time `json:"started"`
	// Differs names the settings that are not the same as here.
	Differs string `json:"settings_differ,omitempty"`
	// Complete says that none of its messages is missing.
	Complete bool `json:"complete"`
	// Requests, PrefillTokens and DecodeBlocks are its work on all ranks.
	Requests      int    `json:"requests"`
	PrefillTokens int64  `json:"prefill_tokens"`
	DecodeBlocks  int64  `json:"decode_blocks"`
	Messages      uint64 `json:"messages_total"`
	Gaps          uint64 `json:"gaps_total"`
	// UnknownRanks have work of its requests and are not known here.
	UnknownRanks int `json:"unknown_ranks"`
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

// ListenerAccesses are who may come in at the two listeners.
type ListenerAccesses struct {
	Data  ListenerAccess `json:"data"`
	Admin ListenerAccess `json:"admin"`
}

// ListenerAccess is who may come in at a listener.
type ListenerAccess struct {
	Listen string `json:"listen"`
	// Loopback says that it is reached from the router's machine only.
	Loopback bool `json:"loopback"`
	// TLS says that it speaks nothing else, ClientCertificates that clients must
	// show one.
	TLS                bool `json:"tls"`
	ClientCertificates bool `json:"client_certificates"`
	// Token says that a bearer token lets users in, Keys that API keys do; one of
	// those that are true must be shown.
	Token bool `json:"token"`
	Keys  bool `json:"keys"`
}

// Who is in words who is let in.
func (a *ListenerAccess) Who() string {
	words := []string{"in the clear"}
	if a.TLS {
		words[0] = "TLS"
	}
	for _, w := range []struct {
		is   bool
		text string
	}{{a.Loopback, "this machine only"}, {a.ClientCertificates, "with a client certificate"}, {a.Token, "with a token"}, {a.Keys, "with an API key"}} {
		if w.is {
			words = append(words, w.text)
		}
	}
	return strings.Join(words, ", ")
}

// Exposed says in words what is wrong with a listener that other machines reach;
// empty for nothing.
func (a *ListenerAccess) Exposed() string {
	switch {
	case a.Loopback || a.Listen == "":
		return ""
	case !a.ClientCertificates && !a.Token && !a.Keys:
		return "other machines reach it, and it does not authenticate them"
	case !a.TLS:
		return "other machines reach it without TLS: tokens, keys, prompts and answers cross the network in the clear"
	}
	return ""
}

// Kubernetes is what the router makes of a cluster's pods.
type Kubernetes struct {
	Server     string   `json:"server"`
	Namespaces []string `json:"namespaces"`
	// Connected says that the API server answers every watch.
	Connected bool              `json:"connected"`
	Watches   []KubernetesWatch `json:"watches"`
	Failures  uint64            `json:"failures_total"`
	Pods      int               `json:"pods"`
	Workers   int               `json:"workers"`
	Waiting   int               `json:"waiting_pods"`
	// LeftOut are pods that are no workers, the first of LeftOutCount.
	LeftOut      []LeftOutPod `json:"left_out,omitempty"`
	LeftOutCount int          `json:"left_out_pods"`
}

// KubernetesWatch is one selector in one namespace.
type KubernetesWatch struct {
	Namespace string    `json:"namespace"`
	Selector  string    `json:"selector"`
	Synced    bool      `json:"synced"` // listed at least once
	Error     string    `json:"error,omitempty"`
	Since     time.Time `json:"since,omitzero"` // of Error
	Failures  uint64    `json:"failures_total"`
}

// LeftOutPod is a pod that a selector finds and that is no worker.
type LeftOutPod struct {
	Pod    string `json:"pod"`
	Reason string `json:"reason"`
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

// IndexTotals are the figures of the KV index.
type IndexTotals struct {
	Blocks        int64  `json:"blocks"`
	Memberships   int64  `json:"memberships"`
	Nodes         int64  `json:"nodes"`
	Bytes         int64  `json:"memory_bytes"`
	MaxBlocks     int64  `json:"max_memberships"`
	Lookups       uint64 `json:"lookups_total"`
	Stored        uint64 `json:"stored_total"`
	Removed       uint64 `json:"removed_total"`
	Orphaned      uint64 `json:"orphaned_total"`
	Refused       uint64 `json:"refused_total"`
	UntrustedRank int    `json:"untrusted_ranks"`
	// HitShare is predicted cached tokens / prompt tokens since the start, null
	// before the first prompt.
	HitShare *float64 `json:"hit_share"`
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

// LastUsable reports whether no worker but the named one is usable in its role.
func LastUsable(ws []Worker, name string) bool {
	i := slices.IndexFunc(ws, func(w Worker) bool { return w.Name == name })
	return i >= 0 && !slices.ContainsFunc(ws, func(w Worker) bool { return w.Name != name && w.Usable && w.Role == ws[i].Role })
}

// Worker is one engine process (GET /admin/v1/workers).
type Worker struct {
	Name            string            `json:"name"`
	URL             string            `json:"url"`
	Engine          string            `json:"engine"`
	Version         string            `json:"version,omitempty"`
	Role            string            `json:"role"`
	Connector       string            `json:"connector,omitempty"`
	Models          []string          `json:"models"`
	LoRAs           []string          `json:"loras,omitempty"`
	Labels          map[string]string `json:"labels,omitempty"`
	DP              int               `json:"dp"`
	LB              string            `json:"lb,omitempty"`       // how the deployment's ranks lie behind ports
	DPStart         int               `json:"dp_start,omitempty"` // place of the first rank in the deployment
	BlockSizeTokens int               `json:"block_size_tokens"`
	MaxModelLen     int               `json:"max_model_len_tokens"`
	KVBlocks        int               `json:"kv_blocks_per_rank"` // engine blocks; 0 unknown
	CacheType       string            `json:"cache_dtype,omitempty"`
	KVCopies        string            `json:"kv_copies,omitempty"`
	KVLastBlock     string            `json:"kv_last_block,omitempty"` // "dropped": recomputed in every hit
	AttentionChunk  int               `json:"attention_chunk_tokens,omitempty"`
	KVHash          string            `json:"kv_hash,omitempty"`
	KVHashSeed      string            `json:"kv_hash_seed,omitempty"`
	Revision        string            `json:"revision,omitempty"`
	Slice           string            `json:"slice,omitempty"`
	From            map[string]string `json:"from,omitempty"` // where each fact comes from
	Source          string            `json:"source"`
	Origin          string            `json:"origin,omitempty"`
	Health          string            `json:"health"`
	Reason          string            `json:"reason,omitempty"`
	Since           time.Time         `json:"since,omitzero"`
	Draining        bool              `json:"draining"`
	Usable          bool              `json:"usable"`
	Conflict        string            `json:"conflict,omitempty"`
	// Troubles are what is wrong with it although it answers; that a rank is slow
	// stands with the rank.
	Troubles []Trouble `json:"troubles,omitempty"`
	// Ranks are one and more; absent in dynctl top, which lists them apart.
	Ranks []Rank `json:"ranks,omitempty"`
}

// Trouble is something wrong with a worker.
type Trouble struct {
	// Cause is "failing", "mute" or "small_cache".
	Cause string `json:"cause"`
	// Rank is the label of the rank that it is about; absent for the whole worker.
	Rank  string    `json:"rank,omitempty"`
	Text  string    `json:"text"`
	Since time.Time `json:"since"`
}

// CacheGroup is one of several KV caches of a rank's layers.
type CacheGroup struct {
	Group  int32  `json:"group"` // the engine's number of it
	Kind   string `json:"kind"`
	Window int    `json:"window_tokens,omitempty"`
	Block  int    `json:"block_tokens"`
}

// Rank is one data-parallel rank, as the router sees it and as its engine
// does (GET /admin/v1/ranks).
type Rank struct {
	Label  string `json:"label"` // "worker/dpN"
	Worker string `json:"worker"`
	DP     int    `json:"dp"`
	Slot   uint32 `json:"slot"`
	Role   string `json:"role"`
	Health string `json:"health"`
	Usable bool   `json:"usable"`
	Reason string `json:"reason,omitempty"`

	// The router's account.
	ActiveRequests int    `json:"active_requests"`
	PrefillTokens  int64  `json:"prefill_tokens"`
	DecodeBlocks   int64  `json:"decode_blocks"`
	Requests       uint64 `json:"requests_total"`
	Failures       uint64 `json:"failures_total"`
	// Moves are the streams that continued elsewhere; null in a recording without outcomes.
	Moves *Moves `json:"moves"`

	// As the router measured it in the last seconds, null without samples: medians
	// of the time to a leg's first token and of the time between tokens, and what
	// came out.
	TTFT       *float64 `json:"ttft_ms"`
	ITL        *float64 `json:"itl_ms"`
	OutputRate *float64 `json:"output_tokens_per_second"`
	// Slow is absent unless the rank is slow, as far as is known. SpeedKnown says that
	// enough is known of the rank and of its peers to judge it; false without traffic, and
	// where it has neither peers like it nor a past.
	Slow       *Slow `json:"slow,omitempty"`
	SpeedKnown bool  `json:"speed_known"`

	// The index and its feed.
	IndexBlocks   int64 `json:"index_blocks"` // router blocks
	CapacityBlock int64 `json:"capacity_blocks,omitempty"`
	// IndexRoom is the most that IndexBlocks can truly be: more than CapacityBlock where
	// several cache groups share a pool.
	IndexRoom int64 `json:"index_room_blocks,omitempty"`
	Feed      Feed  `json:"feed"`

	// What the engine reports; null before its first report.
	Engine *EngineLoad `json:"engine"`
}

// Moves are streams that continued elsewhere, since the rank joined: those that it had, and
// rests that were requested of its engine as decode legs, each attempt counted. Waiting are
// those that wait now for a place on it; null in a recording, which does not have it.
type Moves struct {
	Away    uint64 `json:"away_total"`
	Onto    uint64 `json:"here_total"`
	Waiting *int   `json:"waiting"`
}

// Slow says at what a rank is slow, and how much: its median over the median of
// ranks with the same role, model and hardware.
type Slow struct {
	Figure string    `json:"figure"` // "ITL" or "TTFT"
	Times  float64   `json:"times"`
	Since  time.Time `json:"since"`
	// Always says that it was hardly faster before, as far as is known.
	Always bool `json:"always,omitempty"`
}

// EngineLoad is the newest scrape of a rank.
type EngineLoad struct {
	Running       *int     `json:"running_requests"`
	Waiting       *int     `json:"waiting_requests"`
	KVUsage       *float64 `json:"kv_usage_share"`
	PrefixQueries *float64 `json:"prefix_queries_tokens_total"`
	PrefixHits    *float64 `json:"prefix_hits_tokens_total"`
	ExternalHits  *float64 `json:"external_hits_tokens_total"`
	// Unused says why the rank counts as idle although its engine exports no
	// load series of it: its counters say that it has served nothing yet.
	Unused bool      `json:"unused,omitempty"`
	At     time.Time `json:"at"`
}

// Feed is the state of a rank's KV event feed.
type Feed struct {
	// State is "none", "connecting", "live", "gap", "replaying", "verifying",
	// "stale", "mute" or "unknown".
	State    string    `json:"state"`
	Trusted  bool      `json:"trusted"`
	Reason   string    `json:"reason,omitempty"`
	Since    time.Time `json:"since,omitzero"`
	Endpoint string    `json:"endpoint,omitempty"`
	// Replay is the replay endpoint, nil in a recording, which does not have it.
	// Without one (""), a lost batch costs all of the rank's entries, and a lost
	// connection does unless the engine's metrics and its next batch prove that
	// nothing was missed.
	Replay *string `json:"replay_endpoint,omitempty"`
	// UnknownKinds are the engine's names of cache kinds that this version does
	// not know; with one of them the rank's blocks cannot be known.
	UnknownKinds []string `json:"unknown_cache_kinds,omitempty"`
	// CacheGroups are those of a rank whose events name several; what it is credited with is
	// what all of them can continue from.
	CacheGroups []CacheGroup `json:"cache_groups,omitempty"`
	// TiersReported says that events have named a tier outside the device and the rank is followed
	// there, which hybrid models are not, Tiers how many of its blocks are there.
	TiersReported bool        `json:"tiers_reported,omitempty"`
	Tiers         route.Tiers `json:"tiers,omitzero"`
	// CopiesImplausible says that copies of the rank's blocks are not counted because its
	// events add up to more than there can be.
	CopiesImplausible bool `json:"copies_implausible,omitempty"`
	// HashDiffers says that the engine names its blocks otherwise than kv_hash and
	// kv_hash_seed state, so that only what its events say counts.
	HashDiffers bool `json:"hash_differs,omitempty"`
	// LastSeq is the number of the newest batch, null before the first.
	LastSeq  *uint64   `json:"last_seq"`
	LastAt   time.Time `json:"last_at,omitzero"`
	Batches  uint64    `json:"batches_total"`
	Events   uint64    `json:"events_total"`
	Blocks   uint64    `json:"blocks_total"`
	Gaps     uint64    `json:"gaps_total"`
	Replayed uint64    `json:"replayed_batches_total"`
	Restarts uint64    `json:"restarts_total"`
	Errors   uint64    `json:"decode_errors_total"`
	Orphans  uint64    `json:"orphaned_blocks_total"`
	Lost     uint64    `json:"lost_batches_total"`
	// ConnectErrors, SourceErrors and ReplayErrors count what failed: connections,
	// questions for the endpoint, replays.
	ConnectErrors uint64 `json:"connect_errors_total"`
	SourceErrors  uint64 `json:"source_errors_total"`
	ReplayErrors  uint64 `json:"replay_errors_total"`
	// Overrun counts batches dropped because too many waited for a replay, which is requested
	// again.
	Overrun uint64 `json:"overrun_batches_total"`
	// Foreign counts batches of a second publisher that claims the rank,
	// RankDisagree those that claim another rank than that of the socket.
	Foreign      uint64 `json:"foreign_batches_total"`
	RankDisagree uint64 `json:"rank_disagree_batches_total"`
	// Unindexed counts blocks that the index cannot hold: they came without token
	// ids, with more or fewer than fit, or when too many blocks of several parts
	// were held.
	Unindexed uint64 `json:"unindexed_blocks_total"`
	// Refused counts the blocks that found no room in the index.
	Refused uint64 `json:"refused_blocks_total"`
	// Dropped is how often the rank's entries were dropped, to be rebuilt.
	Dropped uint64 `json:"dropped_total"`
	// Lag is receipt minus publication of the newest batch that was not replayed,
	// by two clocks, in seconds; null before the first, and where the publisher
	// has no clock.
	Lag *float64 `json:"lag_seconds"`
}

// WorkerList answers GET /admin/v1/workers.
type WorkerList struct {
	Schema   string    `json:"schema"`
	Now      time.Time `json:"now"`
	Revision uint64    `json:"fleet_revision"`
	Workers  []Worker  `json:"workers"`
}

// RankList answers GET /admin/v1/ranks.
type RankList struct {
	Schema string    `json:"schema"`
	Now    time.Time `json:"now"`
	Ranks  []Rank    `json:"ranks"`
}

// AddWorker is the body of POST /admin/v1/workers: the flag form of a worker.
type AddWorker struct {
	Role string `json:"role,omitempty"`
	Spec string `json:"spec"`
}

// DecisionList answers GET /admin/v1/decisions, newest first. Decisions are
// receipts (schema dynctl.receipt/v1), given as they are so that this package
// does not repeat their shape.
type DecisionList struct {
	Schema    string            `json:"schema"`
	Now       time.Time         `json:"now"`
	Decisions []json.RawMessage `json:"decisions"`
	// Next is the cursor of older decisions; empty at the end.
	Next string `json:"next,omitempty"`
	// Total counts the decisions since the start.
	Total uint64 `json:"decisions_total"`
}

// IndexStats answers GET /admin/v1/index/stats.
type IndexStats struct {
	Schema string      `json:"schema"`
	Now    time.Time   `json:"now"`
	Totals IndexTotals `json:"totals"`
	Ranks  []IndexRank `json:"ranks"`
}

// IndexRank is what the index holds of one rank.
type IndexRank struct {
	Label    string `json:"label"`
	Slot     uint32 `json:"slot"`
	Blocks   int64  `json:"blocks"`
	Stored   uint64 `json:"stored_total"`
	Removed  uint64 `json:"removed_total"`
	Orphaned uint64 `json:"orphaned_total"`
	Refused  uint64 `json:"refused_total"`
	Lost     bool   `json:"lost"`
}

// IndexChildren answers GET /admin/v1/index/children?node=&sort=&limit=&rank=.
type IndexChildren struct {
	Schema   string      `json:"schema"`
	Now      time.Time   `json:"now"`
	Node     *IndexNode  `json:"node"` // null for the root
	Children []IndexNode `json:"children"`
	Total    int         `json:"total"`
	Partial  bool        `json:"partial"`
}

// IndexNode is one run of blocks in the radix tree, from where it leaves others to
// where others leave it.
type IndexNode struct {
	ID           string `json:"id"`
	DepthBlocks  int    `json:"depth_blocks"`
	LengthBlocks int    `json:"length_blocks"`
	Local        string `json:"local_hash"` // of the first block, 16 hex digits
	Children     int    `json:"children"`
	Blocks       int    `json:"subtree_blocks"`
	Exact        bool   `json:"subtree_exact"` // otherwise there are more children and blocks
	Ranks        int    `json:"ranks"`
	Longest      int    `json:"longest_blocks"`
	Hits         uint64 `json:"hits_total"`
	HitsExact    bool   `json:"hits_exact"` // otherwise there may be more
	// RankLabels are those of the ranks that hold it: of the requested node all, of its
	// children at most 64.
	RankLabels []string `json:"rank_labels"`
}

// Event is one entry of the event log.
type Event = eventlog.Event

// EventList answers GET /admin/v1/events?after=&limit=&wait=, oldest first:
// the events that follow "after", the newest without it.
type EventList struct {
	Schema string    `json:"schema"`
	Now    time.Time `json:"now"`
	Events []Event   `json:"events"`
	Newest uint64    `json:"newest_seq"`
	Lost   uint64    `json:"lost"` // overwritten between "after" and the first event
}

// Snapshot answers GET /admin/v1/snapshot?decisions=&events=&after=: all that
// a screen needs for one refresh, taken at one moment.
type Snapshot struct {
	Schema    string            `json:"schema"`
	Status    Status            `json:"status"`
	Workers   []Worker          `json:"workers"` // with their ranks
	Decisions []json.RawMessage `json:"decisions"`
	Events    []Event           `json:"events"`
}

// RouteRequest is the body of POST /admin/v1/route, a dry run: what would be
// decided for this request now. Exactly one of Body, Prompt and Tokens is set.
type RouteRequest struct {
	// Endpoint is the path that the body is for; /v1/completions by default.
	Endpoint string          `json:"endpoint,omitempty"`
	Body     json.RawMessage `json:"body,omitempty"`
	Model    string          `json:"model,omitempty"`
	Prompt   string          `json:"prompt,omitempty"`
	Tokens   []uint32        `json:"tokens,omitempty"`
	// Path forces "local" or "remote"; Session is the session key.
	Path    string `json:"path,omitempty"`
	Session string `json:"session,omitempty"`
}

// RouteAnswer answers a dry run. Receipt has the form of a decision's receipt,
// without an outcome; Text is the same in plain words.
type RouteAnswer struct {
	Schema  string          `json:"schema"`
	Receipt json.RawMessage `json:"receipt"`
	Text    string          `json:"text"`
}

// ConfigView answers GET /admin/v1/config.
type ConfigView struct {
	Schema   string        `json:"schema"`
	Revision uint64        `json:"config_revision"`
	Settings []ConfigValue `json:"settings"`
}

// ConfigValue is one effective setting.
type ConfigValue struct {
	Key    string `json:"key"`
	Value  any    `json:"value"`
	Origin string `json:"origin"`
}

// ConfigPatch is the body of POST /admin/v1/config: settings that may change while the router
// runs ("routing.threshold", "routing.policy", …). All are applied together or none.
type ConfigPatch struct {
	Settings map[string]any `json:"settings"`
}

// DrainRequest is the body of POST /admin/v1/drain.
type DrainRequest struct {
	// TimeoutSeconds is how long running requests may take; 0 stands for
	// timeouts.drain.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
}

// DrainState is a drain of the router that has begun.
type DrainState struct {
	Since time.Time `json:"since"`
	// Closes is when new requests are refused, Until when what still runs is cut.
	Closes   time.Time `json:"closes,omitzero"`
	Until    time.Time `json:"until,omitzero"`
	Inflight int       `json:"inflight_requests"`
}

// Problem is the body of an answer that is not 2xx.
type Problem struct {
	Error struct {
		Message string `json:"message"`
		Type    string `json:"type"`
		Code    string `json:"code"`
	} `json:"error"`
}
