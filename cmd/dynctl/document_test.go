package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router"
)

var update = flag.Bool("update", false, "write generated documents and golden files anew")

// TestDocumentSettings keeps the table of settings in the documentation equal
// to the settings.
func TestDocumentSettings(t *testing.T) {
	const path, begin, end = "../../docs/configuration.md", "-update -->\n", "<!-- end of settings -->"
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(raw), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the settings", path)
	}
	var b strings.Builder
	b.WriteString("\n| key | flag | default | meaning |\n|---|---|---|---|\n")
	defaults := router.DefaultConfig()
	for _, s := range settings {
		value := yamlValue(field(&defaults, s.key).Interface())
		fmt.Fprintf(&b, "| `%s` | `--%s` | `%s` | %s |\n", s.key, s.flag, value, strings.ReplaceAll(strings.ReplaceAll(s.help, "`", ""), "|", ", "))
	}
	b.WriteString("\n")
	want := head + begin + b.String() + end + tail
	if string(raw) == want {
		return
	}
	if !*update {
		t.Fatalf("%s is not what the settings say; run go test ./cmd/dynctl -run Document -update", path)
	}
	if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestSettingsCoverTheConfig: every key of the file has a flag, except for
// lists of objects.
func TestSettingsCoverTheConfig(t *testing.T) {
	known := map[string]bool{"aliases": true}
	for _, s := range settings {
		if known[s.key] {
			t.Errorf("setting %s stands twice", s.key)
		}
		known[s.key] = true
		if !field(new(router.Config), s.key).IsValid() {
			t.Errorf("setting %s is no key of the config", s.key)
		}
	}
	for _, k := range configKeys() {
		if !known[k] {
			t.Errorf("key %s has no flag", k)
		}
	}
}
