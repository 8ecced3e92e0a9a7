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
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
)

// Schema names this version of the API.
const Schema = "dynctl.admin/v1"

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
