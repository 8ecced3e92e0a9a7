package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "dynctl",
		Short: "Route LLM requests by KV cache, and prove every decision",
		Long: `dynctl is a router for fleets of LLM engines (vLLM, SGLang) that knows which
KV-cache blocks every data-parallel rank holds, decides for each request which
rank answers it and whether a prefill worker computes the prompt first, and can
show and explain each of these decisions.

Start with:  dynctl serve --sim 2p2d`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("unknown command %q; see %s --help", args[0], cmd.CommandPath())
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return withCode(exitUsage, fmt.Errorf("%w; see %s --help", err, cmd.CommandPath()))
	})
	root.AddCommand(commands()...)
	usageArgs(root)
	return root
}

// usageArgs makes wrong arguments of any command exit with the usage code.
func usageArgs(cmd *cobra.Command) {
	check := cmd.Args
	if check == nil {
		check = cobra.ArbitraryArgs
	}
	cmd.Args = func(c *cobra.Command, args []string) error { return withCode(exitUsage, check(c, args)) }
	for _, c := range cmd.Commands() {
		usageArgs(c)
	}
}
