package kvindex

import (
	"fmt"
	"hash/crc32"
	"slices"
	"sync/atomic"

	"github.com/dynctl/dynctl/internal/blockhash"
)

// Stats returns the figures of the whole index. It takes no lock, so figures that belong together may
// differ by what was applied meanwhile.
func (x *Index) Stats() Stats {
	s := Stats{
		Ranks: int(x.live.Load()), Memberships: x.held.Load(), Blocks: x.blocks.Load(), Nodes: x.nodes.Load(),
		Bytes: x.m.bytes.Load(), MaxBlocks: x.o.MaxBlocks, MaxBytes: x.o.MaxBytes,
	}
	for i := range x.ep.stripes {
		s.Lookups += x.ep.stripes[i].lookups.Load()
	}
	add := func(c *counters) {
		for _, p := range [...]struct {
			to   *uint64
			from *atomic.Uint64
		}{
			{&s.Stored, &c.stored},
			{&s.Removed, &c.evicted},
			{&s.Orphaned, &c.orphaned},
			{&s.Refused, &c.refused},
		} {
			*p.to += p.from.Load()
		}
	}
	add(&x.gone)
	for i := range x.ranks {
		if k := x.ranks[i].Load(); k != nil {
			add(&k.counters)
		}
	}
	return s
}

// HasRoom reports whether an eighth of the limits is free, so that what was refused may be tried again.
func (x *Index) HasRoom() bool {
	return x.held.Load() <= x.o.MaxBlocks/8*7 && x.m.bytes.Load() <= x.o.MaxBytes/8*7
}

func (x *Index) rank(r Rank) *rankState {
	if int64(r) >= int64(len(x.ranks)) {
		return nil
	}
	return x.ranks[r].Load()
}

// RankStats returns the counters of rank r, and false when the slot is free. It takes no lock.
func (x *Index) RankStats(r Rank) (RankStats, bool) {
	k := x.rank(r)
	if k == nil {
		return RankStats{}, false
	}
	return RankStats{
		Rank: r, Name: k.name, Blocks: x.sizes[r].Load(), Copies: k.extra.Load(),
		Stored: k.stored.Load(), Removed: k.evicted.Load(), Orphaned: k.orphaned.Load(), Refused: k.refused.Load(), Lost: k.lost.Load(),
	}, true
}

// Blocks is how many blocks rank r holds, 0 where the slot is free. It takes no lock.
func (x *Index) Blocks(r Rank) int {
	if int64(r) < int64(len(x.sizes)) {
		return int(x.sizes[r].Load())
	}
	return 0
}

// Ranks returns the counters of all ranks by slot.
func (x *Index) Ranks() []RankStats {
	var out []RankStats
	for r := range x.ranks {
		if s, ok := x.RankStats(Rank(r)); ok {
			out = append(out, s)
		}
	}
	return out
}

// RankBlocks calls yield with the sequence hash and the engine's name of every block that rank r
// holds, reachable or not, in no special order, until it returns false. Events of the rank wait
// meanwhile; lookups and other ranks do not. yield must not call the index.
func (x *Index) RankBlocks(r Rank, yield func(seq, name uint64) bool) error {
	k := x.rank(r)
	if k == nil {
		return fmt.Errorf("blocks of rank %d: %w", r, ErrUnknownRank)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	v := x.ep.enter(uint32(r))
	defer x.ep.exit(uint32(r), v)
	chains := chains{x: x, seq: map[uint32][]uint64{}}
	k.tab.all(func(ref uint32) bool {
		n, off := x.m.at(ref)
		return yield(chains.of(n, off+1)[off], k.tab.nameOf(ref))
	})
	return nil
}

// Sequences appends to dst, for each name, the sequence hash of the block that rank r calls
// so, 0 where it holds none. Events of the rank wait meanwhile.
func (x *Index) Sequences(r Rank, names, dst []uint64) []uint64 {
	k := x.rank(r)
	if k == nil {
		return append(dst, make([]uint64, len(names))...)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	v := x.ep.enter(uint32(r))
	defer x.ep.exit(uint32(r), v)
	chains := chains{x: x, seq: map[uint32][]uint64{}}
	for _, name := range names {
		seq := uint64(0)
		if ref := k.tab.find(name); ref != 0 {
			n, off := x.m.at(ref)
			seq = chains.of(n, off+1)[off]
		}
		dst = append(dst, seq)
	}
	return dst
}

// chains computes the sequence hashes of runs whose blocks stay, because a rank that stands still
// holds them or blocks below them.
type chains struct {
	x   *Index
	seq map[uint32][]uint64
}

// of returns the sequence hashes of at least the first n blocks of the run.
func (c *chains) of(id, n uint32) []uint64 {
	type want struct{ id, n uint32 }
	todo := []want{{id, n}}
	for len(todo) > 0 {
		w := todo[len(todo)-1]
		s := c.seq[w.id]
		if len(s) >= int(w.n) {
			todo = todo[:len(todo)-1]
			continue
		}
		nd := c.x.m.node(w.id)
		if nd.off > 0 && len(c.seq[nd.parent]) < int(nd.off) {
			todo = append(todo, want{nd.parent, nd.off})
			continue
		}
		dir := c.x.m.dir(nd.dir.Load())
		s = slices.Grow(s, int(w.n)-len(s))
		for i := uint32(len(s)); i < w.n; i++ {
			l := loadWord(&c.x.m.locals(loadHalf(&dir[i/chunkLen]))[i%chunkLen])
			switch {
			case i > 0:
				l = blockhash.Next(s[i-1], l)
			case nd.off > 0:
				l = blockhash.Next(c.seq[nd.parent][nd.off-1], l)
			}
			s = append(s, l)
		}
		c.seq[w.id] = s
	}
	return c.seq[id]
}

// RankChecksum returns the sum of a mix of the sequence hashes of all blocks that rank r holds, 0
// without one. It depends on neither names nor the order of events.
func (x *Index) RankChecksum(r Rank) uint64 {
	sum := uint64(0)
	// An unknown rank holds nothing.
	_ = x.RankBlocks(r, func(seq, _ uint64) bool {
		sum += blockhash.Next(seq, 1)
		return true
	})
	return sum
}

// Checksum returns a checksum of who holds what, of rank names and sequence hashes. It is the same
// for the same content, whatever the slots and the order of events.
func (x *Index) Checksum() uint64 {
	sum := uint64(0)
	for r := range x.ranks {
		if k := x.ranks[r].Load(); k != nil {
			sum += blockhash.Next(uint64(crc32.ChecksumIEEE([]byte(k.name))), x.RankChecksum(Rank(r)))
		}
	}
	return sum
}
