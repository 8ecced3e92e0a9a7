package benchcmd

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/report"
	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
)

func newCompare() *cobra.Command {
	var output string
	var failIf []string
	cmd := &cobra.Command{
		Use:   "compare A B",
		Short: "Compare two runs, with intervals",
		Long: `Compare two runs of dynctl bench --threshold: how much each metric of B differs
from A at each load and path, over the lengths that both measured, with a 95%
interval from the repeats.

--fail-if METRIC>PERCENT% (or <) makes the exit code 5 when a difference is
beyond the limit and its interval excludes that nothing changed. The metrics
are ` + strings.Join(report.Metrics(), ", ") + `.`,
		Example: `  dynctl bench compare run-20261121-1423 run-20261122-0900
  dynctl bench compare old new --fail-if 'ttft_p50>5%' --fail-if 'output_tokens_per_second<-3%'`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			var conds []report.Condition
			for _, s := range failIf {
				c, err := report.ParseCondition(s)
				if err != nil {
					return cli.WithCode(cli.ExitUsage, err)
				}
				conds = append(conds, c)
			}
			a, err := report.ReadResult(args[0])
			if err != nil {
				return cli.WithCode(cli.ExitUsage, err)
			}
			b, err := report.ReadResult(args[1])
			if err != nil {
				return cli.WithCode(cli.ExitUsage, err)
			}
			changes := report.Compare(a, b)
			if len(changes) == 0 {
				return cli.WithCode(cli.ExitUsage, errors.New("the runs have no load, path and length in common"))
			}
			if output == "table" {
				err = report.CompareText(cmd.OutOrStdout(), a, b, changes)
			} else {
				err = cli.WriteData(cmd.OutOrStdout(), output, map[string]any{"schema": "dynctl.bench-compare/v1", "a": a.Name, "b": b.Name, "changes": report.Finite(changes)})
			}
			if err != nil {
				return err
			}
			var failed []string
			for _, c := range conds {
				failed = append(failed, c.Failed(changes)...)
			}
			if len(failed) > 0 {
				return cli.WithCode(cli.ExitMissed, errors.New(strings.Join(failed, "\n")))
			}
			return nil
		},
	}
	cmd.Flags().StringArrayVar(&failIf, "fail-if", nil, "`CONDITION` such as 'ttft_p50>5%' (repeatable)")
	cli.OutputFlag(cmd, &output, "table", "json", "yaml")
	return cmd
}

func newReport() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "report FOLDER",
		Short: "Show a finished run again, or write its HTML",
		Long: `Show a finished run or sweep again, or write its HTML. Tables, gates and the
sentence of a run that compares paths are made again from the cells, by the rules
of this version of dynctl.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := report.ReadResult(args[0])
			if errors.Is(err, report.ErrSchema) {
				if s, err := report.ReadSweep(args[0]); err == nil {
					return showSweep(cmd.OutOrStdout(), output, s)
				}
			}
			if err != nil {
				return cli.WithCode(cli.ExitUsage, err)
			}
			r = experiment.Review(r)
			switch output {
			case "html":
				return report.HTML(cmd.OutOrStdout(), r)
			case "csv":
				return report.CSV(cmd.OutOrStdout(), r.Cells)
			case "json":
				return cli.WriteData(cmd.OutOrStdout(), "json", r)
			}
			return report.Text(cmd.OutOrStdout(), r, report.TextOptions{Width: terminalWidth(cmd.OutOrStdout()), Wide: output == "wide"})
		},
	}
	cli.OutputFlag(cmd, &output, "table", "wide", "json", "csv", "html")
	return cmd
}

func newApply() *cobra.Command {
	var router cli.RouterFlags
	var yes bool
	cmd := &cobra.Command{
		Use:   "apply FOLDER",
		Short: "Set the threshold that a run recommends on a running router",
		Long: `Show what would change on a running router and, after a question, set the
threshold that a run recommends. A run whose gates failed recommends nothing
and is refused. Where the router's threshold is auto, what it has learned is
shown beside what was measured.`,
		Example: `  dynctl bench apply run-20261121-1423 --router http://127.0.0.1:8001`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := report.ReadResult(args[0])
			if err != nil {
				return cli.WithCode(cli.ExitUsage, err)
			}
			if r.Recommend == nil || !r.Valid {
				return cli.WithCode(cli.ExitInvalid, fmt.Errorf("%s recommends nothing: %s", filepath.Base(args[0]), r.Sentence))
			}
			c, err := router.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			s, err := c.Status(cmd.Context())
			if err != nil {
				return cli.AdminError(err)
			}
			out := cmd.OutOrStdout()
			printable.Fprintf(out, "%s  (%s)\n", c.URL(), r.Sentence)
			for i := range s.Costs {
				for k := range s.Costs[i].Crossings {
					printable.Fprintf(out, "  learned for %s: %s\n", s.Costs[i].Model, s.Costs[i].Crossings[k].Sentence())
				}
			}
			changes := map[string]any{}
			diff := func(key string, old, now any) {
				if fmt.Sprint(old) == fmt.Sprint(now) {
					printable.Fprintf(out, "  %s: %v\n", key, old)
					return
				}
				printable.Fprintf(out, "- %s: %v\n+ %s: %v\n", key, old, key, now)
				changes[key] = now
			}
			diff("routing.threshold", s.Threshold(), r.Recommend.EffISL)
			diff("routing.threshold_on", s.ThresholdOn, "eff_isl")
			if t := r.Target; t != nil && len(s.Models) > 0 && !slices.Contains(s.Models, t.Model) {
				printable.Fprintf(cmd.ErrOrStderr(), "caution: the run measured %s, this router serves %s\n", t.Model, strings.Join(s.Models, ", "))
			}
			if len(changes) == 0 {
				fmt.Fprintln(out, "nothing to change")
				return nil
			}
			if !yes {
				if f, ok := cmd.InOrStdin().(*os.File); ok && !cli.IsTerminal(f) {
					return cli.WithCode(cli.ExitUsage, errors.New("nothing was changed: give --yes where there is no terminal"))
				}
				fmt.Fprint(cmd.ErrOrStderr(), "apply? [y/N] ")
				line, err := bufio.NewReader(io.LimitReader(cmd.InOrStdin(), 64)).ReadString('\n')
				if a := strings.ToLower(strings.TrimSpace(line)); err != nil && a == "" || a != "y" && a != "yes" {
					fmt.Fprintln(cmd.ErrOrStderr(), "nothing was changed")
					return nil
				}
			}
			v, err := c.SetConfig(cmd.Context(), changes)
			if err != nil {
				return cli.AdminError(err)
			}
			printable.Fprintf(out, "set, configuration revision %d\n", v.Revision)
			return nil
		},
	}
	router.Add(cmd)
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return cmd
}
