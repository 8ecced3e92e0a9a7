package admin

import (
	"time"
)

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
