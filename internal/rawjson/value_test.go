package rawjson

import (
	"encoding/json"
	"testing"
	"unicode/utf8"
)

func TestGet(t *testing.T) {
	t.Parallel()
	const text = ` {"a":{"b":[10, {"c":"x\"y"}, null]}, "a":1, "\u0064":true, "":"none", "n":-7, "e":[]} trailing`
	for path, want := range map[string]string{
		"a.b.0": "10", "a.b.1.c": `"x\"y"`, "a.b.2": "null", "a.b": `[10, {"c":"x\"y"}, null]`,
		"a.b.3": "", "a.b.-1": "", "a.b.x": "", "a.x": "", "a.b.0.z": "", "x": "", "e.0": "", "n.0": "",
		"d": "true", "": `"none"`, "n": "-7",
	} {
		if got := Value(text).Get(path); string(got) != want || got.Exists() != (want != "") {
			t.Errorf("%q is %s, want %s", path, got, want)
		}
	}
	for text, want := range map[string]string{
		`{"a":{"b":"whole"`:  `"whole"`, // an answer of which not all was read
		`{"a":{"b":"not who`: "",
		`{"a":{"b":[1,[2]`:   "",
		`{"a":{"b":`:         "",
		`{"a":{"b"`:          "",
		`{"a":`:              "",
		`not JSON`:           "",
		``:                   "",
		`null`:               "",
	} {
		if got := Value(text).Get("a.b"); string(got) != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

func TestPut(t *testing.T) {
	t.Parallel()
	const text = ` {"a": {"b": [1, "two"]} , "c":{}}`
	for path, want := range map[string]string{
		"a.b.1": ` {"a": {"b": [1, NEW]} , "c":{}}`,
		"a":     ` {"a": NEW , "c":{}}`,
		"c.d":   text,
		"a.b.2": text,
	} {
		if got := string(Put([]byte(text), path, []byte("NEW"))); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	if got := string(Put([]byte(`{"a":"cut`), "a", []byte("1"))); got != `{"a":"cut` {
		t.Errorf("a value without its end became %s", got)
	}
}

func TestValues(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]struct {
		text  string
		n     int
		whole bool
	}{
		`"a\u00e9\n"`: {"aé\n", 0, false},
		`"plain"`:     {"plain", 0, false},
		`null`:        {"", 0, false},
		``:            {"", 0, false},
		`true`:        {"true", 0, false},
		`12`:          {"12", 12, true},
		`-3`:          {"-3", -3, true},
		`1.0`:         {"1.0", 0, false},
		`1e3`:         {"1e3", 0, false},
		`"5"`:         {"5", 0, false},
		`{"a":1}`:     {`{"a":1}`, 0, false},

		`99999999999999999999`: {"99999999999999999999", 0, false},
	} {
		v := Value(text)
		n, whole := v.Int()
		if whole != want.whole || whole && n != want.n {
			t.Errorf("%s is the number %d, %v", text, n, whole)
		}
		if got := v.String(); got != want.text {
			t.Errorf("%s is the text %q, want %q", text, got, want.text)
		}
		if v.Bool() != (text == "true") {
			t.Errorf("%s is %v", text, v.Bool())
		}
	}
}

// FuzzValue: the members and elements of valid JSON are those that encoding/json finds,
// and bad JSON is read without harm.
func FuzzValue(f *testing.F) {
	f.Add([]byte(`{"a":[1,{"b\n":null}],"a":"x"}`), "a.1.b")
	f.Add([]byte(`[[],{},"\ud800",-1e5]`), "0.0")
	f.Add([]byte(`{"a":{"a":"x`), "a.a")
	f.Fuzz(func(t *testing.T, b []byte, path string) {
		v := Value(b)
		got := v.Get(path)
		put := Put(b, path, []byte("1"))
		members := map[string]string{}
		for name, e := range v.Members() {
			members[string(name)] = string(e)
		}
		var elements int
		for range v.Elements() {
			elements++
		}
		if !json.Valid(b) || !utf8.Valid(b) {
			return
		}
		if got.Exists() && string(Value(put).Get(path)) != "1" {
			t.Fatalf("%s: %q was %s, and is not 1 in %s", b, path, got, put)
		}
		var object map[string]json.RawMessage
		var list []json.RawMessage
		switch {
		case json.Unmarshal(b, &object) == nil && object != nil:
			for name, want := range object {
				if members[name] != string(want) {
					t.Fatalf("%s: member %q is %s, want %s", b, name, members[name], want)
				}
			}
		case json.Unmarshal(b, &list) == nil && elements != len(list):
			t.Fatalf("%s: %d elements, want %d", b, elements, len(list))
		}
	})
}
