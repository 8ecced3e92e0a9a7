package api

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestValidJSON(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		``: false, ` `: false, `1`: true, ` {} `: true, `{}{}`: false, `nul`: false,
		`[1,2,3]`: true, `[1, 2, 3]`: true, "[1,\n 2]": true, `[10,20 ,30]`: true,
		`[1,]`: false, `[1, ]`: false, `[,1]`: false, `[1,,2]`: false, `[01,2]`: false, `[0,1]`: true, `[1`: false, `[1,`: false, `[1, `: false,
		`[[7, 6], [5]]`: true, `{"a":[1,-2,3e4,5.6]}`: true, "\"\xff\"": false,
		strings.Repeat("[", 4) + strings.Repeat("]", 4): true,
		strings.Repeat("[", 5) + strings.Repeat("]", 5): false,
	} {
		if got := ValidJSON([]byte(text), 4); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}

// FuzzValidJSON holds it against encoding/json.
func FuzzValidJSON(f *testing.F) {
	for _, s := range []string{`[1,2, 3]`, `{"a":[0,1,23],"b":"\u00e9"}`, "[1,\t-2 ]", `[1,]`, `"\ud800"`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if got, want := ValidJSON(b, 1<<20), json.Valid(b) && utf8.Valid(b); got != want {
			t.Fatalf("%q: %v, encoding/json says %v", b, got, want)
		}
	})
}
