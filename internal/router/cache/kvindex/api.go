package kvindex

import (
	"cmp"
	"errors"
	"math"
)

// Rank is a small dense slot number for a (worker, dp_rank) pair, chosen by the caller and below
// [Options.MaxRanks]. A slot may be given to another pair only after [Index.RemoveRank].
type Rank uint32

// Defaults of [Options].
const (
	DefaultMaxRanks  = 4096
	DefaultMaxBlocks = 128 << 20
	DefaultMaxBytes  = 8 << 30
)

// maxRanks bounds [Options.MaxRanks]: the ranks of a run have to fit the largest array.
const maxRanks = 8191

const minBytes = 16 << 20

// Options are the limits of an [Index]. A zero field means its default.
type Options struct {
	// MaxRanks is the number of rank slots. Default [DefaultMaxRanks], at most 8,191.
	MaxRanks int
	// MaxBlocks is the number of memberships, (block, rank) pairs, that may be held at a time. Stores
	// beyond it are refused and counted, the newest first, and the rank is marked as lost.
	MaxBlocks int64
	// MaxBytes is the memory that the index may map for its tables, in bytes. Stores beyond it are
	// refused as for MaxBlocks. The memory is taken as needed, in steps of 2 MiB. Less than 16 MiB
	// counts as 16 MiB.
	MaxBytes int64
}

func (o Options) withDefaults() Options {
	o.MaxRanks = min(cmp.Or(max(o.MaxRanks, 0), DefaultMaxRanks), maxRanks)
	o.MaxBlocks = cmp.Or(max(o.MaxBlocks, 0), DefaultMaxBlocks)
	o.MaxBytes = max(cmp.Or(max(o.MaxBytes, 0), DefaultMaxBytes), minBytes)
	return o
}

// Errors that callers distinguish.
var (
	ErrRankRange   = errors.New("rank out of range")
	ErrRankInUse   = errors.New("rank is in use")
	ErrUnknownRank = errors.New("unknown rank")
	ErrUnknownNode = errors.New("unknown node")
	ErrSnapshot    = errors.New("bad snapshot")
	ErrNotEmpty    = errors.New("index is not empty")
)

// Result says what one [Index.Apply] did, in blocks.
type Result struct {
	Stored    int // memberships that are new
	Duplicate int // blocks that the rank held already, under this name or another one
	Removed   int // memberships that are gone because of a Remove
	Renamed   int // memberships dropped because their name was given to another block
	Unknown   int // removed names that the rank does not hold
	Orphaned  int // blocks whose chain hangs off a parent that the rank does not hold; not stored
	Refused   int // blocks not stored because a limit is reached, the rank is unknown, or the lengths of names and locals differ
	Copied    int // blocks stored again that count as a further copy, see [Batch.StoreCopies]
	Kept      int // removed names that have another copy left
	Cleared   int // memberships dropped by a Clear
	// Lost reports that the index now knows less than the rank holds (orphaned, renamed or refused blocks).
	Lost bool
}

// add adds what a later batch did.
func (r *Result) add(next *Result) {
	r.Stored += next.Stored
	r.Duplicate += next.Duplicate
	r.Removed += next.Removed
	r.Renamed += next.Renamed
	r.Unknown += next.Unknown
	r.Orphaned += next.Orphaned
	r.Refused += next.Refused
	r.Copied += next.Copied
	r.Kept += next.Kept
	r.Cleared += next.Cleared
	r.Lost = r.Lost || next.Lost
}

type opKind uint8

const (
	opStore opKind = iota + 1
	opRemove
	opClear
)

// op is one step of a batch: names[from:from+n] of the batch. locals of a store start at lfrom.
type op struct {
	kind      opKind
	hasParent bool
	copies    bool   // store: a block that is held already is one more copy
	short     uint32 // store: blocks left out because names and locals differ in length
	from, n   uint32
	lfrom     uint32
	parent    uint64
}

// A Batch collects the events of one rank, usually those of one message of its engine, so that they
// are applied under one lock. It copies what it is given, and its memory is reused after Reset. The
// zero Batch is empty and ready.
type Batch struct {
	ops    []op
	names  []uint64
	locals []uint64
}

// maxBatch bounds the blocks of one batch; what goes beyond is dropped and reported as refused.
const maxBatch = math.MaxUint32 >> 1

// Reset empties the batch and keeps its memory.
func (b *Batch) Reset() {
	b.ops, b.names, b.locals = b.ops[:0], b.names[:0], b.locals[:0]
}

// Blocks returns the number of block names in the batch.
func (b *Batch) Blocks() int { return len(b.names) }

// Store adds a chain of blocks: names[i] is the engine's name of the block with local hash locals[i],
// which follows names[i-1]. The first one follows the block that the rank calls parent, or is a
// block 0 when hasParent is false. Blocks without both a name and a local hash are refused.
func (b *Batch) Store(parent uint64, hasParent bool, names, locals []uint64) {
	n := min(len(names), len(locals), maxBatch-len(b.names))
	b.ops = append(b.ops, op{
		kind: opStore, hasParent: hasParent, parent: parent,
		from: uint32(len(b.names)), lfrom: uint32(len(b.locals)), n: uint32(n),
		short: uint32(max(len(names), len(locals)) - n),
	})
	b.names = append(b.names, names[:n]...)
	b.locals = append(b.locals, locals[:n]...)
}

// StoreCopies is Store for engines that keep a block in memory as often as it was stored and publish the
// removal of each copy (vLLM up to 0.33): a block that the rank holds already under the same name counts
// as a further copy, and is gone when as many removals have come. The number of such blocks is bounded;
// beyond it the first removal counts, so that the index undercounts.
func (b *Batch) StoreCopies(parent uint64, hasParent bool, names, locals []uint64) {
	b.Store(parent, hasParent, names, locals)
	b.ops[len(b.ops)-1].copies = true
}

// Remove adds the removal of blocks by name, in the order of the engine's evictions.
func (b *Batch) Remove(names ...uint64) {
	n := min(len(names), maxBatch-len(b.names))
	if l := len(b.ops); l > 0 && b.ops[l-1].kind == opRemove {
		b.ops[l-1].n += uint32(n)
	} else {
		b.ops = append(b.ops, op{kind: opRemove, from: uint32(len(b.names)), n: uint32(n)})
	}
	if n == 1 { // most engines publish one name each; a copy of many takes longer to begin
		b.names = append(b.names, names[0])
		return
	}
	b.names = append(b.names, names[:n]...)
}

// Clear adds the removal of everything that the rank holds.
func (b *Batch) Clear() { b.ops = append(b.ops, op{kind: opClear}) }

// A Query holds the answer of [Index.Overlap] and is reused from call to call. The zero Query is
// ready. It must not be used by two goroutines at a time.
type Query struct {
	depth   []uint32 // by rank
	touched []uint32 // ranks with a depth above 0
	stripe  uint32   // reader counter in use, +1; 0 = not chosen yet
}

// Depth returns how many leading blocks rank r holds.
func (q *Query) Depth(r Rank) int {
	if int(r) < len(q.depth) {
		return int(q.depth[r])
	}
	return 0
}

// Len returns the number of ranks that hold at least one leading block.
func (q *Query) Len() int { return len(q.touched) }

// Best returns the greatest depth of any rank.
func (q *Query) Best() int {
	best := uint32(0)
	for _, r := range q.touched {
		best = max(best, q.depth[r])
	}
	return int(best)
}

func (q *Query) reset(ranks int) {
	for _, r := range q.touched {
		q.depth[r] = 0
	}
	q.touched = q.touched[:0]
	if len(q.depth) < ranks {
		q.depth = append(q.depth, make([]uint32, ranks-len(q.depth))...)
	}
}

// RankStats are the counters of one rank. All but Blocks only grow while the slot keeps its name.
type RankStats struct {
	Rank     Rank
	Name     string
	Blocks   int64 // held now
	Copies   int64 // further copies of them, see [Batch.StoreCopies]
	Stored   uint64
	Removed  uint64
	Orphaned uint64
	Refused  uint64
	// Lost is set by the first block that could not be stored or kept (see [Result.Lost]) and unset
	// when the rank is cleared.
	Lost bool
}

// Stats are the figures of the whole index.
type Stats struct {
	Ranks       int
	Memberships int64 // (block, rank) pairs
	Blocks      int64 // distinct blocks kept, those that only lead to held ones included
	Nodes       int64 // runs of blocks in the tree
	Bytes       int64 // memory mapped
	MaxBlocks   int64
	MaxBytes    int64
	Lookups     uint64 // calls of Overlap
	Stored      uint64
	Removed     uint64
	Orphaned    uint64
	Refused     uint64
}

// NodeID names a run of blocks for [Index.Children]. It stays valid as long as the run's first block
// lives; a stale one is answered with [ErrUnknownNode], or by the run that took its place.
type NodeID uint64

// Root is the node above all blocks 0.
const Root NodeID = 0

// SortBy is an order of [Index.Children].
type SortBy string

// Orders of children, greatest first.
const (
	ByBlocks SortBy = "blocks" // blocks of the subtree
	ByRanks  SortBy = "ranks"
	ByHits   SortBy = "hits"
)

// BrowseOptions choose and order the answer of [Index.Children].
type BrowseOptions struct {
	Sort     SortBy // default ByBlocks
	Limit    int    // children returned, default 100, at most 1,000
	MinDepth int    // leave out children that end above this depth
	Rank     *Rank  // leave out children that this rank holds nothing of
}

// Child is one run of blocks: from where it leaves others to where others leave it.
type Child struct {
	ID        NodeID
	Depth     int    // blocks of the prefix above the run
	Local     uint64 // local hash of the first block
	Length    int    // blocks in the run
	Children  int    // runs that follow on this one
	Blocks    int    // blocks of the subtree, the run included
	Exact     bool   // Children and Blocks are exact; otherwise the search hit its bound and they are lower ones
	Ranks     int    // ranks that hold the first block or more
	Longest   int    // leading blocks held by the rank that holds most
	Hits      uint64 // lookups that passed through the run
	HitsExact bool   // Hits is exact; otherwise there may be more, which ended in this run or just above
	Mask      []Rank // up to 64 of the ranks counted in Ranks, ascending; all of them in Browse.Node
}

// Browse is the answer of [Index.Children].
type Browse struct {
	Node     Child // the node itself; the zero Child for the root
	Children []Child
	Total    int  // children seen that pass the filter
	Partial  bool // the node has more children than were looked at
}
