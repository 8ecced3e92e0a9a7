// Package kvindex answers how many leading blocks of a prompt each rank holds.
package kvindex

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"sync"

	"github.com/dynctl/dynctl/internal/router/blockhash"
)

type block struct {
	parent, local uint64
	depth         int
	kids          map[uint64]struct{}
	ranks         map[Rank]uint64 // name
	hits          uint64
}

type rank struct {
	RankStats
	names map[uint64]uint64 // engine name to sequence hash
}

// Index is the per-rank prefix overlap index. Its methods are safe for concurrent use.
type Index struct {
	o       Options
	mu      sync.RWMutex
	blocks  map[uint64]*block // by sequence hash; 0 = root
	ranks   map[Rank]*rank
	total   int64
	stats   Stats
	lookups uint64
}

// New returns an empty index.
func New(o Options) *Index {
	x := &Index{o: o.withDefaults(), ranks: map[Rank]*rank{}}
	x.blocks = map[uint64]*block{uint64(Root): {kids: map[uint64]struct{}{}}}
	return x
}

// Close frees the index's memory. The index may not be used any more.
func (x *Index) Close() error { return nil }

// AddRank gives slot r to the rank called name.
func (x *Index) AddRank(r Rank, name string) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if int64(r) >= int64(x.o.MaxRanks) {
		return fmt.Errorf("add rank %s in slot %d of %d: %w", name, r, x.o.MaxRanks, ErrRankRange)
	}
	if x.ranks[r] != nil {
		return fmt.Errorf("add rank %s in slot %d: %w", name, r, ErrRankInUse)
	}
	x.ranks[r] = &rank{RankStats: RankStats{Rank: r, Name: name}, names: map[uint64]uint64{}}
	return nil
}

// RemoveRank drops all that rank r holds and frees its slot.
func (x *Index) RemoveRank(r Rank) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if k := x.ranks[r]; k != nil {
		x.clear(k)
		delete(x.ranks, r)
	}
}

// ClearRank drops all that rank r holds.
func (x *Index) ClearRank(r Rank) {
	var b Batch
	b.Clear()
	x.Apply(r, &b)
}

func (x *Index) drop(k *rank, name uint64) {
	s := k.names[name]
	delete(k.names, name)
	delete(x.blocks[s].ranks, k.Rank)
	x.total--
	k.Blocks--
	for s != 0 {
		b := x.blocks[s]
		if len(b.ranks) > 0 || len(b.kids) > 0 {
			return
		}
		delete(x.blocks, s)
		delete(x.blocks[b.parent].kids, s)
		s = b.parent
	}
}

func (x *Index) clear(k *rank) int {
	n := len(k.names)
	for name := range k.names {
		x.drop(k, name)
	}
	return n
}

// Apply performs the batch's events for rank r, in order.
func (x *Index) Apply(r Rank, b *Batch) Result {
	x.mu.Lock()
	defer x.mu.Unlock()
	var res Result
	k := x.ranks[r]
	for i := range b.ops {
		o := &b.ops[i]
		names := b.names[o.from : o.from+o.n]
		if k == nil {
			if o.kind == opStore {
				res.Refused += len(names) + int(o.short)
			} else {
				res.Unknown += len(names)
			}
			continue
		}
		switch o.kind {
		case opStore:
			x.store(k, o, names, b.locals[o.lfrom:o.lfrom+o.n], &res)
			res.Refused += int(o.short)
		case opRemove:
			for _, name := range names {
				if _, ok := k.names[name]; ok {
					x.drop(k, name)
					res.Removed++
				} else {
					res.Unknown++
				}
			}
		case opClear:
			res.Cleared += x.clear(k)
			k.Lost = false
		}
		if res.Orphaned+res.Refused+res.Renamed > 0 {
			res.Lost = true
		}
	}
	if k != nil {
		k.Lost = k.Lost || res.Lost
		k.Stored += uint64(res.Stored)
		k.Duplicate += uint64(res.Duplicate)
		k.Removed += uint64(res.Removed)
		k.Renamed += uint64(res.Renamed)
		k.Unknown += uint64(res.Unknown)
		k.Orphaned += uint64(res.Orphaned)
		k.Refused += uint64(res.Refused)
		k.Cleared += uint64(res.Cleared)
	}
	x.stats.Stored += uint64(res.Stored)
	x.stats.Duplicate += uint64(res.Duplicate)
	x.stats.Removed += uint64(res.Removed)
	x.stats.Renamed += uint64(res.Renamed)
	x.stats.Unknown += uint64(res.Unknown)
	x.stats.Orphaned += uint64(res.Orphaned)
	x.stats.Refused += uint64(res.Refused)
	x.stats.Cleared += uint64(res.Cleared)
	return res
}

func (x *Index) store(k *rank, o *op, names, locals []uint64, res *Result) {
	s, depth := uint64(Root), 0
	if o.hasParent {
		var ok bool
		if s, ok = k.names[o.parent]; !ok {
			res.Orphaned += len(names)
			return
		}
		depth = x.blocks[s].depth
	}
	for i, name := range names {
		if x.total >= x.o.MaxBlocks {
			res.Refused += len(names) - i
			return
		}
		p := s
		if s = locals[i]; p != 0 {
			s = blockhash.Next(p, locals[i])
		}
		depth++
		b := x.blocks[s]
		if b == nil {
			b = &block{parent: p, local: locals[i], depth: depth, kids: map[uint64]struct{}{}, ranks: map[Rank]uint64{}}
			x.blocks[s] = b
			x.blocks[p].kids[s] = struct{}{}
		}
		if _, held := b.ranks[k.Rank]; held {
			res.Duplicate++
			continue
		}
		b.ranks[k.Rank] = name
		x.total++
		k.Blocks++
		if _, ok := k.names[name]; ok {
			x.drop(k, name)
			res.Renamed++
		}
		k.names[name] = s
		res.Stored++
	}
}

// Overlap finds, for every rank, how many leading blocks of the prompt with these local hashes it holds.
func (x *Index) Overlap(locals []uint64, q *Query) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	q.reset(x.o.MaxRanks)
	s := uint64(Root)
	for i, l := range locals {
		if i == 0 {
			s = l
		} else {
			s = blockhash.Next(s, l)
		}
		b := x.blocks[s]
		if b == nil {
			return
		}
		for r := range b.ranks {
			if q.depth[r] == uint32(i) {
				if i == 0 {
					q.touched = append(q.touched, uint32(r))
				}
				q.depth[r] = uint32(i) + 1
			}
		}
	}
}

// Stats returns the figures of the whole index.
func (x *Index) Stats() Stats {
	x.mu.RLock()
	defer x.mu.RUnlock()
	s := x.stats
	s.Ranks, s.Memberships, s.Blocks = len(x.ranks), x.total, int64(len(x.blocks)-1)
	s.Nodes, s.MaxBlocks, s.MaxBytes = s.Blocks, x.o.MaxBlocks, x.o.MaxBytes
	return s
}

// RankStats returns the counters of rank r, and false when the slot is free.
func (x *Index) RankStats(r Rank) (RankStats, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if k := x.ranks[r]; k != nil {
		return k.RankStats, true
	}
	return RankStats{}, false
}

// RankBlocks calls yield with the sequence hash and the engine's name of every block that rank r
// holds, in no special order, until it returns false.
func (x *Index) RankBlocks(r Rank, yield func(seq, name uint64) bool) error {
	x.mu.RLock()
	defer x.mu.RUnlock()
	k := x.ranks[r]
	if k == nil {
		return fmt.Errorf("blocks of rank %d: %w", r, ErrUnknownRank)
	}
	for n, s := range k.names {
		if !yield(s, n) {
			return nil
		}
	}
	return nil
}

// RankChecksum returns the sum of a mix of the sequence hashes of all blocks that rank r holds, 0 for
// an empty or free slot. It does not depend on names or on the order of events.
func (x *Index) RankChecksum(r Rank) uint64 {
	sum := uint64(0)
	_ = x.RankBlocks(r, func(seq, _ uint64) bool {
		sum += blockhash.Next(seq, 1)
		return true
	})
	return sum
}

// Checksum returns a checksum of who holds what: of rank names and sequence hashes.
func (x *Index) Checksum() uint64 {
	sum := uint64(0)
	for r := range Rank(x.o.MaxRanks) {
		if s, ok := x.RankStats(r); ok {
			sum += rankTerm(s.Name, x.RankChecksum(r))
		}
	}
	return sum
}

func rankTerm(name string, sum uint64) uint64 {
	return blockhash.Next(uint64(crc32.ChecksumIEEE([]byte(name))), sum)
}

// Children returns the runs that hang off node.
func (x *Index) Children(node NodeID, o BrowseOptions) (Browse, error) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	b := x.blocks[uint64(node)]
	if b == nil {
		return Browse{}, fmt.Errorf("children of node %x: %w", uint64(node), ErrUnknownNode)
	}
	var out Browse
	for s := range b.kids {
		k := x.blocks[s]
		out.Children = append(out.Children, Child{ID: NodeID(s), Depth: k.depth - 1, Local: k.local, Length: 1,
			Children: len(k.kids), Blocks: 1, Ranks: len(k.ranks), Longest: min(1, len(k.ranks))})
	}
	out.Total = len(out.Children)
	slices.SortFunc(out.Children, func(a, b Child) int { return b.Ranks - a.Ranks })
	if o.Limit <= 0 {
		o.Limit = 100
	}
	out.Children = out.Children[:min(len(out.Children), o.Limit)]
	return out, nil
}

// Snapshot writes ranks and memberships with their engine names.
func (x *Index) Snapshot(w io.Writer) error { return errors.ErrUnsupported }

// Restore fills an empty index from a snapshot.
func (x *Index) Restore(r io.Reader) error { return errors.ErrUnsupported }
