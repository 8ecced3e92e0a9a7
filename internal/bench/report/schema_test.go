package report

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/bench/experiment"
)

var update = flag.Bool("update", false, "write docs/schema/bench-v1.json")

// describe is the JSON schema of a Go type as encoding/json writes it.
func describe(t reflect.Type) map[string]any {
	switch t {
	case reflect.TypeFor[time.Time]():
		return map[string]any{"type": "string", "format": "date-time"}
	case reflect.TypeFor[time.Duration]():
		return map[string]any{"type": "integer"}
	}
	switch t.Kind() {
	case reflect.Pointer:
		s := describe(t.Elem())
		s["type"] = []any{s["type"], "null"}
		return s
	case reflect.Struct:
		props, required := map[string]any{}, []any{}
		for i := range t.NumField() {
			f := t.Field(i)
			name, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
			if name == "-" || !f.IsExported() {
				continue
			}
			if name == "" {
				name = f.Name
			}
			props[name] = describe(f.Type)
			if !strings.Contains(opts, "omitempty") && !strings.Contains(opts, "omitzero") {
				required = append(required, name)
			}
		}
		return map[string]any{"type": "object", "properties": props, "required": required}
	case reflect.Slice:
		return map[string]any{"type": "array", "items": describe(t.Elem())}
	case reflect.Map:
		return map[string]any{"type": "object", "additionalProperties": describe(t.Elem())}
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

// check reports where a value does not fit a schema of the kind above.
func check(at string, s map[string]any, v any) []string {
	var out []string
	types, ok := s["type"].([]any)
	if !ok {
		types = []any{s["type"]}
	}
	fits := false
	for _, t := range types {
		switch x := v.(type) {
		case nil:
			fits = fits || t == "null"
		case string:
			fits = fits || t == "string"
		case bool:
			fits = fits || t == "boolean"
		case float64:
			fits = fits || t == "number" || t == "integer" && x == float64(int64(x))
		case []any:
			fits = fits || t == "array"
		case map[string]any:
			fits = fits || t == "object"
		}
	}
	if !fits {
		return []string{fmt.Sprintf("%s is %T, want %v", at, v, s["type"])}
	}
	switch x := v.(type) {
	case []any:
		for i, e := range x {
			out = append(out, check(fmt.Sprintf("%s[%d]", at, i), s["items"].(map[string]any), e)...)
		}
	case map[string]any:
		props, _ := s["properties"].(map[string]any)
		for k, e := range x {
			switch p, known := props[k].(map[string]any); {
			case known:
				out = append(out, check(at+"."+k, p, e)...)
			case props != nil:
				out = append(out, at+"."+k+" is not in the schema")
			}
		}
		required, _ := s["required"].([]any)
		for _, k := range required {
			if _, ok := x[k.(string)]; !ok {
				out = append(out, at+"."+k.(string)+" is missing")
			}
		}
	}
	return out
}

// The committed schema is that of the code, and results fit it.
func TestSchema(t *testing.T) {
	s := describe(reflect.TypeFor[experiment.Result]())
	s["$schema"], s["$id"], s["title"] = "https://json-schema.org/draft/2020-12/schema", experiment.Schema, "result.json of dynctl bench --threshold"
	s["properties"].(map[string]any)["schema"] = map[string]any{"type": "string", "const": experiment.Schema}
	raw, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	raw = append(raw, '\n')
	path := filepath.Join("..", "..", "..", "docs", "schema", "bench-v1.json")
	if *update {
		if err := os.WriteFile(path, raw, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	committed, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(committed), string(raw)); diff != "" {
		t.Errorf("docs/schema/bench-v1.json is old: go test ./internal/bench/report -run TestSchema -update\n%s", diff)
	}
	var schema map[string]any
	if err := json.Unmarshal(committed, &schema); err != nil {
		t.Fatal(err)
	}
	for _, r := range []*experiment.Result{result(t, 1, 1), result(t, 9, 2)} {
		raw, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var v any
		if err := json.Unmarshal(raw, &v); err != nil {
			t.Fatal(err)
		}
		for _, fault := range check("result", schema, v) {
			t.Error(fault)
		}
	}
}
