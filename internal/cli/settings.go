package cli

import (
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
