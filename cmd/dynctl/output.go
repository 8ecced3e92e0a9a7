package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
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
