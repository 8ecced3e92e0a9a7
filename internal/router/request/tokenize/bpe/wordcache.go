package bpe

import (
	"encoding/binary"
	"sync/atomic"
)

// wordCache remembers the ids of short words: a fixed table, one slot per
// hash, the newest word wins. Readers and writers take no lock; a slot's
// version is odd while it is written and a reader that sees it change looks
// away. Every field is atomic, so that a torn read is only ever discarded.
type wordCache struct {
	slots []wordSlot
	mask  uint64
}

type wordSlot struct {
	version atomic.Uint64 // odd: being written
	lo, hi  atomic.Uint64 // the word's bytes
	meta    atomic.Uint64 // word length | number of ids << 8
	ids     [2]atomic.Uint64
}

const (
	maxCachedWord = 16 // bytes
	maxCachedIDs  = 4
)

// wordKey is a word of at most 16 bytes by value.
type wordKey struct {
	lo, hi uint64
	n      uint8
}

func packWord(w []byte) wordKey {
	n := len(w)
	k := wordKey{n: uint8(n)}
	switch {
	case n >= 8:
		k.lo = binary.LittleEndian.Uint64(w)
		k.hi = binary.LittleEndian.Uint64(w[n-8:])
	case n >= 4:
		k.lo = uint64(binary.LittleEndian.Uint32(w))
		k.hi = uint64(binary.LittleEndian.Uint32(w[n-4:]))
	default:
		for i := range n {
			k.lo |= uint64(w[i]) << (8 * i)
		}
	}
	return k
}

func (k wordKey) hash() uint64 {
	h := (k.lo ^ uint64(k.n)<<56) * 0x9e3779b97f4a7c15
	h ^= h >> 29
	h = (h ^ k.hi) * 0xbf58476d1ce4e5b9
	return h ^ h>>32
}

func newWordCache(words int) *wordCache {
	n := 16
	for n < words && n < 1<<24 {
		n <<= 1
	}
	return &wordCache{slots: make([]wordSlot, n), mask: uint64(n - 1)}
}

// get appends the ids of k to dst.
func (c *wordCache) get(k wordKey, dst []uint32) ([]uint32, bool) {
	s := &c.slots[k.hash()&c.mask]
	v := s.version.Load()
	if v&1 != 0 || v == 0 || s.lo.Load() != k.lo || s.hi.Load() != k.hi {
		return dst, false
	}
	meta := s.meta.Load()
	a, b := s.ids[0].Load(), s.ids[1].Load()
	if uint8(meta) != k.n || s.version.Load() != v {
		return dst, false
	}
	switch meta >> 8 {
	case 1:
		return append(dst, uint32(a)), true
	case 2:
		return append(dst, uint32(a), uint32(a>>32)), true
	case 3:
		return append(dst, uint32(a), uint32(a>>32), uint32(b)), true
	}
	return append(dst, uint32(a), uint32(a>>32), uint32(b), uint32(b>>32)), true
}

// put stores the ids of k, unless there are too many or the slot is busy.
func (c *wordCache) put(k wordKey, ids []uint32) {
	if len(ids) == 0 || len(ids) > maxCachedIDs {
		return
	}
	s := &c.slots[k.hash()&c.mask]
	v := s.version.Load()
	if v&1 != 0 || !s.version.CompareAndSwap(v, v+1) {
		return
	}
	var p [maxCachedIDs]uint32
	copy(p[:], ids)
	s.lo.Store(k.lo)
	s.hi.Store(k.hi)
	s.meta.Store(uint64(k.n) | uint64(len(ids))<<8)
	s.ids[0].Store(uint64(p[0]) | uint64(p[1])<<32)
	s.ids[1].Store(uint64(p[2]) | uint64(p[3])<<32)
	s.version.Store(v + 2)
}
