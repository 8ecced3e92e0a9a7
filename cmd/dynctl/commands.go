package main

import "github.com/spf13/cobra"

// commands lists the subcommands, in the order of the help.
func commands() []*cobra.Command {
	return []*cobra.Command{
		newServeCmd(),
		newExplainCmd(),
		newWorkersCmd(),
		newDoctorCmd(),
		newTopCmd(),
		newRecordCmd(),
		newReplayCmd(),
		newBenchCmd(),
		newSimCmd(),
		newConfigCmd(),
		newKeysCmd(),
		newVersionCmd(),
		newDocsCmd(),
	}
}
