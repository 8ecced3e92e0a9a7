package commands

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
)

// TestOutputFormats: whoever knows the formats of one command knows those of
// the others. All data commands write JSON, JSON lines and YAML; lists are
// tables, CSV and markdown, too.
func TestOutputFormats(t *testing.T) {
	data := []string{"json", "jsonl", "yaml"}
	want := map[string][]string{
		"dynctl explain": data, "dynctl version": data,
		"dynctl workers list": cli.ListFormats(), "dynctl replicas": cli.ListFormats(), "dynctl workers call": cli.ListFormats(), "dynctl config view": cli.ListFormats(), "dynctl sim": cli.ListFormats(), "dynctl doctor": cli.ListFormats(), "dynctl keys check": cli.ListFormats(),
		"dynctl replay": cli.ListFormats(), "dynctl replay stat": cli.ListFormats(),
		// The screen's figures are a tree of tables: YAML is of no use to jq,
		// and rows of one kind are what workers list is for.
		"dynctl top": {"table", "json", "jsonl"},
	}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			walk(sub)
		}
		path := c.CommandPath()
		// bench writes its cells as files of a run's folder.
		if c.Flags().Lookup("output") == nil || strings.HasPrefix(path, "dynctl bench") {
			return
		}
		formats, known := want[path]
		if !known {
			t.Errorf("%s has -o: say here which formats it has", path)
		}
		complete, _ := c.GetFlagCompletionFunc("output")
		has, _ := complete(c, nil, "")
		for _, f := range formats {
			if !slices.Contains(has, f) {
				t.Errorf("%s has no -o %s", path, f)
			}
		}
		delete(want, path)
	}
	walk(Root())
	for path := range want {
		t.Errorf("%s has no -o", path)
	}
}
