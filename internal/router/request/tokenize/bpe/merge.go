package bpe

import "math"

// noMerge is the value of a pair that does not merge.
const noMerge = math.MaxUint64

// mergeTable maps a pair of token ids to rank<<32 | merged id, so that the
// smaller value is the merge to do first. Open addressing, half full at most.
type mergeTable struct {
	slots []mergeSlot
	shift uint
	// bytes answers for pairs of single bytes, which are most look-ups,
	// without hashing.
	bytes []uint64 // [256*256]
}

type mergeSlot struct{ key, val uint64 }

func newMergeTable(n int) *mergeTable {
	bits := uint(4)
	for 1<<bits < 2*n {
		bits++
	}
	t := &mergeTable{slots: make([]mergeSlot, 1<<bits), shift: 64 - bits, bytes: make([]uint64, 1<<16)}
	for i := range t.slots {
		t.slots[i].val = noMerge
	}
	for i := range t.bytes {
		t.bytes[i] = noMerge
	}
	return t
}

func (t *mergeTable) slot(key uint64) uint {
	return uint((key * 0x9e3779b97f4a7c15) >> t.shift)
}

// put stores a merge; a later one for the same pair replaces the earlier.
func (t *mergeTable) put(a, b, rank, id uint32) {
	key := uint64(a)<<32 | uint64(b)
	i := t.slot(key)
	for t.slots[i].val != noMerge && t.slots[i].key != key {
		i = (i + 1) & uint(len(t.slots)-1)
	}
	t.slots[i] = mergeSlot{key, uint64(rank)<<32 | uint64(id)}
}

func (t *mergeTable) get(a, b uint32) uint64 {
	key := uint64(a)<<32 | uint64(b)
	i := t.slot(key)
	for {
		s := &t.slots[i&uint(len(t.slots)-1)]
		if s.key == key || s.val == noMerge {
			return s.val
		}
		i++
	}
}

// shortWord is the longest word, in bytes, merged by scanning for the
// smallest rank; longer ones use the heap, which is O(n log n).
const shortWord = 48

// merge appends the ids of one word. This is the definition of BPE: start
// with one id per byte, do the merge of lowest rank (leftmost among equals)
// until none is left.
func (t *Tokenizer) merge(dst []uint32, w []byte, h *mergeHeap) []uint32 {
	switch {
	case len(w) == 1:
		return append(dst, t.byteID[w[0]])
	case len(w) > shortWord:
		return t.mergeLong(dst, w, h)
	}
	var (
		ids  [shortWord]uint32
		vals [shortWord]uint64 // vals[i] is the merge of ids[i] and ids[i+1]
	)
	n := len(w)
	best, at := uint64(noMerge), 0
	for i := range n - 1 {
		ids[i] = t.byteID[w[i]]
		v := t.merges.bytes[int(w[i])<<8|int(w[i+1])]
		vals[i] = v
		if v < best {
			best, at = v, i
		}
	}
	ids[n-1] = t.byteID[w[n-1]]
	vals[n-1] = noMerge
	for best != noMerge {
		ids[at] = uint32(best)
		n--
		copy(ids[at+1:n], ids[at+2:n+1])
		copy(vals[at+1:n], vals[at+2:n+1])
		vals[n-1] = noMerge
		if at+1 < n {
			vals[at] = t.merges.get(ids[at], ids[at+1])
		}
		if at > 0 {
			vals[at-1] = t.merges.get(ids[at-1], ids[at])
		}
		best = noMerge
		for i, v := range vals[:n-1] {
			if v < best {
				best, at = v, i
			}
		}
	}
	return append(dst, ids[:n]...)
}

// mergeHeap is the scratch space of mergeLong.
type mergeHeap struct {
	items      []heapItem
	ids        []uint32
	prev, next []int32 // -1 ends the list; a merged-away node has next == dead
}

const dead = -2

type heapItem struct {
	val uint64 // rank<<32 | merged id
	pos int32
}

func (x heapItem) less(y heapItem) bool {
	return x.val < y.val || x.val == y.val && x.pos < y.pos
}

func (h *mergeHeap) push(x heapItem) {
	h.items = append(h.items, x)
	i := len(h.items) - 1
	for i > 0 {
		p := (i - 1) / 2
		if !x.less(h.items[p]) {
			break
		}
		h.items[i] = h.items[p]
		i = p
	}
	h.items[i] = x
}

func (h *mergeHeap) pop() heapItem {
	top := h.items[0]
	last := len(h.items) - 1
	x := h.items[last]
	h.items = h.items[:last]
	h.sift(0, x)
	return top
}

// sift places x at or below position i.
func (h *mergeHeap) sift(i int, x heapItem) {
	n := len(h.items)
	if n == 0 {
		return
	}
	for {
		c := 2*i + 1
		if c >= n {
			break
		}
		if c+1 < n && h.items[c+1].less(h.items[c]) {
			c++
		}
		if !h.items[c].less(x) {
			break
		}
		h.items[i] = h.items[c]
		i = c
	}
	h.items[i] = x
}

func (h *mergeHeap) reset(n int) {
	if cap(h.ids) < n {
		h.ids = make([]uint32, n)
		h.prev = make([]int32, n)
		h.next = make([]int32, n)
		h.items = make([]heapItem, 0, n)
	}
	h.ids, h.prev, h.next, h.items = h.ids[:n], h.prev[:n], h.next[:n], h.items[:0]
}

// mergeLong is merge with a heap over a linked list. A heap item is stale
// when its node is gone or its pair now merges to something else.
func (t *Tokenizer) mergeLong(dst []uint32, w []byte, h *mergeHeap) []uint32 {
	n := len(w)
	h.reset(n)
	for i := range n {
		h.ids[i] = t.byteID[w[i]]
		h.prev[i], h.next[i] = int32(i-1), int32(i+1)
		if i+1 < n {
			if v := t.merges.bytes[int(w[i])<<8|int(w[i+1])]; v != noMerge {
				h.items = append(h.items, heapItem{v, int32(i)})
			}
		}
	}
	h.next[n-1] = -1
	for i := len(h.items)/2 - 1; i >= 0; i-- {
		h.sift(i, h.items[i])
	}
	for len(h.items) > 0 {
		x := h.pop()
		p := x.pos
		q := h.next[p]
		if q < 0 || t.merges.get(h.ids[p], h.ids[q]) != x.val {
			continue
		}
		h.ids[p] = uint32(x.val)
		r := h.next[q]
		h.next[q] = dead
		h.next[p] = r
		if r >= 0 {
			h.prev[r] = p
			if v := t.merges.get(h.ids[p], h.ids[r]); v != noMerge {
				h.push(heapItem{v, p})
			}
		}
		if l := h.prev[p]; l >= 0 {
			if v := t.merges.get(h.ids[l], h.ids[p]); v != noMerge {
				h.push(heapItem{v, l})
			}
		}
	}
	for p := int32(0); p >= 0; p = h.next[p] {
		dst = append(dst, h.ids[p])
	}
	return dst
}
