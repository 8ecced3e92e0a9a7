// Package kvstream is what the KV events of one rank do to the index: Sequence judges batch
// numbers, Applier turns events into index operations, Stream joins the two with the decoder,
// the index and the accounts of cache groups and tiers. They have no socket and no clock, so
// that live feeds (package kvfeed), the replay of a recording and simulations run the same code.
package kvstream

import (
	"fmt"
	"math"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvtier"
)

// Stream is everything that one rank's batches do to the index, in order: it
// judges numbers, decodes, applies, and empties the rank whenever its entries
// can no longer be true. It is for one goroutine at a time.
//
// Offer never applies a batch that does not follow the one before. After a Gap
// or Restart the caller either offers the missing batches or gives them up with
// Skip or Reset; both empty the rank.
type Stream struct {
	index *kvindex.Index
	rank  kvindex.Rank
	seq   Sequence
	app   *Applier
	dec   kvevent.Decoder
	batch kvevent.Batch
	ops   kvindex.Batch
	tiers *kvtier.Tiers // nil until an event reports one

	seen func() // of Playback

	base     uint64  // no block comes from a batch before this one
	claimed  int32   // the rank that the latest batch claims, -1 for none
	at       float64 // the publisher's time of the latest batch, Unix seconds
	complete bool    // every batch since the publisher's first was applied
	short    bool    // the index refused blocks of the rank for lack of room
	began    bool    // short began, for TakeShort
	fault    string
	counters Counters
}

// Counters count what a Stream did. They only grow.
type Counters struct {
	Batches uint64 `json:"batches"`
	Applied
	// Unreadable counts batches that could not be decoded, Skipped events that
	// could not be; both empty the rank. Unknown counts events of unknown kinds.
	Unreadable uint64 `json:"unreadable_batches"`
	Skipped    uint64 `json:"skipped_events"`
	Unknown    uint64 `json:"unknown_events"`
	// Orphans are blocks whose parent the rank does not hold, Refused those beyond the limits of
	// the index, Renamed those that lost their name to another block. The index holds no such
	// block.
	Orphans uint64 `json:"orphan_blocks"`
	Refused uint64 `json:"refused_blocks"`
	Renamed uint64 `json:"renamed_blocks"`
	// Dropped counts how often the rank was emptied because its entries could
	// not be trusted.
	Dropped uint64 `json:"dropped"`
}

// New makes the Stream of a rank that has a slot in the index, for router
// blocks of blockSize tokens.
func New(index *kvindex.Index, rank kvindex.Rank, blockSize int) *Stream {
	return &Stream{index: index, rank: rank, app: NewApplier(blockSize)}
}

// Know sets what is known of the engine in addition to its events; call it before the
// first batch.
func (s *Stream) Know(t kvgroup.Traits) { s.app.Traits = t }

// Offer judges the next batch and applies it if the verdict is Apply.
func (s *Stream) Offer(seq uint64, payload []byte) Verdict {
	return s.OfferDecoded(seq, payload, nil)
}

// OfferDecoded is Offer for a payload that may have been decoded already; decoded is nil
// if it was not.
func (s *Stream) OfferDecoded(seq uint64, payload []byte, decoded *kvevent.Batch) Verdict {
	first := !s.seq.started
	v := s.seq.Observe(seq, Stamp(payload))
	if v.Kind != Apply {
		return v
	}
	if first {
		s.complete = true
	}
	s.counters.Batches++
	if decoded == nil {
		decoded = &s.batch
		if err := s.dec.Decode(payload, decoded); err != nil {
			s.counters.Unreadable++
			s.claimed, s.at = -1, 0
			s.distrust(fmt.Sprintf("batch %d cannot be read: %v", seq, err))
			return v
		}
	}
	s.claimed, s.at = decoded.Rank, decoded.TS
	s.apply(seq, decoded)
	return v
}

// ApplyUnnumbered applies a batch of an engine that neither numbers nor loses batches:
// a simulated one.
func (s *Stream) ApplyUnnumbered(b *kvevent.Batch) { s.apply(s.seq.Next(), b) }

func (s *Stream) apply(seq uint64, b *kvevent.Batch) {
	was := s.app.Mismatch()
	if s.app.groups == nil && s.app.several(b) {
		s.beginGroups()
	}
	s.ops.Reset()
	tiered := s.app.Counters.Tiered
	s.app.Apply(b, &s.ops)
	if s.tiers != nil || s.app.Counters.Tiered != tiered {
		s.noteTiers(b)
	}
	var r kvindex.Result
	if s.seen == nil {
		r = s.index.Apply(s.rank, &s.ops)
	} else {
		r = s.index.ApplySteps(s.rank, &s.ops, s.seen)
	}
	if s.tiers != nil {
		s.joinTiers(b)
	}
	s.counters.Orphans += uint64(r.Orphaned)
	s.counters.Refused += uint64(r.Refused)
	s.counters.Renamed += uint64(r.Renamed)
	if r.Refused > 0 {
		s.setShort(true)
		s.complete = false
	}
	s.counters.Unknown += uint64(b.Unknown)
	if b.Skipped > 0 {
		// One of them may have been a removal.
		s.counters.Skipped += uint64(b.Skipped)
		s.distrust(fmt.Sprintf("%d events of batch %d cannot be read: %v", b.Skipped, seq, b.Reason))
	}
	if why := s.app.Mismatch(); why != "" && why != was {
		s.counters.Dropped++
		s.fault = why
	}
}

// distrust empties the rank and keeps the reason for TakeFault.
func (s *Stream) distrust(reason string) {
	s.Drop()
	s.fault = reason
}

// Drop empties the rank, whose entries can no longer be known to be true, and continues
// with the next batch.
func (s *Stream) Drop() {
	s.index.ClearRank(s.rank)
	s.app.Emptied()
	s.clearTiers()
	s.counters.Dropped++
	s.base = s.seq.Next()
	s.complete = false
	s.setShort(false)
}

// setShort notes whether the index lacks blocks of the rank for lack of room.
func (s *Stream) setShort(is bool) {
	s.began = is && (s.began || !s.short)
	s.short = is
}

// Short reports whether the index lacks blocks of the rank for lack of room.
func (s *Stream) Short() bool { return s.short }

// EndShort says that the publisher's replay had nothing more that the index lacks.
func (s *Stream) EndShort() { s.setShort(false) }

// TakeShort reports whether, since the last call, the index has begun to lack
// blocks of the rank for lack of room.
func (s *Stream) TakeShort() bool {
	began := s.began
	s.began = false
	return began
}

// TakeFault returns why the latest batches emptied the rank, and forgets it;
// "" when they did not.
func (s *Stream) TakeFault() string {
	f := s.fault
	s.fault = ""
	return f
}

// Skip gives up the batches before seq: the rank is emptied and seq is the next
// batch. A Stream that has seen nothing yet has nothing to empty.
func (s *Stream) Skip(seq uint64) {
	if s.seq.started {
		s.Drop()
	}
	s.seq.Skip(seq)
	s.base = seq
	s.complete = false
}

// Reset empties the rank and waits for the first batch of a publisher that
// started over.
func (s *Stream) Reset() {
	if s.seq.started {
		s.Drop()
	}
	s.seq.Reset()
	s.base = 0
	s.app.Reset()
	s.tiers = nil
	s.complete = false
}

// Playback applies a batch that a feed has applied, in the same order and from the same
// beginning. What was dropped for batches missing before it is played back by Reset and
// Drop. If seen is given it is called for each state of the rank that a reader may have
// found while the batch was being applied, before the last one.
func (s *Stream) Playback(seq uint64, payload []byte, seen func()) {
	s.seen = seen
	defer func() { s.seen = nil }()
	if v := s.Offer(seq, payload); v.Kind == Gap {
		s.seq.Skip(seq)
		s.base = seq
		s.complete = false
		s.Offer(seq, payload)
	}
}

// maxKept bounds the accounts of groups and of tiers that are kept, in bytes together: as
// text in a rank's note they are a third longer, and must fit kvindex.MaxNote. It is enough
// for 2 million blocks.
const maxKept = kvindex.MaxNote / 3 * 2

// Position is where a Stream stands and what it has learned: enough to continue
// with entries of the index that were kept in a file.
type Position struct {
	Seq   uint64 `json:"seq"`
	Stamp uint64 `json:"stamp"`
	Shape
	Group int32 `json:"group"`
	// Base and Complete are those of the Stream.
	Base     uint64 `json:"base"`
	Complete bool   `json:"complete"`
	// Short says that the index had no room for some of the rank's blocks.
	Short bool `json:"short,omitempty"`
	// Groups is the account of a rank's several cache groups (kvgroup.Groups.Append), Tiers
	// that of its blocks outside the device (kvtier.Tiers.Append).
	Groups []byte `json:"groups,omitempty"`
	Tiers  []byte `json:"tiers,omitempty"`
}

// Position returns the Stream's position; false before its first batch, while the rank's
// blocks cannot be held, for blocks of several parts, and when the account of the groups
// is too large for a snapshot. Tiers whose account does not fit are left out: they count
// as empty then.
func (s *Stream) Position() (Position, bool) {
	last, ok := s.seq.Last()
	if !ok || s.app.parts > 1 || s.app.Mismatch() != "" {
		return Position{}, false
	}
	stamp, ok := s.seq.stampOf(last)
	p := Position{Seq: last, Stamp: stamp, Shape: s.app.Shape(), Group: s.app.group, Base: s.base, Complete: s.complete, Short: s.short}
	if g := s.app.groups; g != nil {
		if p.Groups = g.Append(nil); len(p.Groups) > maxKept {
			return Position{}, false
		}
	}
	if s.tiers != nil && s.countsTiers() {
		if kept := s.tiers.Append(nil); len(p.Groups)+len(kept) <= maxKept {
			p.Tiers = kept
		}
	}
	return p, ok
}

// sound reports whether a Stream for router blocks of size tokens may have been there.
func (p *Position) sound(size int) bool {
	shape := p.EngineBlock == 0 && p.Parts == 0 || p.EngineBlock == size && p.Parts == 1
	return shape && p.Seq < kvevent.EndSeq && p.Ahead >= 0 && p.Ahead <= math.MaxUint8 && p.Group >= -1
}

// Resume makes a new Stream continue at p.
func (s *Stream) Resume(p Position) {
	s.seq.Resume(p.Seq, p.Stamp)
	if !p.sound(s.app.size) {
		s.Reset() // kept by a router with another block size, or made up
		return
	}
	s.base, s.complete = p.Base, p.Complete
	s.setShort(p.Short)
	s.app.engine, s.app.parts, s.app.ahead, s.app.bigram, s.app.group = p.EngineBlock, p.Parts, p.Ahead, p.Bigram, p.Group
	if len(p.Groups) > 0 {
		g, err := kvgroup.Read(s.app.size, p.Groups)
		if err != nil {
			s.Reset() // kept by a router with another form of it
			return
		}
		g.Know(s.app.traits())
		s.app.groups = g
	}
	if len(p.Tiers) > 0 {
		// In another form of it they begin empty, which is never too much.
		s.tiers, _ = kvtier.Read(p.Tiers)
	}
}

// Base returns the number of the first batch that the rank's entries come from:
// since it, every batch was applied. A replay that reaches no further back has
// nothing to add.
func (s *Stream) Base() uint64 { return s.base }

// Last returns the number of the newest batch applied, false before the first.
func (s *Stream) Last() (uint64, bool) { return s.seq.Last() }

// Next returns the number that the next batch must have.
func (s *Stream) Next() uint64 { return s.seq.Next() }

// Holds reports whether the batch seq was applied with this very payload, as far as is
// remembered.
func (s *Stream) Holds(seq uint64, payload []byte) bool { return s.seq.Holds(seq, Stamp(payload)) }

// Forgotten reports whether batch seq was applied or skipped so long ago that its stamp is
// gone. Within one connection's overlap of live and replayed batches that is a duplicate.
func (s *Stream) Forgotten(seq uint64) bool { return seq < s.seq.next && s.seq.next-seq > s.seq.known }

// Claimed returns the rank that the latest batch claims to be of, -1 for none.
func (s *Stream) Claimed() int32 { return s.claimed }

// Published returns the publisher's time of the latest batch in Unix seconds, 0 where it
// has none.
func (s *Stream) Published() float64 { return s.at }

// LacksParent reports whether a block came whose parent was never stored, although every batch
// was applied and the index refused none: engine and Stream name blocks in two ways, or a batch
// was lost without a trace. Pairs of tokens are enough for it.
func (s *Stream) LacksParent() bool {
	return s.counters.Orphans > 0 && s.complete && s.counters.Refused == 0 && !s.app.bigram
}

// GroupsAndTiers returns those of the rank's several cache groups and of its tiers, nil
// without one. They are for [Usable], in any goroutine.
func (s *Stream) GroupsAndTiers() (*kvgroup.Groups, *kvtier.Tiers) { return s.app.groups, s.tiers }

// Complete reports whether the rank's entries come from every batch that its
// publisher ever sent; otherwise blocks stored before are missing from them.
func (s *Stream) Complete() bool { return s.complete }

// Placeholder returns the token that stands for media in the engine's prompts; ok is false where
// no event has shown one, or several were seen.
func (s *Stream) Placeholder() (token uint32, ok bool) {
	p := &s.app.placeholder
	return p.Token, p.Known && !p.Mixed
}

// Shape returns the shape of the rank's blocks.
func (s *Stream) Shape() Shape { return s.app.Shape() }

// CacheGroups are those that the rank's engine has reported, nil while it is only one.
func (s *Stream) CacheGroups() []kvgroup.Group {
	if s.app.groups == nil {
		return nil
	}
	return s.app.groups.Reported()
}

// UnknownKinds returns the engine's names of cache kinds that nothing is known of here,
// fit to be shown, in the order in which they came. The slice must not be changed.
func (s *Stream) UnknownKinds() []string { return s.app.unknown }

// CopiesImplausible reports whether the copies of the rank's blocks are no longer counted
// because a block had more of them than there can be.
func (s *Stream) CopiesImplausible() bool {
	return s.app.groups != nil && s.app.groups.CopiesImplausible()
}

// HashDiffers reports whether the engine names its blocks otherwise than was stated.
func (s *Stream) HashDiffers() bool { return s.app.groups != nil && s.app.groups.HashDiffers() }

// ByNames reports whether the rank has blocks that are found only by the engine's names of
// a prompt's own (see [kvgroup.Text]).
func (s *Stream) ByNames() bool { return s.app.groups != nil && s.app.groups.ByNames() }

// Mismatch returns why the rank's blocks cannot be held, or "".
func (s *Stream) Mismatch() string { return s.app.Mismatch() }

// Counters returns what the Stream did so far.
func (s *Stream) Counters() Counters {
	c := s.counters
	c.Applied = s.app.Counters
	return c
}
