// Package replay does recorded runs again: it plays KV events through the router's own feed and
// index, makes recorded decisions once more and explains where they come out differently. It
// also runs recorded requests through the router's stages and simulated engines under a virtual
// clock.
package replay

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/route"
)

// PlayerOptions configure a Player.
type PlayerOptions struct {
	// BlockSize is the router's block in tokens for ranks whose trace does not state it; 0
	// takes the engine's own.
	BlockSize int
	// MaxRanks bounds the ranks (default kvindex.DefaultMaxRanks).
	MaxRanks int
}

// Player keeps an index in the state that a trace's records describe. It is
// for one goroutine.
type Player struct {
	o     PlayerOptions
	index *kvindex.Index
	ranks map[string]*playRank
	list  []*playRank
	dec   kvevent.Decoder
	batch kvevent.Batch
	ops   kvindex.Batch
	// seen, if it is set, is called for the states of a rank within a batch.
	seen func()
	// Totals of records, for reports.
	counts Counts
}

// Counts are what a Player has played.
type Counts struct {
	Batches uint64 `json:"batches"`
	Events  uint64 `json:"events"`
	// Stored and Removed are router blocks.
	Stored  uint64 `json:"stored_blocks"`
	Removed uint64 `json:"removed_blocks"`
	Clears  uint64 `json:"clears"`
	// Gaps are places where a rank's batch numbers skip without a record that
	// says so; Missing the batches in them.
	Gaps    uint64 `json:"gaps"`
	Missing uint64 `json:"missing_batches"`
	Orphans uint64 `json:"orphan_blocks"`
	// Duplicates are batches that were applied before.
	Duplicates uint64 `json:"duplicate_batches"`
	Unreadable uint64 `json:"unreadable_batches"`
	// Unplaced batches came before their rank's block size was known.
	Unplaced uint64 `json:"unplaced_batches"`
	Dropped  uint64 `json:"records_dropped_while_recording"`
}

type playRank struct {
	name   string
	slot   kvindex.Rank
	size   int // router block in tokens, 0 not known yet
	stream *kvstream.Stream

	traits     kvgroup.Traits
	fed        bool // there were records of its KV events
	trust      bool // what the newest feed record said
	trustKnown bool
	began      bool // the first batch was seen
	described  bool // there was a rank record
	partial    bool // it began with entries that the recording does not have
	next       uint64
	lastLine   int64    // line of the newest record that changed the entries
	gap        *missing // the newest gap
	last       kvstream.Counters
}

// missing is a gap in a rank's batches.
type missing struct {
	from, to      uint64
	after, atLine int64
}

// NewPlayer makes a Player with an empty index.
func NewPlayer(o PlayerOptions) *Player {
	o.MaxRanks = cmp.Or(max(o.MaxRanks, 0), kvindex.DefaultMaxRanks)
	return &Player{o: o, index: kvindex.New(kvindex.Options{MaxRanks: o.MaxRanks}), ranks: map[string]*playRank{}}
}

// Close frees the index.
func (p *Player) Close() { _ = p.index.Close() } // memory only

// Counts is what was played so far.
func (p *Player) Counts() Counts { return p.counts }

// errRanks is a trace of more ranks than the index has slots.
var errRanks = errors.New("more ranks than the index has slots")

// rank finds or makes the rank with a label.
func (p *Player) rank(name string) (*playRank, error) {
	if r := p.ranks[name]; r != nil {
		return r, nil
	}
	if len(p.list) >= p.o.MaxRanks {
		return nil, fmt.Errorf("rank %s: %w (%d)", name, errRanks, p.o.MaxRanks)
	}
	r := &playRank{name: name, slot: kvindex.Rank(len(p.list)), size: p.o.BlockSize}
	if err := p.index.AddRank(r.slot, name); err != nil {
		return nil, fmt.Errorf("rank %s: %w", name, err)
	}
	p.ranks[name] = r
	p.list = append(p.list, r)
	return r, nil
}

// Play does what a record says; records that do nothing to the index are
// stepped over.
func (p *Player) Play(rec *trace.Record) error {
	switch rec.Kind {
	case trace.KindRank, trace.KindBatch, trace.KindClear, trace.KindFeed, trace.KindEvent:
	case trace.KindDropped:
		p.counts.Dropped += rec.Dropped
		return nil
	default:
		return nil
	}
	r, err := p.rank(rec.Rank)
	if err != nil {
		return err
	}
	switch rec.Kind {
	case trace.KindRank:
		switch {
		case rec.RankInfo.New:
			p.renew(r)
		case rec.RankInfo.Kept:
			p.renew(r)
			r.partial = true
		case !r.described:
			r.partial = true // unless its first batch is number 0
		}
		r.described = true
		r.traits = rec.RankInfo.Traits
		if s := rec.RankInfo.BlockSize; s > 0 && s != r.size {
			r.size, r.stream = s, nil
			p.index.ClearRank(r.slot)
		}
	case trace.KindFeed:
		r.fed, r.trust, r.trustKnown = true, rec.Trusted, true
	case trace.KindClear:
		r.fed = true
		p.counts.Clears++
		r.lastLine = rec.Line
		if rec.Clear.ForgotPublisher {
			r.next = 0
		}
		if r.stream != nil {
			if rec.Clear.ForgotPublisher {
				r.stream.Reset()
			} else {
				r.stream.Drop()
			}
			r.stream.TakeFault()
			p.account(r)
		}
		r.gap = nil
		// Whatever was missed is gone from both sides now, but not what was
		// dropped at the same time.
		r.began, r.partial = true, r.partial && !rec.Clear.ForgotPublisher
		r.next = anySeq
	case trace.KindBatch:
		r.fed = true
		p.playBatch(r, rec)
	case trace.KindEvent:
		r.fed = true
		p.playEvent(r, rec)
	}
	return nil
}

// anySeq is a next batch number that may be any.
const anySeq = ^uint64(0)

// renew forgets a rank: its feed begins, as after its worker left the fleet and returned.
func (p *Player) renew(r *playRank) {
	p.index.ClearRank(r.slot)
	r.stream, r.began, r.partial, r.next, r.gap = nil, false, false, 0, nil
	r.trust, r.last = false, kvstream.Counters{}
}

func (p *Player) playBatch(r *playRank, rec *trace.Record) {
	b := &rec.Batch
	p.counts.Batches++
	if !r.began {
		r.began, r.partial, r.next = true, b.Seq != 0, b.Seq
	}
	if r.next != anySeq && b.Seq > r.next {
		r.gap = &missing{from: r.next, to: b.Seq - 1, after: r.lastLine, atLine: rec.Line}
		p.counts.Gaps++
		p.counts.Missing += b.Seq - r.next
	}
	if r.next == anySeq || b.Seq >= r.next {
		r.next = b.Seq + 1
	}
	if r.stream == nil {
		if r.size == 0 {
			if r.size = p.blockOf(b.Payload); r.size == 0 {
				p.counts.Unplaced++
				return
			}
		}
		r.stream = kvstream.New(p.index, r.slot, r.size)
		r.stream.Know(r.traits)
		r.last = kvstream.Counters{}
	}
	before, had := r.stream.Last()
	r.stream.Playback(b.Seq, b.Payload, p.seen)
	r.stream.TakeFault()
	if now, ok := r.stream.Last(); had && ok && now == before {
		p.counts.Duplicates++
	}
	r.lastLine = rec.Line
	p.account(r)
}

// account adds what a rank's stream has done since the last time.
func (p *Player) account(r *playRank) {
	now := r.stream.Counters()
	p.counts.Events += now.Events - r.last.Events
	p.counts.Stored += now.Stored - r.last.Stored
	p.counts.Removed += now.Removed - r.last.Removed
	p.counts.Orphans += now.Orphans - r.last.Orphans
	p.counts.Unreadable += now.Unreadable - r.last.Unreadable
	r.last = now
}

// blockOf is the engine's block size as a batch states it, 0 if it does not.
func (p *Player) blockOf(payload []byte) int {
	if p.dec.Decode(payload, &p.batch) != nil {
		return 0
	}
	for i := range p.batch.Events {
		if e := &p.batch.Events[i]; e.Kind == kvevent.Stored && e.BlockSize > 0 && len(e.Tokens) > 0 {
			return int(e.BlockSize)
		}
	}
	return 0
}

// playEvent applies one event that came as hashes.
func (p *Player) playEvent(r *playRank, rec *trace.Record) {
	e := &rec.Event
	p.counts.Batches++
	p.counts.Events++
	if e.Tier != "" && e.Tier != "device" && e.Tier != "gpu" {
		return
	}
	p.ops.Reset()
	switch e.Op {
	case trace.Stored:
		p.ops.Store(e.Parent, e.HasParent, e.Names, e.Locals)
		p.counts.Stored += uint64(len(e.Names))
	case trace.Removed:
		p.ops.Remove(e.Names...)
		p.counts.Removed += uint64(len(e.Names))
	case trace.Cleared:
		p.ops.Clear()
		p.counts.Clears++
	}
	r.lastLine = rec.Line
	p.counts.Orphans += uint64(p.index.Apply(r.slot, &p.ops).Orphaned)
}

// Overlap asks who holds how many leading blocks.
func (p *Player) Overlap(locals []uint64, q *kvindex.Query) { p.index.Overlap(locals, q) }

// trusted reports whether the rank's entries count; they do unless a record said
// otherwise.
func (r *playRank) trusted() bool { return r.trust || !r.trustKnown }

// prompt is what the cache groups of a rank are asked about.
func prompt(locals []uint64, isl int) kvgroup.Prompt {
	return kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: isl}
}

// promptOf is the prompt of a decision, with what the engine's names of its blocks are
// made of where the recording has it: the tokens, if nothing else is in the hashes. A
// salt or an adapter would be, and neither is recorded.
func promptOf(d *trace.Decision) kvgroup.Prompt {
	p := prompt(d.Locals, d.Input.Facts.ISL)
	if len(d.Locals) > 0 && slices.Equal(blockhash.Locals(nil, d.Tokens, d.BlockSize, blockhash.Key{}), d.Locals) {
		p.Text = new(kvgroup.Text)
		p.Text.Set(d.Tokens, "")
	}
	return p
}

// usable is how many leading tokens of a prompt a rank is known to reuse, as the
// router reads the index: none when it is not trusted, whole engine blocks only; beyond
// are the tokens that its other tiers hold behind them.
func (r *playRank) usable(q *kvindex.Query, p kvgroup.Prompt) (n int, beyond route.Tiers) {
	if !r.trusted() {
		return 0, beyond
	}
	n = q.Depth(r.slot)
	if r.stream != nil {
		n, beyond = r.stream.Usable(n, p)
	}
	return n * r.size, beyond.Scale(r.size, 1)
}

// byNames reports whether a router that trusts the rank finds blocks of it by the engine's
// names of a prompt's own.
func (r *playRank) byNames() bool {
	return r.trusted() && r.stream != nil && r.stream.Mismatch() == "" && r.stream.ByNames()
}

// RankState is what a Player knows of one rank.
type RankState struct {
	Rank      string `json:"rank"`
	Blocks    int64  `json:"blocks"`
	BlockSize int    `json:"block_size_tokens"`
	// Checksum is that of the rank's entries.
	Checksum string `json:"checksum"`
	// Partial says that the rank's cache began with entries that the recording does not have.
	Partial bool `json:"partial,omitempty"`
}

// Ranks lists the ranks in the order of their first record.
func (p *Player) Ranks() []RankState {
	out := make([]RankState, 0, len(p.list))
	for _, r := range p.list {
		s, _ := p.index.RankStats(r.slot)
		out = append(out, RankState{
			Rank: r.name, Blocks: s.Blocks, BlockSize: r.size, Partial: r.partial,
			Checksum: fmt.Sprintf("%016x", p.index.RankChecksum(r.slot)),
		})
	}
	return out
}
