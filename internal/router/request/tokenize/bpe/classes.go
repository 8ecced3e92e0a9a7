package bpe

import (
	"sync"
	"unicode"
	"unicode/utf8"
)

// class is a one-hot set of the character classes that pre-tokenizer patterns
// distinguish. Every code point has exactly one.
type class uint16

const (
	clOther class = 1 << iota // control, format, private use, unassigned; also a byte that is not UTF-8
	clSpace                   // \s except CR and LF
	clNL                      // CR, LF
	clLu
	clLl
	clLt
	clLm
	clLo
	clM
	clN
	clP
	clS

	clL  = clLu | clLl | clLt | clLm | clLo
	clWS = clSpace | clNL
)

// unicode16 lists what Unicode 16.0 assigned after the 15.0 of Go 1.26's
// unicode package. The Hugging Face tokenizers 0.23.3 regexp engine knows
// 16.0; found by asking it for the class of every code point.
var unicode16 = []struct {
	lo, hi rune
	c      class
}{
	{0x897, 0x897, clM}, {0x1b4e, 0x1b4f, clP}, {0x1b7f, 0x1b7f, clP}, {0x1c89, 0x1c89, clLu},
	{0x1c8a, 0x1c8a, clLl}, {0x2427, 0x2429, clS}, {0x2ffc, 0x2fff, clS}, {0x31e4, 0x31e5, clS},
	{0x31ef, 0x31ef, clS}, {0xa7cb, 0xa7cc, clLu}, {0xa7cd, 0xa7cd, clLl}, {0xa7da, 0xa7da, clLu},
	{0xa7db, 0xa7db, clLl}, {0xa7dc, 0xa7dc, clLu}, {0x105c0, 0x105f3, clLo}, {0x10d40, 0x10d49, clN},
	{0x10d4a, 0x10d4d, clLo}, {0x10d4e, 0x10d4e, clLm}, {0x10d4f, 0x10d4f, clLo}, {0x10d50, 0x10d65, clLu},
	{0x10d69, 0x10d6d, clM}, {0x10d6e, 0x10d6e, clP}, {0x10d6f, 0x10d6f, clLm}, {0x10d70, 0x10d85, clLl},
	{0x10d8e, 0x10d8f, clS}, {0x10ec2, 0x10ec4, clLo}, {0x10efc, 0x10efc, clM}, {0x11380, 0x11389, clLo},
	{0x1138b, 0x1138b, clLo}, {0x1138e, 0x1138e, clLo}, {0x11390, 0x113b5, clLo}, {0x113b7, 0x113b7, clLo},
	{0x113b8, 0x113c0, clM}, {0x113c2, 0x113c2, clM}, {0x113c5, 0x113c5, clM}, {0x113c7, 0x113ca, clM},
	{0x113cc, 0x113d0, clM}, {0x113d1, 0x113d1, clLo}, {0x113d2, 0x113d2, clM}, {0x113d3, 0x113d3, clLo},
	{0x113d4, 0x113d5, clP}, {0x113d7, 0x113d8, clP}, {0x113e1, 0x113e2, clM}, {0x116d0, 0x116e3, clN},
	{0x11bc0, 0x11be0, clLo}, {0x11be1, 0x11be1, clP}, {0x11bf0, 0x11bf9, clN}, {0x11f5a, 0x11f5a, clM},
	{0x13460, 0x143fa, clLo}, {0x16100, 0x1611d, clLo}, {0x1611e, 0x1612f, clM}, {0x16130, 0x16139, clN},
	{0x16d40, 0x16d42, clLm}, {0x16d43, 0x16d6a, clLo}, {0x16d6b, 0x16d6c, clLm}, {0x16d6d, 0x16d6f, clP},
	{0x16d70, 0x16d79, clN}, {0x18cff, 0x18cff, clLo}, {0x1cc00, 0x1ccef, clS}, {0x1ccf0, 0x1ccf9, clN},
	{0x1cd00, 0x1ceb3, clS}, {0x1e5d0, 0x1e5ed, clLo}, {0x1e5ee, 0x1e5ef, clM}, {0x1e5f0, 0x1e5f0, clLo},
	{0x1e5f1, 0x1e5fa, clN}, {0x1e5ff, 0x1e5ff, clP}, {0x1f8b2, 0x1f8bb, clS}, {0x1f8c0, 0x1f8c1, clS},
	{0x1fa89, 0x1fa89, clS}, {0x1fa8f, 0x1fa8f, clS}, {0x1fabe, 0x1fabe, clS}, {0x1fac6, 0x1fac6, clS},
	{0x1fadc, 0x1fadc, clS}, {0x1fadf, 0x1fadf, clS}, {0x1fae9, 0x1fae9, clS}, {0x1fbcb, 0x1fbef, clS},
	{0x2ebf0, 0x2ee5d, clLo},
}

// classTable maps a code point to its class: pages of 128 code points, equal
// pages shared. It is read-only after it was built.
type classTable struct {
	ascii [128]class
	page  [(unicode.MaxRune + 1) >> 7]uint16
	pages [][128]class
}

// sharedClasses returns the one table of the process, which is a constant that
// is cheaper to build on first use than to keep in the binary.
var sharedClasses = sync.OnceValue(newClassTable)

func newClassTable() *classTable {
	flat := make([]class, unicode.MaxRune+1)
	for i := range flat {
		flat[i] = clOther
	}
	fill := func(t *unicode.RangeTable, c class) {
		for _, r := range t.R16 {
			for x := rune(r.Lo); x <= rune(r.Hi); x += rune(r.Stride) {
				flat[x] = c
			}
		}
		for _, r := range t.R32 {
			for x := rune(r.Lo); x <= rune(r.Hi); x += rune(r.Stride) {
				flat[x] = c
			}
		}
	}
	fill(unicode.Lu, clLu)
	fill(unicode.Ll, clLl)
	fill(unicode.Lt, clLt)
	fill(unicode.Lm, clLm)
	fill(unicode.Lo, clLo)
	fill(unicode.M, clM)
	fill(unicode.N, clN)
	fill(unicode.P, clP)
	fill(unicode.S, clS)
	fill(unicode.White_Space, clSpace)
	flat['\r'], flat['\n'] = clNL, clNL
	for _, r := range unicode16 {
		for x := r.lo; x <= r.hi; x++ {
			flat[x] = r.c
		}
	}
	t := &classTable{}
	copy(t.ascii[:], flat)
	seen := make(map[[128]class]uint16)
	for p := range t.page {
		k := [128]class(flat[p<<7:])
		n, ok := seen[k]
		if !ok {
			n = uint16(len(t.pages))
			t.pages = append(t.pages, k)
			seen[k] = n
		}
		t.page[p] = n
	}
	return t
}

// at returns the class and byte length of the character at b[i].
func (t *classTable) at(b []byte, i int) (class, int) {
	if c := b[i]; c < utf8.RuneSelf {
		return t.ascii[c], 1
	}
	return t.wide(b[i:])
}

func (t *classTable) wide(b []byte) (class, int) {
	// Three-byte sequences (CJK) first: they are the bulk of non-ASCII text.
	if len(b) >= 3 && b[0]&0xf0 == 0xe0 && b[1]&0xc0 == 0x80 && b[2]&0xc0 == 0x80 {
		r := rune(b[0]&0x0f)<<12 | rune(b[1]&0x3f)<<6 | rune(b[2]&0x3f)
		if r >= 0x800 && (r < 0xd800 || r > 0xdfff) {
			return t.pages[t.page[r>>7]][r&127], 3
		}
		return clOther, 1
	}
	r, n := utf8.DecodeRune(b)
	if r == utf8.RuneError && n <= 1 {
		return clOther, 1
	}
	return t.pages[t.page[r>>7]][r&127], n
}

// run returns the end of the run of characters of the given classes that
// starts at b[i].
func (t *classTable) run(b []byte, i int, set class) int {
	for i < len(b) {
		if c := b[i]; c < utf8.RuneSelf {
			if t.ascii[c]&set == 0 {
				return i
			}
			i++
			continue
		}
		c, n := t.wide(b[i:])
		if c&set == 0 {
			return i
		}
		i += n
	}
	return i
}

// wordExtra reports whether r, of class c and neither letter nor mark, is in
// Unicode's \w: Alphabetic, decimal digit, connector punctuation, join control.
func wordExtra(r rune, c class) bool {
	switch c {
	case clN:
		return unicode.In(r, unicode.Nd, unicode.Nl) || r >= 0x10d40 && r <= 0x10d49 || r >= 0x116d0 && r <= 0x116e3 ||
			r >= 0x11bf0 && r <= 0x11bf9 || r >= 0x16130 && r <= 0x16139 || r >= 0x16d70 && r <= 0x16d79 ||
			r >= 0x1ccf0 && r <= 0x1ccf9 || r >= 0x1e5f1 && r <= 0x1e5fa
	case clP:
		return unicode.Is(unicode.Pc, r)
	}
	return r == 0x200c || r == 0x200d || unicode.Is(unicode.Other_Alphabetic, r)
}
