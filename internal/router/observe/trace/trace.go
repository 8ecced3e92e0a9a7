// Package trace is the recording of a router: its records, the file that holds
// them, and the readers of the formats that others write.
//
// A file in the project's own format is JSONL, plain or compressed (.gz, .zst).
// Its first line is a Header, every other line one record with a "kind":
//
//	rank      a rank of the fleet and what is known of it
//	kv        one batch of KV events as the engine sent it: base64 of msgpack
//	clear     the router dropped a rank's entries, and why
//	feed      the router began or ceased to trust a rank's entries
//	event     one KV event as hashes, where the engine's bytes are not at hand
//	request   a prompt as block hashes or token ids, with its answer's length
//	settings  what an operator has set of decisions, by its revision
//	worker    a worker as decisions see it, by a number
//	decision  everything else a routing decision was made from, and what it was
//	outcome   what came of a request
//	dropped   how many records were lost before this one
//	end       the last record of a recording that was closed
//
// There is never any text of a prompt or an answer in it. Kinds and members that a reader does
// not know are stepped over. A decision that depends on such a member, or on a settings or
// worker line that was lost, cannot be made again, and says so. Times are microseconds since the
// header's start; within a rank, records are in the order in which they took effect.
// docs/trace-format.md has every member.
//
// Also read, and recognized by their first line: the lines of Dynamo's KV event
// recorder (1.6), Dynamo request traces (dynamo.request.trace.v1), request
// traces of Mooncake and of Alibaba's Bailian, and raw captures of KV event
// sockets (one JSON object per message with frames_b64).
package trace

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
)

// Schema names the version of the project's own format.
const Schema = "dynctl.trace/v2"

// schemaName is Schema without its version.
const schemaName = "dynctl.trace/"

// Header is the first line of an own trace.
type Header struct {
	Schema string `json:"schema"`
	// Source says who wrote the file: "serve", "record", "convert".
	Source  string `json:"source,omitempty"`
	Version string `json:"dynctl_version,omitempty"`
	// Router names the router among those that share its load; empty for one alone.
	Router string `json:"router,omitempty"`
	// Rules is the version of the rules that decided (decide.Rules), Terms the
	// terms of a cost. Zero terms are left out of decisions, so that only Terms
	// show a reader that there is one that it does not know.
	Rules int      `json:"rules,omitempty"`
	Terms []string `json:"terms,omitempty"`
	// Start is the time that the records' times count from.
	Start time.Time `json:"start"`
	// Part counts the files of one recording from 0.
	Part int `json:"part,omitempty"`
	// BlockSize is the router's block in tokens, 0 when ranks differ.
	BlockSize int `json:"block_size_tokens,omitempty"`
	// Prompts says what a request's prompt is: "whole" (all of it) is the only
	// value; another format's turns that add to each other are joined first.
	Prompts string `json:"prompts,omitempty"`
}

// Kind is what a record is of.
type Kind string

// The kinds of records.
const (
	KindRank     Kind = "rank"
	KindBatch    Kind = "kv"
	KindClear    Kind = "clear"
	KindFeed     Kind = "feed"
	KindEvent    Kind = "event"
	KindRequest  Kind = "request"
	KindSettings Kind = "settings"
	KindWorker   Kind = "worker"
	KindCosts    Kind = "costs"
	KindDecision Kind = "decision"
	KindOutcome  Kind = "outcome"
	KindDropped  Kind = "dropped"
	KindEnd      Kind = "end"
)

// Record is one record of a trace; the member of its kind is set. Settings and
// workers are no records of their own: a Decision has those that it refers to. A
// Reader fills the same Record again and again: Payload, Names and Locals are valid
// until the next call only, what pointers lead to stays.
type Record struct {
	Kind Kind
	// Time since the trace's start.
	Time time.Duration
	// Line is the line's number from 1, Offset the byte in the (uncompressed)
	// file where it begins. Writers ignore both.
	Line, Offset int64
	// Rank is the label "worker/dpN" of rank, kv, clear, feed and event.
	Rank string

	RankInfo RankInfo
	Batch    Batch
	Clear    Clear
	// Trusted is the member of feed.
	Trusted  bool
	Event    Event
	Request  *Request
	Decision *Decision
	Outcome  *Outcome
	// Dropped is how many records were lost, in a dropped record.
	Dropped uint64
	End     *End
}

// RankInfo describes a rank.
type RankInfo struct {
	Slot uint32 `json:"slot"`
	// BlockSize is the router's block for this rank, KVBlocks its capacity in
	// such blocks; 0 when unknown.
	BlockSize int `json:"block_size_tokens,omitempty"`
	KVBlocks  int `json:"kv_blocks,omitempty"`
	// New says that the rank's entries begin empty: its feed begins. Kept says that it begins
	// with entries that the recording does not have, from before a restart or from another router.
	New  bool `json:"new,omitempty"`
	Kept bool `json:"kept,omitempty"`
	// Traits are what the router knew of the engine.
	kvgroup.Traits
}

// Batch is one message of a rank's KV event socket.
type Batch struct {
	Seq uint64
	// Received is when it came, since the trace's start; Record.Time is when its
	// effect was complete.
	Received time.Duration
	// Replayed says that it came from the replay socket.
	Replayed bool
	// Payload is the msgpack.
	Payload []byte
}

// Clear says that a rank's entries were dropped.
type Clear struct {
	// ForgotPublisher says that what was learned of the publisher was dropped, too.
	ForgotPublisher bool   `json:"anew,omitempty"`
	Reason          string `json:"reason,omitempty"`
}

// Op is what an Event does.
type Op string

// The operations.
const (
	Stored  Op = "stored"
	Removed Op = "removed"
	Cleared Op = "cleared"
)

// Event is one KV event as hashes.
type Event struct {
	ID uint64
	Op Op
	// Names are the engine's hashes; Locals the local hashes, for Stored only,
	// parallel to Names. Parent is the engine's hash of the block before.
	Names, Locals []uint64
	Parent        uint64
	HasParent     bool
	// Tier, Domain, Start and Extra are Dynamo's storage_tier, residency_domain,
	// start_position (-1 when absent) and the blocks' mm_extra_info, kept as
	// they came; Extra is a JSON array or nil.
	Tier, Domain string
	Start        int64
	Extra        json.RawMessage
	Session      string
}

// Request is a prompt without its text.
type Request struct {
	ID    string `json:"id,omitempty"`
	Model string `json:"model,omitempty"`
	// ISL and OSL are the lengths of the prompt and the answer in tokens.
	ISL int `json:"isl_tokens"`
	OSL int `json:"osl_tokens"`
	// BlockSize is the tokens that one element of Blocks stands for.
	BlockSize int `json:"block_size_tokens,omitempty"`
	// IDs says what Blocks are: "local" (hashes of a block's own tokens) or
	// "prefix" (names of a block with all before it).
	IDs string `json:"ids,omitempty"`
	// Blocks may leave out the last, partial block of the prompt.
	Blocks Hashes `json:"blocks,omitempty"`
	// Tokens are the prompt's ids, where they were recorded.
	Tokens  Tokens `json:"tokens,omitempty"`
	Session string `json:"session,omitempty"`
	// ThinkUS is the time in µs from the end of the session's previous answer to this
	// request; nil where the trace does not have it.
	ThinkUS *int64 `json:"think_us,omitempty"`
}

// The kinds of ids.
const (
	LocalIDs  = "local"
	PrefixIDs = "prefix"
)

// End closes a recording.
type End struct {
	Records uint64 `json:"records"`
	Dropped uint64 `json:"dropped"`
}

// Errors that callers distinguish.
var (
	// ErrSchema is a file of another format or of a newer version.
	ErrSchema = errors.New("not a trace that can be read here")
	// ErrEmpty is a file without a single line.
	ErrEmpty = errors.New("the trace is empty")
	// ErrTooManyBad ends the reading of a file with more bad lines than allowed.
	ErrTooManyBad = errors.New("too many bad lines")
)

// LineError is a line that cannot be read.
type LineError struct {
	Name string
	// Line counts from 1; Byte is where the fault is in the uncompressed file.
	Line, Byte int64
	Err        error
}

// Error names the file, the line and the byte.
func (e *LineError) Error() string {
	return fmt.Sprintf("%s: line %d (byte %d): %v", e.Name, e.Line, e.Byte, e.Err)
}

// Unwrap is the cause.
func (e *LineError) Unwrap() error { return e.Err }

// Format is how a file is written.
type Format string

// The formats. Own is the only one that can hold everything.
const (
	Auto            Format = "auto"
	Own             Format = "dynctl"
	DynamoEvents    Format = "dynamo-events"
	DynamoRequests  Format = "dynamo-requests"
	Mooncake        Format = "mooncake"
	Bailian         Format = "bailian"
	Capture         Format = "capture"
	mooncakeBlock          = 512 // tokens of one hash id
	bailianBlock           = 16
	dynamoReqSchema        = "dynamo.request.trace.v1"
)

// Formats lists the formats that can be read.
func Formats() []Format {
	return []Format{Auto, Own, DynamoEvents, DynamoRequests, Mooncake, Bailian, Capture}
}

// ParseFormat reads a format's name.
func ParseFormat(s string) (Format, error) {
	var names []string
	for _, f := range Formats() {
		if string(f) == s {
			return f, nil
		}
		names = append(names, string(f))
	}
	return "", fmt.Errorf("unknown trace format %q (one of %s)", s, strings.Join(names, ", "))
}
