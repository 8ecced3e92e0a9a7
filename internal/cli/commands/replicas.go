package commands

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// newReplicasCmd makes the command replicas: the other routers of a fleet as one of them
// sees them.
func newReplicasCmd() *cobra.Command {
	var router cli.RouterFlags
	var output string
	cmd := &cobra.Command{
		Use:   "replicas",
		Short: "List the other routers that share their load with a running router",
		Long: `List the other routers of the fleet as the asked one sees them: how old their
load is, what they have in flight, and where their version or settings differ.
A router that has been silent for a second counts as without load.`,
		Args: cobra.NoArgs,
		RunE: router.Ask(func(cmd *cobra.Command, c *admin.Client, _ []string) error {
			s, err := c.Status(cmd.Context())
			if err != nil {
				return err
			}
			if s.Replicas == nil {
				return errors.New("this router shares its load with no other: start it with --replicas")
			}
			return listReplicas(cmd.OutOrStdout(), cmd.ErrOrStderr(), output, s)
		}),
	}
	router.Add(cmd)
	cli.OutputFlag(cmd, &output, cli.ListFormats()...)
	return cmd
}

func listReplicas(out, notes io.Writer, format string, s *admin.Status) error {
	r := s.Replicas
	t := cli.Listing{Whole: r, Head: []string{"ROUTER", "STATE", "SILENT", "VERSION", "STARTED", "REQUESTS", "PREFILL TOKENS", "DECODE BLOCKS", "GAPS", "UNKNOWN RANKS", "SETTINGS"}}
	for i := range r.Routers {
		o := &r.Routers[i]
		state, version := o.State, cli.OrDash(o.Version)
		if state == "live" && !o.Complete {
			state = "live, incomplete"
		}
		if o.Version != "" && o.Version != s.Version {
			version += " (here " + s.Version + ")"
		}
		alike := "same"
		if o.Differs != "" {
			alike = "differ: " + o.Differs
		}
		t.Items = append(t.Items, o)
		t.Rows = append(t.Rows, []string{
			o.Name, state, fmt.Sprintf("%.0f ms", o.SilentMS), version, o.Started.Format(time.RFC3339), fmt.Sprint(o.Requests), fmt.Sprint(o.PrefillTokens), fmt.Sprint(o.DecodeBlocks),
			fmt.Sprint(o.Gaps), fmt.Sprint(o.UnknownRanks), alike,
		})
	}
	if err := t.Write(out, format); err != nil || format != "table" {
		return err
	}
	printable.Fprintf(notes, "%s of fleet %s shares its load with %s\n", r.Name, r.Fleet, cli.Plural(r.Live, "other router"))
	if c := r.IndexCopied; c != nil && c.Ranks > 0 {
		printable.Fprintf(notes, "the index began with %d blocks on %s of router %s\n", c.Blocks, cli.Plural(c.Ranks, "rank"), c.Router)
	}
	if c := r.IndexCopied; c != nil && c.Missing+c.Refused > 0 {
		printable.Fprintf(notes, "%s began without blocks of another router, last: %s\n", cli.Plural(c.Missing+c.Refused, "rank"), c.Why)
	}
	for _, n := range []struct {
		n    uint64
		text string
	}{
		{r.OtherFleet, "messages of another fleet"}, {r.SameName, "messages of another router with this one's name: set replicas.name"}, {r.TooMany, "messages of routers beyond the limit"},
		{r.Refused, "messages refused, last: " + r.LastRefused}, {r.Failed, "messages not sent, last: " + r.LastFailure},
		{uint64(len(r.Ignored)), fmt.Sprintf("ranks that only others call busy: %v", r.Ignored)},
	} {
		if n.n > 0 {
			printable.Fprintf(notes, "%d %s\n", n.n, n.text)
		}
	}
	return nil
}
