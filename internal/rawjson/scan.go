package rawjson

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"unicode/utf8"
)

// Scanner walks JSON text and validates what it passes (RFC 8259, valid UTF-8, limited
// depth). Its methods take the index at which to begin and return the index after what
// they read. They return -1 for bad text; Problem then says where and why.
type Scanner struct {
	b        []byte
	depth    int
	maxDepth int
	at       int
	what     string
	points   int
}

// NewScanner returns a scanner of b that refuses values nested deeper than depth.
func NewScanner(b []byte, depth int) Scanner { return Scanner{b: b, maxDepth: depth} }

// Problem is where the text is bad, and what the scanner expected there.
func (s *Scanner) Problem() (at int, what string) { return s.at, s.what }

// Points is the number of code points of the string read last, -1 where they were not
// counted on the way.
func (s *Scanner) Points() int { return s.points }

// Fail notes a problem and returns -1.
func (s *Scanner) Fail(at int, what string) int {
	s.at, s.what = at, what
	return -1
}

// Space returns the index of the first byte from i on that is not white space.
func (s *Scanner) Space(i int) int { return Space(s.b, i) }

// Space returns the index of the first byte of b from i on that is not white space.
func Space(b []byte, i int) int {
	for i < len(b) {
		switch b[i] {
		case ' ', '\n', '\r', '\t':
			i++
		default:
			return i
		}
	}
	return i
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// special sets the high bit of each byte of x that ends or interrupts a plain
// run within a string: a quote, a backslash, or a control character. The other
// bits mean nothing. A borrow can set a wrong bit only above a right one, so
// that the lowest is always right.
func special(x uint64) uint64 {
	y := x ^ ones*0x02 // the quote becomes 0x20, next to the control characters
	e := x ^ ones*'\\'
	return (y-ones*0x21)&^y | (e-ones)&^e
}

// Str reads a string whose opening quote is at i-1 and returns the index after
// the closing quote, and whether there were escapes. It takes 32 or 8 bytes at
// a time, because prompts are long and mostly free of anything special.
func (s *Scanner) Str(i int) (end int, escaped bool) {
	b := s.b
	start := i
	var seen uint64
	escapes, unicode := 0, false
	for {
		clean := 4 // words in a row without anything special
		for i+8 <= len(b) {
			for clean >= 4 && i+32 <= len(b) {
				p := b[i : i+32 : i+32]
				x0, x1 := binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:])
				x2, x3 := binary.LittleEndian.Uint64(p[16:]), binary.LittleEndian.Uint64(p[24:])
				if (special(x0)|special(x1)|special(x2)|special(x3))&highs != 0 {
					clean = 0
					break
				}
				seen |= x0 | x1 | x2 | x3
				i += 32
			}
			if i+8 > len(b) {
				break
			}
			x := binary.LittleEndian.Uint64(b[i:])
			m := special(x) & highs
			if m == 0 {
				seen |= x
				i += 8
				clean++
				continue
			}
			k := bits.TrailingZeros64(m) &^ 7
			seen |= x & (1<<k - 1)
			i += k >> 3
			if b[i] == '\\' && i+1 < len(b) && plainEscape[b[i+1]] {
				escapes++
				i += 2
				clean = 0
				continue
			}
			break
		}
		if i >= len(b) {
			return s.Fail(i, "a string is not closed"), false
		}
		c := b[i]
		switch {
		case c == '"':
			if seen&highs != 0 && !utf8.Valid(b[start:i]) {
				return s.Fail(badUTF8(b, start, i), "a string is not valid UTF-8"), false
			}
			if s.points = i - start - escapes; unicode || seen&highs != 0 {
				s.points = -1
			}
			return i + 1, escapes > 0 || unicode
		case c == '\\':
			if i+1 >= len(b) {
				return s.Fail(i+1, "a string is not closed"), false
			}
			switch {
			case plainEscape[b[i+1]]:
				escapes++
				i += 2
			case b[i+1] == 'u':
				unicode = true
				for k := i + 2; k < i+6; k++ {
					if k >= len(b) || !isHex(b[k]) {
						return s.Fail(k, "expected four hexadecimal digits after \\u"), false
					}
				}
				i += 6
			default:
				return s.Fail(i+1, "expected one of \"\\/bfnrtu after a backslash"), false
			}
		case c < 0x20:
			return s.Fail(i, "a control character in a string must be escaped"), false
		default:
			seen |= uint64(c) // the last few bytes of the body
			i++
		}
	}
}

// plainEscape are the characters that make an escape of two bytes.
var plainEscape = [256]bool{'"': true, '\\': true, '/': true, 'b': true, 'f': true, 'n': true, 'r': true, 't': true}

func isHex(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

func badUTF8(b []byte, i, end int) int {
	for i < end {
		r, n := utf8.DecodeRune(b[i:end])
		if r == utf8.RuneError && n <= 1 {
			return i
		}
		i += n
	}
	return i
}

func (s *Scanner) digits(i int) int {
	for i < len(s.b) && s.b[i]-'0' <= 9 {
		i++
	}
	return i
}

func (s *Scanner) number(i int) int {
	b := s.b
	if b[i] == '-' {
		i++
	}
	switch {
	case i >= len(b) || b[i]-'0' > 9:
		return s.Fail(i, "expected a digit")
	case b[i] == '0':
		i++
		if i < len(b) && b[i]-'0' <= 9 {
			return s.Fail(i, "a number must not begin with 0")
		}
	default:
		i = s.digits(i)
	}
	if i < len(b) && b[i] == '.' {
		j := s.digits(i + 1)
		if j == i+1 {
			return s.Fail(j, "expected a digit after the decimal point")
		}
		i = j
	}
	if i < len(b) && b[i]|0x20 == 'e' {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		j := s.digits(i)
		if j == i {
			return s.Fail(j, "expected a digit in the exponent")
		}
		i = j
	}
	return i
}

func (s *Scanner) literal(i int, word string) int {
	if len(s.b)-i >= len(word) && string(s.b[i:i+len(word)]) == word {
		return i + len(word)
	}
	return s.Fail(i, "expected a JSON value")
}

// Value reads any value that begins at i (no white space before it).
func (s *Scanner) Value(i int) int {
	if i >= len(s.b) {
		return s.Fail(i, "expected a JSON value")
	}
	switch c := s.b[i]; c {
	case '"':
		end, _ := s.Str(i + 1)
		return end
	case '{':
		return s.Object(i, nil)
	case '[':
		return s.Array(i, nil)
	case 't':
		return s.literal(i, "true")
	case 'f':
		return s.literal(i, "false")
	case 'n':
		return s.literal(i, "null")
	default:
		if c == '-' || c-'0' <= 9 {
			return s.number(i)
		}
		return s.Fail(i, "expected a JSON value")
	}
}

// Member is called with where a key begins and ends between its quotes, whether it has
// escapes, and the index of its value. It reads the value and returns the index after it.
type Member func(key, end int, escaped bool, value int) int

// Object reads an object that begins at i; on, when not nil, reads its values.
func (s *Scanner) Object(i int, on Member) int {
	if s.depth++; s.depth > s.maxDepth {
		return s.Fail(i, fmt.Sprintf("values are nested deeper than %d", s.maxDepth))
	}
	i = s.Space(i + 1)
	if i < len(s.b) && s.b[i] == '}' {
		s.depth--
		return i + 1
	}
	for {
		if i >= len(s.b) || s.b[i] != '"' {
			return s.Fail(i, "expected a string as the key of an object's member")
		}
		key := i + 1
		end, escaped := s.Str(i + 1)
		if end < 0 {
			return -1
		}
		i = s.Space(end)
		if i >= len(s.b) || s.b[i] != ':' {
			return s.Fail(i, "expected ':' after a key")
		}
		i = s.Space(i + 1)
		if on != nil {
			i = on(key, end-1, escaped, i)
		} else {
			i = s.Value(i)
		}
		if i < 0 {
			return -1
		}
		i = s.Space(i)
		if i >= len(s.b) {
			return s.Fail(i, "expected ',' or '}' after a member of an object")
		}
		switch s.b[i] {
		case ',':
			i = s.Space(i + 1)
		case '}':
			s.depth--
			return i + 1
		default:
			return s.Fail(i, "expected ',' or '}' after a member of an object")
		}
	}
}

// Array reads an array that begins at i; on, when not nil, reads its elements.
func (s *Scanner) Array(i int, on func(i int) int) int {
	if s.depth++; s.depth > s.maxDepth {
		return s.Fail(i, fmt.Sprintf("values are nested deeper than %d", s.maxDepth))
	}
	i = s.Space(i + 1)
	if i < len(s.b) && s.b[i] == ']' {
		s.depth--
		return i + 1
	}
	for {
		if on != nil {
			i = on(i)
		} else {
			i = s.Value(s.Space(s.wholes(i)))
		}
		if i < 0 {
			return -1
		}
		i = s.Space(i)
		if i >= len(s.b) {
			return s.Fail(i, "expected ',' or ']' after an element of an array")
		}
		switch s.b[i] {
		case ',':
			i = s.Space(i + 1)
		case ']':
			s.depth--
			return i + 1
		default:
			return s.Fail(i, "expected ',' or ']' after an element of an array")
		}
	}
}

// wholes skips the elements of an array from i on that are plain whole numbers
// and not the last: of token and block ids there are thousands. It is not
// inlined, so that the alignment of its loop, which costs up to a fifth of its
// time, does not change with the code around a call.
//
//go:noinline
func (s *Scanner) wholes(i int) int {
	for b := s.b; ; {
		k := i
		for k < len(b) && b[k]-'0' <= 9 {
			k++
		}
		if k == i || b[i] == '0' || k >= len(b) || b[k] != ',' {
			return i
		}
		if i = k + 1; i < len(b) && b[i] == ' ' {
			i++
		}
	}
}

// ReadObject reports whether b is one JSON object, in valid UTF-8 and with nothing nested
// deeper than depth, and calls each for its members, duplicates included: the name with its
// escapes resolved, the raw value. It may have been called for some before the answer is
// false.
func ReadObject(b []byte, depth int, each func(name, value []byte)) bool {
	s := NewScanner(b, depth)
	i := s.Space(0)
	if i >= len(b) || b[i] != '{' {
		return false
	}
	i = s.Object(i, func(key, keyEnd int, _ bool, i int) int {
		end := s.Value(i)
		if end >= 0 {
			each(resolved(b[key:keyEnd]), b[i:end])
		}
		return end
	})
	return i >= 0 && s.Space(i) == len(b)
}
