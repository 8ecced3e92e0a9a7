// Package replaycmd is the command replay: traces played, verified, shown, simulated under
// other settings, converted, described and made.
package replaycmd

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/table"
)

// traceFlags say how trace files are read.
type traceFlags struct {
	format  string
	maxBad  int
	maxLine int
	quiet   bool
}

func (f *traceFlags) add(cmd *cobra.Command) {
	flags := cmd.PersistentFlags()
	var formats []string
	for _, format := range trace.Formats() {
		formats = append(formats, string(format))
	}
	flags.StringVar(&f.format, "format", "auto", "how the trace is written: "+strings.Join(formats, "|"))
	flags.IntVar(&f.maxBad, "max-bad", 0, "skip up to `N` bad lines; -1 skips any number")
	flags.IntVar(&f.maxLine, "max-line", trace.DefaultMaxLine, "greatest length of a line in `BYTES`")
	flags.BoolVar(&f.quiet, "quiet", false, "no progress and no word about skipped lines")
	_ = cmd.RegisterFlagCompletionFunc("format", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
}

// traceFiles are the files of one trace: one, or the parts of a recording in
// their order.
type traceFiles struct {
	paths   []string
	options trace.Options
	stdin   io.Reader
	size    int64        // of all files as stored, 0 when unknown
	cut     atomic.Int64 // the last line that could be read of a trace that is cut
}

// files checks the arguments of a command and finds the files' sizes.
func (f *traceFlags) files(cmd *cobra.Command, args []string) (*traceFiles, error) {
	format, err := trace.ParseFormat(f.format)
	if err != nil {
		return nil, cli.WithCode(cli.ExitUsage, err)
	}
	t := &traceFiles{paths: args, stdin: cmd.InOrStdin(), options: trace.Options{Format: format, MaxBad: f.maxBad, MaxLine: f.maxLine}}
	if len(args) == 0 {
		return nil, cli.WithCode(cli.ExitUsage, errors.New("give a trace file, or - for stdin"))
	}
	t.options.OnCut = func(line int64) { t.cut.Store(line) }
	if !f.quiet {
		var skipped atomic.Int64 // a recording that is shown is read by two at once
		t.options.OnBad = func(e *trace.LineError) {
			if skipped.Add(1) <= 10 {
				printable.Fprintf(cmd.ErrOrStderr(), "skipped: %s\n", e)
			}
		}
	}
	for _, p := range args {
		if p == "-" {
			if len(args) > 1 {
				return nil, cli.WithCode(cli.ExitUsage, errors.New("stdin cannot be one of several files"))
			}
			break
		}
		st, err := os.Stat(p)
		if err != nil {
			return nil, cli.WithCode(cli.ExitUsage, err)
		}
		t.size += st.Size()
	}
	return t, nil
}

// open opens the trace again; several files are read as one.
func (t *traceFiles) open() (*trace.Reader, error) {
	if len(t.paths) == 1 {
		r, err := trace.Open(t.paths[0], t.stdin, t.options)
		return r, cli.WithCode(cli.ExitInvalid, err)
	}
	r, err := trace.OpenAll(t.paths, t.options)
	return r, cli.WithCode(cli.ExitInvalid, err)
}

// whole is an error when what was read of the trace ended at a cut. What was found holds
// up to there; it is written before this is asked.
func (t *traceFiles) whole() error {
	if line := t.cut.Load(); line > 0 {
		return cli.WithCode(cli.ExitInvalid, fmt.Errorf("the trace is cut after line %d: what is above holds up to there, and what was recorded later is not in the file", line))
	}
	return nil
}

// again reports whether the trace can be opened more than once; stdin cannot.
func (t *traceFiles) again() error {
	if t.paths[0] == "-" {
		return cli.WithCode(cli.ExitUsage, errors.New("the trace is read several times: give a file, not stdin"))
	}
	return nil
}

// traceError gives an error about a trace's content its exit code.
func traceError(err error) error {
	var line *trace.LineError
	if errors.As(err, &line) || errors.Is(err, trace.ErrSchema) || errors.Is(err, trace.ErrEmpty) {
		return cli.WithCode(cli.ExitInvalid, err)
	}
	return err
}

// replayFlags are the flags of replay itself.
type replayFlags struct {
	trace     traceFlags
	speed     string
	from, to  time.Duration
	at        int64
	step      bool
	verify    bool
	minMatch  string
	blockSize int
	whatIf    []string
	tunes     bool
	seeds     int
	compare   compareFlags
	output    string
	tui       bool
	listen    string
}

// New makes the command.
func New() *cobra.Command {
	var f replayFlags
	cmd := &cobra.Command{
		Use:   "replay TRACE…",
		Short: "Play a trace again: check decisions, or ask what other settings had done",
		Long: `Play a trace again.

A trace of KV events is played through the router's own feed and index; --verify
makes the recorded decisions again and explains the first that differs. --what-if
on a recording makes its decisions under other settings.

A trace of requests (or a recording, whose decisions are requests) is run with
--policy, --routing-threshold or --kv-blocks through the router's stages and
simulated engines under a virtual clock: one row of the table for each policy.

Reads dynctl's own recordings, Dynamo's KV event recorder and request traces,
request traces of Mooncake and Bailian, and raw captures, plain or compressed
(.gz, .zst), or stdin (-).
The parts of one recording are given in their order. With --verify the recordings of several
routers that share their load are verified one by one; then it shows what the routers
did not see of each other's decisions, and what that cost.`,
		Example: `  dynctl replay trace.jsonl.zst --verify
  dynctl replay router-a.jsonl router-b.jsonl --verify
  dynctl replay trace.jsonl --speed 10x --from 1m --to 5m
  dynctl replay trace.jsonl --at 41208 --step
  dynctl replay trace.jsonl --what-if threshold=4096
  dynctl replay conversation.jsonl.gz --policy kv,kv_dynamo,least_loaded,round_robin --fleet 16a
  dynctl replay conversation.jsonl.gz --fleet 4p12d --routing-threshold 0,1024,2048,1000000
  dynctl replay run.jsonl.zst --tune`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return f.run(cmd, args) },
	}
	flags := cmd.Flags()
	f.trace.add(cmd)
	flags.StringVar(&f.speed, "speed", "max", "how fast events are played: max, or 1x, 10x, 0.5x")
	flags.DurationVar(&f.from, "from", 0, "begin at this time of the trace; events before are played at full speed")
	flags.DurationVar(&f.to, "to", 0, "end at this time of the trace")
	flags.Int64Var(&f.at, "at", 0, "play up to this `LINE` and show the state there")
	flags.BoolVar(&f.step, "step", false, "continue record by record from there: enter is the next, a number that many, q the end")
	flags.BoolVar(&f.verify, "verify", false, "make the recorded decisions again and compare")
	flags.StringVar(&f.minMatch, "min-match", "", "with --verify: exit with 5 when a smaller share of decisions, as in 99%, is proven to come out the same; without it, when one comes out differently or cannot be made again")
	flags.IntVar(&f.blockSize, "block-size", 0, "`TOKENS` per router block; 0 takes what the trace says")
	flags.StringArrayVar(&f.whatIf, "what-if", nil, "change a setting, `KEY=VALUE` (repeatable): "+strings.Join(replay.ChangeKeys(), ", "))
	flags.BoolVar(&f.tui, "tui", false, "watch the recording with top, in time unless --speed says otherwise")
	flags.StringVar(&f.listen, "admin-listen", "", "serve the recording as a router's admin API on this loopback `HOST:PORT`; pause, step and back by POST /admin/v1/replay")
	flags.BoolVar(&f.tunes, "tune", false, "simulate the requests with several values of "+tuned+" and print the one to set")
	flags.IntVar(&f.seeds, "seeds", 4, "with --tune: how often each value is simulated, with arrivals that differ a little")
	f.compare.add(cmd)
	cli.OutputFlag(cmd, &f.output, cli.ListFormats()...)
	cmd.AddCommand(newConvert(&f.trace), newStat(&f.trace), newGenerate())
	return cmd
}

// A way is one of the things that replay does with a trace, in words.
type way string

const (
	toPlay     way = "a trace that is only played"
	toVerify   way = "--verify"
	toRedecide way = "--what-if"
	toSimulate way = "a simulation (--policy, --routing-threshold, --fleet and the like)"
	toTune     way = "--tune"
	toShow     way = "a recording that is shown (--tui, --admin-listen)"
)

// way is what the flags ask for.
func (f *replayFlags) way(cmd *cobra.Command) way {
	switch {
	case f.tui || f.listen != "":
		return toShow
	case f.tunes:
		return toTune
	case f.compare.asked(cmd):
		return toSimulate
	case len(f.whatIf) > 0:
		return toRedecide
	case f.verify:
		return toVerify
	}
	return toPlay
}

// readBy are the ways that look at a flag. Those of reading a trace and of the output are for
// all of them, and all others for simulations.
var readBy = map[string][]way{
	"help": nil, "output": nil, "format": nil, "max-bad": nil, "max-line": nil, "quiet": nil,
	"speed": {toPlay, toVerify, toShow}, "block-size": {toPlay, toVerify, toShow}, "at": {toPlay, toVerify}, "step": {toPlay, toVerify},
	"from": {toPlay, toVerify, toShow, toSimulate, toTune}, "to": {toPlay, toVerify, toSimulate, toTune},
	"verify": {toVerify}, "min-match": {toVerify},
	"what-if": {toRedecide, toSimulate}, "tune": {toTune}, "seeds": {toTune},
	"tui": {toShow}, "admin-listen": {toShow},
	"seed": {toRedecide, toSimulate, toTune}, "scrape-interval": {toRedecide, toSimulate, toTune}, "slow-factor": {toRedecide, toSimulate, toTune},
	"slo-ttft": {toRedecide, toSimulate, toTune}, "slo-itl": {toRedecide, toSimulate, toTune}, "queue-size": {toRedecide, toSimulate, toTune}, "queue-timeout": {toRedecide, toSimulate, toTune},
}

// idle is an error that names a given flag which the way does not look at.
func (w way) idle(cmd *cobra.Command) error {
	for _, name := range cli.Given(cmd) {
		by, listed := readBy[name]
		if !listed {
			by = []way{toSimulate, toTune}
		}
		if by == nil || slices.Contains(by, w) {
			continue
		}
		names := make([]string, len(by))
		for i, one := range by {
			names[i] = string(one)
		}
		return cli.WithCode(cli.ExitUsage, fmt.Errorf("--%s has no effect with %s; it is for %s", name, w, strings.Join(names, ", ")))
	}
	return nil
}

func (f *replayFlags) run(cmd *cobra.Command, args []string) error {
	files, err := f.trace.files(cmd, args)
	if err != nil {
		return err
	}
	way := f.way(cmd)
	if err := way.idle(cmd); err != nil {
		return err
	}
	var changes []replay.Change
	for _, text := range f.whatIf {
		c, err := replay.ParseChange(text)
		if err != nil {
			return cli.WithCode(cli.ExitUsage, fmt.Errorf("--what-if %w", err))
		}
		changes = append(changes, c)
	}
	minMatch := 0.0
	if f.minMatch != "" {
		if minMatch, err = share(f.minMatch); err != nil {
			return cli.WithCode(cli.ExitUsage, fmt.Errorf("--min-match %s: %w", f.minMatch, err))
		}
	}
	switch way {
	case toShow:
		return f.show(cmd, files)
	case toTune:
		return f.tune(cmd, files)
	case toSimulate:
		return f.simulate(cmd, files, changes)
	case toRedecide:
		for _, c := range changes {
			if c.Constant() {
				return cli.WithCode(cli.ExitUsage, fmt.Errorf("--what-if %s has no effect on recorded decisions: their cost models have constants of their own. Simulate the requests: --policy kv --set %s", c, c))
			}
		}
		return f.redecide(cmd, files, changes)
	case toVerify:
		routers, err := files.byRouter()
		if err != nil {
			return err
		}
		if routers != nil {
			return f.verifyRouters(cmd, routers, minMatch)
		}
	case toPlay:
	}
	return f.play(cmd, files, minMatch)
}

// share reads "99.9%" or "0.999".
func share(text string) (float64, error) {
	t, percent := strings.CutSuffix(strings.TrimSpace(text), "%")
	v, err := strconv.ParseFloat(t, 64)
	if percent {
		v /= 100
	}
	if err == nil && !(v >= 0 && v <= 1) {
		err = errors.New("want a share of 0 to 1, or a percentage")
	}
	return v, err
}

func parseSpeed(text string) (float64, error) {
	if text == "max" {
		return 0, nil
	}
	v, err := strconv.ParseFloat(strings.TrimSuffix(text, "x"), 64)
	if err != nil || !(v > 0 && v <= 1e9) {
		return 0, fmt.Errorf("--speed %s: want max, or a factor such as 1x or 10x", text)
	}
	return v, nil
}

// play plays the events of a trace.
func (f *replayFlags) play(cmd *cobra.Command, files *traceFiles, minMatch float64) error {
	speed, err := parseSpeed(f.speed)
	if err != nil {
		return cli.WithCode(cli.ExitUsage, err)
	}
	r, err := files.open()
	if err != nil {
		return err
	}
	defer r.Close()
	o := replay.Options{
		Player: replay.PlayerOptions{BlockSize: f.blockSize}, Speed: speed, From: f.from, To: f.to, At: f.at, Verify: f.verify,
	}
	bar := newBar(cmd.ErrOrStderr(), files.size, f.trace.quiet || f.step)
	o.Progress = bar.show
	if f.step {
		if files.paths[0] == "-" {
			return cli.WithCode(cli.ExitUsage, errors.New("--step reads its keys from stdin, so the trace must be a file"))
		}
		if f.verify {
			return cli.WithCode(cli.ExitUsage, errors.New("--step and --verify exclude each other"))
		}
		o.At = 0
		o.Each = stepper(cmd.OutOrStdout(), cmd.InOrStdin(), f.at)
	} else if f.at > 0 {
		o.Each = func(rec *trace.Record, p *replay.Player) error {
			if rec.Line >= f.at {
				return replay.Show(cmd.ErrOrStderr(), rec, p)
			}
			return nil
		}
	}
	rep, err := replay.Play(cmd.Context(), r, o)
	bar.end()
	if err != nil {
		return traceError(err)
	}
	if err := writeReport(cmd.OutOrStdout(), f.output, replay.Head, rep); err != nil {
		return err
	}
	if f.at > rep.Lines {
		return cli.WithCode(cli.ExitUsage, fmt.Errorf("--at %d: the trace ends with line %d", f.at, rep.Lines))
	}
	if v := rep.Verify; v != nil && v.Match() < minMatch {
		return cli.WithCode(cli.ExitMissed, fmt.Errorf("%.2f%% of %d decisions are proven to come out the same (%d more are taken on trust), fewer than --min-match %s", 100*v.Match(), v.Decisions, v.Unproven, f.minMatch))
	}
	if v := rep.Verify; v != nil && f.minMatch == "" && v.Divergent()+v.Unverifiable > 0 {
		return cli.WithCode(cli.ExitMissed, fmt.Errorf("of %d decisions, %d come out differently and %d cannot be made again, see above; --min-match sets how many must be proven", v.Decisions, v.Divergent(), v.Unverifiable))
	}
	return files.whole()
}

// redecide makes recorded decisions under other settings.
func (f *replayFlags) redecide(cmd *cobra.Command, files *traceFiles, changes []replay.Change) error {
	r, err := files.open()
	if err != nil {
		return err
	}
	defer r.Close()
	d, err := replay.Redecide(cmd.Context(), r, changes)
	if err != nil {
		return traceError(err)
	}
	if d.Decisions == 0 {
		return cli.WithCode(cli.ExitUsage, errors.New("the trace has no decisions; to simulate its requests, add --policy or --routing-threshold"))
	}
	simulated, reason, err := f.simulated(cmd.Context(), files, changes)
	if err != nil {
		return traceError(err)
	}
	d.Simulated = simulated
	if reason != "" && !f.trace.quiet {
		printable.Fprintf(cmd.ErrOrStderr(), "note: whether this would be better is not known, since it cannot be simulated: %s\n", reason)
	}
	if err := writeReport(cmd.OutOrStdout(), f.output, replay.RedecisionHead, d); err != nil {
		return err
	}
	return files.whole()
}

// writeReport writes what was found as data, as rows, or in words.
func writeReport(out io.Writer, format string, head []string, found interface {
	Rows() [][]string
	Text(out io.Writer) error
}) error {
	switch format {
	case "json", "jsonl", "yaml":
		return cli.WriteData(out, format, found)
	case "csv", "markdown":
		return table.Write(out, format, head, found.Rows())
	}
	return found.Text(out)
}

// stepper shows records one by one from a line on.
func stepper(out io.Writer, in io.Reader, at int64) func(*trace.Record, *replay.Player) error {
	keys := bufio.NewScanner(in)
	skip := 0
	return func(rec *trace.Record, p *replay.Player) error {
		if rec.Line < at {
			return nil
		}
		if skip > 1 {
			skip--
			return nil
		}
		if err := replay.Show(out, rec, p); err != nil {
			return err
		}
		fmt.Fprint(out, "[enter, N, q] ")
		if !keys.Scan() {
			return replay.ErrStop
		}
		switch key := strings.TrimSpace(keys.Text()); key {
		case "q", "quit":
			return replay.ErrStop
		case "":
			skip = 0
		default:
			n, err := strconv.Atoi(key)
			if err != nil || n < 1 {
				fmt.Fprintln(out, "enter is the next record, a number that many, q the end")
				n = 1
			}
			skip = n
		}
		return nil
	}
}

// bar is a progress line on a terminal.
type bar struct {
	out   io.Writer
	size  int64
	last  time.Time
	shown bool
}

func newBar(out io.Writer, size int64, quiet bool) *bar {
	if quiet || !cli.IsTerminal(out) {
		return &bar{}
	}
	return &bar{out: out, size: size}
}

func (b *bar) show(p replay.Progress) {
	if b.out == nil || time.Since(b.last) < 100*time.Millisecond {
		return
	}
	b.last, b.shown = time.Now(), true
	line := fmt.Sprintf("%s records  %s blocks", table.Count(p.Records), table.Count(p.Blocks))
	if s := p.Wall.Seconds(); s > 0 {
		line += fmt.Sprintf("  %s records/s  %s blocks/s  x%.0f real time", table.Count(uint64(float64(p.Records)/s)), table.Count(uint64(float64(p.Blocks)/s)), p.Trace.Seconds()/s)
	}
	if b.size > 0 {
		done := min(float64(p.Consumed)/float64(b.size), 1)
		const width = 24
		n := int(done * width)
		eta := "-"
		if done > 0.01 {
			eta = time.Duration(float64(p.Wall) * (1 - done) / done).Round(time.Second).String()
		}
		line = fmt.Sprintf("[%s%s] %5.1f%%  %s  eta %s", strings.Repeat("#", n), strings.Repeat("-", width-n), 100*done, line, eta)
	}
	fmt.Fprintf(b.out, "\r\x1b[K%s", line)
}

func (b *bar) end() {
	if b.shown {
		fmt.Fprint(b.out, "\r\x1b[K")
	}
}

func newConvert(tf *traceFlags) *cobra.Command {
	var to, path string
	cmd := &cobra.Command{
		Use:   "convert TRACE… -w FILE",
		Short: "Write a trace in another format",
		Long: `Write a trace in another format: dynctl, or the requests alone as mooncake. The
file appears under its name when it is whole, or not at all.`,
		Example: `  dynctl replay convert dynamo.jsonl.gz --to dynctl -w kv.jsonl.zst
  dynctl replay convert recording.jsonl.zst --to mooncake -w requests.jsonl`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			files, err := tf.files(cmd, args)
			if err != nil {
				return err
			}
			target, err := trace.ParseFormat(to)
			if err != nil {
				return cli.WithCode(cli.ExitUsage, err)
			}
			if target == trace.Mooncake {
				if err := files.again(); err != nil {
					return err
				}
			}
			w, err := trace.Create(path, cmd.OutOrStdout())
			if err != nil {
				return cli.WithCode(cli.ExitUsage, err)
			}
			defer w.Discard()
			records, err := replay.Convert(files.open, w, replay.ConvertOptions{To: target, Version: cli.BuildVersion().Version})
			if err != nil {
				return traceError(err)
			}
			if err := w.Commit(); err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "%s records written\n", table.Count(records))
			return files.whole()
		},
	}
	cmd.Flags().StringVar(&to, "to", "dynctl", "format to write: dynctl|mooncake")
	cmd.Flags().StringVarP(&path, "write", "w", "-", "`FILE` to write; .gz and .zst compress, - is stdout")
	return cmd
}

func newStat(tf *traceFlags) *cobra.Command {
	var output string
	var caches bool
	cmd := &cobra.Command{
		Use:   "stat TRACE…",
		Short: "Show lengths, shared prefixes and load of a trace's requests",
		Example: `  dynctl replay stat conversation.jsonl.gz
  dynctl replay stat conversation.jsonl.gz --caches -o json`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			files, err := tf.files(cmd, args)
			if err != nil {
				return err
			}
			if err := files.again(); err != nil {
				return err
			}
			src, err := arrivals.FromTrace(files.open)
			if err != nil {
				return traceError(err)
			}
			s, err := arrivals.Describe(src)
			if err != nil {
				return traceError(err)
			}
			if caches {
				if err := s.AddCaches(src); err != nil {
					return traceError(err)
				}
			}
			switch output {
			case "json", "jsonl", "yaml":
				err = cli.WriteData(cmd.OutOrStdout(), output, s)
			default:
				err = table.Write(cmd.OutOrStdout(), output, []string{"FIGURE", "VALUE"}, s.Rows())
			}
			if err != nil {
				return err
			}
			return files.whole()
		},
	}
	cli.OutputFlag(cmd, &output, cli.ListFormats()...)
	cmd.Flags().BoolVar(&caches, "caches", false, "also show what shared caches of several sizes would hit")
	return cmd
}
