package commands

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/table"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// sendLoad sends n completions at a time until each of so many was answered, of
// prompts that share prefixes.
func sendLoad(ctx context.Context, g *loopback.Rig, clients, each int) (ok, failed int64) {
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
				// An answer that breaks off was begun well: its status counts.
				status, _, _, _ := g.Post(ctx, "/v1/completions", map[string]any{"model": "sim", "prompt": p, "max_tokens": 1 + rng.IntN(12), "stream": c%2 == 0})
				if status == http.StatusOK {
					good.Add(1)
				} else {
					bad.Add(1)
				}
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
	tap := newTap("serve", "")
	g, err := loopback.Start(ctx, loopback.Options{
		Fleet: "2p3d:dp=2,kv_blocks=200,speed=20", Observer: recordingObserver(tap), Admin: router.AdminOptions{Stream: tap},
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
	flags := &recordFlags{Path: path}
	file, err := startRecording(tap, flags, cli.NewLogger(settings.Log{Level: "error", Format: "text"}, io.Discard))
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
	st := file.State()
	if st == nil {
		t.Fatal("the recording has no state while it lasts")
	}
	if st.Path != path || st.Error != "" {
		t.Errorf("while it lasts the recording is %q, error %q", st.Path, st.Error)
	}
	if st.Records < 1400 || st.Dropped != 0 {
		t.Errorf("while it lasts the recording has %d records, %d dropped", st.Records, st.Dropped)
	}
	if err := file.Stop(); err != nil {
		t.Fatal(err)
	}
	if st := file.State(); st.Bytes == 0 || st.Error != "" {
		t.Errorf("in the end the recording says %+v", st)
	}

	code, out, errs := typed("replay", path, "--verify", "-o", "json")
	if code != cli.ExitOK {
		t.Errorf("exit %d: %s", code, errs)
	}
	var rep replay.Report
	if err := json.Unmarshal([]byte(out), &rep); err != nil {
		t.Fatal(err)
	}
	v := rep.Verify
	want := *v
	want.Proven, want.Unproven, want.InputsDiffer = v.Decisions, 0, 0
	if d := cmp.Diff(want, *v, cmp.Exporter(func(reflect.Type) bool { return true })); d != "" || v.Decisions < 700 {
		first, _ := json.MarshalIndent([]*replay.Divergence{v.First, v.FirstInput}, "", " ")
		t.Errorf("%d decisions, first %s (-want +got):\n%s", v.Decisions, first, d)
	}
	if rep.Counts.Dropped != 0 || rep.Cut {
		t.Errorf("the recording dropped %d batches, is cut: %t", rep.Counts.Dropped, rep.Cut)
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
	code, out, errs = typed("replay", late, "--verify", "--min-match", "100%", "-o", "json")
	var after replay.Report
	if err := json.Unmarshal([]byte(out), &after); err != nil {
		t.Fatal(err)
	}
	if code != cli.ExitMissed || !strings.Contains(errs, "taken on trust") {
		t.Errorf("without the first batch: exit %d, %s", code, errs)
	}
	v = after.Verify
	if v.Unproven == 0 || v.Unverifiable != 0 || v.Proven+v.Unproven != v.Equal || v.Equal+v.Divergent() != v.Decisions {
		first, _ := json.MarshalIndent([]any{missing.Rank, missing.Batch.Seq, v.First, v.FirstInput}, "", " ")
		t.Errorf("without the first batch, of %d decisions: %d proven, %d on trust, %d equal, %d divergent, %d unverifiable\n%s", v.Decisions, v.Proven, v.Unproven, v.Equal, v.Divergent(), v.Unverifiable, first)
	}
	if code, out, _ = typed("replay", late, "--verify", "--min-match", "0%"); code != cli.ExitOK || !strings.Contains(out, fmt.Sprintf("decisions proven (%s / %s), %s taken on trust, 0 unverifiable, %s divergent", table.Count(v.Proven), table.Count(v.Decisions), table.Count(v.Unproven), table.Count(v.Divergent()))) {
		t.Errorf("exit %d with\n%.600s", code, out)
	}

	// The same file again, without one batch at a time, until a decision comes
	// out differently for lack of it.
	explained := false
	for n := 10; n < 200 && !explained; n += 5 {
		missing, cut := withoutOne(t, path, n, func(*trace.Record) {})
		code, out, errs = typed("replay", cut, "--verify")
		if code != cli.ExitOK && code != cli.ExitMissed {
			t.Fatalf("exit %d: %s", code, errs)
		}
		if strings.Contains(out, "FIRST DIVERGENCE") != (code == cli.ExitMissed) {
			t.Errorf("exit %d with\n%s", code, out)
		}
		if code == cli.ExitMissed {
			explained = strings.Contains(out, fmt.Sprintf("batch %d of this rank is missing", missing.Batch.Seq)) && strings.Contains(out, "because "+missing.Rank)
		}
	}
	if !explained {
		t.Error("no decision differs, whichever batch is missing")
	}

	// What if: the recording holds all that other settings need.
	if code, out, errs = typed("replay", path, "--what-if", "threshold=0"); code != cli.ExitOK || !strings.Contains(out, "to remote") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	// Its decisions are requests for a simulation.
	code, out, errs = typed("replay", path, "--policy", "kv,round_robin", "--fleet", "3a:block=16", "--kv-blocks", "512", "--quiet", "-o", "csv")
	if lines := strings.Split(strings.TrimSpace(out), "\n"); code != cli.ExitOK || len(lines) != 3 {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	if code, out, errs = typed("replay", "stat", path); code != cli.ExitOK || !strings.Contains(out, "reuse bound") {
		t.Errorf("exit %d: %s%s", code, out, errs)
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
	book := trace.NewReferences()
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
