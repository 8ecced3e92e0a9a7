package rawjson

import (
	"bytes"
	"encoding/json"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func TestObject(t *testing.T) {
	t.Parallel()
	for in, want := range map[string][]string{
		` { "a" : 1 , "b\"c":[1,{"x":"]}"}], "d":"\\"} `: {"a", "1", `b\"c`, `[1,{"x":"]}"}]`, "d", `"\\"`},
		`{}`:            nil,
		`{"a":null}`:    {"a", "null"},
		`{"a":1,"a":2}`: {"a", "1", "a", "2"},
		`{"a":-1.5e3,}`: {"a", "-1.5e3", "!"},
		`{"a"}`:         {"!"},
		`{"a":}`:        {"!"},
		`{"a":1`:        {"a", "1", "!"},
		`{"a":"x`:       {"!"},
		`{"a":[1,2}`:    {"a", "[1,2}", "!"}, // skipped over, not checked
		`[]`:            {"!"},
		``:              {"!"},
	} {
		var got []string
		if err := Object([]byte(in), func(k, v []byte) bool { got = append(got, string(k), string(v)); return true }); err != nil {
			got = append(got, "!")
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", in, d)
		}
	}
}

func TestUint32(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]bool{"0": true, "4294967295": true, "4294967296": false, "": false, "-1": false, "1.0": false, "01": false, "1e3": false, `"1"`: false} {
		if _, ok := Uint32([]byte(in)); ok != want {
			t.Errorf("%q: %v, want %v", in, ok, want)
		}
	}
}

// FuzzAgainstStdlib: strings and objects read as encoding/json reads them.
func FuzzAgainstStdlib(f *testing.F) {
	f.Add([]byte(`{"a":"\u00e9\ud83d\ude00\ud800x\/\b","b":[1,"2",{"c":null}]}`))
	f.Add([]byte(`"\\\""`))
	f.Add([]byte(`[true,false,[[]],"]"]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var any1 any
		valid := json.Unmarshal(b, &any1) == nil && utf8.Valid(b)
		v := bytes.Trim(b, " \t\r\n")
		n, m := 0, 0
		errO := Object(v, func(_, e []byte) bool { n++; return true })
		errA := Array(v, func(e []byte) bool { m++; return true })
		text, ok := Unquote(nil, v)
		if !valid {
			return
		}
		switch x := any1.(type) {
		case string:
			if !ok || string(text) != x {
				t.Fatalf("Unquote(%s) = %q, %v; want %q", v, text, ok, x)
			}
			if q := AppendQuote(nil, x); json.Unmarshal(q, &any1) != nil || any1 != x {
				t.Fatalf("AppendQuote(%q) = %s", x, q)
			}
		case map[string]any:
			if errO != nil || n < len(x) {
				t.Fatalf("Object(%s): %d members, %v", v, n, errO)
			}
		case []any:
			if errA != nil || m != len(x) {
				t.Fatalf("Array(%s): %d elements, %v; want %d", v, m, errA, len(x))
			}
		}
	})
}

// TestWalkerNeverReadsBeyond: of text that ends anywhere a walker gives what
// there is, and then neither a key nor a value nor a next one.
func TestWalkerNeverReadsBeyond(t *testing.T) {
	t.Parallel()
	const text = ` {"a": [1, {"b\"": "x]"}] , "c":"d\\", "e" : -1.5, "f":{} } `
	whole := []string{"a", `[1, {"b\"": "x]"}]`, "c", `"d\\"`, "e", "-1.5", "f", "{}"}
	for n := range len(text) + 1 {
		w := Walk([]byte(text[:n]))
		var got []string
		for more := w.Open('{'); more; more = w.Next() {
			got = append(got, string(w.Key()), string(w.Value()))
		}
		for i, want := range whole {
			if i < len(got)-2 && got[i] != want {
				t.Errorf("%s: part %d is %q, want %q", text[:n], i, got[i], want)
			}
		}
		if closed := w.Close('}'); closed != (n >= len(text)-1) || closed && len(got) != len(whole) {
			t.Errorf("%s: %q, closed: %v", text[:n], got, closed)
		}
		if len(w.Value()) != 0 || w.Next() || w.Key() != nil {
			t.Errorf("%s: goes on after its end", text[:n])
		}
	}
}

// stepped is Value, read byte by byte.
func stepped(b []byte) (end int, cut bool) {
	depth := 0
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case c == '"':
			for i++; i < len(b) && b[i] != '"'; i++ {
				if b[i] == '\\' {
					i++
				}
			}
			if i >= len(b) {
				return len(b), true
			}
			if depth == 0 {
				return i + 1, false
			}
		case c == '{' || c == '[':
			depth++
		case c == '}' || c == ']':
			if depth == 0 {
				return i, false
			}
			if depth--; depth == 0 {
				return i + 1, false
			}
		case depth == 0 && bytes.IndexByte([]byte(",: \n\r\t"), c) >= 0:
			return i, false
		}
	}
	return len(b), depth > 0
}

// FuzzSkip: a value that is passed over in words ends where it ends byte by byte.
func FuzzSkip(f *testing.F) {
	for _, text := range []string{
		`{"a": [1, {"b\"": "x]"}], "long": "a text of more than 32 bytes with \\\" and }", "c":"d\\"} `,
		`[[1000001,1000002,1000003],[7]],`, `"not closed \"`, `[[{]}"`, `12"a",`, `-1.5e3]`, "\x00\x80[\xdb\x5a\xfd]", `"1234567\"9"`, `[{"12345678":"]"}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		w := Walk(b)
		got := w.Value()
		end, cut := stepped(b)
		if len(got) != end || w.i != end || w.cut != cut {
			t.Fatalf("%q: ends at %d (cut: %v), want %d (%v)", b, w.i, w.cut, end, cut)
		}
	})
}
