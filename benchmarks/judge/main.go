// Command judge sets the policies against each other over workloads, fleets and loads, and
// judges policy kv by a rule that was fixed before its weights were chosen. docs/lab/judge.md
// describes the rule and how to read the result; scripts/judge-policies.sh runs it.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/replay/simulate"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
)

//go:embed padded.yaml
var padded []byte

// options are what the command line says.
type options struct {
	tuning, judging []string
	part            string
	fleets          []string
	policies, more  []string
	set             []string
	loads           []float64
	sensitivity     bool
	drift           bool
	seeds, requests int
	jobs            int
	conversation    string
	download        bool
	dir             string
	output          string
}

// The judgement's own numbers: another number of requests or seeds gives none.
const (
	judgedRequests = 1500
	judgedSeeds    = 4
)

// judgedPolicies are the columns that the rule compares.
const judgedPolicies = "kv,kv_blocks,kv_dynamo,session,least_loaded,kv:0,kv:2048,kv:never"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	code, err := start(ctx, os.Args[1:], os.Stdout, os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "judge:", err)
	}
	os.Exit(code)
}

// start runs the command line and returns its exit code.
func start(ctx context.Context, args []string, stdout, stderr io.Writer) (int, error) {
	o, err := parse(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return cli.ExitOK, nil
	case err != nil:
		return cli.ExitUsage, err
	}
	if o.drift {
		err := drift(ctx, o, stdout, stderr)
		if err != nil {
			return cli.ExitRuntime, err
		}
		return cli.ExitOK, nil
	}
	j, err := run(ctx, o, stderr)
	if err != nil {
		return cli.ExitRuntime, err
	}
	if o.output == "json" {
		err = cli.WriteData(stdout, "json", j)
	} else {
		err = j.write(stdout)
	}
	switch {
	case err != nil:
		return cli.ExitRuntime, err
	case o.sensitivity:
		return cli.ExitOK, nil
	case len(j.NotJudged) > 0:
		return cli.ExitInvalid, nil
	case !j.Judging.passed():
		return cli.ExitMissed, nil
	}
	return cli.ExitOK, nil
}

// parse reads the command line.
func parse(args []string, stderr io.Writer) (*options, error) {
	var o options
	f := flag.NewFlagSet("judge", flag.ContinueOnError)
	f.SetOutput(stderr)
	list := func(name string, to *[]string, fallback, help string) {
		*to = words(fallback)
		f.Func(name, help, func(text string) error {
			*to = words(text)
			return nil
		})
	}
	list("tuning", &o.tuning, "", "workloads that weights may be chosen on")
	list("judging", &o.judging, "", "workloads that are judged")
	f.StringVar(&o.part, "half", "all", "which half to run: all, tuning or judging")
	list("fleets", &o.fleets, strings.Join(fleets, ","), "fleets to run; fewer than all are not judged")
	list("more", &o.more, "", "further columns that are printed and not judged, POLICY or POLICY:THRESHOLD")
	o.loads = loads
	f.Func("loads", "loads to run, of 0.5,0.8,1 times what a fleet serves; fewer than all are not judged", o.parseLoads)
	f.BoolVar(&o.sensitivity, "sensitivity", false, "run the tuning half with half and with one and a half times each tuned constant, and print what that changes; fewer -fleets, -loads, -seeds take less time")
	f.BoolVar(&o.drift, "drift", false, "run nothing but the loads under which engines become slow or go, and compare auto with the fixed thresholds")
	f.Func("set", "setting or constant of policy kv, KEY=VALUE (repeatable): "+strings.Join(slices.Concat(replay.ChangeKeys(), replay.ConstantKeys()), ", "), func(text string) error {
		o.set = append(o.set, text)
		return nil
	})
	f.IntVar(&o.seeds, "seeds", judgedSeeds, "seeds of each cell, at least 2")
	f.IntVar(&o.requests, "requests", judgedRequests, "requests of each run")
	f.IntVar(&o.jobs, "jobs", runtime.NumCPU(), "runs at a time")
	f.StringVar(&o.conversation, "conversation", "", "the public conversation trace, plain or .gz; empty looks in the user's cache")
	f.BoolVar(&o.download, "download", false, "fetch the conversation trace into the user's cache")
	f.StringVar(&o.dir, "dir", "", "folder of results and capacities; empty is in the user's cache")
	f.StringVar(&o.output, "o", "markdown", "output: markdown or json")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	o.policies = words(judgedPolicies)
	return &o, o.check(f.Args())
}

// parseLoads reads some of loads.
func (o *options) parseLoads(text string) error {
	o.loads = nil
	for _, word := range words(text) {
		v, err := strconv.ParseFloat(word, 64)
		if err != nil || !slices.Contains(loads, v) {
			return fmt.Errorf("%s: not one of 0.5, 0.8, 1", word)
		}
		o.loads = append(o.loads, v)
	}
	return nil
}

// words are the parts of a list with commas.
func words(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' })
}

// check reports what is wrong with the options.
func (o *options) check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("%q: flags only", rest[0])
	case o.part != "all" && o.part != "tuning" && o.part != "judging":
		return fmt.Errorf("-half %s: not one of all, tuning, judging", o.part)
	case o.output != "markdown" && o.output != "json":
		return fmt.Errorf("-o %s: not one of markdown, json", o.output)
	case o.drift && o.seeds == 1: // its table has no interval
	case o.seeds < 2 || o.seeds > 1000:
		return fmt.Errorf("-seeds %d: want 2 to 1000, as an interval needs two", o.seeds)
	case o.requests < 1:
		return fmt.Errorf("-requests %d: want 1 or more", o.requests)
	case o.jobs < 1:
		return fmt.Errorf("-jobs %d: want 1 or more", o.jobs)
	case o.sensitivity && (o.drift || o.part == "judging" || len(o.set)+len(o.more) > 0):
		return errors.New("-sensitivity: not with -drift, -half judging, -set or -more: it runs the tuning half, as shipped and with each constant changed")
	case o.drift:
	case len(o.loads) == 0:
		return errors.New("-loads: name one or more of 0.5, 0.8, 1")
	case len(o.tuning)+len(o.judging) == 0:
		return errors.New("name the halves with -tuning and -judging, as scripts/judge-policies.sh does")
	}
	seen := map[string]bool{}
	for _, name := range slices.Concat(o.tuning, o.judging) {
		if seen[name] || find(name) == nil {
			return fmt.Errorf("workload %s: named twice, or not one of those that there are", name)
		}
		seen[name] = true
	}
	for _, name := range o.fleets {
		if !slices.Contains(fleets, name) {
			return fmt.Errorf("-fleets %s: not one of %s", name, strings.Join(fleets, ", "))
		}
	}
	return nil
}

// find returns a workload by its name, nil for an unknown one.
func find(name string) *workload {
	i := slices.IndexFunc(workloads, func(w workload) bool { return w.name == name })
	if i < 0 {
		return nil
	}
	return &workloads[i]
}

// run runs what the options say.
func run(ctx context.Context, o *options, log io.Writer) (_ *judgement, err error) {
	b := &bench{requests: o.requests, seeds: o.seeds, jobs: o.jobs, loads: o.loads, log: log, traces: map[string][]arrivals.Request{}}
	j := &judgement{}
	var changes []replay.Change
	for _, text := range o.set {
		c, err := replay.ParseChange(text)
		if err != nil {
			return nil, fmt.Errorf("-set: %w", err)
		}
		changes = append(changes, c)
	}
	for i, idle := range replay.Idle(simulate.Decisions(subject, decide.Threshold{Auto: true}), changes, replay.Ranks{Split: true, Alone: true, Limits: true}) {
		if idle {
			return nil, fmt.Errorf("-set %s has no effect on policy %s", changes[i], subject)
		}
	}
	j.Set = setting(changes)
	for _, text := range o.policies {
		c, err := parseColumn(text)
		if err != nil { // this build lacks a policy of the rule
			j.NotJudged = append(j.NotJudged, err.Error())
			continue
		}
		if c.policy == subject {
			c.changes = changes
		}
		b.columns = append(b.columns, c)
	}
	b.judged = len(b.columns)
	for _, text := range o.more {
		c, err := parseColumn(text)
		if err != nil {
			return nil, fmt.Errorf("-more: %w", err)
		}
		if c.policy == subject {
			c.changes = changes
		}
		b.columns = append(b.columns, c)
		j.Printed = append(j.Printed, c.name)
	}
	j.Judged = b.names()
	var changed []variant
	if o.sensitivity {
		o.part = "tuning"
		if changed, err = variants(); err != nil {
			return nil, err
		}
		for i := range changed {
			b.columns = append(b.columns, changed[i].column)
		}
	}
	list, err := j.choose(ctx, o, b)
	if err != nil {
		return nil, err
	}
	if b.store, err = o.open(); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.store.close()) }()
	b.profile = filepath.Join(o.dir, "padded.yaml")
	if err := os.WriteFile(b.profile, padded, 0o644); err != nil {
		return nil, err
	}
	if j.Cells, err = b.cells(ctx, list, o.fleets); err != nil {
		return nil, err
	}
	part := func(names []string) *verdict {
		var cells []*cell
		for _, c := range j.Cells {
			if slices.Contains(names, c.Workload) {
				cells = append(cells, c)
			}
		}
		if len(cells) == 0 {
			return nil
		}
		return judge(cells, j.Judged)
	}
	j.Tuning, j.Judging = part(o.tuning), part(o.judging)
	if o.sensitivity {
		j.Sensitivity = effects(j.Cells, j.Judged, changed)
	}
	return j, nil
}

// open opens the folder of results, and names it where the command line does not.
func (o *options) open() (*store, error) {
	if o.dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return nil, fmt.Errorf("-dir: %w", err)
		}
		o.dir = filepath.Join(cache, "dynctl-judge")
	}
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return openStore(o.dir, program)
}

// choose returns the workloads to run, and notes what keeps them from being judged.
func (j *judgement) choose(ctx context.Context, o *options, b *bench) ([]*workload, error) {
	without := func(why string) { j.NotJudged = append(j.NotJudged, why) }
	var list []*workload
	if o.part != "judging" {
		for _, name := range o.tuning {
			list = append(list, find(name))
		}
	}
	if o.part != "tuning" {
		for _, name := range o.judging {
			list = append(list, find(name))
		}
	} else {
		without("only the tuning half was run")
	}
	if i := slices.IndexFunc(list, func(w *workload) bool { return w.name == conversation }); i >= 0 {
		if o.download {
			if err := download(ctx, traceURL); err != nil {
				return nil, err
			}
		}
		recorded, err := readConversation(o.conversation)
		switch {
		case errors.Is(err, errNoTrace):
			without(err.Error() + "; this workload is left out")
			list = slices.Delete(list, i, i+1)
		case err != nil:
			return nil, err
		}
		b.recorded = recorded
	}
	if o.requests != judgedRequests || o.seeds != judgedSeeds {
		without(fmt.Sprintf("%d requests and %d seeds, not %d and %d", o.requests, o.seeds, judgedRequests, judgedSeeds))
	}
	for _, f := range fleets {
		if !slices.Contains(o.fleets, f) {
			without("fleet " + f + " was not run")
		}
	}
	for _, load := range loads {
		if !slices.Contains(o.loads, load) {
			without(fmt.Sprintf("load %g was not run", load))
		}
	}
	for i := range workloads {
		if name := workloads[i].name; !slices.Contains(o.tuning, name) && !slices.Contains(o.judging, name) {
			without("workload " + name + " is in no half")
		}
	}
	if len(list) == 0 {
		return nil, errors.New("no workload is left to run")
	}
	return list, nil
}
