package main

import (
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/settings/load"
)

// settingFlags adds a flag for every setting, with completion where the values
// are words.
func settingFlags(cmd *cobra.Command) {
	load.AddFlags(cmd.Flags())
	for _, r := range settings.Rows() {
		if r.Values != nil {
			_ = cmd.RegisterFlagCompletionFunc(r.Flag, cobra.FixedCompletions(r.Values, cobra.ShellCompDirectiveNoFileComp))
		}
	}
}

// settingWords are the words that a setting may have.
func settingWords(key string) []string { return settings.Lookup(key).Values }

// loadConfig reads the settings of a command.
func loadConfig(path string, flags *pflag.FlagSet) (*load.Loaded, error) {
	var other []string
	for _, v := range otherVariables {
		other = append(other, strings.Split(v.name, ", ")...)
	}
	l, err := load.Load(path, flags, other)
	if err != nil {
		return nil, withCode(exitUsage, err)
	}
	return l, nil
}
