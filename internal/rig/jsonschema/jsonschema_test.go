package jsonschema

import (
	"encoding/json"
	"reflect"
	"testing"
	"time"
)

type Named struct {
	A int `json:"a"`
}

type outer struct {
	Plain
	Named `json:"named,omitzero"`
	P     *float64          `json:"p"`
	L     []string          `json:"l"`
	M     map[string]any    `json:"m,omitempty"`
	T     time.Time         `json:"t,omitzero"`
	W     word              `json:"w,omitzero"`
	R     []json.RawMessage `json:"r,omitempty"`
	X     string            `json:"-"`
}

type Plain struct {
	B bool `json:"b"`
}

type word int

func (word) MarshalText() ([]byte, error) { return []byte("w"), nil }

// TestOf: what encoding/json writes of a value fits the schema of its type, and what a
// mistake would make of it does not.
func TestOf(t *testing.T) {
	own := map[reflect.Type]map[string]any{reflect.TypeFor[json.RawMessage](): {"type": "object"}}
	s := Of(reflect.TypeFor[outer](), own)
	one := 1.5
	for _, v := range []outer{
		{L: []string{}},
		{Named: Named{A: 1}, P: &one, L: []string{"x"}, M: map[string]any{"k": nil}, T: time.Unix(0, 0), W: 1, R: []json.RawMessage{[]byte(`{"any":1}`)}},
	} {
		raw, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		if faults := check(t, s, string(raw)); len(faults) > 0 {
			t.Errorf("%s: %v", raw, faults)
		}
	}
	for doc, want := range map[string]string{
		`{"b":true,"p":null,"l":[],"named":{"a":1.5}}`: "$.named.a is float64, want integer",
		`{"b":true,"p":null,"l":[],"c":1}`:             "$.c is not in the schema",
		`{"b":true,"p":null}`:                          "$.l is missing",
		`{"b":true,"p":null,"l":null}`:                 "$.l is <nil>, want array",
		`{"b":true,"p":null,"l":[1]}`:                  "$.l[0] is float64, want string",
		`[]`:                                           "$ is []interface {}, want object",
	} {
		if faults := check(t, s, doc); len(faults) != 1 || faults[0] != want {
			t.Errorf("%s: %q, want %q", doc, faults, want)
		}
	}
	if faults := check(t, map[string]any{"const": "v1"}, `"v2"`); len(faults) != 1 {
		t.Errorf("another constant: %v", faults)
	}
	if faults := check(t, map[string]any{"enum": []any{"a", "b"}}, `"c"`); len(faults) != 1 {
		t.Errorf("another word: %v", faults)
	}
	if faults := check(t, map[string]any{"pattern": "^a+$"}, `"ab"`); len(faults) != 1 {
		t.Errorf("a text of another pattern: %v", faults)
	}
	if faults := check(t, Of(reflect.TypeFor[map[string]int](), nil), `{"a":1,"b":"c"}`); len(faults) != 1 {
		t.Errorf("a member of another type: %v", faults)
	}
	if faults := check(t, Of(reflect.TypeFor[time.Time](), nil), `"yesterday"`); len(faults) != 1 {
		t.Errorf("no time: %v", faults)
	}
}

func check(t *testing.T, s map[string]any, doc string) []string {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(doc), &v); err != nil {
		t.Fatal(err)
	}
	return Check("$", s, v)
}
