package report

import (
	"encoding/json"
	"flag"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/rig/jsonschema"
)

var update = flag.Bool("update", false, "write docs/schema/bench-v1.json")

// The committed schema is that of the code, and results fit it.
func TestSchema(t *testing.T) {
	s := jsonschema.Of(reflect.TypeFor[experiment.Result](), nil)
	s["$schema"], s["$id"], s["title"] = "https://json-schema.org/draft/2020-12/schema", experiment.Schema, "result.json of dynctl bench --threshold"
	s["properties"].(map[string]any)["schema"] = map[string]any{"type": "string", "const": experiment.Schema}
	schema := jsonschema.Committed(t, filepath.Join("..", "..", "..", "docs", "schema", "bench-v1.json"), s, *update)
	for _, r := range []*experiment.Result{result(t, 1, 1), result(t, 9, 2)} {
		raw, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var v any
		if err := json.Unmarshal(raw, &v); err != nil {
			t.Fatal(err)
		}
		for _, fault := range jsonschema.Check("result", schema, v) {
			t.Error(fault)
		}
	}
}
