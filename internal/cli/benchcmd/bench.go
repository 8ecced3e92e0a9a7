// Package benchcmd is the command bench: paths of a fleet compared, or the fleet measured by
// load; how a run is watched and steered, resumed, compared with another one and applied.
package benchcmd

import (
	"cmp"
	"context"
	cryptorand "crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/bench/live"
	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/bench/report"
	"github.com/dynctl/dynctl/internal/bench/workload"
	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
)

// simulated is the fleet that is measured when no target is named. It has room for the
// longest prompts at the highest load that are measured by default.
const simulated = "1p1d:kv_blocks=8192"

// benchFlags are the flags of dynctl bench.
type benchFlags struct {
	target cli.TargetFlags

	threshold                         bool
	isl, osl, concurrency, rate       string
	repeat, maxRepeat, requests, cap  int
	cached, slo, arrival, objective   string
	burstiness, level                 float64
	seed                              uint64
	noRefine, dryRun                  bool
	out, resume, progress, note       string
	thresholds, trace, arm            string
	traceScale                        float64
	traceLimit, prefixGroups, prefixN int
	turns                             int
	timeout                           time.Duration
}

// New makes the command.
func New() *cobra.Command {
	var f benchFlags
	var output string
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure where remote prefill starts to pay, or a fleet by load",
		Long: `Measure a pool of prefill and decode engines.

With --threshold (the default) every prompt length is measured with local and
with remote prefill, in pairs. For each load the answer is the number of uncached
input tokens from which remote prefill is better, with its interval. The gates say
whether that can be trusted; when one fails there is no recommendation and the
exit code is 3.

With --sweep, --trace, --thresholds, --turns or --prefix-groups the fleet is
measured by load, with the router's own choice of path.

The target is one of these; --sim also without a flag and DYNCTL_ROUTER:
  --router             a running router, by its admin URL; it needs
                       --allow-routing-headers
  --prefill, --decode  engines behind a router in this process
  --sim                simulated engines

Times: intended is when a request should have been sent, sent is when it was.
  TTFT      first piece with a token - sent; from intended in an open loop
            (--rate). Both are in the files. A role-only piece is no token.
  ITL       gaps between tokens, pooled; a piece of k tokens gives k gaps of
            dt/k. Exact with continuous usage, which the client requests.
  TPOT      (last - first) / (tokens - tokens of the first piece)
  E2E       last - sent
  goodput   requests that meet every --slo target, by second; an answer too
            short for a TPOT is not judged by it
  tokens/s  tokens of all requests / (last token - first send); ramp requests,
            sent before the measured ones, count here and nowhere else
  dispatch  sent - intended: what the client itself added

In a closed loop (--concurrency) a slower answer also delays the next request,
so a longer --osl lowers the rate and with it the TTFT. Use --rate to hold the
rate. docs/bench.md has the method.

ctrl-c ends the run after the current cell and keeps what is done; --resume
continues it. A second ctrl-c ends it immediately. On a terminal there are also keys:
  p  pause before the next cell, and continue
  s  skip the current cell: it is void, and its pair is left out
  q  as ctrl-c`,
		Example: `  dynctl bench
  dynctl bench --threshold --isl 256:16384:x2 --osl 128 --concurrency 1,16,64 --slo ttft=800ms,itl=40ms --router http://127.0.0.1:8001
  dynctl bench --threshold --prefill http://127.0.0.1:18100 --decode http://127.0.0.1:18101 --cached 0,0.5
  dynctl bench --sweep --rate 1,2,4,8 --isl 'N(1024,256)' --osl 64 --arrival poisson
  dynctl bench --trace conversation.jsonl.gz --trace-scale 0.5 --router http://127.0.0.1:8001
  dynctl bench --thresholds 256,1024,4096 --isl 'L(800,1.2)' --rate 4 --router http://127.0.0.1:8001`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd, output)
		},
	}
	fl := cmd.Flags()
	t := &f.target
	t.Add(fl)
	fl.StringVar(&t.Router, "router", "", "admin `URL` of a running router (environment DYNCTL_ROUTER)")
	fl.StringArrayVar(&t.Prefill, "prefill", nil, "engine that prefills, `URL[,key=value,...]` (repeatable)")
	fl.StringVar(&t.Sim, "sim", "", "simulated `FLEET` such as 1p1d or 2p2d:speed=4 (default "+simulated+" when no target is named)")
	fl.StringVar(&t.Profile, "profile", "", "timing of simulated engines whose part of --sim names none: a model of a real GPU, see dynctl sim --help")
	fl.StringVar(&t.Model, "model", "", "model; not needed when there is only one")

	fl.BoolVar(&f.threshold, "threshold", false, "find where remote prefill starts to pay (the default)")
	fl.StringVar(&f.isl, "isl", "256:8192:x2", "prompt lengths `TOKENS`: LOW:HIGH:xFACTOR, LOW:HIGH:+STEP or a list; in a sweep a length or a distribution such as N(1024,256), U(128,2048), L(1024,0.8)")
	fl.StringVar(&f.osl, "osl", "32", "answer length in `TOKENS`; in a sweep also a distribution")
	fl.StringVar(&f.concurrency, "concurrency", "", "requests in flight, a `LIST` (default 1,8 without --rate)")
	fl.StringVar(&f.rate, "rate", "", "planned requests per second, a `LIST`: an open loop")
	fl.StringVar(&f.arrival, "arrival", "poisson", "gaps of an open loop: constant|poisson|gamma")
	fl.Float64Var(&f.burstiness, "burstiness", 1, "shape of gamma gaps: 1 is poisson, smaller is burstier")
	fl.IntVar(&f.cap, "max-in-flight", 0, "bound on what an open loop has in flight; waiting for it counts as delay (0: none)")
	fl.IntVar(&f.repeat, "repeat", 5, "repeats of each cell")
	fl.IntVar(&f.maxRepeat, "max-repeat", 0, "most repeats near the crossing (default 6 times --repeat)")
	fl.IntVar(&f.requests, "requests", 0, "requests measured in a cell (default 8, or twice the concurrency, or 10 s of the rate)")
	fl.StringVar(&f.cached, "cached", "0", "shares of the prompt that the ranks already hold, a `LIST`")
	fl.StringVar(&f.slo, "slo", "", "targets of a good request, `ttft=800ms,itl=40ms,tpot=...,e2e=...`")
	fl.StringVar(&f.objective, "objective", "ttft", "what the recommendation is for: ttft|itl|goodput")
	fl.Float64Var(&f.level, "level", 0.95, "level of the intervals")
	fl.Uint64Var(&f.seed, "seed", 1, "seed of order, schedules and statistics; prompts differ in every run all the same")
	fl.BoolVar(&f.noRefine, "no-refine", false, "leave out the cells around the crossing")
	fl.DurationVar(&f.timeout, "timeout", 10*time.Minute, "longest time of one request")

	fl.BoolVar(new(bool), "sweep", false, "measure by load instead of comparing paths")
	fl.StringVar(&f.thresholds, "thresholds", "", "sweep the router's threshold over a `LIST` of tokens; the old one is set again at the end")
	fl.StringVar(&f.trace, "trace", "", "send the requests of a trace `FILE` (own, Mooncake, Bailian or Dynamo format) at its times")
	fl.Float64Var(&f.traceScale, "trace-scale", 1, "factor on the trace's gaps: 0.5 is twice as fast")
	fl.IntVar(&f.traceLimit, "trace-limit", 0, "most requests of the trace")
	fl.IntVar(&f.prefixGroups, "prefix-groups", 0, "sweep: number of groups of prompts that share a prefix")
	fl.IntVar(&f.prefixN, "prefix-tokens", 512, "sweep: length of that prefix in tokens")
	fl.IntVar(&f.turns, "turns", 1, "sweep: turns of a conversation; each prompt is the conversation so far")
	fl.StringVar(&f.arm, "path", "auto", "sweep: force the path, auto|local|remote")

	fl.StringVar(&f.out, "out", "", "`FOLDER` of the run (default run-DATE-TIME)")
	fl.StringVar(&f.resume, "resume", "", "continue the run in `FOLDER`, with its plan and its target")
	fl.BoolVar(&f.dryRun, "dry-run", false, "check the target, show the plan with its cost, and stop")
	fl.StringVar(&f.progress, "progress", "auto", "auto|lines|jsonl|none")
	fl.StringVar(&f.note, "hardware", "", "`TEXT` that names the hardware in the report")
	cli.OutputFlag(cmd, &output, "table", "wide", "json")
	for flag, values := range map[string][]string{
		"arrival": {"constant", "poisson", "gamma"}, "objective": {"ttft", "itl", "goodput"}, "path": {"auto", "local", "remote"}, "progress": {"auto", "lines", "jsonl", "none"},
	} {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	cmd.AddCommand(newCompare(), newApply(), newReport())
	return cmd
}

// sweeps reports whether the flags ask for a sweep by load.
func (f *benchFlags) sweeps(cmd *cobra.Command) bool {
	s, _ := cmd.Flags().GetBool("sweep")
	return s || f.trace != "" || f.thresholds != "" || f.turns > 1 || f.prefixGroups > 0
}

func (f *benchFlags) run(cmd *cobra.Command, output string) error {
	switch f.progress {
	case "auto", "lines", "jsonl", "none":
	default:
		return cli.WithCode(cli.ExitUsage, fmt.Errorf("--progress %s: not one of auto, lines, jsonl, none", f.progress))
	}
	if _, err := loadgen.ParseArrival(f.arrival); err != nil {
		return cli.WithCode(cli.ExitUsage, fmt.Errorf("--arrival: %w", err))
	}
	if f.sweeps(cmd) {
		if f.resume != "" {
			return cli.WithCode(cli.ExitUsage, errors.New("--resume continues a run that compares paths; a sweep is not resumed: start it again, without --resume"))
		}
		if f.threshold {
			return cli.WithCode(cli.ExitUsage, errors.New("--threshold compares paths and does not go with --sweep, --trace, --thresholds, --turns or --prefix-groups"))
		}
		return f.sweep(cmd, output)
	}
	// These say how a sweep is made, and do not ask for one by themselves.
	for _, name := range [...]string{"path", "prefix-tokens", "trace-limit", "trace-scale"} {
		if cmd.Flags().Changed(name) {
			return cli.WithCode(cli.ExitUsage, fmt.Errorf("--%s is for sweeps, and this run compares paths: add --sweep, --trace, --thresholds, --turns or --prefix-groups, or leave it out", name))
		}
	}
	return f.crossover(cmd, output)
}

func (f *benchFlags) loads() ([]plan.Load, error) {
	conc := f.concurrency
	if conc == "" && f.rate == "" {
		conc = "1,8"
	}
	var out []plan.Load
	for _, s := range splitList(conc) {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("--concurrency: %q is not a number of requests", s)
		}
		out = append(out, plan.Load{Concurrency: n})
	}
	for _, s := range splitList(f.rate) {
		v, err := strconv.ParseFloat(s, 64)
		if err != nil || !(v > 0) || v > 1e6 {
			return nil, fmt.Errorf("--rate: %q is not a number of requests per second", s)
		}
		out = append(out, plan.Load{Rate: v})
	}
	return out, nil
}

func splitList(s string) []string {
	var out []string
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}

// spec is the flags as a plan; it is not validated against the target yet.
func (f *benchFlags) spec() (*plan.Spec, error) {
	s, err := f.parse()
	if err != nil {
		return nil, err
	}
	s.Salt = newSalt()
	return s, s.Validate(plan.Limits{})
}

// parse reads the flags that a plan holds, each by itself.
func (f *benchFlags) parse() (*plan.Spec, error) {
	s := &plan.Spec{
		Schema: plan.Schema, Repeats: f.repeat, MaxRepeats: f.maxRepeat, Requests: f.requests, Arrival: f.arrival, Burstiness: f.burstiness,
		Cap: f.cap, Seed: f.seed, Level: f.level, Objective: f.objective, NoRefine: f.noRefine,
	}
	var errs []error
	var err error
	if s.ISL, err = plan.ParseISL(f.isl); err != nil {
		errs = append(errs, fmt.Errorf("--isl: %w", err))
	}
	if s.OSL, err = strconv.Atoi(strings.TrimSpace(f.osl)); err != nil {
		errs = append(errs, fmt.Errorf("--osl: %q is not a number of tokens", f.osl))
	}
	if s.Loads, err = f.loads(); err != nil {
		errs = append(errs, err)
	}
	for _, c := range splitList(f.cached) {
		v, err := strconv.ParseFloat(c, 64)
		if err != nil {
			errs = append(errs, fmt.Errorf("--cached: %q is not a share such as 0.5", c))
		}
		s.Cached = append(s.Cached, v)
	}
	if s.SLO, err = plan.ParseSLO(f.slo); err != nil {
		errs = append(errs, fmt.Errorf("--slo: %w", err))
	}
	s.MaxRepeats = cmp.Or(s.MaxRepeats, 6*s.Repeats)
	return s, errors.Join(errs...)
}

// newSalt makes the prompts of a run its own.
func newSalt() string {
	var b [8]byte
	_, _ = cryptorand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// hardware describes this machine for the report.
func (f *benchFlags) hardware() string {
	if f.note != "" {
		return f.note
	}
	// procfs reads this file on Linux only, and one line of it is all that is wanted.
	host, _ := os.ReadFile("/proc/cpuinfo")
	model := ""
	for line := range strings.SplitSeq(string(host), "\n") {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			model = ", " + strings.TrimSpace(v)
			break
		}
	}
	return fmt.Sprintf("client on %s/%s, %d CPU cores%s", runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), model)
}

// look gathers what the target is and refuses what cannot be.
func (f *benchFlags) look(ctx context.Context, t *cli.Target) (*fleet.Facts, workload.Pool, bool, error) {
	facts, err := t.Describe(ctx, f.target.Model)
	if err != nil {
		return nil, nil, false, cli.AdminError(err)
	}
	pool, own := t.Pool(ctx, facts.Model)
	return facts, pool, own, nil
}

// crossover runs dynctl bench --threshold.
func (f *benchFlags) crossover(cmd *cobra.Command, output string) (err error) {
	stderr := cmd.ErrOrStderr()
	var folder *report.Folder
	var spec *plan.Spec
	var run *plan.Run
	var done map[string]experiment.CellResult
	finished := false
	defer func() {
		if folder != nil && !finished {
			err = errors.Join(err, folder.Close())
		}
	}()
	if f.out != "" && f.resume == "" {
		if err := report.Absent(f.out, true); err != nil {
			return cli.WithCode(cli.ExitUsage, err)
		}
	}
	if f.resume != "" {
		if err := report.Finished(f.resume); err != nil {
			return cli.WithCode(cli.ExitUsage, err)
		}
		if folder, run, done, err = report.ResumeFolder(f.resume); err != nil {
			return cli.WithCode(cli.ExitUsage, err)
		}
		if err := f.checkResume(cmd, run); err != nil {
			return cli.WithCode(cli.ExitUsage, err)
		}
		spec = &run.Spec
		// The cell that was cut may have left its prompts in the caches.
		spec.Salt = newSalt()
	} else if spec, err = f.spec(); err != nil {
		return cli.WithCode(cli.ExitUsage, err)
	}
	ctx, control, end := newRunControl(cmd.Context(), stderr)
	defer end()
	t, err := f.target.Open(ctx, stderr, simulated)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	facts, pool, own, err := f.look(ctx, t)
	if err != nil {
		return err
	}
	if run != nil {
		if err := run.Target.Same(facts.Fingerprint()); err != nil {
			return cli.WithCode(cli.ExitUsage, fmt.Errorf("--resume %s: %w", f.resume, err))
		}
	}
	if facts.Prefill == 0 {
		return cli.WithCode(cli.ExitUsage, fmt.Errorf("%s has no usable prefill worker for model %s: there is nothing to compare", t.What, facts.Model))
	}
	limits := plan.Limits{MaxModelLen: facts.MaxModelLen, KVTokens: facts.KVTokens}
	if err := spec.Validate(limits); err != nil {
		return cli.WithCode(cli.ExitUsage, err)
	}
	p := newBenchProgress(stderr, f.progress)
	defer p.close()
	control.speak(p.say)
	p.say("check   %s | prefill %d (%d ranks) | decode %d (%d ranks) | %s block %d | %s", t.What, facts.Prefill, facts.PrefillRanks, facts.Decode+facts.Aggregated, facts.DecodeRanks, facts.Model, facts.Block, strings.Join(facts.Engines, ", "))
	if !own {
		p.say("check   the target does not tokenize for us: prompts are made of ids 300 to 999")
	}
	for _, w := range spec.Warnings(limits) {
		p.say("caution %s", w)
	}
	b := &live.Bench{Target: t.Target, Facts: facts, Spec: *spec, Pool: pool, Timeout: f.timeout, Progress: &p.cell}
	ceiling, err := clientCeiling(ctx)
	if err != nil {
		return err
	}
	checks, seconds, err := b.Preflight(ctx)
	for _, c := range checks {
		mark := "ok"
		if !c.OK {
			mark = "NOT OK"
		}
		p.say("check   %s (%s)", c.Text, mark)
	}
	switch {
	case errors.Is(err, live.ErrNotForced):
		return cli.WithCode(cli.ExitUsage, err)
	case err != nil:
		return err
	}
	var want []plan.Wanted
	for _, g := range spec.Groups() {
		want = append(want, spec.Grid(g, facts.Block)...)
	}
	grid, aa := spec.Pairs("grid", want), spec.AAPairs(0)
	eta := 0.0
	for _, pairs := range [][]plan.Pair{grid, aa} {
		for _, pair := range pairs {
			eta += seconds(pair[0]) + seconds(pair[1])
		}
	}
	p.say("check   client ceiling %.0f requests/s against a loopback stub, need %.0f", ceiling, need(spec, seconds))
	text := report.PlanText(spec, plan.CostOf(grid), plan.CostOf(aa), shortTime(time.Duration(eta*float64(time.Second))))
	if f.dryRun {
		if output == "json" {
			return cli.WriteData(cmd.OutOrStdout(), "json", map[string]any{"schema": plan.Schema, "plan": spec, "target": facts, "cost": plan.CostOf(append(grid, aa...)), "estimate_seconds": eta, "checks": checks})
		}
		printable.Fprintf(cmd.OutOrStdout(), "plan    %s\n", text)
		return nil
	}
	p.say("plan    %s", text)
	if f.resume != "" {
		p.say("resume  %s: %d cells are done and taken over; the estimate is of the whole run", f.resume, taken(done))
	}
	if folder == nil {
		name := cmp.Or(f.out, "run-"+time.Now().Format("20060102-150405"))
		run = &plan.Run{Spec: *spec, Target: f.target.Target}
		run.Target.Model, run.Target.Fingerprint = facts.Model, facts.Fingerprint()
		if folder, err = report.CreateFolder(name, run); err != nil {
			return err
		}
	}
	b.OnResult = folder.Request
	start := time.Now()
	r := &experiment.Runner{
		Spec: *spec, Block: facts.Block, Measure: b.Measure, Now: func() time.Duration { return time.Since(start) }, Done: done,
		OnCell: folder.Cell, OnEvent: p.event, Stop: control.stopped, Enter: control.enter,
	}
	if err := p.listen(cmd.InOrStdin(), control); err != nil {
		return err
	}
	res, runErr := r.Run(ctx)
	p.close()
	if s, err := t.Admin.Status(ctx); err == nil {
		for i := range s.Costs {
			if s.Costs[i].Model == facts.Model {
				res.Learned = s.Costs[i].Crossings
			}
		}
	} else {
		p.say("caution the router does not say what it has learned: %v", err)
	}
	res.Name, res.Version, res.Created, res.Target, res.Hardware, res.Simulated, res.Command = filepath.Base(folder.Path), cli.BuildVersion().Version, start, facts, f.hardware(), t.Simulated, append([]string{"dynctl"}, os.Args[1:]...)
	if runErr != nil && res.Partial == "" {
		res.Partial = runErr.Error()
	}
	finished = true
	if err := folder.Finish(res); err != nil {
		return errors.Join(runErr, err)
	}
	if err := f.show(cmd, output, res, folder.Path, facts.Running); err != nil {
		return err
	}
	switch {
	case control.stopped():
		return cli.WithCode(cli.ExitInterrupted, errors.New("ended early: partial results are in "+folder.Path))
	case runErr != nil:
		return lostFleet(fmt.Errorf("%w (what was measured before is in %s)", runErr, folder.Path))
	case !res.Valid:
		return cli.WithCode(cli.ExitInvalid, errors.New("the result is not valid: a gate failed, see above"))
	}
	return nil
}

func (f *benchFlags) show(cmd *cobra.Command, output string, res *experiment.Result, folder string, running int) error {
	if output == "json" {
		return cli.WriteData(cmd.OutOrStdout(), "json", res)
	}
	return report.Text(cmd.OutOrStdout(), res, report.TextOptions{Width: terminalWidth(cmd.OutOrStdout()), Wide: output == "wide", Folder: folder, Live: running})
}

// lostFleet gives the error of a run whose target went away its exit code.
func lostFleet(err error) error {
	if errors.Is(err, live.ErrLost) {
		return cli.WithCode(cli.ExitUnreachable, err)
	}
	return cli.AdminError(err)
}

// taken counts the cells of a run that are not measured again.
func taken(done map[string]experiment.CellResult) int {
	n := 0
	for _, c := range done {
		if c.Cell.Phase != "warmup" {
			n++
		}
	}
	return n
}

// need is about how many requests a second the busiest cells send.
func need(s *plan.Spec, seconds func(plan.Cell) float64) float64 {
	most := 0.0
	for _, l := range s.Loads {
		if l.Rate > 0 {
			most = max(most, l.Rate)
			continue
		}
		c := s.NewCell("check", l, 0, s.ISL[0], 0, plan.Local, 0)
		if sec := seconds(c) - 0.3; sec > 0 {
			most = max(most, float64(c.Requests+c.Ramp)/sec)
		}
	}
	return most
}

func shortTime(d time.Duration) string {
	switch {
	case d > 0 && d < time.Second:
		return "under 1s"
	case d < time.Minute:
		return fmt.Sprintf("%.0fs", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	}
	return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
}
