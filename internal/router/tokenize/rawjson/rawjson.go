// Package rawjson walks JSON in place: the members of an object, the elements
// of an array, the text of a string, without building values. It is tolerant
// of what it skips over and reports what it cannot walk.
package rawjson

import (
	"bytes"
	"errors"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// ErrSyntax is returned for bytes that are not JSON where it matters.
var ErrSyntax = errors.New("malformed JSON")

// space returns the first offset from i that is not white space.
func space(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// Trim returns b without white space around it.
func Trim(b []byte) []byte {
	b = b[space(b, 0):]
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\n' || b[len(b)-1] == '\r' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// stringEnd returns the offset after the closing quote of the string whose
// opening quote is at b[i], -1 when it does not end.
func stringEnd(b []byte, i int) int {
	for j := i + 1; ; {
		k := bytes.IndexByte(b[j:], '"')
		if k < 0 {
			return -1
		}
		k += j
		n := k
		for n > i+1 && b[n-1] == '\\' {
			n--
		}
		if (k-n)%2 == 0 {
			return k + 1
		}
		j = k + 1
	}
}

// skip returns the end of the value that starts at b[i], -1 for none.
func skip(b []byte, i int) int {
	if i >= len(b) {
		return -1
	}
	switch b[i] {
	case '"':
		return stringEnd(b, i)
	case '{', '[':
		depth := 0
		for i < len(b) {
			switch b[i] {
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			case '"':
				if i = stringEnd(b, i); i < 0 {
					return -1
				}
				continue
			}
			i++
		}
		return -1
	case ',', '}', ']', ':':
		return -1
	}
	from := i
	for i < len(b) && b[i] != ',' && b[i] != '}' && b[i] != ']' && b[i] > ' ' {
		i++
	}
	if i == from {
		return -1 // a control character
	}
	return i
}

// Object calls f for each member of the object b, in order, until f returns
// false. key is the raw text between the quotes, val the raw value.
func Object(b []byte, f func(key, val []byte) bool) error {
	i := space(b, 0)
	if i >= len(b) || b[i] != '{' {
		return ErrSyntax
	}
	if i = space(b, i+1); i < len(b) && b[i] == '}' {
		return nil
	}
	for {
		if i >= len(b) || b[i] != '"' {
			return ErrSyntax
		}
		e := stringEnd(b, i)
		if e < 0 {
			return ErrSyntax
		}
		key := b[i+1 : e-1]
		if i = space(b, e); i >= len(b) || b[i] != ':' {
			return ErrSyntax
		}
		i = space(b, i+1)
		if e = skip(b, i); e < 0 {
			return ErrSyntax
		}
		if !f(key, b[i:e]) {
			return nil
		}
		if i = space(b, e); i < len(b) && b[i] == '}' {
			return nil
		}
		if i >= len(b) || b[i] != ',' {
			return ErrSyntax
		}
		i = space(b, i+1)
	}
}

// Array calls f for each element of the array b, until f returns false.
func Array(b []byte, f func(val []byte) bool) error {
	i := space(b, 0)
	if i >= len(b) || b[i] != '[' {
		return ErrSyntax
	}
	if i = space(b, i+1); i < len(b) && b[i] == ']' {
		return nil
	}
	for {
		e := skip(b, i)
		if e < 0 {
			return ErrSyntax
		}
		if !f(b[i:e]) {
			return nil
		}
		if i = space(b, e); i < len(b) && b[i] == ']' {
			return nil
		}
		if i >= len(b) || b[i] != ',' {
			return ErrSyntax
		}
		i = space(b, i+1)
	}
}

// IsString reports whether the raw value val is a string.
func IsString(val []byte) bool { return len(val) >= 2 && val[0] == '"' }

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
// surrogate escape becomes U+FFFD. It reports false for a bad escape, an
// unescaped control character, or a value that is no string.
func Unquote(dst, val []byte) ([]byte, bool) {
	if !IsString(val) {
		return dst, false
	}
	for b := val[1 : len(val)-1]; ; {
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
