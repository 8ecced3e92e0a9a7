package main

import (
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/router/admin"
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

// settingValues lists the effective configuration for the admin API.
func settingValues(c *settings.Config) []admin.ConfigValue {
	var out []admin.ConfigValue
	for _, r := range settings.Rows() {
		out = append(out, admin.ConfigValue{Key: r.Key, Value: shown(r.Get(c))})
	}
	return out
}

// shown is a value as JSON shows it: durations as they are written.
func shown(v any) any {
	if d, ok := v.(time.Duration); ok {
		return d.String()
	}
	return v
}
