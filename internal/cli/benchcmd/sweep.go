package benchcmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/live"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/report"
	"github.com/dynctl/dynctl/internal/bench/sweep"
	"github.com/dynctl/dynctl/internal/bench/workload"
	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
)

// sweep runs dynctl bench --sweep and its relatives.
func (f *benchFlags) sweep(cmd *cobra.Command, output string) (err error) {
	stderr := cmd.ErrOrStderr()
	loads, err := f.loads()
	if err != nil {
		return cli.WithCode(cli.ExitUsage, err)
	}
	slo, err := plan.ParseSLO(f.slo)
	if err != nil {
		return cli.WithCode(cli.ExitUsage, fmt.Errorf("--slo: %w", err))
	}
	if f.repeat < 1 || f.requests < 0 || f.turns < 1 || f.prefixGroups < 0 || f.prefixN < 1 || !(f.level >= 0.5 && f.level < 1) {
		return cli.WithCode(cli.ExitUsage, errors.New("--repeat, --turns and --prefix-tokens must be at least 1, --requests and --prefix-groups at least 0, --level from 0.5 to below 1"))
	}
	arm := plan.Arm(f.arm)
	if arm != plan.Auto && arm != plan.Local && arm != plan.Remote {
		return cli.WithCode(cli.ExitUsage, fmt.Errorf("--path %s: not one of auto, local, remote", f.arm))
	}
	var thresholds []int
	for _, s := range splitList(f.thresholds) {
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 {
			return cli.WithCode(cli.ExitUsage, fmt.Errorf("--thresholds: %q is not a number of tokens", s))
		}
		thresholds = append(thresholds, n)
	}
	var isl, osl workload.Dist
	if f.trace == "" {
		if !cmd.Flags().Changed("isl") {
			f.isl = "1024"
		}
		if isl, err = workload.ParseDist(f.isl); err != nil {
			return cli.WithCode(cli.ExitUsage, fmt.Errorf("--isl: %w", err))
		}
		if osl, err = workload.ParseDist(f.osl); err != nil {
			return cli.WithCode(cli.ExitUsage, fmt.Errorf("--osl: %w", err))
		}
		if f.turns > 1 && f.rate != "" {
			return cli.WithCode(cli.ExitUsage, errors.New("--turns needs --concurrency: the next turn waits for the one before"))
		}
	} else if f.turns > 1 || f.prefixGroups > 0 {
		return cli.WithCode(cli.ExitUsage, errors.New("--trace brings its own prompts: leave out --turns and --prefix-groups"))
	}
	ctx, control, end := newRunControl(cmd.Context(), stderr)
	defer end()
	t, err := f.target.Open(ctx, stderr, simulated)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	facts, pool, _, err := f.look(ctx, t)
	if err != nil {
		return err
	}
	p := newBenchProgress(stderr, f.progress)
	defer p.close()
	control.speak(p.say)
	p.say("check   %s | prefill %d | decode %d | %s block %d", t.What, facts.Prefill, facts.Decode+facts.Aggregated, facts.Model, facts.Block)

	spec := plan.Spec{SLO: slo, Arrival: f.arrival, Burstiness: f.burstiness, Cap: f.cap, Seed: f.seed, Salt: newSalt(), Requests: f.requests}
	b := &live.Bench{Target: t.Target, Facts: facts, Spec: spec, Pool: pool, Timeout: f.timeout, Progress: &p.cell}
	header := arm.Header()
	o := sweep.Options{Thresholds: thresholds, Repeats: f.repeat, Requests: f.requests, Arm: arm, Level: f.level, StopSaturated: f.rate != "", Stop: control.stopped, Enter: control.enter}
	what := ""
	if f.trace != "" {
		items, info, err := workload.ReadTrace(f.trace, cmd.InOrStdin(), workload.TraceOptions{Scale: f.traceScale, Limit: f.traceLimit, MaxLen: facts.MaxModelLen})
		if err != nil {
			return cli.WithCode(cli.ExitUsage, fmt.Errorf("--trace: %w", err))
		}
		span := max(info.Span.Seconds(), 0.001)
		loads = []plan.Load{{Rate: float64(len(items)) / span}}
		what = fmt.Sprintf("trace %s (%s): %d requests in %s, mean isl %.0f, osl %.0f, %d left out as longer than the model", filepath.Base(f.trace), info.Format, len(items), shortTime(info.Span), info.MeanISL, info.MeanOSL, info.TooLong)
		at := make([]time.Duration, len(items))
		for i := range items {
			at[i] = items[i].At
		}
		o.Measure = func(ctx context.Context, c plan.Cell) (*experiment.Measure, error) {
			src := &workload.Trace{Series: workload.Series{Pool: pool, Model: facts.Model, Header: header, Name: c.ID, Salt: spec.Salt + c.ID}, Items: items}
			c.EffISL, c.Ramp, c.Requests = int(info.MeanISL), 0, len(items)
			return b.Run(ctx, c, src, at)
		}
	} else {
		mix := workload.Mixed{ISL: isl, OSL: osl, Groups: f.prefixGroups, PrefixTokens: f.prefixN, Turns: f.turns}
		what = mix.Describe()
		o.Measure = func(ctx context.Context, c plan.Cell) (*experiment.Measure, error) {
			src := &workload.Mixed{
				Series: workload.Series{Pool: pool, Model: facts.Model, Header: header, Name: c.ID, Salt: spec.Salt + c.ID, Ramp: c.Ramp, N: c.Requests},
				ISL:    isl, OSL: osl, Groups: f.prefixGroups, PrefixTokens: f.prefixN, Turns: f.turns, MaxLen: facts.MaxModelLen,
			}
			c.EffISL = int(isl.Mean())
			return b.Run(ctx, c, src, nil)
		}
	}
	o.Loads = loads
	if len(thresholds) > 0 {
		old, err := thresholdOf(ctx, t)
		if err != nil {
			return cli.AdminError(err)
		}
		o.SetThreshold = func(ctx context.Context, n int) error { return setThreshold(ctx, t, n) }
		defer func() {
			c, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			err = errors.Join(err, setThreshold(c, t, old))
		}()
	}
	text := fmt.Sprintf("plan    %s | %d load(s) x %d threshold(s) x %d repeat(s)", what, len(loads), max(len(thresholds), 1), f.repeat)
	if f.dryRun {
		printable.Fprintf(cmd.OutOrStdout(), "%s\n", text)
		return nil
	}
	p.say("%s", text)
	start := time.Now()
	o.OnCell = func(c experiment.CellResult, done, total int) {
		left := time.Duration(float64(time.Since(start)) / float64(done) * float64(total-done))
		p.event(experiment.Event{Kind: "cell", Cell: c.Cell, Result: &c, Done: done, Total: total, Elapsed: time.Since(start), Remaining: left})
	}
	o.OnSkip = func(c plan.Cell) {
		p.event(experiment.Event{Kind: "skip", Cell: c, Text: "skipped by hand"})
	}
	if err := p.listen(cmd.InOrStdin(), control); err != nil {
		return err
	}
	res, runErr := sweep.Run(ctx, o)
	p.close()
	name := cmp.Or(f.out, "sweep-"+start.Format("20060102-150405"))
	res.Name, res.Version, res.Created, res.Workload, res.Target, res.Simulated, res.SLO = filepath.Base(name), cli.BuildVersion().Version, start, what, facts, t.Simulated, slo
	if err := report.WriteSweep(name, res); err != nil {
		return errors.Join(runErr, err)
	}
	if output == "json" {
		err = cli.WriteData(cmd.OutOrStdout(), "json", res)
	} else if err = sweep.Text(cmd.OutOrStdout(), res); err == nil {
		printable.Fprintf(cmd.OutOrStdout(), "  files    %s/  result.json  cells.csv\n", name)
	}
	switch {
	case err != nil:
		return err
	case control.stopped():
		return cli.WithCode(cli.ExitInterrupted, errors.New("ended early: partial results are in "+name))
	}
	return lostFleet(runErr)
}

// thresholdOf is the setting of the threshold that the router has now.
func thresholdOf(ctx context.Context, t *cli.Target) (any, error) {
	s, err := t.Admin.Status(ctx)
	if err != nil {
		return nil, err
	}
	return s.Threshold(), nil
}

func setThreshold(ctx context.Context, t *cli.Target, threshold any) error {
	_, err := t.Admin.SetConfig(ctx, map[string]any{"routing.threshold": threshold})
	return cli.AdminError(err)
}
