package rawjson

import "strings"

// AppendString appends s as a JSON string; invalid UTF-8 becomes U+FFFD.
func AppendString(dst []byte, s string) []byte {
	return AppendQuote(dst, strings.ToValidUTF8(s, "\uFFFD"))
}
