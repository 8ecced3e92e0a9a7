package kvindex

import (
	"math/bits"
	"unsafe"
)

// A rank's table maps the engine's names to blocks and so is the set of blocks that the rank holds. It
// is made of 64-byte lines of 12 entries, an 8-bit tag and a 28-bit block reference each; an operation
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

// A line is 8 words: tags 0-7; tags 8-11 and the overflow; 12 references, each with four more bits on
// top to distinguish names. Tag 0 and reference 0 mark an empty place.
//
// The overflow is about entries that belong here but lie in a later line: their number in the low 16
// bits (65,535 stays), and above it a set of the low 4 bits of their tags, so that a search for what is
// not there ends here as a rule.
type line struct {
	tags uint64
	more uint64 // tags 8-11 | overflow<<32
	refs [lineLen]uint32
}

const (
	lineLen = 12
	// Tables of less than a page are on the heap.
	mapLines = 64
	// Large tables, of 256 KiB and more, hold about 40,000 blocks and more.
	largeLines = 4096
	loBytes    = 0x0101010101010101
	hiBytes    = 0x8080808080808080
	ahead      = 32 // names whose lines are touched before the first is used
)

// home returns the line where a name belongs, its tag, and its upper bits in an entry.
func (t *table) home(name uint64) (at uint32, tag uint8, up uint32) {
	hi, lo := bits.Mul64(name^t.seed, 0x9e3779b97f4a7c15)
	h := hi ^ lo
	return uint32(h >> 32 * uint64(len(t.lines)) >> 32), max(1, uint8(h)), uint32(h) >> 8 << refBits
}

// match returns the top bit of each byte of the tags that may equal those of p, which has the same tag
// in all bytes. The lowest bit of either is exact, one above another may be false.
func (l *line) match(p uint64) (lo, hi uint64) {
	a := l.tags ^ p
	b := (l.more ^ p) | 0xffffffff<<32
	return (a - loBytes) &^ a & hiBytes, (b - loBytes) &^ b & hiBytes
}

func (l *line) empty(i int) {
	l.refs[i] = 0
	if i < 8 {
		l.tags &^= 0xff << (8 * i)
	} else {
		l.more &^= 0xff << (8 * (i - 8))
	}
}

// spilled reports whether an entry with this tag that belongs here may lie in a later line.
func (l *line) spilled(tag uint8) bool { return l.more>>(48+tag&15)&1 != 0 }

func (l *line) spill(tag uint8) {
	if l.more>>32&0xffff != 0xffff {
		l.more += 1 << 32
	}
	l.more |= 1 << (48 + tag&15)
}

func (l *line) unspill() {
	switch l.more >> 32 & 0xffff {
	case 0xffff: // too many to count; the set stays
	case 1:
		l.more &= 0xffffffff
	default:
		l.more -= 1 << 32
	}
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

// locate returns the line and index of the entry with this name, and the line where it belongs. If the
// block is known, want is its reference and saves reading names.
func (t *table) locate(name uint64, want uint32) (home, at uint32, i int, ok bool) {
	if len(t.lines) == 0 {
		return 0, 0, 0, false
	}
	home, tag, up := t.home(name)
	at = home
	for range t.lines {
		l := &t.lines[at]
		lo, hi := l.match(loBytes * uint64(tag))
		for lo|hi != 0 {
			if lo != 0 {
				i = bits.TrailingZeros64(lo) >> 3
				lo &= lo - 1
			} else {
				i = 8 + bits.TrailingZeros64(hi)>>3
				hi &= hi - 1
			}
			e := l.refs[i]
			if want != 0 && e == up|want ||
				want == 0 && e>>refBits == up>>refBits && e&refMask != 0 && t.named(e&refMask, name) {
				return home, at, i, true
			}
		}
		if !l.spilled(tag) {
			break
		}
		at = t.after(at)
	}
	return home, 0, 0, false
}

func (t *table) after(at uint32) uint32 {
	if at++; at == uint32(len(t.lines)) {
		return 0
	}
	return at
}

// find returns the block that the rank calls name, 0 if there is none.
func (t *table) find(name uint64) uint32 {
	if _, at, i, ok := t.locate(name, 0); ok {
		return t.lines[at].refs[i] & refMask
	}
	return 0
}

// take removes and returns the block that the rank calls name, 0 if there is none. If want is not 0, it
// is the only block that may be meant; then it is known to have the name.
func (t *table) take(name uint64, want uint32) uint32 {
	home, at, i, ok := t.locate(name, want)
	if !ok {
		return 0
	}
	l := &t.lines[at]
	ref := l.refs[i] & refMask
	l.empty(i)
	for ; home != at; home = t.after(home) {
		t.lines[home].unspill()
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
	at, tag, up := t.home(name)
	l := &t.lines[at]
	lo, hi := l.match(loBytes * uint64(tag))
	if lo|hi == 0 && !l.spilled(tag) {
		// The name is new, as nearly always.
		if free, _ := l.match(0); free != 0 {
			s := bits.TrailingZeros64(free) &^ 7
			l.tags |= uint64(tag) << s
			l.refs[s>>3] = up | ref
			t.count++
		} else {
			t.insert(at, tag, up|ref)
		}
	} else if _, found, i, ok := t.locate(name, 0); ok {
		l := &t.lines[found]
		was, l.refs[i] = l.refs[i]&refMask, up|ref
		if t.alias != nil {
			delete(t.alias, was)
		}
	} else {
		t.insert(at, tag, up|ref)
	}
	if own {
		if t.alias == nil {
			t.alias = make(map[uint32]uint64)
		}
		t.alias[ref] = name
	}
	return was
}

// insert adds an entry that belongs to line at.
func (t *table) insert(at uint32, tag uint8, entry uint32) {
	t.count++
	for {
		l := &t.lines[at]
		lo, hi := l.match(0)
		if lo != 0 {
			s := bits.TrailingZeros64(lo) &^ 7
			l.tags |= uint64(tag) << s
			l.refs[s>>3] = entry
			return
		}
		if hi != 0 {
			s := bits.TrailingZeros64(hi) &^ 7
			l.more |= uint64(tag) << s
			l.refs[8+s>>3] = entry
			return
		}
		l.spill(tag)
		at = t.after(at)
	}
}

// prefetch touches the lines of the names, so that their cache misses overlap.
func (t *table) prefetch(names []uint64) {
	if len(t.lines) == 0 {
		return
	}
	s := t.touch
	for _, n := range names {
		at, _, _ := t.home(n)
		s += t.lines[at].tags
	}
	t.touch = s
}

// reserve makes room for n more entries. Large tables are filled further and grow by small steps, as
// they are most of the index's memory.
func (t *table) reserve(n int) bool {
	n += t.count
	if n <= room(len(t.lines)) {
		return true
	}
	size := 8
	for room(size) < n {
		switch {
		case size < 2048:
			size *= 4
		case size < largeLines:
			size *= 2
		default:
			size += size / 8
		}
	}
	return t.resize(size)
}

// room returns how many entries a table may have.
func room(lines int) int {
	if lines < largeLines {
		return lines * lineLen * 8 / 10
	}
	return lines * lineLen * 9 / 10
}

func (t *table) resize(lines int) bool {
	old, words := t.lines, t.words
	w := t.alloc(lines)
	if w == nil {
		return false
	}
	t.words, t.lines, t.count = w, linesOf(w), 0
	// Names are read for some lines at once, so that the misses overlap; writes go on in order, as a
	// name's place in a table is proportional to its hash.
	const some = 4
	var names [some * lineLen]uint64
	var refs [some * lineLen]uint32
	for len(old) > 0 {
		n := 0
		for i := range old[:min(some, len(old))] {
			l := &old[i]
			for _, e := range l.refs {
				if ref := e & refMask; ref != 0 {
					names[n], refs[n] = t.nameOf(ref), ref
					n++
				}
			}
		}
		for j, ref := range refs[:n] {
			at, tag, up := t.home(names[j])
			t.insert(at, tag, up|ref)
		}
		old = old[min(some, len(old)):]
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
		for _, e := range l.refs {
			if ref := e & refMask; ref != 0 && !yield(ref) {
				return
			}
		}
	}
}

func linesOf(w []uint64) []line {
	return unsafe.Slice((*line)(unsafe.Pointer(unsafe.SliceData(w))), len(w)/8)
}
