// Package jsonschema makes JSON schemas of Go types, for tests that hold the published
// schemas to the code and what programs print to the schemas.
package jsonschema

import (
	"encoding"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Of is the schema of a type as encoding/json writes it. own are the schemas of types
// that write themselves; those that write a text are strings without.
func Of(t reflect.Type, own map[reflect.Type]map[string]any) map[string]any {
	if s, ok := own[t]; ok {
		return s
	}
	switch {
	case t == reflect.TypeFor[time.Time]():
		return map[string]any{"type": "string", "format": "date-time"}
	case t.Implements(reflect.TypeFor[encoding.TextMarshaler]()):
		return map[string]any{"type": "string"}
	}
	switch t.Kind() {
	case reflect.Pointer:
		s := Of(t.Elem(), own)
		s["type"] = []any{s["type"], "null"}
		return s
	case reflect.Struct:
		s := map[string]any{"type": "object", "properties": map[string]any{}, "required": []any{}}
		members(s, t, own)
		return s
	case reflect.Slice:
		return map[string]any{"type": "array", "items": Of(t.Elem(), own)}
	case reflect.Map:
		return map[string]any{"type": "object", "additionalProperties": Of(t.Elem(), own)}
	case reflect.Interface:
		return map[string]any{}
	case reflect.String:
		return map[string]any{"type": "string"}
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.Float64, reflect.Float32:
		return map[string]any{"type": "number"}
	default:
		return map[string]any{"type": "integer"}
	}
}

// members adds the members of a struct to the schema of an object, those of structs
// embedded without a name among them.
func members(s map[string]any, t reflect.Type, own map[reflect.Type]map[string]any) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported():
			continue
		case name == "" && f.Anonymous:
			members(s, f.Type, own)
			continue
		case name == "":
			name = f.Name
		}
		s["properties"].(map[string]any)[name] = Of(f.Type, own)
		if !strings.Contains(opts, "omitempty") && !strings.Contains(opts, "omitzero") {
			s["required"] = append(s["required"].([]any), name)
		}
	}
}

// Check lists where a decoded value does not fit a schema. It knows the keywords of the
// schemas that Of makes, and pattern. An object with properties has no others, unless
// additionalProperties is their schema.
func Check(at string, s map[string]any, v any) (faults []string) {
	if c, ok := s["const"]; ok && c != v {
		return []string{fmt.Sprintf("%s is %v, want %v", at, v, c)}
	}
	if e, ok := s["enum"].([]any); ok && !slices.Contains(e, v) {
		return []string{fmt.Sprintf("%s is %v, want one of %v", at, v, e)}
	}
	types, ok := s["type"].([]any)
	if one, given := s["type"]; given && !ok {
		types = []any{one}
	}
	if len(types) > 0 && !slices.ContainsFunc(types, func(t any) bool { return is(t, v) }) {
		return []string{fmt.Sprintf("%s is %T, want %v", at, v, s["type"])}
	}
	switch x := v.(type) {
	case string:
		if p, ok := s["pattern"].(string); ok && !regexp.MustCompile(p).MatchString(x) {
			faults = append(faults, fmt.Sprintf("%s is %q, want %s", at, x, p))
		}
		if s["format"] == "date-time" {
			if _, err := time.Parse(time.RFC3339Nano, x); err != nil {
				faults = append(faults, fmt.Sprintf("%s: %v", at, err))
			}
		}
	case []any:
		items, _ := s["items"].(map[string]any)
		for i, e := range x {
			faults = append(faults, Check(fmt.Sprintf("%s[%d]", at, i), items, e)...)
		}
	case map[string]any:
		props, _ := s["properties"].(map[string]any)
		others, _ := s["additionalProperties"].(map[string]any)
		for k, e := range x {
			switch p, known := props[k].(map[string]any); {
			case known:
				faults = append(faults, Check(at+"."+k, p, e)...)
			case others != nil:
				faults = append(faults, Check(at+"."+k, others, e)...)
			case props != nil:
				faults = append(faults, at+"."+k+" is not in the schema")
			}
		}
		required, _ := s["required"].([]any)
		for _, k := range required {
			if _, ok := x[k.(string)]; !ok {
				faults = append(faults, at+"."+k.(string)+" is missing")
			}
		}
	}
	return faults
}

// is reports whether a decoded value is of a schema's type.
func is(name, v any) bool {
	switch x := v.(type) {
	case nil:
		return name == "null"
	case string:
		return name == "string"
	case bool:
		return name == "boolean"
	case float64:
		return name == "number" || name == "integer" && x == float64(int64(x))
	case []any:
		return name == "array"
	case map[string]any:
		return name == "object"
	}
	return false
}

// Committed fails t where a file does not have the schema s, or with update writes it, and
// returns the schema of the file as Check takes it.
func Committed(t testing.TB, path string, s map[string]any, update bool) map[string]any {
	t.Helper()
	raw, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	raw = append(raw, '\n')
	if update {
		if err := os.WriteFile(path, raw, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	committed, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(committed), string(raw)); diff != "" {
		t.Errorf("%s is old: run this test with -update\n%s", path, diff)
	}
	var schema map[string]any
	if err := json.Unmarshal(committed, &schema); err != nil {
		t.Fatal(err)
	}
	return schema
}
