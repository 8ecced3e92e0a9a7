package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/settings/load"
)

// SettingFlags adds a flag for every setting, with completion where the values
// are words.
func SettingFlags(cmd *cobra.Command) {
	load.AddFlags(cmd.Flags())
	for _, r := range settings.Rows() {
		if r.Values != nil {
			_ = cmd.RegisterFlagCompletionFunc(r.Flag, cobra.FixedCompletions(r.Values, cobra.ShellCompDirectiveNoFileComp))
		}
	}
}

// LoadConfig reads the settings of a command from a file ("" for none), the environment
// and its flags. An error is one of usage.
func LoadConfig(path string, flags *pflag.FlagSet) (*load.Loaded, error) {
	var other []string
	for _, v := range otherVariables {
		other = append(other, strings.Split(v.name, ", ")...)
	}
	l, err := load.Load(path, flags, other)
	if err != nil {
		return nil, WithCode(ExitUsage, err)
	}
	return l, nil
}

// GroupFlags shows the flags of a command in its help in groups: first the everyday ones, in
// the order that is given, then the others that have no section in the configuration file,
// then those of each section.
func GroupFlags(cmd *cobra.Command, everyday ...string) {
	cmd.SetUsageFunc(func(c *cobra.Command) error {
		w := c.OutOrStderr()
		if _, err := fmt.Fprintf(w, "Usage:\n  %s\n\nExamples:\n%s\n", c.UseLine(), c.Example); err != nil {
			return err
		}
		for _, g := range flagGroups(c.LocalFlags(), everyday) {
			if _, err := fmt.Fprintf(w, "\n%s:\n%s", g.title, g.flags.FlagUsages()); err != nil {
				return err
			}
		}
		return nil
	})
}

type flagGroup struct {
	title string
	flags *pflag.FlagSet
}

// Given are the names of the flags that a command line has, by name.
func Given(cmd *cobra.Command) (names []string) {
	cmd.Flags().Visit(func(f *pflag.Flag) { names = append(names, f.Name) })
	return names
}

func flagGroups(all *pflag.FlagSet, everyday []string) []flagGroup {
	groups := []flagGroup{{title: "Everyday flags"}, {title: "Other flags"}}
	at, shown := map[string]int{"": 1}, map[string]bool{}
	add := func(group int, f *pflag.Flag) {
		if f == nil || shown[f.Name] || f.Hidden {
			return
		}
		shown[f.Name] = true
		groups[group].flags.AddFlag(f)
	}
	for _, r := range settings.Rows() {
		section, _, nested := strings.Cut(r.Key, ".")
		if _, known := at[section]; nested && !known {
			at[section] = len(groups)
			groups = append(groups, flagGroup{title: "Flags of the section " + section})
		}
	}
	for i := range groups {
		groups[i].flags = pflag.NewFlagSet("", pflag.ContinueOnError)
		groups[i].flags.SortFlags = i > 0
	}
	for _, name := range everyday {
		add(0, all.Lookup(name))
	}
	for _, r := range settings.Rows() {
		section, _, nested := strings.Cut(r.Key, ".")
		if !nested {
			section = ""
		}
		add(at[section], all.Lookup(r.Flag))
	}
	all.VisitAll(func(f *pflag.Flag) { add(1, f) })
	return groups
}
