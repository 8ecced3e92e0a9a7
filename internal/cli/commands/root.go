// Package commands is dynctl's command line. Root is the command dynctl. Each command
// below it is made in the file of its name; the large ones, bench, replay and top, have
// packages beside this one.
package commands

import (
	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/cli/benchcmd"
	"github.com/dynctl/dynctl/internal/cli/replaycmd"
	"github.com/dynctl/dynctl/internal/cli/topcmd"
)

// Group is a heading of the help with the names of its commands, in order.
type Group struct {
	ID, Title string
	Commands  []string
}

// Groups order the help by what a command is for.
func Groups() []Group {
	return []Group{
		{"run", "Run:", []string{"serve", "sim"}},
		{"observe", "Observe:", []string{"top", "explain", "workers", "replicas", "doctor"}},
		{"measure", "Measure:", []string{"record", "replay", "bench"}},
		{"config", "Configure:", []string{"config", "keys", "completion", "version"}},
	}
}

// Root makes the command dynctl with all commands.
func Root() *cobra.Command {
	root := cli.Root(
		newServeCmd(),
		newExplainCmd(),
		newWorkersCmd(),
		newReplicasCmd(),
		newDoctorCmd(),
		topcmd.New(),
		newRecordCmd(),
		replaycmd.New(),
		benchcmd.New(),
		newSimCmd(),
		newConfigCmd(),
		newKeysCmd(),
		newVersionCmd(),
		newDocsCmd(),
		cli.EnvironmentTopic(),
	)
	root.Short = "Route LLM requests by KV cache, and prove every decision"
	root.Long = `dynctl is a router for fleets of LLM engines (vLLM, SGLang) that knows which
KV-cache blocks every data-parallel rank holds, decides for each request which
rank answers it and whether a prefill worker computes the prompt first, and can
show and explain each of these decisions.

Start with:  dynctl serve --sim 2p2d

Results go to standard output, everything else to standard error. Exit codes:
0 ok, 1 failed, 2 wrong usage or configuration, 3 result not valid, 4 target
unreachable, 5 condition missed (--fail-if, --min-match), 130 interrupted.`
	root.Version = cli.BuildVersion().String()
	root.SetVersionTemplate("{{.Version}}\n")
	for _, g := range Groups() {
		root.AddGroup(&cobra.Group{ID: g.ID, Title: g.Title})
		for _, name := range g.Commands {
			cli.Child(root, name).GroupID = g.ID
		}
	}
	return root
}
