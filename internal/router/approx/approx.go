// Package approx guesses prefix overlap where engines tell no KV events, or
// where there are no token ids: what was sent to a rank is assumed to be in
// its cache for a while. Its answers are labelled as guesses by whoever uses
// them; it never feeds the exact index.
package approx

import (
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/kvindex"
)

// Options of an Index. A zero field means its default.
type Options struct {
	// TTL is how long a block is assumed to stay cached after it was last
	// sent; default 2 minutes.
	TTL time.Duration
	// MaxBlocks bounds the (block, rank) pairs; when it is reached, the oldest
	// guesses are forgotten first. Default 4 Mi.
	MaxBlocks int
	// MaxRanks is the number of rank slots; default as in package kvindex.
	MaxRanks int
}

// Index holds guesses. It is safe for concurrent use.
type Index struct {
	ttl time.Duration
	max int
	idx *kvindex.Index

	mu sync.Mutex
	// entries are the guesses in the order of their expiry; a block that was
	// sent again has a later entry too, and only the newest one counts.
	entries []entry
	head    int
	live    map[key]time.Time
	batch   kvindex.Batch
}

type key struct {
	rank kvindex.Rank
	name uint64
}

type entry struct {
	key
	expires time.Time
}

// New makes an empty index.
func New(o Options) *Index {
	if o.TTL <= 0 {
		o.TTL = 2 * time.Minute
	}
	if o.MaxBlocks <= 0 {
		o.MaxBlocks = 4 << 20
	}
	return &Index{
		ttl: o.TTL, max: o.MaxBlocks, live: map[key]time.Time{},
		idx: kvindex.New(kvindex.Options{MaxRanks: o.MaxRanks, MaxBlocks: int64(o.MaxBlocks) + 1<<16}),
	}
}

// Close frees the index.
func (x *Index) Close() error { return x.idx.Close() }

// AddRank begins to take guesses for a rank.
func (x *Index) AddRank(r kvindex.Rank, name string) error { return x.idx.AddRank(r, name) }

// RemoveRank forgets a rank.
func (x *Index) RemoveRank(r kvindex.Rank) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.forget(r)
	x.idx.RemoveRank(r)
}

// ClearRank forgets every guess about a rank, as after a restart of its engine.
func (x *Index) ClearRank(r kvindex.Rank) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.forget(r)
	x.idx.ClearRank(r)
}

func (x *Index) forget(r kvindex.Rank) {
	for k := range x.live {
		if k.rank == r {
			delete(x.live, k)
		}
	}
}

// Sent notes that a prompt with these chained sequence hashes and local hashes
// went to a rank at a time. Both slices have the same length.
func (x *Index) Sent(r kvindex.Rank, locals, seq []uint64, now time.Time) {
	if len(locals) == 0 {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.expire(now)
	x.batch.Reset()
	x.batch.Store(0, false, seq, locals)
	x.idx.Apply(r, &x.batch)
	expires := now.Add(x.ttl)
	// Tail first, so that a prefix always outlives what hangs below it.
	for i := len(seq) - 1; i >= 0; i-- {
		k := key{r, seq[i]}
		x.live[k] = expires
		x.entries = append(x.entries, entry{k, expires})
	}
	for len(x.live) > x.max && x.head < len(x.entries) {
		x.drop()
	}
	x.compact()
}

// expire forgets what is older than the TTL.
func (x *Index) expire(now time.Time) {
	for x.head < len(x.entries) && !x.entries[x.head].expires.After(now) {
		x.drop()
	}
	x.compact()
}

// drop takes the oldest entry, and its block if it was not sent again since.
func (x *Index) drop() {
	e := x.entries[x.head]
	x.head++
	if at, ok := x.live[e.key]; !ok || !at.Equal(e.expires) {
		return
	}
	delete(x.live, e.key)
	x.batch.Reset()
	x.batch.Remove(e.name)
	x.idx.Apply(e.rank, &x.batch)
}

// compact gives the memory of spent entries back, and folds repeated ones when
// they outnumber the live blocks.
func (x *Index) compact() {
	if x.head > 1024 && x.head > len(x.entries)/2 {
		x.entries = append(x.entries[:0], x.entries[x.head:]...)
		x.head = 0
	}
	if waiting := len(x.entries) - x.head; waiting > 4*len(x.live)+4096 {
		kept := x.entries[:0]
		for _, e := range x.entries[x.head:] {
			if at, ok := x.live[e.key]; ok && at.Equal(e.expires) {
				kept = append(kept, e)
			}
		}
		x.entries, x.head = kept, 0
	}
}

// Overlap answers how many leading blocks of a prompt each rank is guessed to
// hold.
func (x *Index) Overlap(locals []uint64, q *kvindex.Query) { x.idx.Overlap(locals, q) }

// Blocks is the number of (block, rank) guesses.
func (x *Index) Blocks() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.live)
}
