// Command dynctl routes requests of large language models to fleets of GPU
// engines, and shows, explains, replays and measures what the router does.
package main

import (
	"os"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/cli/commands"
)

func main() {
	os.Exit(cli.Main(commands.Root(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
