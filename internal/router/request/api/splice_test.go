package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

func parse(t testing.TB, kind Kind, body string) *View {
	t.Helper()
	v := new(View)
	if err := v.Parse([]byte(body), kind, Limits{}); err != nil {
		t.Fatalf("Parse(%s): %v", body, err)
	}
	return v
}

func TestSpliceKeepsEveryOtherByte(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, in string
		edits    []Edit
		want     string
	}{
		{"nothing", ` { "a" : 1 } `, nil, ` { "a" : 1 } `},
		{"replace", `{"a": 1,  "b":2}`, []Edit{Set("a", []byte("7"))}, `{"a": 7,  "b":2}`},
		{"append", "{\"a\": 1 \n}", []Edit{Set("b", []byte("7"))}, "{\"a\": 1,\"b\":7 \n}"},
		{"append to empty", `{ }`, []Edit{Set("b", []byte("7"))}, `{"b":7 }`},
		{"delete first", "{\n \"a\": 1,\n \"b\": 2\n}", []Edit{Delete("a")}, "{\n \"b\": 2\n}"},
		{"delete last", "{\n \"a\": 1,\n \"b\": 2\n}", []Edit{Delete("b")}, "{\n \"a\": 1\n}"},
		{"delete middle", `{"a":1, "b":2, "c":3}`, []Edit{Delete("b")}, `{"a":1, "c":3}`},
		{"delete all", `{ "a":1, "b":2 }`, []Edit{Delete("b"), Delete("a")}, `{  }`},
		{"delete all and append", `{ "a":1, "b":2 }`, []Edit{Delete("b"), Delete("a"), Set("c", []byte("3"))}, `{ "c":3 }`},
		{"delete last and append", `{"a":1, "b":2 }`, []Edit{Delete("b"), Set("c", []byte("3"))}, `{"a":1,"c":3 }`},
		{"if present, absent", `{"a":1}`, []Edit{Replace("b", RawOne)}, `{"a":1}`},
		{"if present, present", `{"b":9}`, []Edit{Replace("b", RawOne)}, `{"b":1}`},
		{"big numbers and order", `{"z":123456789012345678901234567890,"a":1e400,"m":-0}`, []Edit{Set("n", RawOne)},
			`{"z":123456789012345678901234567890,"a":1e400,"m":-0,"n":1}`},
		{"escaped key", `{"str\u0065am":true}`, []Edit{Set("stream", RawFalse)}, `{"str\u0065am":false}`},
		{"unknown key twice", `{"x":1,"y":2,"x":3}`, []Edit{Delete("x")}, `{"y":2}`},
		{"nested set", `{"sampling_params": {"n":1} , "a":2}`, []Edit{Set("sampling_params.max_tokens", RawOne)},
			`{"sampling_params": {"n":1,"max_tokens":1} , "a":2}`},
		{"nested replace and delete", `{"sampling_params":{"max_tokens":50, "min_tokens":3,"stop":["x"]}}`,
			[]Edit{Set("sampling_params.max_tokens", RawOne), Delete("sampling_params.min_tokens")},
			`{"sampling_params":{"max_tokens":1,"stop":["x"]}}`},
		{"nested in a list", `{"sampling_params":[{"max_new_tokens":5}, {"max_new_tokens":6}]}`,
			[]Edit{Set("sampling_params.max_new_tokens", RawOne)},
			`{"sampling_params":[{"max_new_tokens":1}, {"max_new_tokens":1}]}`},
		{"nested, outer absent", `{"a":1}`, []Edit{Set("s.x", RawOne), Set("s.y", RawNull), Set("b", RawTrue)},
			`{"a":1,"s":{"x":1,"y":null},"b":true}`},
		{"nested, outer null", `{"s": null}`, []Edit{Set("s.x", RawOne)}, `{"s": {"x":1}}`},
		{"nested, outer a number", `{"s":4}`, []Edit{Set("s.x", RawOne)}, `{"s":4}`},
		{"nested delete, outer absent", `{"a":1}`, []Edit{Delete("s.x")}, `{"a":1}`},
		{"three levels", `{"s":{"e":{"k":1,"l":2}}}`, []Edit{Delete("s.e.k")}, `{"s":{"e":{"l":2}}}`},
		{"later wins", `{"a":1}`, []Edit{Set("a", []byte("2")), Set("a", []byte("3")), Set("b", RawOne), Set("b", RawNull)}, `{"a":3,"b":null}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			v := parse(t, Chat, c.in)
			if got := string(Splice(nil, v, c.edits)); got != c.want {
				t.Errorf("Splice\n got %s\nwant %s", got, c.want)
			}
		})
	}
}

// naive makes the same edits through encoding/json.
func naive(t interface{ Fatalf(string, ...any) }, body []byte, edits []Edit) any {
	decode := func(b []byte) any {
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		var out any
		if err := d.Decode(&out); err != nil {
			t.Fatalf("decode %s: %v", b, err)
		}
		return out
	}
	var apply func(m map[string]any, key string, e Edit)
	apply = func(m map[string]any, key string, e Edit) {
		head, tail, nested := strings.Cut(key, ".")
		old, present := m[head]
		if !nested {
			switch {
			case e.Value == nil:
				delete(m, head)
			case present || !e.IfPresent:
				m[head] = decode(e.Value)
			}
			return
		}
		switch in := old.(type) {
		case map[string]any:
			apply(in, tail, e)
		case []any:
			for _, el := range in {
				if o, ok := el.(map[string]any); ok {
					apply(o, tail, e)
				}
			}
		case nil:
			if e.Value != nil && !e.IfPresent {
				o := map[string]any{}
				apply(o, tail, e)
				m[head] = o
			}
		}
	}
	out := decode(body)
	for _, e := range edits {
		apply(out.(map[string]any), e.Key, e)
	}
	return out
}

// genJSON draws JSON text with odd white space, escapes and numbers.
func genJSON(t *rapid.T, depth int) string {
	ws := func() string { return rapid.SampledFrom([]string{"", "", " ", "\n\t", "\r\n  "}).Draw(t, "ws") }
	str := func() string {
		return rapid.SampledFrom([]string{
			`""`, `"x"`, `"a \"quoted\" text with \\ and \n"`, `"\u00e9\ud83d\ude00"`, `"日本語のテキスト"`, `"{\"max_tokens\":1}"`, `"0123456789abcdef0123456789abcdef"`,
		}).Draw(t, "str")
	}
	switch k := rapid.IntRange(0, 7).Draw(t, "kind"); {
	case k == 0:
		return "null"
	case k == 1:
		return rapid.SampledFrom([]string{"true", "false"}).Draw(t, "bool")
	case k <= 3:
		return rapid.SampledFrom([]string{"0", "-0", "1e400", "12345678901234567890123", "3.1400", "-1E-7"}).Draw(t, "num")
	case k <= 5 || depth == 0:
		return str()
	case k == 6:
		var els []string
		for range rapid.IntRange(0, 3).Draw(t, "n") {
			els = append(els, ws()+genJSON(t, depth-1)+ws())
		}
		return "[" + strings.Join(els, ",") + "]"
	default:
		return genObject(t, depth-1, []string{`"max_tokens"`, `"min_tokens"`, `"u"`, `"max_t\u006fkens"`, `"w"`})
	}
}

func genObject(t *rapid.T, depth int, keys []string) string {
	ws := func() string { return rapid.SampledFrom([]string{"", "", " ", "\n\t"}).Draw(t, "ws") }
	names := rapid.SliceOfNDistinct(rapid.SampledFrom(keys), 0, len(keys), func(s string) string {
		var out string
		_ = json.Unmarshal([]byte(s), &out)
		return out
	}).Draw(t, "keys")
	var ms []string
	for _, n := range names {
		ms = append(ms, ws()+n+ws()+":"+ws()+genJSON(t, depth)+ws())
	}
	if len(ms) == 0 {
		return "{" + ws() + "}"
	}
	return "{" + strings.Join(ms, ",") + "}"
}

func TestSpliceEqualsSemanticEdit(t *testing.T) {
	t.Parallel()
	topKeys := []string{`"a"`, `"b"`, `"s"`, `"str\u0065am_x"`, `"x.y"`, `"z"`, `"q"`, `"日"`}
	property.Check(t, func(t *rapid.T) {
		body := genObject(t, 3, topKeys)
		var v View
		if err := v.Parse([]byte(body), Unknown, Limits{}); err != nil {
			t.Fatalf("Parse(%s): %v", body, err)
		}
		if !json.Valid([]byte(body)) {
			t.Fatalf("generator made bad JSON: %s", body)
		}
		keys := rapid.SliceOfNDistinct(rapid.SampledFrom([]string{
			"a", "b", "q", "stream_x", "new", "s.max_tokens", "s.min_tokens", "s.u", "z.max_tokens", "gone.k", "gone.l",
		}), 0, 6, rapid.ID[string]).Draw(t, "edits")
		var edits []Edit
		for _, k := range keys {
			e := Edit{Key: k, IfPresent: rapid.Bool().Draw(t, "ifpresent")}
			if rapid.Bool().Draw(t, "set") {
				e.Value = []byte(rapid.SampledFrom([]string{"1", `{"n":[1,2]}`, `"v"`, "null"}).Draw(t, "value"))
			}
			edits = append(edits, e)
		}
		got := Splice(nil, &v, edits)
		if !json.Valid(got) {
			t.Fatalf("Splice(%s, %v) is not JSON: %s", body, show(edits), got)
		}
		if diff := cmp.Diff(naive(t, []byte(body), edits), naive(t, got, nil)); diff != "" {
			t.Fatalf("Splice(%s, %v) = %s: %s", body, show(edits), got, diff)
		}
		// Members that no edit names keep their bytes, in order.
		var again View
		if err := again.Parse(got, Unknown, Limits{}); err != nil {
			t.Fatalf("Parse of the result %s: %v", got, err)
		}
		named := func(name string) bool {
			for _, e := range edits {
				if head, _, _ := strings.Cut(e.Key, "."); head == name {
					return true
				}
			}
			return false
		}
		if diff := cmp.Diff(untouched(&v, named), untouched(&again, named)); diff != "" {
			t.Fatalf("untouched members of %s changed in %s: %s", body, got, diff)
		}
	})
}

func untouched(v *View, named func(string) bool) []string {
	var out []string
	for i := range v.Fields {
		f := &v.Fields[i]
		if !named(v.keyName(f)) {
			out = append(out, string(v.Body[f.Key.Start-1:f.Value.End]))
		}
	}
	return out
}

func show(edits []Edit) string {
	var b strings.Builder
	for _, e := range edits {
		fmt.Fprintf(&b, "{%s %s %v}", e.Key, e.Value, e.IfPresent)
	}
	return b.String()
}
