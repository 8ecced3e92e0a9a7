package kvindex

import (
	"math/bits"
	"unsafe"
)

// Slabs and tables lie in regions of 2 MiB pages: on small pages nearly every touch of a table is a TLB
// miss. A region is mapped at once, and the host gives its memory 2 MiB at a time, from the start, when
// it is first handed out. Within a region memory is handed out in units of 4 KiB, at the first place that
// fits.
const (
	unitWords = 512
	hugeUnits = 2 << 20 / 8 / unitWords // units that the host gives at a time
)

type region struct {
	raw   []uint64 // as mapped
	words []uint64
	used  []uint64 // a bit for each unit
	given int      // units that the host gave
	low   int      // no unit below this one is free
}

// newRegion maps room for at least some units, nil when the host refuses.
func newRegion(units int) *region {
	units = (max(units, regionUnits) + hugeUnits - 1) / hugeUnits * hugeUnits
	raw, words := mapRegion(units * unitWords)
	if raw == nil {
		return nil
	}
	return &region{raw: raw, words: words, used: make([]uint64, units/64)}
}

// find returns the first of n free units that follow each other, -1 if there are none.
func (r *region) find(n int) int {
	end := len(r.used) * 64
	for from := r.low; from+n <= end; {
		w := ^r.used[from/64] >> (from % 64)
		if w == 0 {
			from = (from/64 + 1) * 64
			continue
		}
		from += bits.TrailingZeros64(w)
		to := from
		for to < min(from+n, end) {
			if w := r.used[to/64] >> (to % 64); w != 0 {
				to += bits.TrailingZeros64(w)
				break
			}
			to = (to/64 + 1) * 64
		}
		if to-from >= n {
			return from
		}
		from = to
	}
	return -1
}

func (r *region) mark(at, n int, used bool) {
	if used && at == r.low {
		r.low = at + n
	} else if !used {
		r.low = min(r.low, at)
	}
	for i := at; i < at+n; i++ {
		if used {
			r.used[i/64] |= 1 << (i % 64)
		} else {
			r.used[i/64] &^= 1 << (i % 64)
		}
	}
}

// give makes the host give all memory up to a unit. It is written to at once: if it were read first, as a
// touch ahead of use does, the host would map a page of zeros there and replace it at the first write, for
// which it interrupts all CPUs.
func (m *memory) give(r *region, end int) bool {
	for r.given < end {
		if m.bytes.Add(hugeUnits*unitWords*8) > m.limit {
			m.bytes.Add(-hugeUnits * unitWords * 8)
			return false
		}
		for i := range hugeUnits {
			r.words[(r.given+i)*unitWords] = 0
		}
		r.given += hugeUnits
	}
	return true
}

// take returns n words that may hold anything, nil when there is no room within the limit. The caller
// holds mu.
func (m *memory) take(n int) []uint64 {
	units := (n + unitWords - 1) / unitWords
	var r *region
	at := -1
	for _, r = range m.regions {
		if at = r.find(units); at >= 0 {
			break
		}
	}
	if at < 0 {
		if r = newRegion(units); r == nil {
			return nil
		}
		m.regions = append(m.regions, r)
		at = 0
	}
	if !m.give(r, at+units) {
		return nil
	}
	r.mark(at, units, true)
	return r.words[at*unitWords : at*unitWords+n : at*unitWords+n]
}

// grab returns n zeroed words, nil when there is no room within the limit.
func (m *memory) grab(n int) []uint64 {
	m.mu.Lock()
	w := m.take(n)
	m.mu.Unlock()
	clear(w)
	return w
}

// drop gives back what grab returned.
func (m *memory) drop(w []uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := uintptr(unsafe.Pointer(unsafe.SliceData(w)))
	for _, r := range m.regions {
		if at := (p - uintptr(unsafe.Pointer(unsafe.SliceData(r.words)))) / 8; at < uintptr(len(r.words)) {
			r.mark(int(at/unitWords), (len(w)+unitWords-1)/unitWords, false)
			return
		}
	}
}
