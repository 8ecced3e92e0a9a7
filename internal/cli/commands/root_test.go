package commands

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/rig/clitest"
)

// typed runs a command line without a terminal.
func typed(args ...string) (code int, stdout, stderr string) {
	return clitest.Run(Root(), "", args...)
}

// TestCommandLineMistakes: a mistake is reported once, with what was probably
// meant, on standard error, with the code of the contract.
func TestCommandLineMistakes(t *testing.T) {
	const nobody = "http://127.0.0.1:1" // port 1 is closed
	for _, c := range []struct {
		args string
		code int
		say  string
	}{
		{"srve", cli.ExitUsage, `dynctl: unknown command "srve"; did you mean "dynctl serve"?`},
		{"workers lst", cli.ExitUsage, `dynctl: unknown command "lst"; did you mean "dynctl workers list"?`},
		{"config zzzzzz", cli.ExitUsage, `dynctl: unknown command "zzzzzz"; see dynctl config --help`},
		{"help nosuchthing", cli.ExitUsage, `dynctl: unknown command "nosuchthing"; see dynctl --help`},
		{"bench --path local --sim 1p1d", cli.ExitUsage, "dynctl: --path is for sweeps, and this run compares paths: add --sweep, --trace, --thresholds, --turns or --prefix-groups, or leave it out"},
		{"bench --threshold --trace-scale 2 --sim 1p1d", cli.ExitUsage, "dynctl: --trace-scale is for sweeps, and"},
		{"serve --listn x", cli.ExitUsage, `dynctl: unknown flag --listn (did you mean --listen?); see dynctl serve --help`},
		{"serve extra", cli.ExitUsage, `dynctl: dynctl serve takes no arguments, and "extra" is one; see dynctl serve --help`},
		{"serve --sim", cli.ExitUsage, "dynctl: --sim needs a value: --sim FLEET; see dynctl serve --help"},
		{"serve --listen 8000", cli.ExitUsage, "dynctl: 1 problem in the configuration:\n  flag --listen: listen: \"8000\" is not HOST:PORT; did you mean \"127.0.0.1:8000\", for this machine only?"},
		{"serve --sim 2x2d", cli.ExitUsage, "dynctl: 1 problem in the configuration:\n  flag --sim: sim: fleet \"2x2d\": want counts like 2p2d (p prefill, d decode, a aggregated)"},
		{"workers drain", cli.ExitUsage, "dynctl: 0 arguments given: type dynctl workers drain NAME; see dynctl workers drain --help"},
		{"workers drain a --wait soon", cli.ExitUsage, "dynctl: --wait soon: not a duration such as 500ms, 10s or 2m; see dynctl workers drain --help"},
		{"workers list -o xml", cli.ExitUsage, "dynctl: -o xml: not one of table, wide, json, jsonl, csv, markdown, yaml"},
		{"config validate /no/such/file", cli.ExitUsage, "dynctl: config file /no/such/file: no such file or directory"},
		{"record --events bad -w /no/such/file", cli.ExitUsage, "dynctl: --events bad: want NAME=ENDPOINT[,REPLAY]"},
		{"explain --tokens 1,x", cli.ExitUsage, `dynctl: --tokens: "x" is not a token id`},
		{"explain --router " + nobody + " id", cli.ExitUnreachable, "dynctl: no router answers at " + nobody},
		{"workers list --router " + nobody, cli.ExitUnreachable, "dynctl: no router answers at " + nobody},
	} {
		t.Run(c.args, func(t *testing.T) {
			code, stdout, stderr := typed(strings.Fields(c.args)...)
			if code != c.code || stdout != "" || !strings.HasPrefix(stderr, c.say) || strings.Count(stderr, "dynctl: ") != 1 {
				t.Errorf("code %d, want %d\nstdout %q\nstderr %q\nwant   %q", code, c.code, stdout, stderr, c.say)
			}
		})
	}
}

// TestHelpOfEveryCommand: help goes to standard output and says what the flags
// are, and no command hides behind another's name.
func TestHelpOfEveryCommand(t *testing.T) {
	for _, args := range []string{"", "serve", "sim", "explain", "workers", "workers list", "workers drain", "config", "config view", "keys new", "top", "record", "replay", "version", "environment"} {
		code, stdout, stderr := typed(append([]string{"help"}, strings.Fields(args)...)...)
		if code != cli.ExitOK || stderr != "" || len(stdout) < 100 && args != "version" {
			t.Errorf("help %s: code %d, %q, %q", args, code, stdout, stderr)
		}
	}
	root := Root()
	for _, c := range root.Commands() {
		if c.IsAvailableCommand() && c.Name() != "help" && c.GroupID == "" {
			t.Errorf("%s stands in no group of the help", c.Name())
		}
	}
}

// TestFlagsStandUnderEachOther: pflag pads by bytes, so what stands left of the blanks
// must be of one byte to a column.
func TestFlagsStandUnderEachOther(t *testing.T) {
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			name, _ := pflag.UnquoteUsage(f)
			if strings.ContainsFunc(f.Name+name, func(r rune) bool { return r > 126 }) {
				t.Errorf("%s --%s %s is not ASCII", c.CommandPath(), f.Name, name)
			}
		})
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(Root())
}

// TestCommandsAreCheap: what every command pays, also "version", is that of making the
// commands; texts that take long are made when they are asked for.
func TestCommandsAreCheap(t *testing.T) {
	const most = 5000 // half of it is taken; a table of all variables took 10,000 more
	if n := testing.AllocsPerRun(3, func() { Root() }); n > most {
		t.Errorf("%.0f allocations to make the commands, want at most %d", n, most)
	}
}
