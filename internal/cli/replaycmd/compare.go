package replaycmd

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/replay/simulate"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/table"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

// compareFlags describe simulated runs; every combination is a row.
type compareFlags struct {
	policies   []string
	thresholds []string
	kvBlocks   []string
	fleet      string
	on         string
	speedup    float64
	closedLoop bool
	seed       uint64
	scrape     time.Duration
	ttft, itl  time.Duration
	faults     []string
	set        []string
	countFrom  time.Duration
	assume     float64
	slowFactor float64
	limits     admission.Limits
	jobs       int
	others     float64 // routing.others of the recording; 0 for not known
}

func (c *compareFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringSliceVar(&c.policies, "policy", nil, "simulate the requests under these policies: "+strings.Join(settings.Lookup("routing.policy").Values, ","))
	f.StringSliceVar(&c.thresholds, "routing-threshold", nil, "simulate with these thresholds, in `TOKENS`; auto takes the path that costs less, by what was learned in the run, and auto:TOKENS says what decides before enough is known")
	f.StringSliceVar(&c.kvBlocks, "kv-blocks", nil, "simulate with caches of `N` blocks a rank; \"unlimited\" evicts nothing")
	f.StringVar(&c.fleet, "fleet", "16a", "simulated engines, as in serve --sim; a recording has its own fleet unless this is given; blocks are of 64 tokens and a cache holds 16384 unless stated otherwise")
	f.StringVar(&c.on, "routing-threshold-on", "eff_isl", "what the threshold counts: eff_isl|isl")
	f.Float64Var(&c.speedup, "arrival-speedup", 1, "let requests arrive `N` times faster; with --closed-loop thinking times are also shorter")
	f.BoolVar(&c.closedLoop, "closed-loop", false, "let each turn of a session wait for the answer before it and then for its thinking time, so that a slow policy is not flooded")
	f.Uint64Var(&c.seed, "seed", 1, "seed of random choices in a simulation")
	f.DurationVar(&c.scrape, "scrape-interval", time.Second, "how old engines' load figures may be in a simulation")
	f.DurationVar(&c.ttft, "slo-ttft", 2*time.Second, "a good request has its first token within this")
	f.DurationVar(&c.itl, "slo-itl", 25*time.Millisecond, "a good request has its tokens within this of each other, on average")
	f.StringSliceVar(&c.faults, "fault", nil, "simulate with engines that change, as in 10m:prefill_slow=3 (prefill ranks three times slower), 10m:one_prefill_slow=3 (the last of them), 10m:one_decode_slow=3 (the last of those that answer), 10m:network_slow=10, 10m:prefill_gone=0.5 (half of them)")
	f.StringArrayVar(&c.set, "set", nil, "simulate with a setting of those of --what-if, or a constant of the cost in time ("+strings.Join(replay.ConstantKeys(), ", ")+"), `KEY=VALUE` (repeatable); one that changes nothing in the simulation is an error")
	f.DurationVar(&c.countFrom, "count-from", 0, "leave requests of a simulation out of its result that arrive sooner after the first")
	f.Float64Var(&c.assume, "assume", 1, "let auto assume at the start of a simulation that everything takes `N` times as long: 3 or 0.33 try start values that are wrong")
	f.Float64Var(&c.slowFactor, "slow-factor", settings.Default().Health.SlowFactor, "simulate with health.slow_factor: ranks `N` times slower than their peers cost more where load counts; 0 judges none")
	f.IntVar(&c.limits.Inflight, "max-inflight", 0, "simulate with at most `N` requests in progress; 0 is no limit")
	f.IntVar(&c.limits.Queue, "queue-size", settings.Default().Limits.Queue, "how many requests wait in a simulation with a limit (this one, or --set routing.busy_…)")
	f.DurationVar(&c.limits.Timeout, "queue-timeout", settings.Default().Limits.QueueTimeout, "longest wait of a simulated request")
	f.IntVar(&c.jobs, "jobs", 0, "simulations at a time; 0 is one for each processor")
	_ = cmd.RegisterFlagCompletionFunc("policy", cobra.FixedCompletions(settings.Lookup("routing.policy").Values, cobra.ShellCompDirectiveNoFileComp))
}

// asked reports whether a simulation is wanted.
func (c *compareFlags) asked(cmd *cobra.Command) bool {
	return slices.ContainsFunc([]string{"policy", "routing-threshold", "kv-blocks", "fleet", "arrival-speedup", "closed-loop", "max-inflight", "fault", "set"}, cmd.Flags().Changed)
}

// parseFleet reads a fleet with defaults for simulations.
func (c *compareFlags) parseFleet() (sim.Fleet, error) {
	f, err := simulate.ParseFleet(c.fleet)
	if err != nil {
		return f, cli.WithCode(cli.ExitUsage, fmt.Errorf("--fleet %s: %w", c.fleet, err))
	}
	return f, nil
}

// changes are settings that simulated runs are made with.
type changes struct {
	flag string
	list []replay.Change
	// needed says of each that it can alter a decision of some run.
	needed []bool
}

// ownFlags are the flags of settings that each row of a simulation has its own of.
var ownFlags = map[string]string{
	"policy": "--policy", "threshold": "--routing-threshold", "isl": "--routing-threshold", "eff_isl": "--routing-threshold", "threshold_on": "--routing-threshold-on",
}

// settings are what --set says.
func (c *compareFlags) settings() (*changes, error) {
	set := &changes{flag: "--set", needed: make([]bool, len(c.set))}
	for _, text := range c.set {
		one, err := replay.ParseChange(text)
		if err != nil {
			return nil, fmt.Errorf("--set %w", err)
		}
		if flag := ownFlags[one.Key]; flag != "" {
			return nil, fmt.Errorf("--set %s: the rows of a simulation have this by %s", text, flag)
		}
		set.list = append(set.list, one)
	}
	return set, nil
}

// apply makes a run with those of the changes that can alter its decisions, and names them;
// empty for none.
func (c *changes) apply(s *simulate.Setup) string {
	idle := replay.Idle(s.Options, c.list, s.Ranks())
	var list []replay.Change
	var names []string
	for i, one := range c.list {
		if !idle[i] {
			c.needed[i] = true
			list, names = append(list, one), append(names, one.String())
		}
	}
	s.Set(list)
	return strings.Join(names, " ")
}

// idle is an error that names a change which alters no decision of any run.
func (c *changes) idle() error {
	for i, one := range c.list {
		if !c.needed[i] {
			return fmt.Errorf("%s %s has no effect: no policy of this simulation, on these engines and with this threshold, looks at it", c.flag, one)
		}
	}
	return nil
}

// row is one simulated run to be made.
type row struct {
	setup  simulate.Setup
	blocks int // a rank's cache, 0 for unlimited
	label  string
	result *simulate.Result
}

// rows are all combinations.
func (c *compareFlags) rows(list []replay.Change, from, to time.Duration, stat *arrivals.Stat) ([]row, error) {
	fleet, err := c.parseFleet()
	if err != nil {
		return nil, err
	}
	policies, thresholds, caches := c.policies, c.thresholds, c.kvBlocks
	if len(policies) == 0 {
		policies = []string{string(selector.KV)}
	}
	if len(thresholds) == 0 {
		thresholds = []string{"0"}
	}
	if len(caches) == 0 {
		caches = []string{""}
	}
	if c.on != "eff_isl" && c.on != "isl" {
		return nil, cli.WithCode(cli.ExitUsage, fmt.Errorf("--routing-threshold-on %s: not one of eff_isl, isl", c.on))
	}
	if !(c.assume >= 0 && c.assume <= 1e6) { // 0 is 1
		return nil, cli.WithCode(cli.ExitUsage, fmt.Errorf("--assume %v: want a factor of at most 1e6", c.assume))
	}
	if !(c.slowFactor == 0 || c.slowFactor >= 1.2 && c.slowFactor <= 1000) {
		return nil, cli.WithCode(cli.ExitUsage, fmt.Errorf("--slow-factor %v: want 0, or a factor from 1.2 to 1000", c.slowFactor))
	}
	slo := []struct {
		flag  string
		limit time.Duration
	}{{"--slo-ttft", c.ttft}, {"--slo-itl", c.itl}}
	for _, l := range slo {
		if l.limit < 0 {
			return nil, cli.WithCode(cli.ExitUsage, fmt.Errorf("%s %s: want a time of more than 0, or 0 for no limit", l.flag, l.limit))
		}
	}
	var faults []simulate.Fault
	for _, text := range c.faults {
		one, err := simulate.ParseFault(text)
		if err != nil {
			return nil, cli.WithCode(cli.ExitUsage, fmt.Errorf("--fault %w", err))
		}
		faults = append(faults, one)
	}
	set, err := c.settings()
	if err != nil {
		return nil, cli.WithCode(cli.ExitUsage, err)
	}
	whatIf := &changes{flag: "--what-if", list: list, needed: make([]bool, len(list))}
	var rows []row
	for _, cache := range caches {
		f, blocks, err := withCache(fleet, cache, stat)
		if err != nil {
			return nil, cli.WithCode(cli.ExitUsage, err)
		}
		for _, text := range thresholds {
			threshold, err := decide.ParseThreshold(text)
			if err != nil {
				return nil, cli.WithCode(cli.ExitUsage, fmt.Errorf("--routing-threshold %w", err))
			}
			for _, l := range slo {
				if threshold.Auto && l.limit == 0 {
					return nil, cli.WithCode(cli.ExitUsage, fmt.Errorf("%s 0: --routing-threshold %s chooses paths by the limits, and needs one of more than 0", l.flag, text))
				}
			}
			for _, p := range policies {
				policy, err := selector.ParsePolicy(p)
				if err != nil {
					return nil, cli.WithCode(cli.ExitUsage, err)
				}
				s := simulate.Setup{
					Fleet: f, Options: simulate.Decisions(policy, threshold),
					Speedup: c.speedup, ClosedLoop: c.closedLoop, Seed: c.seed, Scrape: c.scrape, From: from, To: to, TTFT: c.ttft, ITL: c.itl, Limits: c.limits,
					Faults: faults, CountFrom: c.countFrom, Assume: c.assume, SlowFactor: c.slowFactor,
				}
				s.Rule.On = decide.Measure(c.on)
				label := set.apply(&s)
				rows = append(rows, row{setup: s, blocks: blocks, label: label})
				if also := whatIf.apply(&s); also != "" {
					rows = append(rows, row{setup: s, blocks: blocks, label: strings.TrimSpace(label + " " + also)})
				}
			}
		}
	}
	if err := cmp.Or(set.idle(), whatIf.idle()); err != nil {
		return nil, cli.WithCode(cli.ExitUsage, err)
	}
	return rows, nil
}

// withCache sets the caches of a fleet's ranks.
func withCache(f sim.Fleet, text string, stat *arrivals.Stat) (sim.Fleet, int, error) {
	groups := append([]sim.Group(nil), f.Groups...)
	blocks := groups[0].Blocks
	switch text {
	case "":
		for _, g := range groups {
			blocks = max(blocks, g.Blocks)
		}
		return f, blocks, nil
	case "unlimited", "0":
		// Enough for twice an even share of everything ever computed, with the
		// longest prompt on top; the table shows evictions, should there be any.
		ranks, tokens := 0, uint64(stat.ISL.Mean*float64(stat.Requests)+stat.OSL.Mean*float64(stat.Requests))
		for _, g := range groups {
			ranks += g.Count * g.DP
		}
		blocks = int(2*tokens/uint64(ranks)/uint64(groups[0].BlockSize)) + int(stat.ISL.Max+stat.OSL.Max)/groups[0].BlockSize + 64*groups[0].MaxSeqs
		blocks = min(blocks, 1<<24)
	default:
		n, err := strconv.Atoi(text)
		if err != nil || n < 2 {
			return f, 0, fmt.Errorf("--kv-blocks %s: want a number of blocks or \"unlimited\"", text)
		}
		blocks = n
	}
	for i := range groups {
		groups[i].Blocks = blocks
	}
	if text == "unlimited" || text == "0" {
		return sim.Fleet{Groups: groups}, 0, nil
	}
	return sim.Fleet{Groups: groups}, blocks, nil
}

// requests reads the requests of a trace that are to be simulated, and what of the simulation
// the trace says.
func (f *replayFlags) requests(cmd *cobra.Command, files *traceFiles) (arrivals.Source, *arrivals.Stat, error) {
	if err := files.again(); err != nil {
		return nil, nil, err
	}
	src, err := arrivals.FromTrace(files.open)
	if err != nil {
		return nil, nil, traceError(err)
	}
	stat, err := arrivals.Describe(src)
	if err != nil {
		return nil, nil, traceError(err)
	}
	if err := f.likeRecorded(cmd.Context(), cmd.ErrOrStderr(), cmd.Flags().Changed, files); err != nil {
		return nil, nil, traceError(err)
	}
	if f.compare.jobs < 0 {
		return nil, nil, cli.WithCode(cli.ExitUsage, errors.New("--jobs must not be negative; 0 is one for each processor"))
	}
	if stat.Sessions == 0 && f.compare.closedLoop {
		return nil, nil, cli.WithCode(cli.ExitUsage, errors.New("--closed-loop: no request of the trace names a session, so none can wait for an answer: leave it out, or simulate a trace with sessions"))
	}
	return src, stat, nil
}

// simulate runs the rows and prints their table.
func (f *replayFlags) simulate(cmd *cobra.Command, files *traceFiles, changes []replay.Change) error {
	src, stat, err := f.requests(cmd, files)
	if err != nil {
		return err
	}
	rows, err := f.compare.rows(changes, f.from, f.to, stat)
	if err != nil {
		return err
	}
	for _, r := range rows {
		if t := r.setup.Rule.Threshold; t < 0 {
			printable.Fprintf(cmd.ErrOrStderr(), "caution: --routing-threshold %d is always remote, as 0 is; for never remote give one above every prompt\n", t)
		}
	}
	if stat.Sessions == 0 && slices.ContainsFunc(rows, func(r row) bool { return r.setup.Decode == selector.Session || r.setup.Prefill == selector.Session }) {
		printable.Fprintf(cmd.ErrOrStderr(), "caution: policy session: no request of the trace names a session, so all go where %s sends them\n", selector.LeastLoaded)
	}
	if f.compare.closedLoop {
		all, err := arrivals.Keep(src)
		if err != nil {
			return fmt.Errorf("--closed-loop: %w", err)
		}
		src = arrivals.FromSlice(all) // the simulations share the prompts
	}
	if err := f.bounds(rows, src); err != nil {
		return traceError(err)
	}
	g, ctx := errgroup.WithContext(cmd.Context())
	g.SetLimit(cmp.Or(f.compare.jobs, runtime.NumCPU()))
	var says sync.Mutex // one simulation at a time says that it has ended
	for i := range rows {
		g.Go(func() error {
			res, err := simulate.Run(ctx, src, rows[i].setup)
			if err != nil {
				return err
			}
			bound := rows[i].result.Bound
			res.Bound, res.KVBlocks, res.Label = bound, rows[i].blocks, rows[i].label
			if bound > 0 {
				res.OfBound = res.HitRatio / bound
			}
			rows[i].result = res
			if !f.trace.quiet {
				says.Lock()
				defer says.Unlock()
				printable.Fprintf(cmd.ErrOrStderr(), "%s threshold %s: %s requests, %s of trace in %.1f s\n", res.Policy, res.Rule(), table.Count(res.Requests),
					time.Duration(res.VirtualS*float64(time.Second)).Round(time.Second), res.WallS)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return traceError(err)
	}
	results := make([]*simulate.Result, len(rows))
	for i := range rows {
		results[i] = rows[i].result
	}
	if !f.trace.quiet {
		for _, note := range rows[0].setup.Fleet.Notes() { // all rows have the same profiles
			fmt.Fprintln(cmd.ErrOrStderr(), "note:", note)
		}
		for _, r := range results {
			if r.Gaps > 0 { // those of the others differ little
				fmt.Fprintf(cmd.ErrOrStderr(), "note: skipped %s of more than an hour without requests, the longest (%s) before request %d; figures per second include them (--from and --to cut the trace)\n",
					cli.Plural(r.Gaps, "gap"), longTime(r.LongestGapS), r.GapBefore)
				break
			}
		}
	}
	switch f.output {
	case "json", "yaml":
		err = cli.WriteData(cmd.OutOrStdout(), f.output, results)
	case "jsonl":
		err = cli.WriteLines(cmd.OutOrStdout(), results)
	default:
		err = simulate.WriteTable(cmd.OutOrStdout(), f.output, results)
	}
	if err != nil {
		return err
	}
	return files.whole()
}

// longTime writes a time of hours or more, in seconds.
func longTime(s float64) string {
	const hour, day, year = 3600, 24 * 3600, 365 * 24 * 3600
	switch {
	case s < 2*day:
		return fmt.Sprintf("%.1f hours", s/hour)
	case s < 2*year:
		return fmt.Sprintf("%.1f days", s/day)
	}
	return fmt.Sprintf("%.1f years", s/year)
}

// bounds finds what one shared cache of all ranks' blocks would give, once for
// each size.
func (f *replayFlags) bounds(rows []row, src arrivals.Source) error {
	type key struct{ size, blocks int }
	known := map[key]float64{}
	for i := range rows {
		all := 0
		for _, g := range rows[i].setup.Fleet.Groups {
			all += g.Count * g.DP * (g.Blocks - 1)
		}
		k := key{rows[i].setup.Fleet.Groups[0].BlockSize, all}
		if rows[i].blocks == 0 {
			k.blocks = 0
		}
		b, ok := known[k]
		if !ok {
			var err error
			if b, err = arrivals.Bound(src, k.size, k.blocks); err != nil {
				return err
			}
			known[k] = b
		}
		rows[i].result = &simulate.Result{Bound: b}
	}
	return nil
}
