package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/table"
)

// outputFlag adds -o with the formats that the command can write; the first is
// the default. Other values are a usage error.
func outputFlag(cmd *cobra.Command, value *string, formats ...string) {
	cmd.Flags().StringVarP(value, "output", "o", formats[0], "output format: "+strings.Join(formats, "|"))
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
	before := cmd.PreRunE
	cmd.PreRunE = func(c *cobra.Command, args []string) error {
		if !slices.Contains(formats, *value) {
			return withCode(exitUsage, fmt.Errorf("-o %s: not one of %s", *value, strings.Join(formats, ", ")))
		}
		if before != nil {
			return before(c, args)
		}
		return nil
	}
}

// writeData writes v as indented JSON, one-line JSON or YAML. YAML keeps the
// names of the JSON form.
func writeData(w io.Writer, format string, v any) error {
	switch format {
	case "yaml":
		raw, err := json.Marshal(v)
		if err != nil {
			return err
		}
		var generic any
		if err := yaml.Unmarshal(raw, &generic); err != nil {
			return err
		}
		enc := yaml.NewEncoder(w)
		enc.SetIndent(2)
		if err := enc.Encode(generic); err != nil {
			return err
		}
		return enc.Close()
	case "jsonl":
		return json.NewEncoder(w).Encode(v)
	default:
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		enc.SetEscapeHTML(false)
		return enc.Encode(v)
	}
}

// writeLines writes each thing as JSON on a line of its own.
func writeLines[T any](w io.Writer, items []T) error {
	for _, item := range items {
		if err := writeData(w, "jsonl", item); err != nil {
			return err
		}
	}
	return nil
}

// listFormats are the formats of a command that lists things.
var listFormats = []string{"table", "json", "jsonl", "csv", "markdown", "yaml"}

// A listing is a list of things in all its forms.
type listing struct {
	// whole is the answer as data, items what it lists.
	whole any
	items []any
	// head and rows are the columns for people.
	head []string
	rows [][]string
}

// add adds a thing; what it is made of stands in whole, too.
func (l *listing) add(item any, cells ...string) {
	l.items, l.rows = append(l.items, item), append(l.rows, cells)
}

// write writes the list: JSON and YAML whole, JSON lines a thing to a line, the
// other formats as rows.
func (l *listing) write(out io.Writer, format string) error {
	switch format {
	case "json", "yaml":
		return writeData(out, format, l.whole)
	case "jsonl":
		return writeLines(out, l.items)
	}
	return table.Write(out, format, l.head, l.rows)
}
