package bpe

import (
	"sort"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// normalizer applies NFC or NFKC. The form of x/text breaks up more than 30
// combining marks in a row (Unicode's stream-safe format) and the reference
// does not, so such text takes a slow path of its own.
type normalizer struct {
	form    norm.Form        // NFC or NFKC
	decomp  norm.Form        // NFD or NFKD
	compose map[[2]rune]rune // primary composites
	ccc     map[rune]uint8   // only non-starters
	full    map[rune][]rune  // full decompositions, Hangul excluded
}

// maxMarks is well below the stream-safe limit; a decomposition adds few
// marks to those that stand in the text.
const maxMarks = 12

func newNormalizer(form norm.Form) *normalizer {
	n := &normalizer{form: form, decomp: norm.NFD, compose: map[[2]rune]rune{}, ccc: map[rune]uint8{}, full: map[rune][]rune{}}
	if form == norm.NFKC {
		n.decomp = norm.NFKD
	}
	var buf [utf8.UTFMax]byte
	for r := rune(0x80); r <= utf8.MaxRune; r++ {
		if r >= hangulBase && r < hangulEnd || r >= 0xd800 && r < 0xe000 {
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
	return n
}

// apply returns the normal form of b: b itself when it already is, else
// buf's storage.
func (n *normalizer) apply(buf, b []byte) []byte {
	q := n.form.QuickSpan(b)
	if q == len(b) {
		return b
	}
	if n.longRun(b) {
		return n.slow(buf[:0], b)
	}
	return n.form.Append(buf[:0], b...)
}

// longRun reports whether b has more than maxMarks combining marks in a row.
func (n *normalizer) longRun(b []byte) bool {
	marks := 0
	for i := 0; i < len(b); {
		if b[i] < 0xcc { // below U+0300: no combining mark
			marks, i = 0, i+1
			continue
		}
		p := n.decomp.Properties(b[i:])
		size := max(p.Size(), 1)
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
