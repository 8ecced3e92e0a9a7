package commands

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

func newWorkersCallCmd(router *cli.RouterFlags) *cobra.Command {
	var output string
	call := admin.ControlCall{Timeout: admin.ControlTimeout}
	cmd := &cobra.Command{
		Use:   "call ACTION [NAME…]",
		Short: "Have the engines of all workers, or of those named, do something",
		Long: "call has engines reset their prefix cache, profile, sleep, wake, and load or unload\n" +
			"LoRA adapters, and prints what each worker answered. It fails when a worker did not do it.\n\n" +
			"ACTION is one of " + strings.Join(admin.ControlActions(), ", ") + ".",
		Example: "  dynctl workers call reset_prefix_cache\n" +
			"  dynctl workers call sleep decode-0 decode-1 --level 1\n" +
			"  dynctl workers call load_lora_adapter --adapter poet --path /adapters/poet",
		Args: cobra.MinimumNArgs(1),
		RunE: router.Ask(func(cmd *cobra.Command, c *admin.Client, args []string) error {
			call.Action, call.Workers = args[0], args[1:]
			if _, _, err := admin.ParseControl(call.Action, call.Query()); err != nil {
				return cli.WithCode(cli.ExitUsage, err)
			}
			a, err := c.Control(cmd.Context(), call)
			if err != nil {
				return err
			}
			return listCalled(cmd.OutOrStdout(), output, a)
		}),
	}
	actions, names := cobra.FixedCompletions(admin.ControlActions(), cobra.ShellCompDirectiveNoFileComp), router.Complete(workerNames)
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return actions(cmd, args, word)
		}
		return names(cmd, nil, word)
	}
	f := cmd.Flags()
	f.StringVar(&call.Level, "level", "", "how deep vLLM `sleep`s, 0 to 2")
	f.StringSliceVar(&call.Tags, "tag", nil, "`part` of an engine that sleeps (SGLang) or wakes, such as weights; repeatable")
	f.StringVar(&call.Adapter, "adapter", "", "`name` of the adapter to load or unload")
	f.StringVar(&call.Path, "path", "", "`path` at which engines find the adapter to load")
	f.DurationVar(&call.Timeout, "timeout", admin.ControlTimeout, "`time` for all workers together, up to "+admin.MaxControlTimeout.String())
	cli.OutputFlag(cmd, &output, cli.ListFormats()...)
	return cmd
}

// listCalled writes what each worker answered. The error is that some did not do it.
func listCalled(out io.Writer, format string, a *admin.ControlAnswer) error {
	t := cli.Listing{Whole: a, Head: []string{"WORKER", "DONE", "STATUS", "TIME", "ANSWER"}}
	var failed []string
	for i := range a.Workers {
		r := &a.Workers[i]
		done, status := "yes", "-"
		if !r.OK {
			done = "no"
			failed = append(failed, r.Worker)
		}
		if r.Status != 0 {
			status = fmt.Sprint(r.Status)
		}
		t.Items = append(t.Items, r)
		t.Rows = append(t.Rows, []string{r.Worker, done, status, millis(&r.DurationMS), cli.OrDash(r.Message)})
	}
	if err := t.Write(out, format); err != nil {
		return err
	}
	if len(failed) > 0 {
		return fmt.Errorf("%s: %d of %s failed: %s", a.Action, len(failed), cli.Plural(len(a.Workers), "worker"), strings.Join(failed[:min(len(failed), 8)], ", "))
	}
	return nil
}
