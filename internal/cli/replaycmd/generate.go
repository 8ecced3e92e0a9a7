package replaycmd

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

func newGenerate() *cobra.Command {
	var path string
	var o arrivals.Options
	cmd := &cobra.Command{
		Use:   "generate SHAPE -w FILE",
		Short: "Make a trace of requests of a certain shape",
		Long: `Make a trace of requests to simulate where you have no trace of your own: agents
(sessions of 20 to 40 growing turns that share a head), chats (many turns with
pauses), documents (long prompts that share nothing) or bursts (chats, and forty
prompts together every 20 s). The trace names the sessions of agents and chats, so
that policy session finds them, and the thinking time before each later turn for
replay --closed-loop. The same arguments give the same trace.`,
		Example: `  dynctl replay generate agents -w agents.jsonl.gz
  dynctl replay generate agents --sessions 300 --head 8192 -w busy.jsonl.gz
  dynctl replay generate bursts --requests 10000 -w bursts.jsonl.gz`,
		Args:      cobra.ExactArgs(1),
		ValidArgs: arrivals.Shapes(),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Shape = args[0]
			for _, name := range []string{"head", "sessions"} {
				if o.Shape != "agents" && cmd.Flags().Changed(name) {
					return cli.WithCode(cli.ExitUsage, fmt.Errorf("--%s is for agents only: leave it out for %s", name, o.Shape))
				}
			}
			all, err := arrivals.Generate(o)
			if err != nil {
				return cli.WithCode(cli.ExitUsage, err)
			}
			w, err := trace.Create(path, cmd.OutOrStdout())
			if err != nil {
				return cli.WithCode(cli.ExitUsage, err)
			}
			defer w.Discard()
			line, err := trace.AppendHeader(nil, trace.Header{Source: "dynctl replay generate " + args[0], Start: time.Unix(0, 0)})
			if err != nil {
				return err
			}
			for i := range all {
				if _, err := w.Write(line); err != nil {
					return err
				}
				if line, err = trace.AppendRecord(line[:0], &trace.Record{Kind: trace.KindRequest, Time: all[i].At, Request: &all[i].Request}); err != nil {
					return err
				}
			}
			if _, err := w.Write(line); err != nil {
				return err
			}
			return w.Commit()
		},
	}
	cmd.Flags().StringVarP(&path, "write", "w", "-", "`FILE` to write; .gz and .zst compress, - is stdout")
	cmd.Flags().IntVar(&o.Requests, "requests", 2000, "how many requests to make")
	cmd.Flags().Uint64Var(&o.Seed, "seed", 1, "seed of their lengths and times")
	cmd.Flags().IntVar(&o.Head, "head", 2048, "`TOKENS` that all agents' prompts begin with, in whole blocks of 64")
	cmd.Flags().IntVar(&o.Sessions, "sessions", 24, "how many agents run at a time")
	return cmd
}
