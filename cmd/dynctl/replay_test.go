package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/bench/replay"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/decide"
	"github.com/dynctl/dynctl/internal/router/routertest"
	"github.com/dynctl/dynctl/internal/router/trace"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/table"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// command runs a command line and returns its exit code and outputs.
func command(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = runMain(args, strings.NewReader(stdin), &out, &errs)
	return code, out.String(), errs.String()
}

// sendLoad sends n completions at a time until each of so many was answered, of
// prompts that share prefixes.
func sendLoad(ctx context.Context, g *routertest.Rig, clients, each int) (ok, failed int64) {
	rng := rand.New(rand.NewPCG(7, 7))
	prefixes := make([][]int, 10)
	for i := range prefixes {
		for range 600 {
			prefixes[i] = append(prefixes[i], 1000+rng.IntN(40000))
		}
	}
	var good, bad atomic.Int64
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(c), 1))
			for range each {
				p := append([]int{}, prefixes[rng.IntN(len(prefixes))][:40+rng.IntN(560)]...)
				for range rng.IntN(100) {
					p = append(p, 1000+rng.IntN(40000))
				}
				body, _ := json.Marshal(map[string]any{"model": "sim", "prompt": p, "max_tokens": 1 + rng.IntN(12), "stream": c%2 == 0})
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, g.URL+"/v1/completions", bytes.NewReader(body))
				if err != nil {
					bad.Add(1)
					continue
				}
				req.Header.Set("Content-Type", "application/json")
				resp, err := g.Client.Do(req)
				if err != nil {
					bad.Add(1)
					continue
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				if resp.StatusCode != http.StatusOK {
					bad.Add(1)
					continue
				}
				good.Add(1)
			}
		})
	}
	wg.Wait()
	return good.Load(), bad.Load()
}

// TestRecordAndVerify records a router under load while engines are killed, lose
// events and break off streams that others go on with, and reproduces every decision; without one of the recorded
// batches the replay says which decision differs and which batch is missing.
func TestRecordAndVerify(t *testing.T) {
	if testing.Short() {
		t.Skip("a router with engines, for a few seconds")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	path := filepath.Join(t.TempDir(), "run.jsonl.zst")
	tap := newTap("serve")
	g, err := routertest.Start(ctx, routertest.Options{
		Fleet: "2p3d:dp=2,kv_blocks=200,speed=20", Observer: observer(tap), Admin: router.AdminOptions{Stream: tap},
		Configure: func(c *settings.Config) { c.Routing.Threshold.Tokens, c.Continue.Mode = 200, settings.ContinueExact },
	})
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	shut := func() {
		if !closed {
			closed = true
			if err := g.Close(context.WithoutCancel(ctx)); err != nil {
				t.Error(err)
			}
		}
	}
	defer shut()
	flags := &recordFlags{path: path}
	file, err := startRecording(tap, flags, newLogger(settings.Log{Level: "error", Format: "text"}, io.Discard))
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	if ok, failed := sendLoad(ctx, g, 8, 20); ok != 160 || failed != 0 {
		t.Errorf("%d requests answered, %d failed", ok, failed)
	}
	var wg sync.WaitGroup
	wg.Go(func() { sendLoad(ctx, g, 8, 60) })
	if err := g.Sim.Engine(3).SetFaults(fault.Set{DropEvents: 0.1, ReorderEvents: 0.1}); err != nil {
		t.Error(err)
	}
	if err := g.Sim.Engine(4).SetFaults(fault.Set{DieRate: 0.5, DieAfter: 3}); err != nil {
		t.Error(err)
	}
	g.Sim.Engine(2).Kill()
	if err := g.Sim.Engine(2).Restart(); err != nil {
		t.Error(err)
	}
	g.Sim.Engine(0).Kill()
	wg.Wait()
	if err := g.Sim.Engine(0).Restart(); err != nil {
		t.Error(err)
	}
	sendLoad(ctx, g, 8, 20)
	shut()
	if st := file.State(); st == nil || st.Path != path || st.Records < 1400 || st.Dropped != 0 || st.Error != "" {
		t.Errorf("while it lasts the recording says %+v", st)
	}
	if err := file.stop(); err != nil {
		t.Fatal(err)
	}
	if st := file.State(); st.Bytes == 0 || st.Error != "" {
		t.Errorf("in the end the recording says %+v", st)
	}

	code, out, errs := command(t, "", "replay", path, "--verify", "-o", "json")
	if code != exitOK {
		t.Errorf("exit %d: %s", code, errs)
	}
	var rep replay.Report
	if err := json.Unmarshal([]byte(out), &rep); err != nil {
		t.Fatal(err)
	}
	v := rep.Verify
	if v.Decisions < 700 || v.Proven != v.Decisions || v.OnTrust != 0 || v.InputsDiffer != 0 || rep.Counts.Dropped != 0 || rep.Cut {
		first, _ := json.MarshalIndent([]*replay.Divergence{v.First, v.FirstInput}, "", " ")
		t.Errorf("%d of %d decisions proven, %d with other inputs: %s", v.Proven, v.Decisions, v.InputsDiffer, first)
	}
	if rep.Counts.Clears == 0 || rep.Records[trace.KindOutcome] < 700 {
		t.Errorf("nothing happened: %+v, %v", rep.Counts, rep.Records)
	}

	// A recording that was begun in the middle of the ranks' lives, after the first
	// batch: what depends on that is taken on trust, and does not count for
	// --min-match.
	continued := 0
	missing, late := withoutOne(t, path, 1, func(rec *trace.Record) {
		if rec.RankInfo.New = false; rec.Outcome != nil {
			continued += len(rec.Outcome.Continued)
		}
	})
	if continued == 0 {
		t.Error("no stream went on elsewhere")
	}
	code, out, errs = command(t, "", "replay", late, "--verify", "-o", "json")
	var after replay.Report
	if err := json.Unmarshal([]byte(out), &after); err != nil {
		t.Fatal(err)
	}
	if v = after.Verify; v.OnTrust == 0 || v.Proven+v.OnTrust != v.Equal || v.Proven+v.OnTrust+v.Divergent()+v.Unverifiable != v.Decisions || v.Unverifiable != 0 || code != exitMissed || !strings.Contains(errs, "taken on trust") {
		first, _ := json.MarshalIndent([]any{missing.Rank, missing.Batch.Seq, v.First, v.FirstInput}, "", " ")
		t.Errorf("without the first batch: exit %d, %+v, %s\n%s", code, v, errs, first)
	}
	if code, out, _ = command(t, "", "replay", late, "--verify", "--min-match", "0%"); code != exitOK || !strings.Contains(out, fmt.Sprintf("decisions proven (%s / %s), %s taken on trust, 0 unverifiable, %s divergent", table.Count(v.Proven), table.Count(v.Decisions), table.Count(v.OnTrust), table.Count(v.Divergent()))) {
		t.Errorf("exit %d with\n%.600s", code, out)
	}

	// The same file again, without one batch at a time, until a decision comes
	// out differently for lack of it.
	told := false
	for n := 10; n < 200 && !told; n += 5 {
		missing, cut := withoutOne(t, path, n, func(*trace.Record) {})
		code, out, errs = command(t, "", "replay", cut, "--verify")
		if code != exitOK && code != exitMissed {
			t.Fatalf("exit %d: %s", code, errs)
		}
		if (strings.Contains(out, "FIRST DIVERGENCE") || !strings.Contains(out, ", 0 taken on trust")) != (code == exitMissed) {
			t.Errorf("exit %d with\n%s", code, out)
		}
		if code == exitMissed {
			told = strings.Contains(out, fmt.Sprintf("batch %d of this rank is missing", missing.Batch.Seq)) && strings.Contains(out, "because "+missing.Rank)
		}
	}
	if !told {
		t.Error("no decision differs, whichever batch is missing")
	}

	// What if: the recording holds all that other settings need.
	if code, out, errs = command(t, "", "replay", path, "--what-if", "threshold=0"); code != exitOK || !strings.Contains(out, "to remote") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	// Its decisions are requests for a simulation.
	code, out, errs = command(t, "", "replay", path, "--policy", "kv,round_robin", "--fleet", "3a:block=16", "--kv-blocks", "512", "--quiet", "-o", "csv")
	if lines := strings.Split(strings.TrimSpace(out), "\n"); code != exitOK || len(lines) != 3 {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	if code, out, errs = command(t, "", "replay", "stat", path, "--html", filepath.Join(filepath.Dir(path), "r.html")); code != exitOK || !strings.Contains(out, "reuse bound") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	page, err := os.ReadFile(filepath.Join(filepath.Dir(path), "r.html"))
	if err != nil || !bytes.Contains(page, []byte("<svg")) || bytes.Contains(page, []byte("src=")) || bytes.Contains(page, []byte("href=")) {
		t.Errorf("the report is no page of its own: %v", err)
	}
}

// withoutOne writes a recording again without its nth batch.
func withoutOne(t *testing.T, path string, n int, edit func(*trace.Record)) (missing trace.Record, cut string) {
	t.Helper()
	r, err := trace.Open(path, nil, trace.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	p, err := trace.AppendHeader(nil, trace.Header{Source: "test"})
	if err != nil {
		t.Fatal(err)
	}
	book := trace.NewBook()
	for {
		var rec trace.Record
		if err := r.Next(&rec); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if rec.Kind == trace.KindBatch {
			if n--; n == 0 {
				missing = rec
				continue
			}
		}
		edit(&rec)
		if p, err = book.AppendRecord(p, &rec); err != nil {
			t.Fatal(err)
		}
	}
	cut = filepath.Join(filepath.Dir(path), "cut.jsonl")
	if err := os.WriteFile(cut, p, 0o600); err != nil {
		t.Fatal(err)
	}
	return missing, cut
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
		if got := r.setup.Settings.Rule.LoadCredit; got != decide.LoadCredit {
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
	bad := write("b.jsonl", moon+"{oops\n"+moon)
	for _, tt := range []struct {
		name   string
		stdin  string
		args   []string
		code   int
		stdout string
		stderr string
	}{
		{name: "no file", args: []string{"replay"}, code: exitUsage, stderr: "requires at least 1 arg"},
		{name: "absent", args: []string{"replay", filepath.Join(dir, "x")}, code: exitUsage, stderr: "no such file"},
		{name: "events", args: []string{"replay", events}, stdout: "index   2 blocks, 2 distinct"},
		{name: "events from stdin", stdin: `{"timestamp":5,"event":{"worker_id":1,"event":{"event_id":0,"data":"cleared"}}}`, args: []string{"replay", "-"}, stdout: "clears 1"},
		{name: "at a line", args: []string{"replay", events, "--at", "1"}, stdout: "index   1 blocks", stderr: "stored 1 blocks"},
		{name: "step", stdin: "\nq\n", args: []string{"replay", events, "--at", "1", "--step"}, stdout: "line 2  t=6ms  event"},
		{name: "bad line", args: []string{"replay", bad}, code: exitInvalid, stderr: fmt.Sprintf("line 4 (byte %d)", len(moon)+1)},
		{name: "bad line allowed", args: []string{"replay", bad, "--max-bad", "1"}, stdout: "bad lines 1 (first is line 4)", stderr: "skipped: "},
		{name: "no format", stdin: "hello", args: []string{"replay", "-"}, code: exitInvalid, stderr: "no JSON object"},
		{name: "unknown format", args: []string{"replay", events, "--format", "x"}, code: exitUsage, stderr: "unknown trace format"},
		{name: "unknown policy", args: []string{"replay", requests, "--policy", "best"}, code: exitUsage, stderr: "unknown policy"},
		{name: "unknown what-if", args: []string{"replay", requests, "--what-if", "a=1"}, code: exitUsage, stderr: "overlap_credit"},
		{name: "what-if without decisions", args: []string{"replay", requests, "--what-if", "threshold=1"}, code: exitUsage, stderr: "no decisions"},
		{name: "no requests", args: []string{"replay", events, "--policy", "kv"}, code: exitRuntime, stderr: "no requests"},
		{name: "speed", args: []string{"replay", events, "--speed", "fast"}, code: exitUsage, stderr: "--speed fast"},
		{name: "stdin twice", stdin: moon, args: []string{"replay", "-", "--policy", "kv"}, code: exitUsage, stderr: "not stdin"},
		{name: "policies", args: []string{"replay", requests, "--policy", "kv,random", "--fleet", "2a", "--quiet", "-o", "markdown"}, stdout: "| kv     | 0         | 16384     |"},
		{name: "thresholds and what-if", args: []string{"replay", requests, "--routing-threshold", "0,2000", "--what-if", "spread=0", "--fleet", "1p1d", "--quiet", "-o", "jsonl"}, stdout: `"label":"spread=0"`},
		{name: "stat", args: []string{"replay", "stat", requests}, stdout: "66.67% of blocks (6)"},
		{name: "convert", args: []string{"replay", "convert", requests, "--to", "dynamo-requests", "--block-size", "64"}, stdout: `"trace_block_size":64`, stderr: "3 records written"},
		{name: "convert to nothing", args: []string{"replay", "convert", requests, "--to", "capture"}, code: exitRuntime, stderr: "cannot write capture"},
		{name: "convert a broken file", args: []string{"replay", "convert", bad, "-w", filepath.Join(dir, "half.jsonl")}, code: exitInvalid, stderr: "line 4"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			code, out, errs := command(t, tt.stdin, tt.args...)
			if code != tt.code || !strings.Contains(out, tt.stdout) || !strings.Contains(errs, tt.stderr) {
				t.Errorf("exit %d, want %d\nstdout: %s\nwant: %s\nstderr: %s\nwant: %s", code, tt.code, out, tt.stdout, errs, tt.stderr)
			}
		})
	}
	if list, _ := filepath.Glob(filepath.Join(dir, "*half*")); len(list) > 0 {
		t.Errorf("half-written files: %v", list)
	}
}
