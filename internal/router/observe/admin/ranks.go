package admin

import (
	"time"

	"github.com/dynctl/dynctl/internal/router/route"
)

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

// RankList answers GET /admin/v1/ranks.
type RankList struct {
	Schema string    `json:"schema"`
	Now    time.Time `json:"now"`
	Ranks  []Rank    `json:"ranks"`
}
