package repository

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/rig/jsonschema"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/settings"
)

// chartTypes are schemas of values whose default does not show what else they may be.
var chartTypes = map[string]map[string]any{
	"image.pullPolicy":                   {"enum": []any{"IfNotPresent", "Always", "Never"}},
	"image.pullSecrets":                  {"type": "array", "items": map[string]any{"type": "string"}},
	"service.type":                       {"enum": []any{"ClusterIP", "NodePort", "LoadBalancer"}},
	"extraArgs":                          {"type": "array", "items": map[string]any{"type": "string"}},
	"terminationGracePeriodSeconds":      {"type": []any{"integer", "null"}},
	"podDisruptionBudget.maxUnavailable": {"type": []any{"integer", "string"}},
}

// chartSets are the settings that the chart's arguments set.
var chartSets = map[string]bool{"listen": true, "admin_listen": true, "admin_token_file": true}

// TestDocumentChart keeps the chart's schema, the table in its README and its copies of
// alerts and dashboard equal to what they are written from.
func TestDocumentChart(t *testing.T) {
	var values yaml.Node
	if err := yaml.Unmarshal(chartFiles(chartDir).read(t, "values.yaml"), &values); err != nil {
		t.Fatal(err)
	}
	var table strings.Builder
	table.WriteString("\n| value | default | meaning |\n|---|---|---|\n")
	schema := chartSchema(t, &table, "", values.Content[0])
	schema["$schema"] = "http://json-schema.org/draft-07/schema#"
	properties := schema["properties"].(map[string]any)
	properties["global"] = map[string]any{"type": "object", "description": "Values of a parent chart. This chart uses none of them."}
	properties["enabled"] = map[string]any{"type": "boolean", "description": "For the condition of a parent chart. This chart does not read it."}
	jsonschema.Committed(t, filepath.Join(chartDir, "values.schema.json"), schema, *update)
	Document(t, filepath.Join(chartDir, "README.md"), "values", table.String()+"\n", writes, *update)
	for _, name := range []string{"alerts.yaml", "dashboard.json"} {
		File(t, filepath.Join(chartDir, "files", name), chartFiles(repository).Get("deploy/monitoring/"+name), writes, *update)
	}
}

// chartSchema is the schema of a section of the values, from its defaults and comments. It
// adds a row for each value to the table. A mapping in braces is one value.
func chartSchema(t *testing.T, table *strings.Builder, prefix string, section *yaml.Node) map[string]any {
	t.Helper()
	properties := map[string]any{}
	for i := 0; i < len(section.Content); i += 2 {
		k, v := section.Content[i], section.Content[i+1]
		key := prefix + k.Value
		var meaning []string
		for line := range strings.Lines(k.HeadComment) {
			meaning = append(meaning, strings.TrimSpace(strings.TrimPrefix(line, "#")))
		}
		text := strings.Join(meaning, " ")
		inner := v.Kind == yaml.MappingNode && v.Style&yaml.FlowStyle == 0
		var s map[string]any
		switch {
		case inner && key == "settings":
			fmt.Fprintf(table, "| `settings` | below | %s |\n", text)
			chartSchema(t, table, key+".", v)
			s = settingsSchema()
		case inner:
			s = chartSchema(t, table, key+".", v)
		default:
			if text == "" {
				t.Errorf("values.yaml: %s has no comment", key)
			}
			s = valueSchema(key, v)
			fmt.Fprintf(table, "| `%s` | `%s` | %s |\n", key, shownDefault(t, v), strings.ReplaceAll(text, "|", `\|`))
		}
		if text != "" {
			s["description"] = text
		}
		properties[k.Value] = s
	}
	return map[string]any{"type": "object", "properties": properties, "additionalProperties": false}
}

// valueSchema is the schema of one value, from its default.
func valueSchema(key string, v *yaml.Node) map[string]any {
	if s, ok := chartTypes[key]; ok {
		return s
	}
	texts := regexp.MustCompile(`(?i)(annotations|labels|nodeSelector)$`)
	switch {
	case v.Kind == yaml.SequenceNode && strings.HasPrefix(key, "settings."):
		return map[string]any{"type": "array", "items": map[string]any{"type": "string"}}
	case v.Kind == yaml.SequenceNode:
		return map[string]any{"type": "array", "items": map[string]any{"type": "object"}}
	case v.Kind == yaml.MappingNode && texts.MatchString(key):
		return map[string]any{"type": "object", "additionalProperties": map[string]any{"type": "string"}}
	case v.Kind == yaml.MappingNode:
		return map[string]any{"type": "object"}
	}
	return map[string]any{"type": map[string]string{"!!str": "string", "!!int": "integer", "!!bool": "boolean"}[v.Tag]}
}

// shownDefault is a default in one line.
func shownDefault(t *testing.T, v *yaml.Node) string {
	t.Helper()
	if v.Kind == yaml.ScalarNode && v.Value != "" {
		return v.Value
	}
	var decoded any
	if err := v.Decode(&decoded); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(decoded)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// settingsSchema is the schema of a configuration file, less what the chart sets.
func settingsSchema() map[string]any {
	root := map[string]any{"type": "object", "properties": map[string]any{}, "additionalProperties": false}
	defaults := settings.Default()
	for _, r := range settings.Rows() {
		if chartSets[r.Key] {
			continue
		}
		at := root["properties"].(map[string]any)
		path := strings.Split(r.Key, ".")
		for _, section := range path[:len(path)-1] {
			if at[section] == nil {
				at[section] = map[string]any{"type": "object", "properties": map[string]any{}, "additionalProperties": false}
			}
			at = at[section].(map[string]any)["properties"].(map[string]any)
		}
		s := map[string]any{}
		switch v := r.Get(&defaults).(type) {
		case []string:
			s["type"], s["items"] = "array", map[string]any{"type": "string"}
		case []settings.Alias:
			text := map[string]any{"type": "string"}
			s["type"], s["items"] = "array", map[string]any{"type": "object", "properties": map[string]any{"name": text, "model": text}, "additionalProperties": false}
		case time.Duration:
			s["type"], s["pattern"] = "string", `^(0|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$`
		case decide.Threshold:
			s["type"], s["pattern"] = []any{"integer", "string"}, `^auto(:[0-9]+)?$`
		case bool:
			s["type"] = "boolean"
		case float64:
			s["type"] = "number"
		case string:
			s["type"] = "string"
			if r.Values != nil {
				words := []any{v}
				for _, w := range r.Values {
					if w != v {
						words = append(words, w)
					}
				}
				s["enum"] = words
			}
		default:
			s["type"] = "integer"
		}
		s["description"] = strings.ReplaceAll(r.Help, "`", "")
		at[path[len(path)-1]] = s
	}
	return root
}
