package kvindex

import (
	"math/bits"
	"sync"
)

// A member says how much of a run a rank holds: cutoff<<32 | flags | rank. The rank holds the first
// cutoff blocks; if the extra flag is set, others too, which are in the extras of the index: an engine
// may evict from the middle.
const (
	rankMask = 0xffff
	noRank   = 0xffff // an empty place
	extra    = 1 << 16
)

// extraKey names the extras of a rank in a run.
type extraKey struct{ node, rank uint32 }

// extras hold, for the few ranks that evicted from the middle of a run, a bit for each block held
// beyond the cutoff. The block at the cutoff is never set.
type extras struct {
	mu   sync.Mutex
	bits map[extraKey][]uint64
}

func (e *extras) get(n uint32, r Rank) []uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.bits[extraKey{n, uint32(r)}]
}

// take removes and returns the bits. As only the rank's own Apply changes them, it may put them back.
func (e *extras) take(n uint32, r Rank) []uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.bits[extraKey{n, uint32(r)}]
	delete(e.bits, extraKey{n, uint32(r)})
	return b
}

func (e *extras) set(n uint32, r Rank, b []uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.bits == nil {
		e.bits = make(map[extraKey][]uint64)
	}
	e.bits[extraKey{n, uint32(r)}] = b
}

func (x *Index) extras(n uint32) *extras { return &x.extra[n%uint32(len(x.extra))] }

func hasBit(b []uint64, i uint32) bool { return int(i/64) < len(b) && b[i/64]>>(i%64)&1 != 0 }

func setBit(b []uint64, i uint32) []uint64 {
	for int(i/64) >= len(b) {
		b = append(b, 0)
	}
	b[i/64] |= 1 << (i % 64)
	return b
}

// member returns the index of the rank in the array and its entry, index 0 if there is none.
func (x *Index) member(k *rankState, n uint32, nd *node) (i int, e uint64) {
	h := nd.mem.Load()
	if h == 0 {
		return 0, 0
	}
	a := x.m.array(h)
	cnt := int(loadWord(&a[0]))
	hint := &k.hints[n%uint32(len(k.hints))]
	if i := int(hint.index); hint.node == n && i <= cnt && i > 0 {
		if e := loadWord(&a[i]); e&rankMask == uint64(k.slot) {
			return i, e
		}
	}
	for i := 1; i <= cnt; i++ {
		if e := loadWord(&a[i]); e&rankMask == uint64(k.slot) {
			hint.node, hint.index = n, uint32(i)
			return i, e
		}
	}
	return 0, 0
}

// join returns the place of the rank in the node's array, made if need be, 0 when there is no memory.
func (x *Index) join(k *rankState, c *cache, n uint32, nd *node) (i int, e uint64) {
	if i, e = x.member(k, n, nd); i > 0 {
		return i, e
	}
	h := nd.mem.Load()
	e = uint64(k.slot)
	if h == 0 {
		if h = c.newArray(0); h == 0 {
			return 0, 0
		}
		a := x.m.array(h)
		a[0], a[1] = 1, e
		nd.mem.Store(h)
		return 1, e
	}
	a := x.m.array(h)
	cnt := int(loadWord(&a[0]))
	for i := 1; i <= cnt; i++ {
		if loadWord(&a[i])&rankMask == noRank {
			storeWord(&a[i], e)
			return i, e
		}
	}
	if cnt+1 < len(a) {
		storeWord(&a[cnt+1], e)
		storeWord(&a[0], uint64(cnt+1))
		return cnt + 1, e
	}
	h2 := c.newArray(h>>28 + 1)
	if h2 == 0 {
		return 0, 0
	}
	b := x.m.array(h2)
	for i := 1; i <= cnt; i++ {
		b[i] = loadWord(&a[i])
	}
	b[cnt+1], b[0] = e, uint64(cnt+1)
	nd.mem.Store(h2)
	c.retireArray(h)
	return cnt + 1, e
}

// leave empties the place i.
func (x *Index) leave(nd *node, i int) {
	a := x.m.array(nd.mem.Load())
	storeWord(&a[i], noRank)
	cnt := int(loadWord(&a[0]))
	for cnt > 0 && loadWord(&a[cnt])&rankMask == noRank {
		cnt--
	}
	storeWord(&a[0], uint64(cnt))
}

// keeps returns the number of leading blocks that must stay for the sake of ranks.
func (x *Index) keeps(n uint32, nd *node) (keep uint32) {
	h := nd.mem.Load()
	if h == 0 {
		return 0
	}
	a := x.m.array(h)
	cnt := int(loadWord(&a[0]))
	for i := 1; i <= cnt; i++ {
		e := loadWord(&a[i])
		if e&rankMask == noRank {
			continue
		}
		keep = max(keep, uint32(e>>32))
		if e&extra != 0 {
			b := x.extras(n).get(n, Rank(e&rankMask))
			for w := len(b) - 1; w >= 0; w-- {
				if b[w] != 0 {
					keep = max(keep, uint32(w*64+bits.Len64(b[w])))
					break
				}
			}
		}
	}
	return keep
}

// storeExtra moves the cutoff past the extras that follow it and stores both.
func (x *Index) storeExtra(k *rankState, n uint32, place *uint64, cut uint32, b []uint64) {
	for hasBit(b, cut) {
		b[cut/64] &^= 1 << (cut % 64)
		cut++
	}
	e := uint64(cut)<<32 | uint64(k.slot)
	for _, w := range b {
		if w != 0 {
			e |= extra
			x.extras(n).set(n, k.slot, b)
			break
		}
	}
	storeWord(place, e)
}
