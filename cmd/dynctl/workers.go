package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/router/admin"
)

func newWorkersCmd() *cobra.Command {
	var router routerFlags
	cmd := &cobra.Command{Use: "workers", Short: "List, drain, resume, add and remove the workers of a running router"}
	router.add(cmd)
	drain, resume, remove := newWorkersDrainCmd(&router), newWorkersResumeCmd(&router), newWorkersRemoveCmd(&router)
	for _, c := range []*cobra.Command{drain, resume, remove} {
		c.ValidArgsFunction = completeLive(&router, workerNames)
	}
	cmd.AddCommand(newWorkersListCmd(&router), drain, resume, newWorkersAddCmd(&router), remove)
	return cmd
}

func newWorkersListCmd(router *routerFlags) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the workers and their ranks",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := router.client()
			if err != nil {
				return err
			}
			defer c.Close()
			l, err := c.Workers(cmd.Context())
			if err != nil {
				return adminError(err)
			}
			switch output {
			case "table", "wide":
				return workerTable(cmd.OutOrStdout(), l, output == "wide")
			case "jsonl":
				for _, w := range l.Workers {
					if err := writeData(cmd.OutOrStdout(), "jsonl", w); err != nil {
						return err
					}
				}
				return nil
			default:
				return writeData(cmd.OutOrStdout(), output, l)
			}
		},
	}
	outputFlag(cmd, &output, "table", "wide", "json", "jsonl", "yaml")
	return cmd
}

func workerTable(out io.Writer, l *admin.WorkerList, wide bool) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	head := "RANK\tROLE\tENGINE\tHEALTH\tREQUESTS\tPREFILL TOKENS\tDECODE BLOCKS\tINDEX BLOCKS\tEVENTS"
	if wide {
		head += "\tRUNNING\tWAITING\tKV USED\tBLOCK\tCONNECTOR\tMODELS\tURL\tREASON"
	}
	fmt.Fprintln(w, head)
	for _, k := range l.Workers {
		health := k.Health
		if k.Draining {
			health = "draining"
		}
		for _, r := range k.Ranks {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s", r.Label, k.Role, k.Engine, health, r.ActiveRequests, r.PrefillTokens, r.DecodeBlocks, r.IndexBlocks, r.Feed.State)
			if wide {
				running, waiting, used := "-", "-", "-"
				if e := r.Engine; e != nil {
					if e.Running != nil {
						running = fmt.Sprint(*e.Running)
					}
					if e.Waiting != nil {
						waiting = fmt.Sprint(*e.Waiting)
					}
					if e.KVUsage != nil {
						used = fmt.Sprintf("%.0f%%", 100**e.KVUsage)
					}
				}
				fmt.Fprintf(w, "\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s", running, waiting, used, k.BlockSizeTokens, orDash(k.Connector), orDash(strings.Join(k.Models, ",")), k.URL, orDash(k.Reason))
			}
			fmt.Fprintln(w)
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(l.Workers) == 0 {
		fmt.Fprintln(out, "(no workers)")
	}
	return nil
}

func newWorkersDrainCmd(router *routerFlags) *cobra.Command {
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "drain NAME",
		Short: "Send no new requests to a worker; running ones finish",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := router.client()
			if err != nil {
				return err
			}
			defer c.Close()
			w, err := c.DrainWorker(cmd.Context(), args[0])
			if err != nil {
				return adminError(err)
			}
			if wait <= 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "%s drains, %s in progress\n", w.Name, plural(active(w), "request"))
				return nil
			}
			return waitDrained(cmd.Context(), c, w.Name, wait, cmd.ErrOrStderr())
		},
	}
	cmd.Flags().DurationVar(&wait, "wait", 0, "wait up to `TIME` until no request is left")
	return cmd
}

func active(w *admin.Worker) (n int) {
	for _, r := range w.Ranks {
		n += r.ActiveRequests
	}
	return n
}

func waitDrained(ctx context.Context, c *admin.Client, name string, wait time.Duration, stderr io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	left := 0
	for {
		l, err := c.Workers(ctx)
		if err != nil && ctx.Err() == nil {
			return adminError(err)
		}
		if err == nil {
			left = -1
			for i := range l.Workers {
				if l.Workers[i].Name == name {
					left = active(&l.Workers[i])
				}
			}
			if left <= 0 {
				fmt.Fprintf(stderr, "%s is drained\n", name)
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%s still has %s after %s", name, plural(left, "request"), wait)
		}
	}
}

func newWorkersResumeCmd(router *routerFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "resume NAME",
		Short: "Send requests to a drained worker again",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := router.client()
			if err != nil {
				return err
			}
			defer c.Close()
			w, err := c.ResumeWorker(cmd.Context(), args[0])
			if err != nil {
				return adminError(err)
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "%s takes requests again\n", w.Name)
			return nil
		},
	}
}

func newWorkersAddCmd(router *routerFlags) *cobra.Command {
	var role string
	cmd := &cobra.Command{
		Use:     "add URL[,key=value…]",
		Short:   "Add a worker until the router restarts",
		Example: "  dynctl workers add --role decode http://10.0.0.3:8000,dp=2",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := router.client()
			if err != nil {
				return err
			}
			defer c.Close()
			w, err := c.AddWorker(cmd.Context(), admin.AddWorker{Role: role, Spec: args[0]})
			if err != nil {
				return adminError(err)
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "added %s as %s\n", w.Name, w.Role)
			return nil
		},
	}
	cmd.Flags().StringVar(&role, "role", "", "prefill|decode|aggregated; the engine tells when it is left out")
	_ = cmd.RegisterFlagCompletionFunc("role", cobra.FixedCompletions([]string{"prefill", "decode", "aggregated"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func newWorkersRemoveCmd(router *routerFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove a worker; its running requests finish",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := router.client()
			if err != nil {
				return err
			}
			defer c.Close()
			if err := c.RemoveWorker(cmd.Context(), args[0]); err != nil {
				return adminError(err)
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "removed %s\n", args[0])
			return nil
		},
	}
}
