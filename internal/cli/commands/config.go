package commands

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/settings"
)

// newConfigCmd makes the command config: configuration files made, checked and shown.
func newConfigCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Make, check and show configuration files"}
	cmd.AddCommand(newConfigInitCmd(), newConfigValidateCmd(), newConfigViewCmd())
	return cmd
}

func newConfigInitCmd() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "init [FILE]",
		Short: "Write a configuration file with every key, its default and its meaning",
		Long:  "Write a commented configuration file (default dynctl.yaml; - for standard output).",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			path := "dynctl.yaml"
			if len(args) == 1 {
				path = args[0]
			}
			text := configTemplate()
			if path == "-" {
				_, err := fmt.Fprint(cmd.OutOrStdout(), text)
				return err
			}
			mode := os.O_WRONLY | os.O_CREATE | os.O_EXCL
			if force {
				mode = os.O_WRONLY | os.O_CREATE | os.O_TRUNC
			}
			f, err := os.OpenFile(path, mode, 0o644)
			if errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("%s exists; use --force to overwrite it", path)
			}
			if err != nil {
				return err
			}
			if _, err := f.WriteString(text); err != nil {
				return errors.Join(err, f.Close())
			}
			if err := f.Close(); err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "wrote %s; start with: dynctl serve --config %s\n", path, path)
			return nil
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "overwrite an existing file")
	return cmd
}

// configTemplate is a file with every key commented out at its default.
func configTemplate() string {
	var b strings.Builder
	b.WriteString("# Configuration of dynctl. Every key is shown with its default; remove the # to\n# change it. Flags and environment variables (DYNCTL_ROUTING_THRESHOLD, …) win\n# over this file. Check it with: dynctl config validate FILE\n")
	defaults := settings.Default()
	section := ""
	for _, r := range settings.Rows() {
		if r.Flag == "" {
			continue
		}
		group, name, nested := strings.Cut(r.Key, ".")
		if !nested {
			group, name = "", r.Key
		}
		indent := ""
		if group != "" {
			indent = "  "
		}
		if group != section {
			section = group
			b.WriteString("\n")
			if group != "" {
				b.WriteString(group + ":\n")
			}
		}
		fmt.Fprintf(&b, "%s# %s%s (flag --%s)\n", indent, strings.ToUpper(r.Help[:1]), strings.ReplaceAll(r.Help[1:], "`", ""), r.Flag)
		fmt.Fprintf(&b, "%s# %s: %s\n", indent, name, YAML(r.Get(&defaults)))
	}
	b.WriteString("\n# Further names for models; * in one matches any text.\n# aliases:\n#   - name: gpt-4o\n#     model: Qwen/Qwen3-32B\n")
	return b.String()
}

// YAML is the value of a setting as a configuration file has it.
func YAML(v any) string {
	switch v := v.(type) {
	case string:
		return fmt.Sprintf("%q", v)
	case []string:
		return "[]"
	case time.Duration:
		return v.String()
	default:
		return fmt.Sprint(v)
	}
}

func newConfigValidateCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "validate FILE",
		Short: "Check a configuration file and name every problem",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			flags := newServeCmd().Flags()
			if _, err := os.Stat(args[0]); err != nil {
				return cli.WithCode(cli.ExitUsage, fmt.Errorf("config file: %w", err))
			}
			l, err := cli.LoadConfig(args[0], flags)
			if err != nil {
				return cli.WithCode(cli.ExitInvalid, errors.Unwrap(err))
			}
			for _, w := range l.Warnings {
				printable.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", w)
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "%s is valid\n", args[0])
			return nil
		},
	}
	return cmd
}

func newConfigViewCmd() *cobra.Command {
	var path, output string
	var origin bool
	cmd := &cobra.Command{
		Use:   "view",
		Short: "Show the effective configuration",
		Long:  "Show the configuration that serve would run with, from defaults, file, environment and flags.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := cli.LoadConfig(path, cmd.Flags())
			if err != nil {
				return err
			}
			for _, w := range l.Warnings {
				printable.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", w)
			}
			type row struct {
				Key    string `json:"key"`
				Value  any    `json:"value"`
				Origin string `json:"origin,omitempty"`
			}
			rows := []row{}
			t := cli.Listing{Head: []string{"KEY", "VALUE"}}
			if origin {
				t.Head = append(t.Head, "ORIGIN")
			}
			for _, s := range settings.Rows() {
				v := s.Shown(&l.Config)
				text := fmt.Sprint(v)
				if list, ok := v.([]string); ok {
					text = strings.Join(list, " ")
				}
				r, cells := row{Key: s.Key, Value: v}, []string{s.Key, cli.OrDash(text)}
				if origin {
					r.Origin = l.Origin[s.Key]
					cells = append(cells, r.Origin)
				}
				rows = append(rows, r)
				t.Add(r, cells...)
			}
			t.Whole = struct {
				Schema   string `json:"schema"`
				Settings []row  `json:"settings"`
			}{"dynctl.config/v1", rows}
			return t.Write(cmd.OutOrStdout(), output)
		},
	}
	cli.SettingFlags(cmd)
	cmd.Flags().StringVar(&path, "config", os.Getenv("DYNCTL_CONFIG"), "configuration `FILE`")
	cmd.Flags().BoolVar(&origin, "origin", false, "show where each value comes from")
	cli.OutputFlag(cmd, &output, cli.ListFormats()...)
	return cmd
}
