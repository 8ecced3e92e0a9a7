package main

import (
	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli/benchcmd"
	"github.com/dynctl/dynctl/internal/cli/configcmd"
	"github.com/dynctl/dynctl/internal/cli/doctorcmd"
	"github.com/dynctl/dynctl/internal/cli/explaincmd"
	"github.com/dynctl/dynctl/internal/cli/keyscmd"
	"github.com/dynctl/dynctl/internal/cli/recordcmd"
	"github.com/dynctl/dynctl/internal/cli/replaycmd"
	"github.com/dynctl/dynctl/internal/cli/servecmd"
	"github.com/dynctl/dynctl/internal/cli/simcmd"
	"github.com/dynctl/dynctl/internal/cli/topcmd"
	"github.com/dynctl/dynctl/internal/cli/workerscmd"
)

// commands lists the subcommands, in the order of the help.
func commands() []*cobra.Command {
	return []*cobra.Command{
		servecmd.New(),
		explaincmd.New(),
		workerscmd.New(),
		doctorcmd.New(),
		topcmd.New(),
		recordcmd.New(),
		replaycmd.New(),
		benchcmd.New(),
		simcmd.New(),
		configcmd.New(),
		keyscmd.New(),
		newVersionCmd(),
		newDocsCmd(),
	}
}
