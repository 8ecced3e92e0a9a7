package benchcmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/bench/experiment"
	"github.com/dynctl/dynctl/internal/bench/live"
	"github.com/dynctl/dynctl/internal/bench/report"
	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/rig/clitest"
	"github.com/dynctl/dynctl/internal/rig/hostile"
)

// typed runs a command line without a terminal.
func typed(args ...string) (code int, stdout, stderr string) {
	return clitest.Run(cli.Root(New()), "", args...)
}

func TestBenchUsage(t *testing.T) {
	for _, c := range []struct{ args, say string }{
		{"bench --isl 256:100:x2", "--isl"},
		{"bench --concurrency 0", "--concurrency"},
		{"bench --rate fast", "--rate"},
		{"bench --slo ttft=800", "--slo"},
		{"bench --cached 1", "--cached"},
		{"bench --objective goodput", "--slo"},
		{"bench --arrival uniform", "--arrival"},
		{"bench --threshold --sweep", "--threshold"},
		{"bench --turns 2 --rate 1", "--turns"},
		{"bench --sweep --isl N(1,", "--isl"},
		{"bench --router http://127.0.0.1:1 --sim 1p1d", "only one of"},
		{"bench --sim 1x", "--sim"},
		{"bench --router http://127.0.0.1:1 --profile cpu", "--profile is for simulated engines"},
		{"bench --sim 1a --isl 64 --osl 1", "no usable prefill worker"},
		{"bench --sim 1p1d:max_model_len=512 --isl 256:4096:x2", "lower the end of --isl to 480"},
		{"bench --resume /no/such/run", "not the folder of a run"},
		{"bench --progress fancy", "--progress"},
		{"bench compare a b", "no result"},
		{"bench compare a b --fail-if nonsense", "--fail-if"},
		{"bench apply /no/such/run", "no result"},
		{"bench --trace /no/such/file --sim 1p1d", "--trace"},
	} {
		t.Run(c.args, func(t *testing.T) {
			code, stdout, stderr := typed(strings.Fields(c.args)...)
			if code != cli.ExitUsage || stdout != "" || !strings.Contains(stderr, c.say) {
				t.Errorf("code %d\nstdout %q\nstderr %q, want %q", code, stdout, stderr, c.say)
			}
		})
	}
	if code, _, stderr := typed("bench", "--router", "http://127.0.0.1:1"); code != cli.ExitUnreachable {
		t.Errorf("nobody there: code %d %s", code, stderr)
	}
}

// TestOutMustBeNew: a folder that exists is refused before the target is looked for, with the
// ways on.
func TestOutMustBeNew(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct{ args, say string }{
		{"bench", "name another folder, or continue the run in it: dynctl bench --resume " + dir},
		{"bench --sweep", "name another folder, or move that one away"},
	} {
		args := append(strings.Fields(c.args), "--router", "http://127.0.0.1:1", "--out", dir)
		if code, _, stderr := typed(args...); code != cli.ExitUsage || !strings.Contains(stderr, "--out "+dir+" exists already: "+c.say) {
			t.Errorf("%s: code %d, %q", c.args, code, stderr)
		}
	}
}

// TestEta: what is not known, and what is over, has no estimate.
func TestEta(t *testing.T) {
	for left, want := range map[time.Duration]string{0: "", -time.Second: "", 300 * time.Millisecond: "  eta under 1s", 90 * time.Second: "  eta 1m30s"} {
		if got := eta(left); got != want {
			t.Errorf("%v: %q, want %q", left, got, want)
		}
	}
}

// TestBenchOfNothingNamed: what is measured when nothing is said is possible, and there is
// nothing to warn of.
func TestBenchOfNothingNamed(t *testing.T) {
	if testing.Short() {
		t.Skip("starts engines")
	}
	code, stdout, stderr := typed("bench", "--dry-run")
	if code != cli.ExitOK || !strings.HasPrefix(stdout, "plan    6 isl") || strings.Contains(stdout+stderr, "caution") {
		t.Errorf("code %d\n%s\n%s", code, stdout, stderr)
	}
}

// TestPlanIsPrintable: a trace that came by mail has whatever name it has.
func TestPlanIsPrintable(t *testing.T) {
	if testing.Short() {
		t.Skip("starts engines")
	}
	file := filepath.Join(t.TempDir(), hostile.Name+"\x1b[2J\u202e\nFORGED line")
	if err := os.WriteFile(file, []byte(`{"timestamp":0,"input_length":16,"output_length":1,"hash_ids":[1]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := typed("bench", "--sim", "1a", "--trace", file, "--dry-run")
	if code != cli.ExitOK {
		t.Fatalf("code %d\n%s\n%s", code, stdout, stderr)
	}
	hostile.Check(t, "the plan", stdout)
}

// TestBenchFromEndToEnd runs the experiment against simulated engines on real
// sockets, and everything that works on its result.
func TestBenchFromEndToEnd(t *testing.T) {
	if testing.Short() {
		t.Skip("runs a whole experiment in real time")
	}
	dir := filepath.Join(t.TempDir(), "run")
	base := []string{"bench", "--sim", "1p1d:speed=4", "--profile", "cpu", "--isl", "64,256", "--osl", "4", "--concurrency", "1", "--repeat", "3", "--requests", "3", "--no-refine"}
	code, stdout, stderr := typed(append(base, "--dry-run")...)
	if code != cli.ExitOK || !strings.HasPrefix(stdout, "plan    2 isl") || !strings.Contains(stdout, "= 12 cells + 6 A/A") {
		t.Fatalf("dry run: code %d %s %s", code, stdout, stderr)
	}
	// On a machine that does other things at the same time a gate may fail
	// honestly; everything else must work all the same.
	code, stdout, stderr = typed(append(base, "--out", dir)...)
	if strings.Contains(stderr, "eta 0s") || !strings.Contains(stderr, "run     warm-up round 1: ttft p50 local ") {
		t.Errorf("progress: %s", stderr)
	}
	if code != cli.ExitOK && code != cli.ExitInvalid || !strings.HasPrefix(stdout, "RESULT") || strings.Count(stderr, "isl ") < 18 {
		t.Fatalf("code %d\n%s\n%s", code, stdout, stderr)
	}
	r, err := report.ReadResult(dir)
	if err != nil || len(r.Cells) < 18 || r.Valid != (code == cli.ExitOK) {
		t.Fatal(err, len(r.Cells))
	}
	if want := "simulated engines 1p1d:profile=cpu,speed=4"; !slices.Contains(r.Simulated, want) || !strings.Contains(stdout, want) {
		t.Errorf("the result is of %q, want %q", r.Simulated, want)
	}
	for _, g := range r.Gates {
		for _, must := range []string{"cache", "errors", "lengths", "path", "transfer"} {
			if g.Name == must && (g.Passed == nil || !*g.Passed) {
				t.Errorf("gate %s: %s", g.Name, g.Text)
			}
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "report.html")); err != nil {
		t.Error(err)
	}
	if code, stdout, stderr = typed("bench", "compare", dir, dir, "--fail-if", "ttft_p50>5%"); code != cli.ExitOK || !strings.Contains(stdout, "COMPARE") {
		t.Errorf("compare with itself: code %d %s %s", code, stdout, stderr)
	}
	for _, format := range []string{"table", "html", "csv", "json"} {
		if code, stdout, stderr = typed("bench", "report", dir, "-o", format); code != cli.ExitOK || len(stdout) < 500 {
			t.Errorf("report -o %s: code %d, %d bytes %s", format, code, len(stdout), stderr)
		}
	}
	// A run that is finished has nothing to resume.
	if code, _, stderr = typed("bench", "--resume", dir); code != cli.ExitUsage || !strings.Contains(stderr, dir+" is finished: all its ") || !strings.Contains(stderr, "dynctl bench report "+dir) {
		t.Errorf("resume of a finished run: code %d %s", code, stderr)
	}
	// A run that was cut continues: half of its cells, and the result, are taken away again.
	if err := os.Remove(filepath.Join(dir, "result.json")); err != nil {
		t.Fatal(err)
	}
	journal := filepath.Join(dir, "cells.jsonl")
	raw, err := os.ReadFile(journal)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(raw), "\n")
	if err := os.WriteFile(journal, []byte(strings.Join(lines[:len(lines)/2], "")), 0o644); err != nil {
		t.Fatal(err)
	}
	code, _, stderr = typed("bench", "--resume", dir, "-o", "json")
	if code != cli.ExitOK && code != cli.ExitInvalid {
		t.Errorf("resume: code %d %s", code, stderr)
	}
	again, err := report.ReadResult(dir)
	if err != nil || len(again.Cells) < 18 || again.Seconds < again.Cells[0].End.Seconds() || again.Cells[0].Measure.TTFT.P50 != r.Cells[0].Measure.TTFT.P50 {
		t.Errorf("after the resumption: %v, %d cells", err, len(again.Cells))
	}
}

// TestBenchSweepAndTrace runs a load sweep, a threshold sweep and a trace.
func TestBenchSweepAndTrace(t *testing.T) {
	if testing.Short() {
		t.Skip("runs in real time")
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "t.jsonl")
	trace := ""
	for i := range 10 {
		line, _ := json.Marshal(map[string]any{"timestamp": 20 * i, "input_length": 600 + i, "output_length": 3, "hash_ids": []int{1, i + 2}})
		trace += string(line) + "\n"
	}
	if err := os.WriteFile(file, []byte(trace), 0o644); err != nil {
		t.Fatal(err)
	}
	const fleet = "1p1d:profile=cpu,speed=20"
	for name, args := range map[string][]string{
		"load":       {"--sweep", "--concurrency", "1,2", "--isl", "U(32,64)", "--osl", "4"},
		"rate":       {"--sweep", "--rate", "20", "--requests", "10", "--arrival", "gamma", "--burstiness", "0.5", "--isl", "32", "--osl", "4"},
		"turns":      {"--turns", "3", "--prefix-groups", "2", "--prefix-tokens", "32", "--concurrency", "2", "--isl", "48", "--osl", "4"},
		"thresholds": {"--thresholds", "32,1024", "--concurrency", "1", "--isl", "200", "--osl", "4"},
		"trace":      {"--trace", file},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"bench", "--sim", fleet, "--repeat", "2", "--out", filepath.Join(dir, name), "-o", "json"}, args...)
			code, stdout, stderr := typed(args...)
			// On a machine that does other things the client gate may fail honestly.
			if code != cli.ExitOK && code != cli.ExitInvalid {
				t.Fatalf("code %d %s", code, stderr)
			}
			if code, stdout, stderr := typed("bench", "report", filepath.Join(dir, name), "-o", "html"); code != cli.ExitOK || strings.Count(stdout, "<svg") != 2 || !strings.Contains(stdout, "<h2>Load generator</h2>") {
				t.Errorf("report: code %d %s\n%s", code, stderr, stdout)
			}
			var r struct {
				Rows []struct {
					Requests, Failed int
					Threshold        int      `json:"threshold_tokens"`
					Hit              *float64 `json:"cache_hit_share"`
				}
				Cells []experiment.CellResult
			}
			if err := json.Unmarshal([]byte(stdout), &r); err != nil {
				t.Fatal(err)
			}
			want := map[string]int{"load": 2, "rate": 1, "turns": 1, "thresholds": 2, "trace": 1}[name]
			if len(r.Rows) != want {
				t.Fatalf("%d rows, want %d", len(r.Rows), want)
			}
			for _, row := range r.Rows {
				if row.Requests == 0 || row.Failed > 0 {
					t.Errorf("%+v", row)
				}
				if name == "turns" && (row.Hit == nil || *row.Hit < 0.2) {
					t.Errorf("turns share their past, yet the hit share is %v", row.Hit)
				}
			}
		})
	}
}

// tripwire calls do when trip is written.
type tripwire struct {
	trip string
	do   func()
}

func (w *tripwire) Write(b []byte) (int, error) {
	if strings.Contains(string(b), w.trip) {
		w.do()
	}
	return len(b), nil
}

// TestResumeKeepsPlanAndTarget: a run goes on with its plan against its target,
// whatever is typed or has changed.
func TestResumeKeepsPlanAndTarget(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	const fleet = "1p1d:profile=instant,kv_blocks=2048"
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err := cli.Run(ctx, cli.Root(New()), []string{"bench", "--sim", fleet, "--isl", "64,256", "--osl", "4", "--concurrency", "1", "--requests", "3", "--out", dir, "--progress", "lines"},
		strings.NewReader(""), io.Discard, &tripwire{trip: "warm-up", do: cancel})
	var coded *cli.ExitError
	if !errors.As(err, &coded) || coded.Code != cli.ExitInterrupted {
		t.Fatalf("interrupted, and the end is %v", err)
	}
	file := filepath.Join(dir, "plan.yaml")
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(whole), "sim: "+fleet) || !strings.Contains(string(whole), "2048 KV blocks") {
		t.Errorf("the plan does not hold its target:\n%s", whole)
	}
	resume := func(more ...string) (int, string, string) {
		return typed(append([]string{"bench", "--resume", dir, "--dry-run"}, more...)...)
	}
	for _, more := range [][]string{nil, {"--osl", "4", "--sim", fleet, "--isl", "256,64"}} {
		code, stdout, stderr := resume(more...)
		if code != cli.ExitOK || !strings.Contains(stdout, "plan    2 isl") || !strings.Contains(stderr, fleet) {
			t.Errorf("%v: code %d\n%s\n%s", more, code, stdout, stderr)
		}
	}
	for _, c := range []struct{ args, say string }{
		{"--osl 99", "--osl contradicts the plan of " + dir + ", which has 4"},
		{"--sim 1p1d:speed=4", "--sim contradicts"},
		{"--router http://127.0.0.1:1", "--router contradicts"},
		{"--concurrency 1,2", "--concurrency contradicts"},
		{"--rate 3", "--rate contradicts"},
		{"--out other", "--out contradicts"},
		{"--profile cpu", "--profile contradicts"},
		{"--sweep", "a sweep is not resumed"},
	} {
		if code, _, stderr := resume(strings.Fields(c.args)...); code != cli.ExitUsage || !strings.Contains(stderr, c.say) {
			t.Errorf("%s: code %d, %q, want %q", c.args, code, stderr, c.say)
		}
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// The same words lead to another fleet now.
	write(strings.ReplaceAll(string(whole), "2048 KV blocks", "1024 KV blocks"))
	if code, _, stderr := resume(); code != cli.ExitUsage || !strings.Contains(stderr, "It was: 1 x decode") || !strings.Contains(stderr, "1024 KV blocks") || !strings.Contains(stderr, "2048 KV blocks") {
		t.Errorf("another target: code %d, %q", code, stderr)
	}
}

// TestLostFleetHasItsCode: a run whose target goes away ends as one whose target was
// never there.
func TestLostFleetHasItsCode(t *testing.T) {
	err := lostFleet(fmt.Errorf("cell: %w within 2m0s: connection refused", live.ErrLost))
	if coded := (*cli.ExitError)(nil); !errors.As(err, &coded) || coded.Code != cli.ExitUnreachable {
		t.Errorf("%#v", err)
	}
	if lostFleet(nil) != nil {
		t.Error("a run that ends well has an error")
	}
}

// TestBenchOfTheEnvironmentsRouter: DYNCTL_ROUTER is the router of bench, too, and not
// simulated engines.
func TestBenchOfTheEnvironmentsRouter(t *testing.T) {
	t.Setenv("DYNCTL_ROUTER", "http://127.0.0.1:1") // port 1 is closed
	if code, _, stderr := typed("bench", "--out", filepath.Join(t.TempDir(), "r")); code != cli.ExitUnreachable || !strings.Contains(stderr, "http://127.0.0.1:1") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}
