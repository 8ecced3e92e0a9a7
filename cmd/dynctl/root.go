package main

import (
	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
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
	root := cli.Root(append(commands(), cli.EnvironmentTopic())...)
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
	for _, g := range groups {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title})
		for _, name := range g.commands {
			cli.Child(root, name).GroupID = g.id
		}
	}
	return root
}
