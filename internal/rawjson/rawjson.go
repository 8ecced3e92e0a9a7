// Package rawjson reads JSON in place, without building values, and writes strings. It is
// the only such reader here; what is off the request path and has a type uses encoding/json.
//
// [Scanner] and [ReadObject] judge text: they check every byte of it within limits, for
// what must be refused when it is bad. [Walker] trusts text: it skips what it is not
// interested in, and takes what it can from text that is bad. It reads what engines send,
// token by token, and text that a Scanner has passed. [Value] picks members of such text
// by their paths.
package rawjson

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/bits"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// ErrSyntax is returned for bytes that are not JSON where it matters.
var ErrSyntax = errors.New("malformed JSON")

// Walker steps through JSON text. It trusts the text to be JSON only as far as
// it never reads beyond it: on anything odd it goes to the end, where there is
// neither a key nor a value nor a next one.
//
//	for more := w.Open('{'); more; more = w.Next() {
//		k, v := w.Key(), w.Value()
//	}
type Walker struct {
	b   []byte
	i   int
	cut bool // the text ended within a value
}

// Walk is a walker at the start of b.
func Walk(b []byte) Walker { return Walker{b: b} }

func (w *Walker) space() {
	if w.i < len(w.b) && w.b[w.i] <= ' ' {
		w.i = Space(w.b, w.i)
	}
}

// At reports whether c is the byte at which the walker stands.
func (w *Walker) At(c byte) bool { return w.i < len(w.b) && w.b[w.i] == c }

// pass goes over c and the white space after it, or else to the end.
func (w *Walker) pass(c byte) bool {
	b, i := w.b, w.i
	if i >= len(b) || b[i] != c {
		w.i = len(b)
		return false
	}
	if i++; i < len(b) && b[i] <= ' ' {
		i = Space(b, i)
	}
	w.i = i
	return true
}

// Open enters an object or an array and reports whether it has anything in it.
func (w *Walker) Open(bracket byte) bool {
	w.space()
	return w.pass(bracket) && w.i < len(w.b) && !w.At('}') && !w.At(']')
}

// Next steps to the next member or element and reports whether there is one.
func (w *Walker) Next() bool {
	if i := w.i + 1; i < len(w.b) && w.b[i-1] == ',' && w.b[i] > ' ' {
		w.i = i
		return true
	}
	w.space()
	return w.At(',') && w.pass(',') && w.i < len(w.b)
}

// Close leaves an object or an array after its last member or element and
// reports whether it ends there.
func (w *Walker) Close(bracket byte) bool { return w.pass(bracket) }

// Key reads a member's key and stops at its value. It returns what is between
// the quotes, escapes not resolved, and nil for none.
func (w *Walker) Key() []byte {
	if !w.At('"') {
		w.i = len(w.b)
		return nil
	}
	k := w.text()
	if i := w.i + 1; i < len(w.b) && w.b[i-1] == ':' && w.b[i] > ' ' {
		w.i = i
		return k
	}
	if w.space(); !w.pass(':') {
		return nil
	}
	return k
}

// short is how long a string is that is read in words.
const short = 32

// text passes over a string and returns what is between its quotes; nil if it is
// not closed.
func (w *Walker) text() []byte {
	b, start := w.b, w.i+1
	// Most are short: a look at each word costs less than a search that is called.
	for k := start; k < start+short && k+8 <= len(b); k += 8 {
		if m := interrupts(binary.LittleEndian.Uint64(b[k:])); m != 0 {
			k += bits.TrailingZeros64(m) >> 3
			if b[k] == '\\' {
				break
			}
			w.i = k + 1
			return b[start:k:k]
		}
	}
	for k := start; k < len(b); {
		q := bytes.IndexByte(b[k:], '"')
		if q < 0 {
			break
		}
		k += q
		n := k
		for n > start && b[n-1] == '\\' {
			n--
		}
		k++
		if (k-1-n)%2 == 0 {
			w.i = k
			return b[start : k-1 : k-1]
		}
	}
	w.i, w.cut = len(b), true
	return nil
}

// scalar marks the bytes that end or interrupt a number or a literal.
var scalar = [256]bool{'"': true, '{': true, '[': true, '}': true, ']': true, ',': true, ':': true, ' ': true, '\n': true, '\r': true, '\t': true}

// Value passes over any value and returns it, or as much of it as there is; it is
// empty for none.
func (w *Walker) Value() []byte {
	b, start := w.b, w.i
	k := start
	for k < len(b) && !scalar[b[k]] {
		k++
	}
	if w.i = k; k < len(b) {
		switch b[k] {
		case '"':
			w.text()
		case '{', '[':
			w.nested()
		}
	}
	return b[start:w.i]
}

// nested passes over an object or an array, or goes to the end.
func (w *Walker) nested() {
	b, depth := w.b, 0
	for w.i < len(b) {
		if w.i+8 <= len(b) {
			m := brackets(binary.LittleEndian.Uint64(b[w.i:]))
			if m == 0 {
				w.i += 8
				continue
			}
			w.i += bits.TrailingZeros64(m) >> 3
		}
		switch b[w.i] {
		case '"':
			w.text()
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				w.i++
				return
			}
		}
		w.i++
	}
	w.cut = true
}

// interrupts sets the high bit of each byte of x that is a quote or a backslash, as [special]
// does.
func interrupts(x uint64) uint64 {
	q, e := x^ones*'"', x^ones*'\\'
	return ((q-ones)&^q | (e-ones)&^e) & highs
}

// brackets sets the high bit of each byte of x that is a quote or a bracket of an object or an
// array, as [special] does.
func brackets(x uint64) uint64 {
	q, t := x^ones*'"', x|ones*0x20 // [ and ] become { and }
	open, shut := t^ones*'{', t^ones*'}'
	return ((q-ones)&^q | (open-ones)&^open | (shut-ones)&^shut) & highs
}

// Object calls f for each member of the object b, in order, until f returns
// false. key is the raw text between the quotes, val the raw value.
func Object(b []byte, f func(key, val []byte) bool) error {
	w := Walk(b)
	for more := w.Open('{'); more; more = w.Next() {
		k, v := w.Key(), w.Value()
		if len(v) == 0 || w.cut {
			return ErrSyntax
		}
		if !f(k, v) {
			return nil
		}
	}
	if !w.Close('}') {
		return ErrSyntax
	}
	return nil
}

// Array calls f for each element of the array b, until f returns false.
func Array(b []byte, f func(val []byte) bool) error {
	w := Walk(b)
	for more := w.Open('['); more; more = w.Next() {
		v := w.Value()
		if len(v) == 0 || w.cut {
			return ErrSyntax
		}
		if !f(v) {
			return nil
		}
	}
	if !w.Close(']') {
		return ErrSyntax
	}
	return nil
}

// IsString reports whether the raw value val is a string.
func IsString(val []byte) bool { return len(val) >= 2 && val[0] == '"' }

// IsObject reports whether the raw value val is an object.
func IsObject(val []byte) bool { return len(val) > 0 && val[0] == '{' }

// IsArray reports whether the raw value val is an array.
func IsArray(val []byte) bool { return len(val) > 0 && val[0] == '[' }

// IsNull reports whether the raw value val is null.
func IsNull(val []byte) bool { return string(val) == "null" }

// Uint32 parses the raw value val as a token id.
func Uint32(val []byte) (uint32, bool) {
	if len(val) == 0 || len(val) > 10 || len(val) > 1 && val[0] == '0' {
		return 0, false
	}
	n := uint64(0)
	for _, c := range val {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return uint32(n), n <= 1<<32-1
}

// Unquote appends the text of the raw string value val to dst. A lone
// surrogate escape becomes U+FFFD, and a control character may stand unescaped.
// It reports false for a bad escape or a value that is no string.
func Unquote(dst, val []byte) ([]byte, bool) {
	if !IsString(val) {
		return dst, false
	}
	return unescape(dst, val[1:len(val)-1])
}

// unescape appends what is between the quotes of a string, as Unquote does.
func unescape(dst, b []byte) ([]byte, bool) {
	for {
		k := bytes.IndexByte(b, '\\')
		if k < 0 {
			return append(dst, b...), true
		}
		var n int
		if dst, n = escape(append(dst, b[:k]...), b[k:]); n == 0 {
			return dst, false
		}
		b = b[k+n:]
	}
}

// escapes are the characters that stand for others after a backslash.
var escapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// escape appends the character of the escape at the start of b and returns
// the escape's length, 0 for a bad one.
func escape(dst, b []byte) ([]byte, int) {
	if len(b) < 2 {
		return dst, 0
	}
	if c := escapes[b[1]]; c != 0 {
		return append(dst, c), 2
	}
	r, ok := hex4(b)
	if !ok {
		return dst, 0
	}
	n := 6
	if utf16.IsSurrogate(r) {
		r2, ok := hex4(b[6:])
		if r = utf16.DecodeRune(r, r2); ok && r != utf8.RuneError {
			n = 12
		} else {
			r = utf8.RuneError
		}
	}
	return utf8.AppendRune(dst, r), n
}

// hex4 parses \uXXXX at the start of b.
func hex4(b []byte) (rune, bool) {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(b[2:6]), 16, 16)
	return rune(n), err == nil
}

// shorts are what stands after the backslash of an escape of two bytes.
var shorts = [256]byte{'"': '"', '\\': '\\', '\b': 'b', '\f': 'f', '\n': 'n', '\r': 'r', '\t': 't'}

// AppendQuote appends s as a JSON string, as Python's json.dumps with
// ensure_ascii=False writes it: only quotes, backslashes and control
// characters are escaped.
func AppendQuote(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	start := 0
	for i := range len(s) {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		dst = append(dst, s[start:i]...)
		start = i + 1
		if short := shorts[c]; short != 0 {
			dst = append(dst, '\\', short)
		} else {
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
	}
	return append(append(dst, s[start:]...), '"')
}
