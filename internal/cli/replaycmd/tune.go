package replaycmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/bench/stats"
	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/replay/simulate"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/table"
)

// tuned is the one setting that --tune tries: of the constants of the cost in time the one that
// an operator can set.
const tuned = "routing.others"

// tried are the values of it, as multiples of the present one.
var tried = []float64{0.25, 0.5, 1, 2, 4}

// tuneLeast is how many requests must count: of fewer the p99 is that of one or two, and policy kv
// ranks by blocks until it has learned from some of them.
const tuneLeast = 300

// tuneRow is what one value of the setting came to: means over the seeds, times in ms.
type tuneRow struct {
	Value   float64 `json:"value"`
	Good    float64 `json:"good_ratio"`
	Goodput float64 `json:"goodput_rps"`
	TTFTP50 float64 `json:"ttft_p50_ms"`
	TTFTP99 float64 `json:"ttft_p99_ms"`
	ITLP50  float64 `json:"itl_p50_ms"`
	ITLP99  float64 `json:"itl_p99_ms"`
	E2EP50  float64 `json:"e2e_p50_ms"`
	E2EP99  float64 `json:"e2e_p99_ms"`
	Hit     float64 `json:"hit_ratio"`
	// By how many times the value is better than the present one, as a geometric mean over the
	// seeds, with its interval: good requests a second, and times.
	GoodTimes   stats.Interval `json:"goodput_times_better"`
	E2EP50Times stats.Interval `json:"e2e_p50_times_better"`
	E2EP99Times stats.Interval `json:"e2e_p99_times_better"`
}

// tuning is what --tune finds.
type tuning struct {
	Key       string `json:"key"`
	Fleet     string `json:"fleet"`
	Policy    string `json:"policy"`
	Threshold string `json:"threshold"`
	// Requests are those of a run that count.
	Requests uint64 `json:"requests"`
	Seeds    int    `json:"seeds"`
	// Level is that of the intervals: all of them together hold with 95 %.
	Level   float64   `json:"interval_level"`
	Present float64   `json:"present_value"`
	Rows    []tuneRow `json:"rows"`
	// Best is the value to set, the present one unless another is better beyond chance.
	Best float64 `json:"best_value"`
	// Setting is what to put into the settings file; Why says why.
	Setting string `json:"setting"`
	Why     string `json:"why"`
}

// tuneSetup is the simulation that --tune repeats.
func (f *replayFlags) tuneSetup(stat *arrivals.Stat) (*simulate.Setup, error) {
	c := &f.compare
	for _, text := range c.set {
		if one, err := replay.ParseChange(text); err == nil && "routing."+one.Key == tuned {
			return nil, fmt.Errorf("--set %s: --tune tries several values of it", text)
		}
	}
	if f.seeds < 2 || f.seeds > 100 {
		return nil, fmt.Errorf("--seeds %d: want 2 to 100, as an interval needs two", f.seeds)
	}
	rows, err := c.rows(nil, f.from, f.to, stat)
	if err != nil {
		return nil, err
	}
	if len(rows) != 1 {
		return nil, errors.New("--tune compares values of one setting: name one --policy, one --routing-threshold and one size of --kv-blocks")
	}
	s := &rows[0].setup
	try, err := replay.ParseChange(tuned + "=" + text(2*f.present()))
	if err != nil {
		return nil, err
	}
	if replay.Idle(s.Options, []replay.Change{try}, s.Ranks())[0] {
		return nil, fmt.Errorf("--tune: %s has no effect with policy %s and this threshold: it is a part of policy %s, and of a threshold that is auto on a fleet with prefill ranks", tuned, s.Decode, selector.KV)
	}
	return s, nil
}

// present is the value of the recording, or the default.
func (f *replayFlags) present() float64 {
	return cmp.Or(f.compare.others, settings.Lookup(tuned).Default.(float64))
}

// text is a value as settings have it.
func text(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

// tune simulates the requests with several values of a setting, and prints how they compare.
func (f *replayFlags) tune(cmd *cobra.Command, files *traceFiles) error {
	src, stat, err := f.requests(cmd, files)
	if err != nil {
		return err
	}
	base, err := f.tuneSetup(stat)
	if err != nil {
		return cli.WithCode(cli.ExitUsage, err)
	}
	all, err := arrivals.Keep(src)
	if err != nil {
		return fmt.Errorf("--tune: %w", err)
	}
	t := &tuning{Key: tuned, Fleet: f.compare.fleet, Policy: string(base.Decode), Seeds: f.seeds, Present: f.present(), Level: 1 - 0.05/float64(len(tried)-1)}
	results, err := f.tuneRuns(cmd, base, all, t.Present)
	if err != nil {
		return traceError(err)
	}
	t.fill(results)
	switch f.output {
	case "json", "jsonl", "yaml":
		err = cli.WriteData(cmd.OutOrStdout(), f.output, t)
	default:
		err = t.write(cmd.OutOrStdout(), f.output)
	}
	if err != nil {
		return err
	}
	return files.whole()
}

// tuneRuns are the results of each tried value and seed. The first seed has the requests at their
// own times.
func (f *replayFlags) tuneRuns(cmd *cobra.Command, base *simulate.Setup, all []arrivals.Request, present float64) ([][]*simulate.Result, error) {
	results := make([][]*simulate.Result, len(tried))
	for i := range results {
		results[i] = make([]*simulate.Result, f.seeds)
	}
	traces := make([][]arrivals.Request, f.seeds)
	for seed := range traces {
		if traces[seed] = all; seed > 0 {
			traces[seed] = arrivals.Moved(all, uint64(seed))
		}
	}
	var says sync.Mutex
	made := 0
	run := func(ctx context.Context, value, seed int) error {
		s := *base
		change, err := replay.ParseChange(tuned + "=" + text(tried[value]*present))
		if err != nil {
			return err
		}
		s.Set([]replay.Change{change})
		s.Seed += uint64(seed)
		res, err := simulate.Run(ctx, arrivals.FromSlice(traces[seed]), s)
		if err != nil {
			return err
		}
		if res.Completed == 0 {
			return cli.WithCode(cli.ExitInvalid, fmt.Errorf("--tune: with %s none of %d requests was completed on --fleet %s", change, res.Requests, f.compare.fleet))
		}
		results[value][seed] = res
		says.Lock()
		defer says.Unlock()
		if made++; !f.trace.quiet {
			printable.Fprintf(cmd.ErrOrStderr(), "run %d of %d: %s, seed %d, in %.1f s\n", made, len(tried)*f.seeds, change, seed+1, res.WallS)
		}
		return nil
	}
	now := slices.Index(tried, 1)
	if err := run(cmd.Context(), now, 0); err != nil {
		return nil, err
	}
	if n := results[now][0].Requests; n < tuneLeast {
		return nil, cli.WithCode(cli.ExitInvalid, fmt.Errorf("--tune: %d requests count, which are no basis: want %d or more, so that a p99 is not that of one request", n, tuneLeast))
	}
	g, ctx := errgroup.WithContext(cmd.Context())
	g.SetLimit(cmp.Or(f.compare.jobs, runtime.NumCPU()))
	for seed := range f.seeds {
		for value := range tried {
			if value != now || seed > 0 {
				g.Go(func() error { return run(ctx, value, seed) })
			}
		}
	}
	return results, g.Wait()
}

// fill compares the results of each value with those of the present one, seed by seed.
func (t *tuning) fill(results [][]*simulate.Result) {
	now := results[slices.Index(tried, 1)]
	t.Requests, t.Threshold = now[0].Requests, now[0].Rule()
	for i, runs := range results {
		mean := func(of func(r *simulate.Result) float64) float64 {
			v := make([]float64, len(runs))
			for k, r := range runs {
				v[k] = of(r)
			}
			return stats.Mean(v)
		}
		times := func(of func(r *simulate.Result) float64) stats.Interval {
			v := make([]float64, len(runs))
			for k, r := range runs {
				v[k] = math.Log(of(r) / of(now[k]))
			}
			return stats.MeanInterval(v, t.Level).Map(math.Exp)
		}
		t.Rows = append(t.Rows, tuneRow{
			Value: tried[i] * t.Present,
			Good:  mean(func(r *simulate.Result) float64 { return r.Good }), Goodput: mean(func(r *simulate.Result) float64 { return r.Goodput }),
			TTFTP50: mean(func(r *simulate.Result) float64 { return r.TTFT.P50 }), TTFTP99: mean(func(r *simulate.Result) float64 { return r.TTFT.P99 }),
			ITLP50: mean(func(r *simulate.Result) float64 { return r.ITL.P50 }), ITLP99: mean(func(r *simulate.Result) float64 { return r.ITL.P99 }),
			E2EP50: mean(func(r *simulate.Result) float64 { return r.E2E.P50 }), E2EP99: mean(func(r *simulate.Result) float64 { return r.E2E.P99 }),
			Hit: mean(func(r *simulate.Result) float64 { return r.HitRatio }),
			// Half a request more, so that a run without a good one has a logarithm.
			GoodTimes:   times(func(r *simulate.Result) float64 { return (r.Good*float64(r.Requests) + 0.5) / r.VirtualS }),
			E2EP50Times: times(func(r *simulate.Result) float64 { return 1 / r.E2E.P50 }),
			E2EP99Times: times(func(r *simulate.Result) float64 { return 1 / r.E2E.P99 }),
		})
	}
	t.choose()
}

// choose takes the value with the most good requests, where they are more than those of the
// present one beyond chance. Where no value has more, it takes the one with the shortest E2E p50,
// if that is shorter beyond chance, and neither good requests nor E2E p99 are worse beyond it.
func (t *tuning) choose() {
	best := slices.MaxFunc(t.Rows, func(a, b tuneRow) int { return cmp.Compare(a.gain(), b.gain()) })
	t.Best, t.Why = t.Present, fmt.Sprintf("no other value is better beyond its %.4g %% interval", 100*t.Level)
	switch {
	case !slices.ContainsFunc(t.Rows, tuneRow.differs):
		t.Why = "no value changes any figure: these requests on this fleet leave nothing to weigh"
	case best.gain() == 0:
	case best.GoodTimes.Low > 1:
		t.Best, t.Why = best.Value, fmt.Sprintf("more good requests: %s", change(best.GoodTimes))
	default:
		t.Best, t.Why = best.Value, fmt.Sprintf("as many good requests, and a shorter E2E p50: %s", change(best.E2EP50Times))
	}
	section, key, _ := strings.Cut(tuned, ".")
	t.Setting = fmt.Sprintf("%s:\n  %s: %s\n", section, key, text(t.Best))
}

// differs reports whether the value gave other figures than the present one.
func (r tuneRow) differs() bool {
	same := func(i stats.Interval) bool { return i.Low == 1 && i.High == 1 }
	return !same(r.GoodTimes) || !same(r.E2EP50Times) || !same(r.E2EP99Times)
}

// gain orders values: 0 for no better one, up to 1 and beyond by E2E p50, and above that by good
// requests.
func (r tuneRow) gain() float64 {
	switch {
	case r.GoodTimes.Low > 1:
		return 1e6 * r.GoodTimes.Value
	case r.GoodTimes.High >= 1 && r.E2EP50Times.Low > 1 && r.E2EP99Times.High >= 1:
		return r.E2EP50Times.Value
	}
	return 0
}

// change is by how many times something is better, in percent with its interval.
func change(i stats.Interval) string {
	p := i.Map(func(v float64) float64 { return 100 * (v - 1) })
	return fmt.Sprintf("%+.1f%% (%+.1f to %+.1f)", p.Value, p.Low, p.High)
}

// write writes the rows as a table, and for people what to set.
func (t *tuning) write(out io.Writer, format string) error {
	head := []string{t.Key, "GOOD", "GOOD/S", "TTFT P50", "TTFT P99", "ITL P50", "ITL P99", "E2E P50", "E2E P99", "HIT", "GOOD/S BETTER", "E2E P50 BETTER", "E2E P99 BETTER"}
	const figures = 10
	rows := make([][]string, 0, len(t.Rows))
	for i := range t.Rows {
		r := &t.Rows[i]
		row := []string{
			text(r.Value), table.Percent(r.Good), fmt.Sprintf("%.2f", r.Goodput), fmt.Sprintf("%.0f", r.TTFTP50), fmt.Sprintf("%.0f", r.TTFTP99),
			fmt.Sprintf("%.1f", r.ITLP50), fmt.Sprintf("%.1f", r.ITLP99), fmt.Sprintf("%.0f", r.E2EP50), fmt.Sprintf("%.0f", r.E2EP99), table.Percent(r.Hit),
			"now", "now", "now",
		}
		if r.Value != t.Present {
			row = append(row[:figures], change(r.GoodTimes), change(r.E2EP50Times), change(r.E2EP99Times))
		}
		rows = append(rows, row)
	}
	if format == "csv" {
		return table.Write(out, format, head, rows)
	}
	left, right := make([][]string, len(rows)), make([][]string, len(rows))
	for i, row := range rows {
		left[i], right[i] = row[:figures], append([]string{row[0]}, row[figures:]...)
	}
	if err := table.Write(out, format, head[:figures], left); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nMeans over %d seeds of %s requests on %s, policy %s, threshold %s; times in ms.\nBetter than now, with the %.4g %% interval over the seeds:\n\n", t.Seeds, table.Count(t.Requests), t.Fleet, t.Policy, t.Threshold, 100*t.Level)
	if err := table.Write(out, format, append([]string{head[0]}, head[figures:]...), right); err != nil {
		return err
	}
	verb := "Set"
	if t.Best == t.Present {
		verb = "Keep"
	}
	_, err := fmt.Fprintf(out, "\n%s this (%s), or --%s %s:\n\n%s", verb, t.Why, settings.Lookup(tuned).Flag, text(t.Best), t.Setting)
	return err
}
