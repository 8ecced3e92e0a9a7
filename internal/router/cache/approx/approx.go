// Package approx predicts prefix overlap from routing, where engines publish
// no KV events or where there are no token ids: what was sent to a rank is
// assumed to be in its cache for a while. Callers label
// them as approximate; they never enter the exact index.
package approx

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// Options of an Index. A zero field means its default.
type Options struct {
	// TTL is how long a block is assumed to stay cached after it was last
	// sent; default 2 minutes.
	TTL time.Duration
	// MaxBlocks bounds the (block, rank) pairs; when it is reached, the oldest
	// are forgotten first. Default 4 Mi.
	MaxBlocks int
	// MaxRanks is the number of rank slots; default as in package kvindex.
	MaxRanks int
}

// Index holds the predicted blocks of ranks. It is safe for concurrent use.
//
// What was sent to a rank is kept as a tree of segments, runs of blocks that
// were sent, and so expire, together: a prompt that is sent again costs a
// comparison of its hashes and moves a few segments, however long it is.
type Index struct {
	ttl time.Duration
	max int
	idx *kvindex.Index

	mu     sync.Mutex
	starts map[key]*segment // by their first block
	// numbers are those of the ranks that have the slots.
	numbers map[kvindex.Rank]uint64
	// list is a ring of all segments in the order of their expiry, itself
	// excluded: list.next goes first. A segment comes after those that hang
	// below it, so that a prefix outlives what follows it.
	list   segment
	blocks int
	path   []*segment // of the prompt at hand
	batch  kvindex.Batch
}

type key struct {
	rank kvindex.Rank
	name uint64
}

// segment is a run of blocks of one rank.
type segment struct {
	rank       kvindex.Rank
	names      []uint64 // sequence hashes, one at least
	expires    time.Time
	made       time.Time // when it was sent first
	grown      bool      // others may hang below it
	prev, next *segment
}

// maxExpire bounds the blocks that one call forgets because of their age, so
// that the first request after a pause does not pay for all that came before.
const maxExpire = 1 << 14

// New makes an empty index.
func New(o Options) *Index {
	o.TTL = cmp.Or(max(o.TTL, 0), 2*time.Minute)
	o.MaxBlocks = cmp.Or(max(o.MaxBlocks, 0), 4<<20)
	x := &Index{
		ttl: o.TTL, max: o.MaxBlocks, starts: map[key]*segment{}, numbers: map[kvindex.Rank]uint64{},
		idx: kvindex.New(kvindex.Options{MaxRanks: o.MaxRanks, MaxBlocks: int64(o.MaxBlocks)}),
	}
	x.list.prev, x.list.next = &x.list, &x.list
	return x
}

// Close frees the index.
func (x *Index) Close() error { return x.idx.Close() }

// AddRank begins to predict the blocks of a rank. Its number distinguishes it
// from others that had its slot before.
func (x *Index) AddRank(r kvindex.Rank, number uint64, name string) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := x.idx.AddRank(r, name); err != nil {
		return err
	}
	x.numbers[r] = number
	return nil
}

// RemoveRank forgets a rank.
func (x *Index) RemoveRank(r kvindex.Rank) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.forget(r)
	delete(x.numbers, r)
	x.idx.RemoveRank(r)
}

// Clear forgets what a rank is predicted to hold.
func (x *Index) Clear(r kvindex.Rank) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.clear(r)
}

// clear is Clear for a caller that holds mu.
func (x *Index) clear(r kvindex.Rank) {
	x.forget(r)
	x.idx.ClearRank(r)
}

// forget drops the segments of a rank; its blocks in the index are the
// caller's.
func (x *Index) forget(r kvindex.Rank) {
	for k, s := range x.starts {
		if k.rank == r {
			delete(x.starts, k)
			x.blocks -= len(s.names)
			s.unlink()
		}
	}
}

func (s *segment) unlink() {
	s.prev.next, s.next.prev = s.next, s.prev
	s.prev, s.next = nil, nil
}

// insert puts s in front of at.
func (s *segment) insert(at *segment) {
	s.prev, s.next = at.prev, at
	s.prev.next, at.prev = s, s
}

// Sent notes that a prompt with these chained sequence hashes and local hashes
// went to a rank at a time. Both slices have the same length. When the rank has
// left meanwhile, and when another one has its slot, nothing is noted.
func (x *Index) Sent(r kvindex.Rank, number uint64, locals, seq []uint64, now time.Time) {
	if len(locals) == 0 {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.expire(now)
	if has, ok := x.numbers[r]; !ok || has != number {
		return
	}
	known := x.walk(r, seq)
	expires := now.Add(x.ttl)
	for i := len(x.path) - 1; i >= 0; i-- { // tail first
		s := x.path[i]
		s.unlink()
		s.insert(&x.list)
		s.expires = expires
	}
	if known < len(seq) {
		x.extend(r, locals, seq, known, expires)
	}
	clear(x.path)
}

// Refused takes back what Sent has predicted at a time: the engine refused the prompt. What
// was there before stays, and so does what other prompts have added since.
func (x *Index) Refused(r kvindex.Rank, number uint64, seq []uint64, sent time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if has, ok := x.numbers[r]; !ok || has != number || len(seq) == 0 {
		return
	}
	if x.walk(r, seq) == len(seq) {
		s := x.path[len(x.path)-1]
		if !s.grown && s.made.Equal(sent) && s.expires.Equal(sent.Add(x.ttl)) {
			x.cut(s, len(s.names))
		}
	}
	clear(x.path)
}

// walk finds the segments that hold the head of a prompt and how many blocks
// that is. A segment of which the prompt uses a part only is split.
func (x *Index) walk(r kvindex.Rank, seq []uint64) (known int) {
	x.path = x.path[:0]
	for known < len(seq) {
		s := x.starts[key{r, seq[known]}]
		if s == nil {
			break
		}
		n := common(s.names, seq[known:])
		x.path = append(x.path, s)
		known += n
		if n < len(s.names) {
			tail := &segment{rank: r, names: slices.Clone(s.names[n:]), expires: s.expires, made: s.made, grown: s.grown}
			s.names, s.grown = slices.Clone(s.names[:n]), true
			tail.insert(s)
			x.starts[key{r, tail.names[0]}] = tail
			break
		}
	}
	return known
}

// common is how many leading values are the same.
func common(a, b []uint64) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// extend adds what follows the known blocks of a prompt, below the path.
func (x *Index) extend(r kvindex.Rank, locals, seq []uint64, known int, expires time.Time) {
	fresh := seq[known:]
	at := &x.list
	if n := len(x.path); n > 0 {
		at = x.path[n-1]
	}
	for oldest := x.list.next; x.blocks+len(fresh) > x.max && oldest != at && oldest != &x.list; oldest = x.list.next {
		x.cut(oldest, x.blocks+len(fresh)-x.max)
	}
	fresh = fresh[:max(0, min(len(fresh), x.max-x.blocks))]
	if len(fresh) == 0 {
		return
	}
	parent := uint64(0)
	if known > 0 {
		parent = seq[known-1]
	}
	x.batch.Reset()
	x.batch.Store(parent, known > 0, fresh, locals[known:known+len(fresh)])
	if res := x.idx.Apply(r, &x.batch); res.Stored+res.Duplicate != len(fresh) {
		// The rank is unknown, or the index has lost blocks that the
		// segments name: start over.
		x.clear(r)
		return
	}
	s := &segment{rank: r, names: slices.Clone(fresh), expires: expires, made: expires.Add(-x.ttl)}
	s.insert(at)
	at.grown = true
	x.starts[key{r, s.names[0]}] = s
	x.blocks += len(s.names)
}

// expire forgets what is older than the TTL.
func (x *Index) expire(now time.Time) {
	for left := maxExpire; left > 0; {
		s := x.list.next
		if s == &x.list || s.expires.After(now) {
			return
		}
		n := min(left, len(s.names))
		left -= n
		x.cut(s, n)
	}
}

// cut forgets the last n blocks of a segment, or all of it. Nothing may hang
// below it.
func (x *Index) cut(s *segment, n int) {
	keep := max(0, len(s.names)-n)
	x.batch.Reset()
	x.batch.Remove(s.names[keep:]...)
	x.idx.Apply(s.rank, &x.batch)
	x.blocks -= len(s.names) - keep
	if keep == 0 {
		delete(x.starts, key{s.rank, s.names[0]})
		s.unlink()
		return
	}
	if s.names = s.names[:keep]; cap(s.names) > 2*keep {
		s.names = slices.Clone(s.names)
	}
}

// Overlap answers how many leading blocks of a prompt each rank is predicted
// to hold.
func (x *Index) Overlap(locals []uint64, q *kvindex.Query) { x.idx.Overlap(locals, q) }

// Blocks is the number of predicted (block, rank) pairs.
func (x *Index) Blocks() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.blocks
}
