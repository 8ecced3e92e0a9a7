package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/workers"
)

// Root is the command dynctl with some commands, its help and its completions. A
// mistake in a command line ends with the code of usage, and says what was probably meant.
func Root(commands ...*cobra.Command) *cobra.Command {
	root := &cobra.Command{Use: "dynctl", SilenceUsage: true, SilenceErrors: true}
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(commands...)
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	usageArgs(root)
	if help := Child(root, "help"); help != nil {
		help.Args = func(c *cobra.Command, args []string) error {
			if at, rest, err := c.Root().Find(args); err != nil || len(rest) > 0 {
				return WithCode(ExitUsage, unknownCommand(at, args[len(args)-len(rest):]))
			}
			return nil
		}
	}
	return root
}

// Child is the command of a name below another one, nil for none.
func Child(cmd *cobra.Command, name string) *cobra.Command {
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
		var coded *ExitError
		if err == nil || errors.As(err, &coded) {
			return err
		}
		if !c.HasSubCommands() && len(args) > 0 && strings.HasPrefix(err.Error(), "unknown command ") { // cobra's words for no arguments
			err = fmt.Errorf("%s takes no arguments, and %q is one", c.CommandPath(), args[0])
		} else if strings.Contains(err.Error(), " arg(s)") { // their number, in cobra's words
			err = fmt.Errorf("%s given: type %s", Plural(len(args), "argument"), strings.TrimSuffix(c.UseLine(), " [flags]"))
		}
		return WithCode(ExitUsage, fmt.Errorf("%w; see %s --help", err, c.CommandPath()))
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
		return WithCode(ExitUsage, fmt.Errorf("unknown command %q; did you mean %q?", args[0], cmd.CommandPath()+" "+near))
	}
	return WithCode(ExitUsage, fmt.Errorf("unknown command %q; see %s --help", args[0], cmd.CommandPath()))
}

// flagError says which flag was meant, or what its value should look like.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var empty *pflag.ValueRequiredError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := workers.Nearest(unknown.GetSpecifiedName(), names); near != "" {
			err = fmt.Errorf("unknown flag --%s (did you mean --%s?)", unknown.GetSpecifiedName(), near)
		}
	case errors.As(err, &empty):
		name, _ := pflag.UnquoteUsage(empty.GetFlag())
		err = fmt.Errorf("--%s needs a value: --%s %s", empty.GetFlag().Name, empty.GetFlag().Name, name)
	case errors.As(err, &invalid):
		if want := kindName(invalid.GetFlag().Value.Type()); want != "" {
			err = fmt.Errorf("--%s %s: not %s", invalid.GetFlag().Name, invalid.GetValue(), want)
		}
	}
	return WithCode(ExitUsage, fmt.Errorf("%w; see %s --help", err, cmd.CommandPath()))
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
