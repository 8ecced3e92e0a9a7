package bpe

import (
	"sort"
	"sync"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// normalizer applies NFC or NFKC as the reference does, which differs from
// x/text in two ways: x/text breaks up more than 30 combining marks in a row
// (Unicode's stream-safe format), and it knows characters that are younger
// than the reference's tables. Text with either takes a slow path of its own.
type normalizer struct {
	form   norm.Form // NFC or NFKC
	decomp norm.Form // NFD or NFKD

	tables  sync.Once        // builds what follows, for the slow path only
	compose map[[2]rune]rune // primary composites
	ccc     map[rune]uint8   // only non-starters
	full    map[rune][]rune  // full decompositions, Hangul excluded
}

// young lists the characters for which x/text's tables (Unicode 15) have a
// combining class, a decomposition or a composition and those of the
// reference (Unicode 9, tokenizers 0.23.3) have none. Found by asking it about
// every code point and every primary composite.
var young = [][2]rune{
	{0x7fd, 0x7fd}, {0x898, 0x89f}, {0x8ca, 0x8d3}, {0x9fe, 0x9fe}, {0xc3c, 0xc3c}, {0xd3b, 0xd3c}, {0xeba, 0xeba},
	{0x1715, 0x1715}, {0x1abf, 0x1ace}, {0x1df6, 0x1dfa}, {0x32ff, 0x32ff}, {0xa7f2, 0xa7f4}, {0xa82c, 0xa82c},
	{0xab69, 0xab69}, {0x10781, 0x10785}, {0x10787, 0x107b0}, {0x107b2, 0x107ba}, {0x10d24, 0x10d27}, {0x10eab, 0x10eac},
	{0x10efd, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b}, {0x1145e, 0x1145e},
	{0x11839, 0x1183a}, {0x11930, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x119e0, 0x119e0}, {0x11a34, 0x11a34},
	{0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42}, {0x11d44, 0x11d45}, {0x11d97, 0x11d97}, {0x11f41, 0x11f42},
	{0x16ff0, 0x16ff1}, {0x1e030, 0x1e06d}, {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef},
	{0x1e4ec, 0x1e4ef}, {0x1f16c, 0x1f16c}, {0x1fbf0, 0x1fbf9},
}

func isYoung(r rune) bool {
	if r < young[0][0] {
		return false
	}
	i := sort.Search(len(young), func(i int) bool { return young[i][1] >= r })
	return i < len(young) && young[i][0] <= r
}

// maxMarks is well below the stream-safe limit; a decomposition adds few
// marks to those that stand in the text.
const maxMarks = 12

func newNormalizer(form norm.Form) *normalizer {
	n := &normalizer{form: form, decomp: norm.NFD}
	if form == norm.NFKC {
		n.decomp = norm.NFKD
	}
	return n
}

// build fills the tables of the slow path.
func (n *normalizer) build() {
	n.compose, n.ccc, n.full = map[[2]rune]rune{}, map[rune]uint8{}, map[rune][]rune{}
	var buf [utf8.UTFMax]byte
	for r := rune(0x80); r <= utf8.MaxRune; r++ {
		if r >= hangulBase && r < hangulEnd || r >= 0xd800 && r < 0xe000 || isYoung(r) {
			continue
		}
		b := buf[:utf8.EncodeRune(buf[:], r)]
		if c := norm.NFD.Properties(b).CCC(); c != 0 {
			n.ccc[r] = c
		}
		if d := n.decomp.Properties(b).Decomposition(); d != nil {
			n.full[r] = []rune(string(d))
		}
		d := norm.NFD.Properties(b).Decomposition()
		if d == nil || norm.NFC.String(string(r)) != string(r) {
			continue // nothing to compose, or a composition exclusion
		}
		full := []rune(string(d))
		if head := []rune(norm.NFC.String(string(full[:len(full)-1]))); len(head) == 1 {
			n.compose[[2]rune{head[0], full[len(full)-1]}] = r
		}
	}
}

// apply returns the normal form of b: b itself when it already is, else
// buf's storage.
func (n *normalizer) apply(buf, b []byte) []byte {
	q := n.form.QuickSpan(b)
	if q == len(b) {
		return b
	}
	if n.needsSlow(b) {
		return n.slow(buf[:0], b)
	}
	return n.form.Append(buf[:0], b...)
}

// needsSlow reports whether b has more than maxMarks combining marks in a row
// or a young character.
func (n *normalizer) needsSlow(b []byte) bool {
	marks := 0
	for i := 0; i < len(b); {
		if b[i] < 0xcc { // below U+0300: no combining mark
			marks, i = 0, i+1
			continue
		}
		r, size := utf8.DecodeRune(b[i:])
		if isYoung(r) {
			return true
		}
		p := n.decomp.Properties(b[i:])
		if p.CCC() == 0 && p.LeadCCC() == 0 && p.TrailCCC() == 0 {
			marks = 0
		} else if marks++; marks > maxMarks {
			return true
		}
		i += size
	}
	return false
}

const (
	hangulBase, hangulEnd = 0xac00, 0xd7a4
	jamoL, jamoV, jamoT   = 0x1100, 0x1161, 0x11a7
	jamoLn, jamoVn        = 19, 21
	jamoTn                = 28
)

// slow is normalization by the book: decompose, order marks, compose.
func (n *normalizer) slow(dst, b []byte) []byte {
	n.tables.Do(n.build)
	var rs []rune
	for i := 0; i < len(b); {
		r, size := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError && size <= 1 {
			r = -1 - rune(b[i]) // an invalid byte stays as it is
		}
		i += size
		switch d, ok := n.full[r]; {
		case r >= hangulBase && r < hangulEnd:
			s := r - hangulBase
			rs = append(rs, jamoL+s/(jamoVn*jamoTn), jamoV+s%(jamoVn*jamoTn)/jamoTn)
			if s%jamoTn != 0 {
				rs = append(rs, jamoT+s%jamoTn)
			}
		case ok:
			rs = append(rs, d...)
		default:
			rs = append(rs, r)
		}
	}
	for i := 0; i < len(rs); {
		if n.ccc[rs[i]] == 0 {
			i++
			continue
		}
		j := i
		for j < len(rs) && n.ccc[rs[j]] != 0 {
			j++
		}
		run := rs[i:j]
		sort.SliceStable(run, func(a, c int) bool { return n.ccc[run[a]] < n.ccc[run[c]] })
		i = j
	}
	out := rs[:0]
	starter := -1 // index in out
	last := uint8(0)
	for _, r := range rs {
		c := n.ccc[r]
		if starter >= 0 && (last < c || len(out) == starter+1) {
			if x, ok := n.pair(out[starter], r); ok {
				out[starter] = x
				continue
			}
		}
		if c == 0 {
			starter, last = len(out), 0
		} else {
			last = c
		}
		out = append(out, r)
	}
	for _, r := range out {
		if r < 0 {
			dst = append(dst, byte(-1-r))
			continue
		}
		dst = utf8.AppendRune(dst, r)
	}
	return dst
}

// pair composes a starter with what follows it.
func (n *normalizer) pair(a, b rune) (rune, bool) {
	if l, v := a-jamoL, b-jamoV; l >= 0 && l < jamoLn && v >= 0 && v < jamoVn {
		return hangulBase + (l*jamoVn+v)*jamoTn, true
	}
	if s, t := a-hangulBase, b-jamoT; s >= 0 && a < hangulEnd && s%jamoTn == 0 && t > 0 && t < jamoTn {
		return a + t, true
	}
	r, ok := n.compose[[2]rune{a, b}]
	return r, ok
}
