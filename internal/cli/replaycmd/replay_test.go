package replaycmd

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/rig/clitest"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/workers"
)

// realRecording is a recording of real engines.
const realRecording = "../../../testdata/trace/vllm-0.32.0-1p1d-evictions.jsonl.zst"

// typed runs a command line without a terminal.
func typed(args ...string) (code int, stdout, stderr string) {
	return clitest.Run(cli.Root(New()), "", args...)
}

// TestACutRecordingIsNotAllOfIt: what is verified up to a cut is said to be that, and
// whoever reads a cut recording is warned, with a code that is not that of a whole one.
func TestACutRecordingIsNotAllOfIt(t *testing.T) {
	dir := t.TempDir()
	whole := filepath.Join(dir, "whole.jsonl")
	if code, _, stderr := typed("replay", "convert", realRecording, "-w", whole); code != cli.ExitOK {
		t.Fatal(stderr)
	}
	raw, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := z.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		data []byte
		code int
	}{
		{"whole.jsonl.gz", packed.Bytes(), cli.ExitOK},
		{"cut.jsonl.gz", packed.Bytes()[:packed.Len()/2], cli.ExitInvalid},
		{"cut.jsonl", raw[:len(raw)/2], cli.ExitInvalid},
	} {
		file := filepath.Join(dir, c.name)
		if err := os.WriteFile(file, c.data, 0o600); err != nil {
			t.Fatal(err)
		}
		code, stdout, stderr := typed("replay", file, "--verify")
		said := strings.Contains(stdout, "% of decisions up to the cut proven") && strings.Contains(stderr, "the trace is cut after line")
		if code != c.code || said != (c.code != cli.ExitOK) {
			t.Errorf("%s: code %d\n%s\n%s", c.name, code, stdout, stderr)
		}
		for _, args := range [][]string{
			{"replay", file}, {"replay", "stat", file}, {"replay", file, "--what-if", "eff_isl=3"}, {"replay", "convert", file, "-w", filepath.Join(dir, "again.jsonl")},
			{"replay", file, "--policy", "kv,random", "--fleet", "2a", "--quiet"}, {"replay", "stat", file, "-o", "json"}, {"replay", file, "--what-if", "eff_isl=3", "-o", "json"},
		} {
			code, stdout, stderr := typed(args...)
			said := strings.Contains(stderr, "the trace is cut after line")
			if code != c.code || said != (c.code != cli.ExitOK) || stdout == "" && args[1] != "convert" {
				t.Errorf("%v: code %d\n%s\n%s", args, code, stdout, stderr)
			}
		}
		// Where reading ends before the cut, the cut is not reported.
		if code, _, stderr := typed("replay", file, "--at", "20"); code != cli.ExitOK {
			t.Errorf("%s --at 20: code %d, %s", c.name, code, stderr)
		}
	}
}

// TestNoSuchLine: a line that the trace does not have is a mistake, and not its end.
func TestNoSuchLine(t *testing.T) {
	code, _, stderr := typed("replay", realRecording, "--at", "99999999")
	if code != cli.ExitUsage || !strings.Contains(stderr, "--at 99999999: the trace ends with line ") {
		t.Errorf("code %d, %q", code, stderr)
	}
	if code, _, stderr = typed("replay", realRecording, "--at", "20"); code != cli.ExitOK {
		t.Errorf("code %d, %q", code, stderr)
	}
}

// TestNothingIsIgnoredBesideTheScreen: what a recording that is shown cannot do is refused.
func TestNothingIsIgnoredBesideTheScreen(t *testing.T) {
	for _, flags := range [][]string{{"--to", "1m"}, {"--at", "3"}, {"--step"}, {"--verify"}, {"--min-match", "1"}, {"--what-if", "threshold=4096"}, {"--tune"}, {"--policy", "kv"}} {
		code, _, stderr := typed(append([]string{"replay", realRecording, "--tui"}, flags...)...)
		if code != cli.ExitUsage || !strings.Contains(stderr, "has no effect with a recording that is shown") {
			t.Errorf("%s: code %d, %q", flags, code, stderr)
		}
	}
	if code, _, stderr := typed("replay", realRecording, "--tui"); code != cli.ExitUsage || strings.Count(stderr, "the screen needs a terminal") != 1 {
		t.Errorf("without a terminal: code %d, %q", code, stderr)
	}
}

// TestChangesAreNamedAsSettings: what a short key changes is shown.
func TestChangesAreNamedAsSettings(t *testing.T) {
	code, stdout, stderr := typed("replay", realRecording, "--what-if", "eff_isl=3")
	if code != cli.ExitOK || !strings.Contains(stdout, "threshold=3,threshold_on=eff_isl") {
		t.Errorf("code %d\n%s\n%s", code, stdout, stderr)
	}
	_, _, stderr = typed("replay", realRecording, "--fleet", "1p1d", "--routing-threshold", "-5")
	if !strings.Contains(stderr, "--routing-threshold -5 is always remote") {
		t.Errorf("%q", stderr)
	}
}

// TestSimulationsNameTheModel: the times of a simulated GPU are called those of a model.
func TestSimulationsNameTheModel(t *testing.T) {
	if _, _, stderr := typed("replay", realRecording, "--fleet", "1p1d:profile=h100-70b-fp8-tp4"); !strings.Contains(stderr, "note: profile h100-70b-fp8-tp4") {
		t.Errorf("%q", stderr)
	}
}

// TestSimulationsDecideAsTheRouter: what no flag of compare says is as in the
// router, with changes and without.
func TestSimulationsDecideAsTheRouter(t *testing.T) {
	change, err := replay.ParseChange("temperature=0.5")
	if err != nil {
		t.Fatal(err)
	}
	rows, err := (&compareFlags{fleet: "1p1d", on: "eff_isl"}).rows([]replay.Change{change}, 0, 0, nil)
	if err != nil || len(rows) != 2 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	for _, r := range rows {
		if got := r.setup.Options.Rule.LoadCredit; got != decide.LoadCredit {
			t.Errorf("%q counts cached blocks as %v of their cost, the router as %v", r.label, got, decide.LoadCredit)
		}
	}
}

// TestReplayCommand is the command line of replay on small files.
func TestReplayCommand(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	moon := strings.Repeat(`{"timestamp":0,"input_length":1100,"output_length":3,"hash_ids":[1,2,3]}`+"\n", 3)
	requests := write("m.jsonl", moon)
	events := write("e.jsonl", `{"timestamp":5,"event":{"worker_id":1,"event":{"event_id":0,"dp_rank":0,"data":{"stored":{"parent_hash":null,"blocks":[{"block_hash":1,"tokens_hash":2}]}}}}}
{"timestamp":6,"event":{"worker_id":1,"event":{"event_id":1,"dp_rank":0,"data":{"stored":{"parent_hash":1,"blocks":[{"block_hash":3,"tokens_hash":4}]}}}}}
`)
	gap := write("gap.jsonl", moon+`{"timestamp":946080000000,"input_length":1100,"output_length":3,"hash_ids":[1,2,3]}`+"\n")
	before := write("before.jsonl", moon+strings.Replace(moon, `"timestamp":0`, `"timestamp":-7`, 1))
	litellm := write("litellm.jsonl", `{"id":"a","call_type":"acompletion","startTime":1.5,"input_length":5}`+"\n")
	chats := write("chats.jsonl", `{"chat_id":1,"parent_chat_id":-1,"timestamp":0.5,"input_length":40,"output_length":2,"type":"text","turn":1,"hash_ids":[1,2,3]}`+"\n")
	bad := write("b.jsonl", moon+"{oops\n"+moon)
	for _, tt := range []struct {
		name   string
		stdin  string
		args   []string
		code   int
		stdout string
		stderr string
	}{
		{name: "no file", args: []string{"replay"}, code: cli.ExitUsage, stderr: "0 arguments given"},
		{name: "absent", args: []string{"replay", filepath.Join(dir, "x")}, code: cli.ExitUsage, stderr: "no such file"},
		{name: "events", args: []string{"replay", events}, stdout: "index   2 blocks, 2 distinct"},
		{name: "events from stdin", stdin: `{"timestamp":5,"event":{"worker_id":1,"event":{"event_id":0,"data":"cleared"}}}`, args: []string{"replay", "-"}, stdout: "clears 1"},
		{name: "at a line", args: []string{"replay", events, "--at", "1"}, stdout: "index   1 blocks", stderr: "stored 1 blocks"},
		{name: "step", stdin: "\nq\n", args: []string{"replay", events, "--at", "1", "--step"}, stdout: "line 2  t=6ms  event"},
		{name: "a gap of years", args: []string{"replay", gap, "--policy", "kv"}, stdout: "kv", stderr: "note: skipped 1 gap of more than an hour without requests, the longest (30.0 years) before request 4;"},
		{name: "a gap of years, quiet", args: []string{"replay", gap, "--policy", "kv", "--quiet", "-o", "json"}, stdout: `"longest_gap_before_request": 4`},
		{name: "before the start", args: []string{"replay", before, "--policy", "kv"}, code: cli.ExitInvalid, stderr: "before.jsonl: line 4 (byte"},
		{name: "a log", args: []string{"replay", litellm, "--policy", "kv"}, code: cli.ExitInvalid, stderr: `resembles Mooncake's, but cannot be read as one: a Mooncake line without "timestamp"`},
		{name: "Bailian", args: []string{"replay", chats, "--policy", "session"}, stdout: "session", stderr: "1 requests"},
		{name: "sessions in a trace without", args: []string{"replay", requests, "--policy", "kv,session", "--quiet"}, stdout: "session", stderr: "caution: policy session: no request of the trace names a session"},
		{name: "a closed loop without sessions", args: []string{"replay", requests, "--closed-loop"}, code: cli.ExitUsage, stderr: "--closed-loop: no request of the trace names a session"},
		{name: "a closed loop", args: []string{"replay", chats, "--closed-loop", "--quiet", "-o", "jsonl"}, stdout: `"closed_loop":true`},
		{name: "bad line", args: []string{"replay", bad}, code: cli.ExitInvalid, stderr: fmt.Sprintf("line 4 (byte %d)", len(moon)+1)},
		{name: "bad line allowed", args: []string{"replay", bad, "--max-bad", "1"}, stdout: "bad lines 1 (first is line 4)", stderr: "skipped: "},
		{name: "no format", stdin: "hello", args: []string{"replay", "-"}, code: cli.ExitInvalid, stderr: "no JSON object"},
		{name: "unknown format", args: []string{"replay", events, "--format", "x"}, code: cli.ExitUsage, stderr: "unknown trace format"},
		{name: "unknown policy", args: []string{"replay", requests, "--policy", "best"}, code: cli.ExitUsage, stderr: "unknown policy"},
		{name: "unknown what-if", args: []string{"replay", requests, "--what-if", "a=1"}, code: cli.ExitUsage, stderr: "overlap_credit"},
		{name: "what-if without decisions", args: []string{"replay", requests, "--what-if", "threshold=1"}, code: cli.ExitUsage, stderr: "no decisions"},
		{name: "no requests", args: []string{"replay", events, "--policy", "kv"}, code: cli.ExitRuntime, stderr: "no requests"},
		{name: "speed", args: []string{"replay", events, "--speed", "fast"}, code: cli.ExitUsage, stderr: "--speed fast"},
		{name: "a head of documents", args: []string{"replay", "generate", "documents", "--head", "9"}, code: cli.ExitUsage, stderr: "--head is for agents only: leave it out for documents"},
		{name: "no sessions", args: []string{"replay", "generate", "agents", "--sessions", "0"}, code: cli.ExitUsage, stderr: "0 sessions at a time: want 1 to"},
		{name: "agents", args: []string{"replay", "generate", "agents", "--requests", "30", "--head", "64", "--sessions", "3"}, stdout: `"session":"agent-2"`},
		{name: "stdin twice", stdin: moon, args: []string{"replay", "-", "--policy", "kv"}, code: cli.ExitUsage, stderr: "not stdin"},
		{name: "policies", args: []string{"replay", requests, "--policy", "kv,random", "--fleet", "2a", "--quiet", "-o", "markdown"}, stdout: "| kv     | 0         | 16384     |"},
		{name: "thresholds and what-if", args: []string{"replay", requests, "--routing-threshold", "0,2000", "--what-if", "spread=0", "--fleet", "1p1d", "--quiet", "-o", "jsonl"}, stdout: `"label":"spread=0"`},
		{name: "a setting", args: []string{"replay", requests, "--policy", "kv,session", "--set", "decode_load=0.5", "--fleet", "2a", "--quiet", "-o", "markdown"}, stdout: "| kv decode_load=0.5 | 0"},
		{name: "a setting of one policy", args: []string{"replay", requests, "--policy", "kv,session", "--set", "decode_load=0.5", "--fleet", "2a", "--quiet", "-o", "markdown"}, stdout: "| session            | 0"},
		{name: "a setting and a what-if", args: []string{"replay", requests, "--set", "decode_load=0.5", "--what-if", "spread=0", "--fleet", "2a", "--quiet", "-o", "jsonl"}, stdout: `"label":"decode_load=0.5 spread=0"`},
		{name: "a setting without effect", args: []string{"replay", requests, "--policy", "kv_dynamo,session", "--set", "decode_load=0.5", "--fleet", "2a"}, code: cli.ExitUsage, stderr: "--set decode_load=0.5 has no effect"},
		{name: "a constant", args: []string{"replay", requests, "--policy", "kv", "--set", "keep=1", "--fleet", "2a", "--quiet", "-o", "json"}, stdout: `"label": "keep=1"`},
		{name: "a constant without effect", args: []string{"replay", requests, "--policy", "kv", "--set", "stale_s=30", "--fleet", "2a"}, code: cli.ExitUsage, stderr: "--set stale_s=30 has no effect"},
		{name: "a constant of limits without limits", args: []string{"replay", requests, "--policy", "kv", "--set", "loss=3", "--fleet", "2a", "--slo-itl", "0"}, code: cli.ExitUsage, stderr: "--set loss=3 has no effect"},
		{name: "a constant of recorded decisions", args: []string{"replay", realRecording, "--what-if", "loss=3"}, code: cli.ExitUsage, stderr: "--what-if loss=3 has no effect on recorded decisions"},
		{name: "a constant that is none", args: []string{"replay", requests, "--policy", "kv", "--set", "stays=2"}, code: cli.ExitUsage, stderr: "--set stays=2: want share of the difference, from 0 to 1"},
		{name: "tune too few", args: []string{"replay", requests, "--tune", "--fleet", "2a", "--quiet"}, code: cli.ExitInvalid, stderr: "--tune: 3 requests count, which are no basis: want 300 or more"},
		{name: "tune events", args: []string{"replay", events, "--tune"}, code: cli.ExitRuntime, stderr: "no requests"},
		{name: "tune another policy", args: []string{"replay", requests, "--tune", "--fleet", "2a", "--policy", "session"}, code: cli.ExitUsage, stderr: "--tune: routing.others has no effect with policy session"},
		{name: "tune two policies", args: []string{"replay", requests, "--tune", "--fleet", "2a", "--policy", "kv,session"}, code: cli.ExitUsage, stderr: "name one --policy"},
		{name: "tune what is set", args: []string{"replay", requests, "--tune", "--set", "others=2"}, code: cli.ExitUsage, stderr: "--set others=2: --tune tries several values of it"},
		{name: "tune once", args: []string{"replay", requests, "--tune", "--seeds", "1"}, code: cli.ExitUsage, stderr: "--seeds 1: want 2 to 100"},
		{name: "tune and what-if", args: []string{"replay", requests, "--tune", "--what-if", "threshold=1"}, code: cli.ExitUsage, stderr: "--what-if has no effect with --tune"},
		{name: "seeds of nothing", args: []string{"replay", requests, "--seeds", "3"}, code: cli.ExitUsage, stderr: "--seeds has no effect with a trace that is only played; it is for --tune"},
		{name: "limits of nothing", args: []string{"replay", realRecording, "--slo-ttft", "1s"}, code: cli.ExitUsage, stderr: "--slo-ttft has no effect with a trace that is only played; it is for --what-if, a simulation"},
		{name: "a share of no proofs", args: []string{"replay", realRecording, "--policy", "kv", "--min-match", "9%"}, code: cli.ExitUsage, stderr: "--min-match has no effect with a simulation"},
		{name: "a simulation that is verified", args: []string{"replay", realRecording, "--fleet", "2a", "--verify"}, code: cli.ExitUsage, stderr: "--verify has no effect with a simulation"},
		{name: "a part of what-if", args: []string{"replay", realRecording, "--what-if", "spread=0", "--to", "1s"}, code: cli.ExitUsage, stderr: "--to has no effect with --what-if; it is for a trace that is only played, --verify"},
		{name: "a what-if without effect", args: []string{"replay", requests, "--policy", "kv_dynamo", "--what-if", "decode_load=0.5", "--fleet", "2a"}, code: cli.ExitUsage, stderr: "--what-if decode_load=0.5 has no effect"},
		{name: "a setting that is a flag", args: []string{"replay", requests, "--set", "threshold=4"}, code: cli.ExitUsage, stderr: "--set threshold=4: the rows of a simulation have this by --routing-threshold"},
		{name: "no such setting", args: []string{"replay", requests, "--set", "moon=1"}, code: cli.ExitUsage, stderr: `--set "moon=1": "moon" cannot be changed here; known here: behind, busy_`},
		{name: "a negative limit", args: []string{"replay", requests, "--policy", "kv", "--fleet", "2a", "--slo-itl", "-1ms"}, code: cli.ExitUsage, stderr: "--slo-itl -1ms: want"},
		{name: "no limit for auto", args: []string{"replay", requests, "--routing-threshold", "0,auto", "--fleet", "1p1d", "--slo-ttft", "0"}, code: cli.ExitUsage, stderr: "--slo-ttft 0: --routing-threshold auto"},
		{name: "no limit between tokens for auto", args: []string{"replay", requests, "--routing-threshold", "auto:9", "--fleet", "1p1d", "--slo-itl", "0s"}, code: cli.ExitUsage, stderr: "--slo-itl 0: --routing-threshold auto:9"},
		{name: "no limit for a number", args: []string{"replay", requests, "--routing-threshold", "9", "--fleet", "1p1d", "--slo-itl", "0", "--slo-ttft", "0", "--quiet", "-o", "jsonl"}, stdout: `"good_ratio":1`},
		{name: "stat", args: []string{"replay", "stat", requests}, stdout: "66.67% of blocks (6)"},
		{name: "convert", args: []string{"replay", "convert", requests, "--to", "mooncake"}, stdout: `"hash_ids":[0,1,2]`, stderr: "3 records written"},
		{name: "convert to what is only read", args: []string{"replay", "convert", events, "--to", "dynamo-events"}, code: cli.ExitRuntime, stderr: "cannot write dynamo-events (one of dynctl, mooncake)"},
		{name: "convert to nothing", args: []string{"replay", "convert", requests, "--to", "capture"}, code: cli.ExitRuntime, stderr: "cannot write capture"},
		{name: "convert a broken file", args: []string{"replay", "convert", bad, "-w", filepath.Join(dir, "half.jsonl")}, code: cli.ExitInvalid, stderr: "line 4"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			code, out, errs := clitest.Run(cli.Root(New()), tt.stdin, tt.args...)
			if code != tt.code || !strings.Contains(out, tt.stdout) || !strings.Contains(errs, tt.stderr) {
				t.Errorf("exit %d, want %d\nstdout: %s\nwant: %s\nstderr: %s\nwant: %s", code, tt.code, out, tt.stdout, errs, tt.stderr)
			}
		})
	}
	if list, _ := filepath.Glob(filepath.Join(dir, "*half*")); len(list) > 0 {
		t.Errorf("half-written files: %v", list)
	}
}

// TestRecordingsAreSimulatedAsTheyWere: without --fleet a recording is simulated on its own
// fleet and with its threshold, and the command says so.
func TestRecordingsAreSimulatedAsTheyWere(t *testing.T) {
	code, stdout, stderr := typed("replay", realRecording, "--policy", "kv,random")
	if code != cli.ExitOK || !strings.Contains(stderr, "note: simulates the fleet of the recording, --fleet 1p1d:block=32,kv_blocks=96 --routing-threshold 96\n") {
		t.Errorf("code %d, %q", code, stderr)
	}
	for line := range strings.Lines(stdout) {
		if n := len(strings.TrimSuffix(line, "\n")); n > 120 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	if !strings.Contains(stdout, "TTFT P50") || !strings.Contains(stdout, "left out here, in -o json and csv: KV BLOCKS, BOUND,") {
		t.Error(stdout)
	}
	if _, stdout, _ = typed("replay", realRecording, "--policy", "kv", "--kv-blocks", "96,256"); !strings.Contains(stdout, "KV BLOCKS  HIT") {
		t.Errorf("caches that differ are not shown:\n%s", stdout)
	}
	for _, more := range []string{"--fleet=2a", "--quiet"} {
		if _, _, stderr = typed("replay", realRecording, "--policy", "kv", more); strings.Contains(stderr, "note: simulates") {
			t.Errorf("%s: %q", more, stderr)
		}
	}
	requests := filepath.Join(t.TempDir(), "m.jsonl")
	if err := os.WriteFile(requests, []byte(`{"timestamp":0,"input_length":1100,"output_length":3,"hash_ids":[1,2,3]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, stderr = typed("replay", requests, "--policy", "kv"); !strings.Contains(stderr, "note: simulates --fleet 16a; name another one with --fleet") {
		t.Errorf("%q", stderr)
	}
}

// TestWhatIfSaysWhetherItIsBetter: in words, rows and JSON, where the recording can be
// simulated.
func TestWhatIfSaysWhetherItIsBetter(t *testing.T) {
	code, stdout, stderr := typed("replay", realRecording, "--what-if", "threshold=4096")
	if code != cli.ExitOK || !strings.HasPrefix(stdout, "RESULT  it would be mixed: ttft p50 ") || !strings.Contains(stdout, "(better)") || !strings.Contains(stdout, "(worse)") || !strings.Contains(stdout, "--fleet 1p1d:block=32,kv_blocks=96") || !strings.Contains(stdout, "simulated ttft p50") {
		t.Errorf("code %d\n%s\n%s", code, stdout, stderr)
	}
	if _, stdout, _ = typed("replay", realRecording, "--what-if", "policy=random", "-o", "jsonl"); !strings.Contains(stdout, `"verdict":"the same"`) {
		t.Error(stdout)
	}
}

// TestTrustIsNoFailure: a recording that began on a running router verifies what it can, and
// its code is that of a success unless a share of proofs is demanded.
func TestTrustIsNoFailure(t *testing.T) {
	file := filepath.Join(t.TempDir(), "late.jsonl")
	if code, _, stderr := typed("replay", "convert", realRecording, "-w", file); code != cli.ExitOK {
		t.Fatal(stderr)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines, dropped := strings.SplitAfter(string(raw), "\n"), 0
	lines = slices.DeleteFunc(lines, func(line string) bool { // what the caches held before
		if dropped < 3 && strings.HasPrefix(line, `{"kind":"kv"`) {
			dropped++
			return true
		}
		return false
	})
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(strings.Join(lines, ""), `,"new":true`, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := typed("replay", file, "--verify")
	if code != cli.ExitOK || !strings.Contains(stdout, "RESULT  no decision differs: ") || !strings.Contains(stdout, "trusted: with recorded figures") || strings.Contains(stdout, " 0 taken on trust") {
		t.Errorf("code %d\n%s\n%s", code, stdout, stderr)
	}
	if code, _, stderr = typed("replay", file, "--verify", "--min-match", "100%"); code != cli.ExitMissed || !strings.Contains(stderr, "more are taken on trust), fewer than --min-match 100%") {
		t.Errorf("code %d\n%s", code, stderr)
	}
}

// TestNothingToVerify: a recording without decisions has no share of them that is proven.
func TestNothingToVerify(t *testing.T) {
	file := filepath.Join(t.TempDir(), "events.jsonl")
	if code, _, stderr := typed("replay", "convert", realRecording, "-w", file); code != cli.ExitOK {
		t.Fatal(stderr)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := slices.DeleteFunc(strings.SplitAfter(string(raw), "\n"), func(line string) bool {
		return strings.HasPrefix(line, `{"kind":"decision"`)
	})
	if err := os.WriteFile(file, []byte(strings.Join(lines, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := typed("replay", file, "--verify")
	if code != cli.ExitOK || !strings.Contains(stdout, "RESULT  nothing to verify: the recording has no decisions") || strings.Contains(stdout, "100.00%") {
		t.Errorf("code %d\n%s\n%s", code, stdout, stderr)
	}
}

// TestVerifyRouters: recordings of several routers are verified each by itself, whatever the
// order of their files, and then together; without the routers' names they are parts of one.
func TestVerifyRouters(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "events.jsonl")
	if code, _, stderr := typed("replay", "convert", realRecording, "-w", file); code != cli.ExitOK {
		t.Fatal(stderr)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	of := func(router string) string {
		path := filepath.Join(dir, router+".jsonl")
		named := strings.Replace(string(raw), `"start":`, `"router":"`+router+`","start":`, 1)
		if err := os.WriteFile(path, []byte(named), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	a, b := of("router-a"), of("router-b")
	code, stdout, stderr := typed("replay", a, b, "--verify", "--min-match", "0%")
	if code != cli.ExitOK || strings.Count(stdout, "RESULT  ") != 2 || !strings.Contains(stdout, "ROUTER  router-a\n") || !strings.Contains(stdout, "ROUTER  router-b\n") || !strings.Contains(stdout, "BLIND   0.00% of ") {
		t.Errorf("code %d\n%s\n%s", code, stdout, stderr)
	}
	code, stdout, stderr = typed("replay", a, b, "--verify", "-o", "json", "--min-match", "0%")
	var whole struct {
		Routers   []struct{ Router string }
		Blindness *replay.BlindReport
	}
	if err := json.Unmarshal([]byte(stdout), &whole); code != cli.ExitOK || err != nil || len(whole.Routers) != 2 || whole.Blindness == nil || whole.Blindness.Decisions == 0 {
		t.Errorf("code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	if _, stdout, _ = typed("replay", a, a, "--verify", "--min-match", "0%"); strings.Contains(stdout, "ROUTER  ") {
		t.Errorf("parts of one recording\n%s", stdout)
	}
}

// TestFleetsOfRecordings: ranks as --fleet takes them, or why they cannot be.
func TestFleetsOfRecordings(t *testing.T) {
	worker := func(name string, role workers.Role, block, blocks int) *workers.Worker {
		return &workers.Worker{Name: name, Facts: workers.Facts{Role: role, BlockSize: block, KVBlocks: blocks}}
	}
	p0, p1 := worker("p0", workers.Prefill, 64, 100), worker("p1", workers.Prefill, 64, 100)
	d0, unknown := worker("d0", workers.Decode, 64, 100), worker("d1", workers.Decode, 0, 0)
	for _, c := range []struct {
		of   choice
		want string
		err  string
	}{
		{choice{"p0/dp0": p0, "p1/dp0": p1, "d0/dp0": d0}, "2p1d:block=64,kv_blocks=100", ""},
		{choice{"p0/dp0": p0, "p0/dp1": p0, "d0/dp0": d0}, "1d:block=64,kv_blocks=100+1p:dp=2,block=64,kv_blocks=100", ""},
		{choice{"d1/dp0": unknown}, "1d", ""},
		{choice{"p0/dp0": p0, "d1/dp0": worker("d1", workers.Decode, 32, 100)}, "", "blocks of several sizes"},
		{choice{"e/dp0": worker("e", workers.Either, 64, 100)}, "", "worker e of the recording has role either"},
		{choice{}, "", "names no workers"},
	} {
		got, err := fleetOf(c.of)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%v: %q, %v", c.of, got, err)
		}
	}
}
