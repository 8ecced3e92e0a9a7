package kvindex

import (
	"math/bits"
	"unsafe"
)

// A rank's table maps the engine's names to blocks and so is the set of blocks that the rank holds. It
// is made of 64-byte lines of 12 entries, an 8-bit tag and a 32-bit block reference each; an operation
// touches one line as a rule, and a deletion moves nothing. A tag that fits is checked against the name
// in the block's chunk, or against the rank's alias if this rank calls the block by another name than
// the rank that stored it first.
type table struct {
	m     *memory
	words []uint64 // mapped, or of the heap while small
	lines []line
	count int
	seed  uint64
	alias map[uint32]uint64 // own names of blocks that others named first; nil = none
	touch uint64            // sum of touched words, so that touching is not optimised away
}

type line struct {
	tags [lineLen]uint8 // 0 = empty
	over uint32         // entries that belong here but lie in a later line
	refs [lineLen]uint32
}

const (
	lineLen = 12
	// mapped tables start at 64 KiB; below, the heap is cheaper than whole pages.
	mapLines = 1024
	loBytes  = 0x0101010101010101
	hiBytes  = 0x8080808080808080
	ahead    = 32 // names whose lines are touched before the first is used
)

func (t *table) home(name uint64) (at uint32, tag uint8) {
	hi, lo := bits.Mul64(name^t.seed, 0x9e3779b97f4a7c15)
	h := hi ^ lo
	return uint32(h >> 32 * uint64(len(t.lines)) >> 32), max(1, uint8(h))
}

// match returns a bit at the top of each byte of the tags that may equal tag. The lowest is exact,
// one above another may be false.
func (l *line) match(tag uint8) (lo uint64, hi uint32) {
	p := loBytes * uint64(tag)
	a := l.low() ^ p
	b := l.high() ^ uint32(p)
	return (a - loBytes) &^ a & hiBytes, (b - loBytes&0xffffffff) &^ b & (hiBytes & 0xffffffff)
}

func (l *line) low() uint64 {
	t := &l.tags
	return uint64(t[0]) | uint64(t[1])<<8 | uint64(t[2])<<16 | uint64(t[3])<<24 |
		uint64(t[4])<<32 | uint64(t[5])<<40 | uint64(t[6])<<48 | uint64(t[7])<<56
}

func (l *line) high() uint32 {
	t := &l.tags
	return uint32(t[8]) | uint32(t[9])<<8 | uint32(t[10])<<16 | uint32(t[11])<<24
}

// named reports whether the rank calls the block name. The rank holds the block.
func (t *table) named(ref uint32, name uint64) bool { return t.nameOf(ref) == name }

func (t *table) nameOf(ref uint32) uint64 {
	if t.alias != nil {
		if a, ok := t.alias[ref]; ok {
			return a
		}
	}
	return t.m.name(ref)
}

// locate returns the line and index of the entry with this name.
func (t *table) locate(name uint64) (at uint32, i int, ok bool) {
	if len(t.lines) == 0 {
		return 0, 0, false
	}
	at, tag := t.home(name)
	for range t.lines {
		l := &t.lines[at]
		lo, hi := l.match(tag)
		for ; lo != 0; lo &= lo - 1 {
			i := bits.TrailingZeros64(lo) / 8
			if l.tags[i] == tag && t.named(l.refs[i], name) {
				return at, i, true
			}
		}
		for ; hi != 0; hi &= hi - 1 {
			i := 8 + bits.TrailingZeros32(hi)/8
			if l.tags[i] == tag && t.named(l.refs[i], name) {
				return at, i, true
			}
		}
		if l.over == 0 {
			return 0, 0, false
		}
		if at++; at == uint32(len(t.lines)) {
			at = 0
		}
	}
	return 0, 0, false
}

// find returns the block that the rank calls name, 0 if there is none.
func (t *table) find(name uint64) uint32 {
	if at, i, ok := t.locate(name); ok {
		return t.lines[at].refs[i]
	}
	return 0
}

// take removes and returns the block that the rank calls name, 0 if there is none.
func (t *table) take(name uint64) uint32 {
	at, i, ok := t.locate(name)
	if !ok {
		return 0
	}
	l := &t.lines[at]
	ref := l.refs[i]
	l.tags[i] = 0
	if h, _ := t.home(name); h != at {
		for ; h != at; h = (h + 1) % uint32(len(t.lines)) {
			t.lines[h].over--
		}
	}
	t.count--
	if t.alias != nil {
		delete(t.alias, ref)
	}
	return ref
}

// put adds a name that the table has room for and returns 0, or, when the name stood for another
// block, lets it stand for this one and returns the other. own says that the block's chunk does not
// have the name.
func (t *table) put(name uint64, ref uint32, own bool) (was uint32) {
	if at, i, ok := t.locate(name); ok {
		l := &t.lines[at]
		was, l.refs[i] = l.refs[i], ref
		if t.alias != nil {
			delete(t.alias, was)
		}
	} else {
		t.insert(name, ref)
	}
	if own {
		if t.alias == nil {
			t.alias = make(map[uint32]uint64)
		}
		t.alias[ref] = name
	}
	return was
}

func (t *table) insert(name uint64, ref uint32) {
	at, tag := t.home(name)
	t.count++
	for {
		l := &t.lines[at]
		lo, hi := l.match(0)
		i := -1
		if lo != 0 {
			i = bits.TrailingZeros64(lo) / 8
		} else if hi != 0 {
			i = 8 + bits.TrailingZeros32(hi)/8
		}
		if i >= 0 {
			l.tags[i], l.refs[i] = tag, ref
			return
		}
		l.over++
		if at++; at == uint32(len(t.lines)) {
			at = 0
		}
	}
}

// prefetch touches the lines of the names, so that their cache misses overlap.
func (t *table) prefetch(names []uint64) {
	if len(t.lines) == 0 {
		return
	}
	s := t.touch
	for _, n := range names {
		at, _ := t.home(n)
		s += uint64(t.lines[at].over)
	}
	t.touch = s
}

// reserve makes room for n more entries: at most 85 % of the places are used.
func (t *table) reserve(n int) bool {
	need := ((t.count+n)*20 + 17*lineLen - 1) / (17 * lineLen)
	if need <= len(t.lines) {
		return true
	}
	size := len(t.lines)
	if size < mapLines {
		size *= 2
	} else {
		size += size / 4
	}
	return t.resize(max(size, need, 8))
}

func (t *table) resize(lines int) bool {
	old, words := t.lines, t.words
	w := t.alloc(lines)
	if w == nil {
		return false
	}
	t.words, t.lines, t.count = w, linesOf(w), 0
	for i := range old {
		l := &old[i]
		for j, tag := range l.tags {
			if tag != 0 {
				t.insert(t.nameOf(l.refs[j]), l.refs[j])
			}
		}
	}
	t.release(words)
	return true
}

func (t *table) alloc(lines int) []uint64 {
	if lines >= mapLines {
		return t.m.grab(lines * 8)
	}
	if t.m.bytes.Add(int64(lines)*64) > t.m.limit {
		t.m.bytes.Add(-int64(lines) * 64)
		return nil
	}
	return make([]uint64, lines*8)
}

func (t *table) release(words []uint64) {
	if len(words) >= mapLines*8 {
		t.m.drop(words)
	} else {
		t.m.bytes.Add(-int64(len(words)) * 8)
	}
}

// reset empties the table and gives its memory back.
func (t *table) reset() {
	t.release(t.words)
	t.words, t.lines, t.count, t.alias = nil, nil, 0, nil
}

// all calls yield with every block held until it returns false.
func (t *table) all(yield func(ref uint32) bool) {
	for i := range t.lines {
		l := &t.lines[i]
		for j, tag := range l.tags {
			if tag != 0 && !yield(l.refs[j]) {
				return
			}
		}
	}
}

func linesOf(w []uint64) []line {
	return unsafe.Slice((*line)(unsafe.Pointer(unsafe.SliceData(w))), len(w)/8)
}
