package commands

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// newWorkersCmd makes the command workers: the fleet of a running router listed, drained,
// resumed, added to, taken from and called.
func newWorkersCmd() *cobra.Command {
	var router cli.RouterFlags
	cmd := &cobra.Command{Use: "workers", Short: "List, drain, resume, add, remove and call the workers of a running router"}
	router.Add(cmd)
	drain, resume, remove := newWorkersDrainCmd(&router), newWorkersResumeCmd(&router), newWorkersRemoveCmd(&router)
	for _, c := range []*cobra.Command{drain, resume, remove} {
		c.ValidArgsFunction = router.Complete(workerNames)
	}
	cmd.AddCommand(newWorkersListCmd(&router), drain, resume, newWorkersAddCmd(&router), remove, newWorkersCallCmd(&router))
	return cmd
}

func newWorkersListCmd(router *cli.RouterFlags) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the workers and their ranks",
		Args:  cobra.NoArgs,
		RunE: router.Ask(func(cmd *cobra.Command, c *admin.Client, _ []string) error {
			l, err := c.Workers(cmd.Context())
			if err != nil {
				return err
			}
			return listWorkers(cmd.OutOrStdout(), output, l)
		}),
	}
	cli.OutputFlag(cmd, &output, append([]string{"table", "wide"}, cli.ListFormats()[1:]...)...)
	return cmd
}

// listWorkers writes the fleet: workers as data, their ranks as rows. The wide
// table and CSV have all columns.
func listWorkers(out io.Writer, format string, l *admin.WorkerList) error {
	all := format == "wide" || format == "csv"
	t := cli.Listing{Whole: l, Head: []string{"RANK", "ROLE", "ENGINE", "HEALTH", "REQUESTS", "PREFILL TOKENS", "DECODE BLOCKS", "INDEX BLOCKS", "EVENTS"}}
	if all {
		t.Head = append(t.Head, "RUNNING", "WAITING", "KV USED", "BLOCK", "CONNECTOR", "MODELS", "URL", "REASON", "REVISION", "FROM", "MOVED AWAY", "MOVED HERE", "WAIT TO MOVE")
	}
	t.Head = append(t.Head, "TTFT", "ITL", "OUT TOK/S", "SLOW")
	for i := range l.Workers {
		w := &l.Workers[i]
		t.Items = append(t.Items, w)
		health := w.Health
		if w.Draining {
			health = "draining"
		}
		for _, r := range w.Ranks {
			row := []string{
				r.Label, w.Role, w.Engine, health, fmt.Sprint(r.ActiveRequests), fmt.Sprint(r.PrefillTokens), fmt.Sprint(r.DecodeBlocks),
				fmt.Sprint(r.IndexBlocks), events(&r.Feed),
			}
			if all {
				why := w.Reason
				if why == "" && r.Feed.State != "none" && !r.Feed.Trusted {
					why = r.Feed.Reason
				}
				for _, t := range w.Troubles {
					if why == "" && (t.Rank == "" || t.Rank == r.Label) {
						why = t.Text
					}
				}
				e, used := cmp.Or(r.Engine, &admin.EngineLoad{}), "-"
				if e.KVUsage != nil {
					used = fmt.Sprintf("%.0f%%", 100**e.KVUsage)
				}
				away, onto, moving := "-", "-", "-"
				if m := r.Moves; m != nil {
					away, onto, moving = fmt.Sprint(m.Away), fmt.Sprint(m.Onto), figure(m.Waiting, "%d")
				}
				row = append(row, figure(e.Running, "%d"), figure(e.Waiting, "%d"), used, fmt.Sprint(w.BlockSizeTokens), cli.OrDash(w.Connector), cli.OrDash(strings.Join(w.Models, ",")), w.URL, cli.OrDash(why), cli.OrDash(revision(w)), cli.OrDash(origins(w)), away, onto, moving)
			}
			t.Rows = append(t.Rows, append(row, millis(r.TTFT), millis(r.ITL), figure(r.OutputRate, "%.0f"), slow(&r)))
		}
	}
	if err := t.Write(out, format); err != nil {
		return err
	}
	if len(l.Workers) == 0 && (format == "table" || format == "wide") {
		fmt.Fprintln(out, "(no workers)")
	}
	return nil
}

// figure is a figure, "-" while it is not known.
func figure[T int | float64](f *T, format string) string {
	if f == nil {
		return "-"
	}
	return fmt.Sprintf(format, *f)
}

func millis(f *float64) string { return figure(f, "%.1f ms") }

// slow says at what a rank is slow, "-" while too little is known of it or its peers.
func slow(k *admin.Rank) string {
	switch {
	case k.Slow != nil:
		return fmt.Sprintf("%s %.1f times its peers'", k.Slow.Figure, k.Slow.Times)
	case k.SpeedKnown:
		return "no"
	}
	return "-"
}

// revision is the rollout that a worker belongs to, and its part of it.
func revision(w *admin.Worker) string {
	if w.Slice == "" {
		return w.Revision
	}
	return w.Revision + " slice " + w.Slice
}

// origins says where each fact of a worker comes from.
func origins(w *admin.Worker) string {
	var out []string
	for _, f := range slices.Sorted(maps.Keys(w.From)) {
		out = append(out, f+": "+w.From[f])
	}
	return strings.Join(out, "; ")
}

// events is the state of a feed, and whether what it loses can be fetched again.
func events(f *admin.Feed) string {
	switch {
	case f.State == "none":
		return f.State
	case f.Replay == nil: // a recording
		return f.State + ", replay unknown"
	case *f.Replay == "":
		return f.State + ", no replay"
	}
	return f.State
}

func newWorkersDrainCmd(router *cli.RouterFlags) *cobra.Command {
	var wait time.Duration
	var move bool
	cmd := &cobra.Command{
		Use:   "drain NAME",
		Short: "Send no new requests to a worker; running ones finish",
		Args:  cobra.ExactArgs(1),
		RunE: router.Ask(func(cmd *cobra.Command, c *admin.Client, args []string) error {
			drain := c.DrainWorker
			if move {
				drain = c.MoveStreams
			}
			w, err := drain(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if l, err := c.Workers(cmd.Context()); err == nil && admin.LastUsable(l.Workers, w.Name) {
				printable.Fprintf(cmd.ErrOrStderr(), "warning: no other %s worker is usable; dynctl workers resume %s ends the drain\n", w.Role, w.Name)
			}
			if wait <= 0 {
				printable.Fprintf(cmd.ErrOrStderr(), "%s drains, %s in progress\n", w.Name, cli.Plural(active(w), "request"))
				return nil
			}
			return waitDrained(cmd.Context(), c, w.Name, wait, cmd.ErrOrStderr())
		}),
	}
	cmd.Flags().BoolVar(&move, "move", false, "have its streams continue elsewhere, those that can (continue.mode)")
	cmd.Flags().DurationVar(&wait, "wait", 0, "wait up to `TIME` until no request is left")
	return cmd
}

func active(w *admin.Worker) (n int) {
	for _, r := range w.Ranks {
		n += r.ActiveRequests
	}
	return n
}

func waitDrained(ctx context.Context, c *admin.Client, name string, most time.Duration, stderr io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	left := 0
	var err error
	if !wait.Until(ctx, 200*time.Millisecond, func() bool {
		var l *admin.WorkerList
		if l, err = c.Workers(ctx); err != nil {
			return ctx.Err() == nil
		}
		left = 0
		for i := range l.Workers {
			if l.Workers[i].Name == name {
				left = active(&l.Workers[i])
			}
		}
		return left == 0
	}) {
		return fmt.Errorf("%s still has %s after %s", name, cli.Plural(left, "request"), most)
	}
	if err != nil {
		return cli.AdminError(err)
	}
	printable.Fprintf(stderr, "%s is drained\n", name)
	return nil
}

func newWorkersResumeCmd(router *cli.RouterFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "resume NAME",
		Short: "Send requests to a drained worker again",
		Args:  cobra.ExactArgs(1),
		RunE: router.Ask(func(cmd *cobra.Command, c *admin.Client, args []string) error {
			w, err := c.ResumeWorker(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			printable.Fprintf(cmd.ErrOrStderr(), "%s takes requests again\n", w.Name)
			return nil
		}),
	}
}

func newWorkersAddCmd(router *cli.RouterFlags) *cobra.Command {
	var role string
	var roles []string
	for _, r := range workers.Roles() {
		roles = append(roles, string(r))
	}
	cmd := &cobra.Command{
		Use:     "add URL[,key=value…]",
		Short:   "Add a worker until the router restarts",
		Example: "  dynctl workers add --role decode http://10.0.0.3:8000,dp=2",
		Args:    cobra.ExactArgs(1),
		RunE: router.Ask(func(cmd *cobra.Command, c *admin.Client, args []string) error {
			w, err := c.AddWorker(cmd.Context(), admin.AddWorker{Role: role, Spec: args[0]})
			if err != nil {
				return err
			}
			printable.Fprintf(cmd.ErrOrStderr(), "added %s as %s; dynctl workers list shows whether it answers\n", w.Name, w.Role)
			return nil
		}),
	}
	cmd.Flags().StringVar(&role, "role", "", strings.Join(roles, "|")+"; left out, the engine reports it")
	_ = cmd.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(roles, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func newWorkersRemoveCmd(router *cli.RouterFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove a worker; its running requests finish",
		Args:  cobra.ExactArgs(1),
		RunE: router.Ask(func(cmd *cobra.Command, c *admin.Client, args []string) error {
			if err := c.RemoveWorker(cmd.Context(), args[0]); err != nil {
				return err
			}
			printable.Fprintf(cmd.ErrOrStderr(), "removed %s\n", args[0])
			return nil
		}),
	}
}

// workerNames are the workers of the router, with role and health.
func workerNames(ctx context.Context, c *admin.Client) ([]string, error) {
	l, err := c.Workers(ctx)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(l.Workers))
	for i, w := range l.Workers {
		names[i] = cobra.CompletionWithDesc(w.Name, w.Role+", "+w.Health)
	}
	return names, nil
}
