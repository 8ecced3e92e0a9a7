package commands

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
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
		Long: `Write a commented configuration file. Without FILE it is dynctl.yaml, or standard
output where that is no terminal. FILE - is standard output, too.`,
		Example: `  dynctl config init
  dynctl config init > router.yaml`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			path := "dynctl.yaml"
			switch {
			case len(args) == 1:
				path = args[0]
			case !cli.IsTerminal(cmd.OutOrStdout()):
				path = "-"
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
		help := strings.ReplaceAll(r.Help, "`", "")
		fmt.Fprintf(&b, "%s# %s%s (flag --%s)\n", indent, strings.ToUpper(help[:1]), help[1:], r.Flag)
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
		Long: `Check a configuration file as serve would read it, with the environment, and name
every problem with its line.

Exit codes: 0 when the file is valid; 2 when there is no such file; 3 when it has
problems.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			flags := newServeCmd().Flags()
			if _, err := os.Stat(args[0]); err != nil {
				return cli.WithCode(cli.ExitUsage, fmt.Errorf("config file %s: %w", args[0], errors.Unwrap(err)))
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
	var path, output, router string
	var origin bool
	var access cli.AccessFlags
	cmd := &cobra.Command{
		Use:   "view",
		Short: "Show the effective configuration",
		Long: `Show the configuration that serve would run with, from defaults, file, environment
and flags, or, with --router, the one that a router runs with now.`,
		Example: `  dynctl config view --config dynctl.yaml --origin
  dynctl config view --router http://127.0.0.1:8001`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var values []admin.ConfigValue
			var err error
			if router != "" {
				values, err = runningConfig(cmd, access, router)
			} else {
				values, err = ownConfig(cmd, path)
			}
			if err != nil {
				return err
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
			for _, v := range values {
				r, cells := row{Key: v.Key, Value: v.Value}, []string{v.Key, cli.OrDash(configText(v.Value))}
				if origin {
					r.Origin = v.Origin
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
	cmd.Flags().StringVar(&router, "router", "", "admin `URL` of a router whose running configuration is shown")
	access.Add(cmd.Flags())
	cmd.Flags().BoolVar(&origin, "origin", false, "show where each value comes from")
	cli.OutputFlag(cmd, &output, cli.ListFormats()...)
	return cmd
}

// ownConfig is what serve would run with.
func ownConfig(cmd *cobra.Command, path string) ([]admin.ConfigValue, error) {
	l, err := cli.LoadConfig(path, cmd.Flags())
	if err != nil {
		return nil, err
	}
	for _, w := range l.Warnings {
		printable.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", w)
	}
	var values []admin.ConfigValue
	for _, s := range settings.Rows() {
		values = append(values, admin.ConfigValue{Key: s.Key, Value: s.Shown(&l.Config), Origin: l.Origin[s.Key]})
	}
	return values, nil
}

// runningConfig is what a router runs with. Flags that change settings contradict it.
func runningConfig(cmd *cobra.Command, access cli.AccessFlags, router string) ([]admin.ConfigValue, error) {
	changed := func(s *settings.Row) bool { return s.Flag != "" && cmd.Flags().Changed(s.Flag) }
	if cmd.Flags().Changed("config") || slices.ContainsFunc(settings.Rows(), changed) {
		return nil, cli.WithCode(cli.ExitUsage, errors.New("--router shows what that router runs with: leave --config and the flags of settings out"))
	}
	c, err := access.Client(router)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	view, err := c.Config(cmd.Context())
	if err != nil {
		return nil, cli.AdminError(err)
	}
	return view.Settings, nil
}

// configText is a value in a table, of this process or as JSON has it.
func configText(v any) string {
	switch v := v.(type) {
	case []string:
		return strings.Join(v, " ")
	case []any:
		var words []string
		for _, x := range v {
			words = append(words, configText(x))
		}
		return strings.Join(words, " ")
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	case nil:
		return ""
	default:
		return fmt.Sprint(v)
	}
}
