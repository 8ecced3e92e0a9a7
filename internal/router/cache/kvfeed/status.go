package kvfeed

import (
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/router/cache/kvtier"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Status is the account of one rank's feed. Counters only grow while the rank
// is with the Manager.
type Status struct {
	Rank   kvindex.Rank `json:"rank"`
	Worker string       `json:"worker"`
	DP     int          `json:"dp_rank"`
	State  State        `json:"state"`
	// Reason says in plain words why the rank is in its state.
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"`
	// Trusted says that routing may use the rank's overlap.
	Trusted bool `json:"trusted"`
	// Complete says that the entries come from every batch the publisher ever
	// sent; if not, blocks stored before may be missing.
	Complete bool   `json:"complete"`
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay_endpoint,omitempty"`

	// UnknownKinds are the engine's names of cache kinds that nothing is known of
	// here. With one of them the rank's blocks cannot be known.
	UnknownKinds []string `json:"unknown_cache_kinds,omitempty"`
	// CacheGroups are set when the engine has reported more than one.
	CacheGroups []kvgroup.Group `json:"cache_groups,omitempty"`
	// TiersReported says that the engine has reported a tier outside its device and that such
	// tiers are followed; Tiers counts the blocks there.
	TiersReported bool        `json:"tiers_reported,omitempty"`
	Tiers         route.Tiers `json:"tiers,omitzero"`

	// CopiesImplausible says that copies of the rank's blocks are not counted because
	// its events stored more of them than there can be.
	CopiesImplausible bool `json:"copies_implausible,omitempty"`

	// HashDiffers says that the engine names its blocks otherwise than was stated.
	HashDiffers bool `json:"hash_differs,omitempty"`

	// LastSeq is the newest batch applied, -1 before the first.
	LastSeq   int64     `json:"last_seq"`
	LastEvent time.Time `json:"last_event,omitzero"`
	// Heard is when a batch was applied last, or when the rank was trusted after that.
	Heard time.Time `json:"heard,omitzero"`
	// LagSeconds is receipt minus publication of the newest live batch, by two
	// clocks; NaN before the first that was dated.
	LagSeconds float64 `json:"lag_seconds"`

	kvstream.Shape
	kvstream.Counters
	FeedCounters
}

// FeedCounters count what happened between the socket and the stream.
type FeedCounters struct {
	Connects      uint64 `json:"connects"`
	ConnectErrors uint64 `json:"connect_errors"`
	// SourceErrors counts failed questions for the current event endpoint.
	SourceErrors uint64 `json:"source_errors"`
	// Malformed messages were not those of a KV event socket.
	Malformed  uint64 `json:"malformed_messages"`
	Duplicates uint64 `json:"duplicate_batches"`
	Restarts   uint64 `json:"restarts"`
	Gaps       uint64 `json:"gaps"`
	// Missing counts the batches inside gaps, Lost those of them that no replay
	// brought back.
	Missing         uint64 `json:"missing_batches"`
	Lost            uint64 `json:"lost_batches"`
	Replays         uint64 `json:"replays"`
	ReplayErrors    uint64 `json:"replay_errors"`
	ReplayedBatches uint64 `json:"replayed_batches"`
	// Overrun counts live batches dropped because too many waited for a replay;
	// they are fetched again by the next one.
	Overrun uint64 `json:"overrun_batches"`
	// Foreign counts batches of a second publisher that claims the rank.
	Foreign uint64 `json:"foreign_batches"`
	// RankDisagree counts batches that claim another rank than the socket's.
	RankDisagree uint64 `json:"rank_disagree_batches"`
}

// Observation is something that changed a rank's entries, in the order in which
// it did. Slices belong to the feed and are valid during the call only.
type Observation struct {
	Rank   kvindex.Rank
	Worker string
	DP     int
	At     time.Time
	// Cleared says that the rank's entries were dropped, for Reason; there is no
	// batch then. ForgotPublisher says that what was learned about the publisher was
	// dropped with them.
	Cleared, ForgotPublisher bool
	Reason                   string

	Seq     uint64
	Payload []byte
	// Replayed says that the batch came from the replay socket.
	Replayed bool

	// OfFeed says that this is about the feed itself, with neither batch nor
	// clearing: it began or ended, or its entries are trusted from now on, or
	// no longer.
	OfFeed bool
	// Began says that the feed begins, with entries from a snapshot if Kept, with
	// none otherwise, in blocks of BlockSize tokens; Traits are those of its Key.
	Began, Kept bool
	Traits      kvgroup.Traits
	BlockSize   int
	// Trusted is whether routing may use the entries.
	Trusted bool
}

// readerState is what requests read of a rank without its lock. groups is nil while the rank has
// reported one cache group only, tiers while it has reported the device only.
type readerState struct {
	word   atomic.Uint64
	groups atomic.Pointer[kvgroup.Groups]
	tiers  atomic.Pointer[kvtier.Tiers]
	// placeholder is the token that stands for media, above 32 bits where it is known, else 0.
	placeholder atomic.Uint64
}

// known marks a placeholder.
const known = 1 << 32

// The word in which a rank's trust and shape are read.
const (
	wordTrusted = 1 << iota
	wordBigram
	wordDrops
	wordFed          // there is a feed
	wordMore         // groups or tiers
	wordAhead = iota // shift of the tokens after a block that its name covers, 8 bits
	wordParts = wordAhead + 8
)

// publish makes state and shape visible to Trusted and Usable, until the feed has ended.
// The caller holds r.mu.
func (r *rank) publish() {
	if r.want == wantEnd {
		return
	}
	s := r.stream.Shape()
	w := uint64(s.Parts)<<wordParts | uint64(uint8(s.Ahead))<<wordAhead | wordFed
	if s.Bigram {
		w |= wordBigram
	}
	if s.Drops {
		w |= wordDrops
	}
	if r.state == Live {
		w |= wordTrusted
	}
	g, t := r.stream.GroupsAndTiers()
	if g != nil || r.reader.groups.Load() != nil {
		r.reader.groups.Store(g)
		if g != nil {
			w |= wordMore
		}
	}
	if t != nil || r.reader.tiers.Load() != nil {
		r.reader.tiers.Store(t)
		if t != nil {
			w |= wordMore
		}
	}
	var placeholder uint64
	if token, ok := r.stream.Placeholder(); ok {
		placeholder = known | uint64(token)
	}
	if placeholder != r.reader.placeholder.Load() {
		r.reader.placeholder.Store(placeholder)
	}
	if w == r.published {
		return
	}
	turned := (w^r.published)&wordTrusted != 0
	r.published = w
	r.reader.word.Store(w)
	if turned {
		r.observeFeed(Observation{Trusted: w&wordTrusted != 0})
	}
}

// observeFeed passes what happens to the feed itself to the observer. The caller
// holds r.mu, or r is not known to anybody yet.
func (r *rank) observeFeed(o Observation) {
	o.OfFeed = true
	r.observe(r.m.now(), o)
}

// status returns the rank's account.
func (r *rank) status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Status{
		Rank: r.id, Worker: r.key.Worker, DP: r.key.DP,
		State: r.state, Reason: r.reason, Since: r.since,
		Trusted: r.state == Live, Complete: r.stream.Complete(),
		Endpoint: r.src.Endpoint, Replay: r.src.Replay,
		CacheGroups:  r.stream.CacheGroups(),
		UnknownKinds: slices.Clone(r.stream.UnknownKinds()),
		LastSeq:      -1, LastEvent: r.lastEvent, Heard: r.heard, LagSeconds: r.lag,
		TiersReported: r.stream.TiersReported(), Tiers: r.stream.Tiers(),
		CopiesImplausible: r.key.CopiesImplausible || r.stream.CopiesImplausible(),
		HashDiffers:       r.stream.HashDiffers(),
		Shape:             r.stream.Shape(), Counters: r.stream.Counters(), FeedCounters: r.n,
	}
	if last, ok := r.stream.Last(); ok {
		s.LastSeq = int64(min(last, math.MaxInt64))
	}
	return s
}
