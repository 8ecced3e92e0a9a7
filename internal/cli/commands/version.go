package commands

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

func newVersionCmd() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this binary",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := cli.BuildVersion()
			if output != "table" {
				return cli.WriteData(cmd.OutOrStdout(), output, struct {
					Schema string `json:"schema"`
					cli.Version
					// Schemas are what this binary writes and reads.
					Schemas []string `json:"schemas"`
				}{"dynctl.version/v1", v, []string{admin.Schema, trace.Schema}})
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), v)
			return err
		},
	}
	cli.OutputFlag(cmd, &output, "table", "json", "jsonl", "yaml")
	return cmd
}
