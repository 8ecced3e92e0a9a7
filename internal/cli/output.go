package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/table"
)

// OutputFlag adds -o with the formats that the command can write; the first is
// the default. Other values are a usage error.
func OutputFlag(cmd *cobra.Command, value *string, formats ...string) {
	cmd.Flags().StringVarP(value, "output", "o", formats[0], "output format: "+strings.Join(formats, "|"))
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if !slices.Contains(formats, *value) {
			return WithCode(ExitUsage, fmt.Errorf("-o %s: not one of %s", *value, strings.Join(formats, ", ")))
		}
		return nil
	}
}

// WriteData writes v as indented JSON, one-line JSON or YAML. YAML keeps the
// names of the JSON form.
func WriteData(w io.Writer, format string, v any) error {
	switch format {
	case "yaml":
		return writeYAML(w, v)
	case "jsonl":
		return json.NewEncoder(printable.JSON(w)).Encode(v)
	default:
		enc := json.NewEncoder(printable.JSON(w))
		enc.SetIndent("", "  ")
		enc.SetEscapeHTML(false)
		return enc.Encode(v)
	}
}

// writeYAML writes v as YAML. Strings with characters that a terminal would obey stand in
// double quotes, where YAML has the escapes of JSON.
func writeYAML(w io.Writer, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(raw)) // YAML would refuse long keys and some characters of JSON
	dec.UseNumber()
	var generic any
	if err := dec.Decode(&generic); err != nil {
		return err
	}
	var doc yaml.Node
	if err := doc.Encode(numbers(generic)); err != nil {
		return err
	}
	quoteObeyed(&doc)
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(&doc), enc.Close()); err != nil {
		return err
	}
	_, err = printable.JSON(w).Write(out.Bytes())
	return err
}

// numbers replaces the numbers in a JSON value by what YAML reads of them: integers stay
// integers.
func numbers(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = numbers(v[k])
		}
	case []any:
		for i := range v {
			v[i] = numbers(v[i])
		}
	case json.Number:
		var n any
		_ = yaml.Unmarshal([]byte(v), &n) // JSON's numbers are YAML's
		return n
	}
	return v
}

// quoteObeyed puts those strings of a document into double quotes in which printable
// escapes a character.
func quoteObeyed(n *yaml.Node) {
	if printable.Line(n.Value) != n.Value {
		n.Style = yaml.DoubleQuotedStyle
	}
	for _, child := range n.Content {
		quoteObeyed(child)
	}
}

// WriteLines writes each thing as JSON on a line of its own.
func WriteLines[T any](w io.Writer, items []T) error {
	for _, item := range items {
		if err := WriteData(w, "jsonl", item); err != nil {
			return err
		}
	}
	return nil
}

// ListFormats are the formats of a command that lists things, the default first.
func ListFormats() []string {
	return []string{"table", "json", "jsonl", "csv", "markdown", "yaml"}
}

// A Listing is a list of things in all its forms.
type Listing struct {
	// Whole is the answer as data, Items what it lists.
	Whole any
	Items []any
	// Head and Rows are the columns for people.
	Head []string
	Rows [][]string
}

// Add adds a thing; what it is made of stands in Whole, too.
func (l *Listing) Add(item any, cells ...string) {
	l.Items, l.Rows = append(l.Items, item), append(l.Rows, cells)
}

// Write writes the list: JSON and YAML whole, JSON lines a thing to a line, the
// other formats as rows.
func (l *Listing) Write(out io.Writer, format string) error {
	switch format {
	case "json", "yaml":
		return WriteData(out, format, l.Whole)
	case "jsonl":
		return WriteLines(out, l.Items)
	}
	return table.Write(out, format, l.Head, l.Rows)
}
