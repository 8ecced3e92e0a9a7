package rawjson

import (
	"testing"
	"unicode/utf8"
)

// TestAppendLossy: what is no character becomes U+FFFD as the Unicode Standard has it
// (its tables 3-8 to 3-11), and what is one stays, U+FFFD itself included.
func TestAppendLossy(t *testing.T) {
	for in, want := range map[string]string{
		"":                                     "",
		"plain €, 語, 🙂":                        "plain €, 語, 🙂",
		"\uFFFD":                               "\uFFFD",
		"a\uFFFDb\uFFFD":                       "a\uFFFDb\uFFFD",
		"\xE2\x82":                             "\uFFFD",
		"\xF1\x80\x80A":                        "\uFFFDA",
		"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82A":    "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA",
		"\xED\xA0\x80\xED\xBF\xBF\xED\xAFA":    "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA",
		"\xE1\x80\xE2\xF0\x91\x92\xF1\xBFA":    "\uFFFD\uFFFD\uFFFD\uFFFDA",
		"\xF4\x91\x92\x93\xFFA\x80\xBFB":       "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDA\uFFFD\uFFFDB",
		"\xEF\xBF":                             "\uFFFD",
		"\xEF\xBF\xBD\xEF\xBF\xEF\xBF\xBD\xEF": "\uFFFD\uFFFD\uFFFD\uFFFD",
	} {
		if got := string(AppendLossy([]byte("x"), []byte(in))); got != "x"+want {
			t.Errorf("%q is %q, want %q", in, got[1:], want)
		}
	}
}

// FuzzAppendLossy: the result is text, valid text is not changed, and what follows a
// whole character does not change what comes before.
func FuzzAppendLossy(f *testing.F) {
	f.Add([]byte("a\uFFFD\xF0\x9F\x99\x82\xE2\x82"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got := AppendLossy(nil, b)
		if !utf8.Valid(got) || utf8.Valid(b) && string(got) != string(b) {
			t.Fatalf("%q is %q", b, got)
		}
		if more := AppendLossy(nil, append(b[:len(b):len(b)], 'x')); string(more) != string(got)+"x" {
			t.Fatalf("%q is %q, and with x behind it %q", b, got, more)
		}
	})
}
