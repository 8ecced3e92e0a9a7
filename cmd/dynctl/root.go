package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/workers"
)

// groups order the help by what a command is for.
var groups = []struct {
	id, title string
	commands  []string
}{
	{"run", "Run:", []string{"serve", "sim"}},
	{"observe", "Observe:", []string{"top", "explain", "workers", "doctor"}},
	{"measure", "Measure:", []string{"record", "replay", "bench"}},
	{"config", "Configure:", []string{"config", "keys", "completion", "version"}},
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "dynctl",
		Short: "Route LLM requests by KV cache, and prove every decision",
		Long: `dynctl is a router for fleets of LLM engines (vLLM, SGLang) that knows which
KV-cache blocks every data-parallel rank holds, decides for each request which
rank answers it and whether a prefill worker computes the prompt first, and can
show and explain each of these decisions.

Start with:  dynctl serve --sim 2p2d

Results go to standard output, everything else to standard error. Exit codes:
0 ok, 1 failed, 2 wrong usage or configuration, 3 result not valid, 4 target
unreachable, 5 condition missed (--fail-if, --min-match), 130 interrupted.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       buildVersion().String(),
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(flagError)
	for _, g := range groups {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title})
	}
	root.AddCommand(commands()...)
	root.AddCommand(newEnvironmentTopic())
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	for _, g := range groups {
		for _, name := range g.commands {
			if c := child(root, name); c != nil {
				c.GroupID = g.id
			}
		}
	}
	usageArgs(root)
	if help := child(root, "help"); help != nil {
		help.Args = func(c *cobra.Command, args []string) error {
			if at, rest, err := c.Root().Find(args); err != nil || len(rest) > 0 {
				return withCode(exitUsage, unknownCommand(at, args[len(args)-len(rest):]))
			}
			return nil
		}
	}
	return root
}

func child(cmd *cobra.Command, name string) *cobra.Command {
	for _, c := range cmd.Commands() {
		if c.Name() == name {
			return c
		}
	}
	return nil
}

// usageArgs makes wrong arguments of any command exit with the usage code, and
// commands that only hold others show their help.
func usageArgs(cmd *cobra.Command) {
	check := cmd.Args
	if cmd.HasSubCommands() && !cmd.Runnable() {
		check = unknownCommand
		cmd.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	}
	if check == nil {
		check = cobra.ArbitraryArgs
	}
	cmd.Args = func(c *cobra.Command, args []string) error {
		err := check(c, args)
		var coded *exitError
		if err == nil || errors.As(err, &coded) {
			return err
		}
		return withCode(exitUsage, fmt.Errorf("%w; see %s --help", err, c.CommandPath()))
	}
	for _, c := range cmd.Commands() {
		usageArgs(c)
	}
}

// unknownCommand refuses the arguments of a command that only holds others.
func unknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() || c.IsAdditionalHelpTopicCommand() {
			names = append(names, c.Name())
		}
	}
	if near := workers.Nearest(args[0], names); near != "" {
		return withCode(exitUsage, fmt.Errorf("unknown command %q; did you mean %q?", args[0], cmd.CommandPath()+" "+near))
	}
	return withCode(exitUsage, fmt.Errorf("unknown command %q; see %s --help", args[0], cmd.CommandPath()))
}

// flagError says which flag was meant, or what its value should look like.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := workers.Nearest(unknown.GetSpecifiedName(), names); near != "" {
			err = fmt.Errorf("unknown flag --%s (did you mean --%s?)", unknown.GetSpecifiedName(), near)
		}
	case errors.As(err, &invalid):
		if want := kindName(invalid.GetFlag().Value.Type()); want != "" {
			err = fmt.Errorf("--%s %s: not %s", invalid.GetFlag().Name, invalid.GetValue(), want)
		}
	}
	return withCode(exitUsage, fmt.Errorf("%w; see %s --help", err, cmd.CommandPath()))
}

// kindName is what a flag of a type wants, in words.
func kindName(kind string) string {
	switch kind {
	case "duration":
		return "a duration such as 500ms, 10s or 2m"
	case "int", "int64", "uint", "uint64", "uint32":
		return "a whole number"
	case "float64":
		return "a number"
	case "bool":
		return "true or false"
	}
	return ""
}
