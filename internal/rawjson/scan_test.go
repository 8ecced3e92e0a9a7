package rawjson

import (
	"encoding/json"
	"maps"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

// membersOf reads an object, and keeps of duplicates the last one.
func membersOf(b []byte, depth int) (map[string]string, bool) {
	m := map[string]string{}
	ok := ReadObject(b, depth, func(name, value []byte) { m[string(name)] = string(value) })
	return m, ok
}

func TestReadObject(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		`1`: true, ` {} `: true, `nul`: false, "\"\xff\"": false,
		`[1,2,3]`: true, `[1, 2, 3]`: true, "[1,\n 2]": true, `[10,20 ,30]`: true,
		`[1,]`: false, `[1, ]`: false, `[,1]`: false, `[1,,2]`: false, `[01,2]`: false, `[0,1]`: true, `[1`: false, `[1,`: false, `[1, `: false,
		`[[7, 6], [5]]`: true, `{"a":[1,-2,3e4,5.6]}`: true,
		strings.Repeat("[", 4) + strings.Repeat("]", 4): true,
		strings.Repeat("[", 5) + strings.Repeat("]", 5): false,
	} {
		if _, got := membersOf([]byte(`{"v":`+text+`}`), 5); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
	for _, text := range []string{``, ` `, `1`, `[{}]`, `{}{}`, `{`, `{"a"}`, `{"a":1,}`, `null`} {
		if _, ok := membersOf([]byte(text), 5); ok {
			t.Errorf("%q is no object", text)
		}
	}
	got, ok := membersOf([]byte(` {"a" : [1, 2] , "\u0062":"x","a":null,"":{"a":7}} `), 5)
	want := map[string]string{"a": "null", "b": `"x"`, "": `{"a":7}`}
	if diff := cmp.Diff(want, got); !ok || diff != "" {
		t.Errorf("%v: want - got +:\n%s", ok, diff)
	}
}

// FuzzReadObject holds it against encoding/json.
func FuzzReadObject(f *testing.F) {
	for _, s := range []string{`{"v":[1,2, 3]}`, `{"a":[0,1,23],"b":"\u00e9"}`, "{\"\\u0061\":[1,\t-2 ],\"a\":1}", `{"v":[1,]}`, `{"v":"\ud800"}`, `[1]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, ok := membersOf(b, 1<<20)
		var said map[string]json.RawMessage
		err := json.Unmarshal(b, &said)
		if want := err == nil && said != nil && utf8.Valid(b); ok != want {
			t.Fatalf("%q: %v, encoding/json says %v", b, ok, err)
		}
		if !ok {
			return
		}
		want := map[string]string{}
		for name, v := range said {
			want[name] = string(v)
		}
		if !maps.Equal(want, got) {
			t.Fatalf("%q: %q, encoding/json says %q", b, got, want)
		}
	})
}
