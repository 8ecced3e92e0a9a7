package rawjson

import "unicode/utf8"

// AppendLossy appends bytes as text, with U+FFFD for each longest part that begins a
// character and does not end it, and for each other byte that is none: Unicode's
// substitution of maximal subparts (The Unicode Standard, 3.9), as Rust's
// String::from_utf8_lossy and Python's errors="replace" do.
func AppendLossy(dst, b []byte) []byte {
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		// A character that is not whole; U+FFFD itself is one of three bytes.
		for k := 2; r == utf8.RuneError && n == k-1 && k <= len(b) && !utf8.FullRune(b[:k]); k++ {
			n = k
		}
		dst = utf8.AppendRune(dst, r)
		b = b[n:]
	}
	return dst
}
