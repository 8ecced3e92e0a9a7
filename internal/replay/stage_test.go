package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/adminserver"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestStage shows a recording through the admin API's own client, and takes it
// back and forth.
func TestStage(t *testing.T) {
	rec := newRecording(t).run(60)
	stage := newStage(t, rec.file(), PlayerOptions{}, 0)
	server := httptest.NewServer(stage.Handler(adminserver.Access{Terms: func() adminserver.Terms { return adminserver.Terms{Body: time.Minute, Write: time.Minute} }}))
	defer server.Close()
	c, err := admin.NewClient(server.URL, admin.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	do := func(what string) map[string]any {
		t.Helper()
		resp, err := server.Client().Post(server.URL+"/admin/v1/replay?do="+what, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var v map[string]any
		if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
			t.Fatal(err)
		}
		v["status"] = resp.StatusCode
		return v
	}
	do("step&n=" + "100")
	first, err := c.Snapshot(t.Context(), 5, 100, 0)
	if err != nil {
		t.Fatal(err)
	}
	if ranks, decisions := first.Status.Workers.Ranks, len(first.Decisions); ranks != testRanks || decisions != 5 {
		t.Errorf("%d ranks, want %d; %d decisions, want 5", ranks, testRanks, decisions)
	}
	if events, held := len(first.Events), first.Status.Index.Memberships; events == 0 || held == 0 {
		t.Errorf("%d events, %d memberships in the index", events, held)
	}
	if now, started := first.Status.Now, first.Status.Started; !now.After(started) {
		t.Errorf("it is %v, and the router was started %v", now, started)
	}
	sum := stage.p.index.Checksum()
	do("step&n=20")
	if stage.p.index.Checksum() == sum {
		t.Error("steps change nothing")
	}
	if v := do("back&n=20"); v["records"] != 100.0 || v["paused"] != true {
		t.Errorf("back: %v", v)
	}
	if stage.p.index.Checksum() != sum {
		t.Error("20 records on and 20 back is another place")
	}
	again, err := c.Snapshot(t.Context(), 5, 100, 0)
	if err != nil || string(again.Decisions[0]) != string(first.Decisions[0]) || !reflect.DeepEqual(again.Events, first.Events) {
		t.Errorf("other decisions or events after going back: %v", err)
	}

	// A cursor leads through all decisions once, and holds after going back.
	var ids []string
	for cursor := ""; ; {
		page, err := c.Decisions(t.Context(), 7, "path=local", cursor)
		if err != nil {
			t.Fatal(err)
		}
		for _, raw := range page.Decisions {
			ids = append(ids, rawjson.Value(raw).Get("id").String())
		}
		if len(ids) == 7 {
			do("step&n=5")
			do("back&n=5")
		}
		if cursor = page.Next; cursor == "" {
			if uint64(len(ids)) != page.Total {
				t.Errorf("%d of %d decisions: %v", len(ids), page.Total, ids)
			}
			break
		}
	}
	for i, id := range ids {
		if want := fmt.Sprint("d", len(ids)-1-i); id != want {
			t.Errorf("decision %d in the list is %s, want %s", i, id, want)
		}
	}

	// Who waits for an event is answered when the recording is taken back to before
	// one that it knows.
	newest := first.Events[len(first.Events)-1].Seq
	waited := make(chan *admin.EventList)
	go func() {
		l, err := c.Events(t.Context(), newest, 100, 20*time.Second)
		if err != nil {
			t.Error(err)
		}
		waited <- l
	}()
	do("back&n=98")
	if l := <-waited; l == nil || l.Newest >= newest || uint64(len(l.Events)) != l.Newest {
		t.Errorf("events after going back: %+v", l)
	}
	do("step&n=98")
	var r struct {
		ID     string `json:"id"`
		Decode struct {
			Chosen     string            `json:"chosen"`
			Candidates []json.RawMessage `json:"candidates"`
		} `json:"decode"`
	}
	if err := json.Unmarshal(first.Decisions[0], &r); err != nil || r.Decode.Chosen == "" || len(r.Decode.Candidates) != testRanks {
		t.Errorf("decision %s: %v", first.Decisions[0], err)
	}
	if _, err := c.Decision(t.Context(), r.ID); err != nil {
		t.Error(err)
	}
	if _, err := c.Decision(t.Context(), "none"); err == nil {
		t.Error("a decision that there is not")
	}
	kids, err := c.IndexChildren(t.Context(), admin.BrowseQuery{})
	if err != nil || len(kids.Children) == 0 || len(kids.Children[0].RankLabels) == 0 {
		t.Errorf("children %+v, %v", kids, err)
	}
	if st, err := c.IndexStats(t.Context()); err != nil || len(st.Ranks) != testRanks {
		t.Errorf("index %+v, %v", st, err)
	}
	if v := do("dance"); v["status"] != http.StatusBadRequest {
		t.Errorf("dance: %v", v)
	}

	// By itself to the end, where it stays.
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- stage.Run(ctx) }()
	do("play")
	deadline := time.Now().Add(10 * time.Second)
	for {
		s, err := c.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if slices.Contains(s.Reasons, "the recording ends here") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the end never comes: %v", s.Reasons)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if st, err := c.Status(t.Context()); err != nil || st.Traffic.Requests != 60 {
		t.Errorf("%d requests at the end, %v", st.Traffic.Requests, err)
	}
}

// TestStageShowsCaches: what ranks of a recording have in cache groups and outside their
// devices is shown as a running router shows it.
func TestStageShowsCaches(t *testing.T) {
	for _, hybrid := range []bool{false, true} {
		rec := newRecording(t)
		rec.offloads, rec.hybrid = true, hybrid
		stage := newStage(t, rec.run(60).file(), PlayerOptions{}, 0)
		if err := stage.Control("step", 1<<10); err != nil {
			t.Fatal(err)
		}
		for _, w := range stage.Workers().Workers {
			f := w.Ranks[0].Feed
			if groups := len(f.CacheGroups); f.TiersReported == hybrid || (f.Tiers.CPU > 0) == hybrid || (groups == 2) != hybrid {
				t.Errorf("hybrid %t: %s has tiers %t %+v, groups %+v", hybrid, w.Name, f.TiersReported, f.Tiers, f.CacheGroups)
			}
		}
	}
}

// TestStageShowsMoves: where streams of a recording went on elsewhere is shown by rank,
// as a running router shows it, once outcomes have said so; who waits is not known.
func TestStageShowsMoves(t *testing.T) {
	rec := newRecording(t)
	rec.decide(rec.prompt())
	legs := make([]receipt.LegEntry, 5)
	for i, at := range []float64{1, 20, 21, 40, 41} {
		legs[i] = receipt.NewLeg("decode", "w-0", rankName(0), 1+i)
		if i > 0 {
			legs[i].Worker, legs[i].Rank = "w-1", rankName(1)
		}
		legs[i].DispatchMS = at
	}
	legs[3].Worker, legs[3].Rank, legs[3].Kind = "w-2", rankName(2), "prefill"
	legs[4].Worker, legs[4].Rank = "w-0", rankName(0)
	rec.add(trace.Record{Kind: trace.KindOutcome, Outcome: &trace.Outcome{
		ID: rec.recs[len(rec.recs)-1].Decision.ID, Stream: true, Result: receipt.Outcome{Status: 200}, Legs: legs,
		Continued: []receipt.Continuation{{AtMS: 10, From: "w-0", Reason: "reset", Tokens: 3}, {AtMS: 30, From: "w-1", Reason: "reset", Tokens: 5}},
	}})
	stage := newStage(t, rec.file(), PlayerOptions{}, 0)
	moves := func(steps int) map[string]admin.Moves {
		t.Helper()
		if err := stage.Control("step", steps); err != nil {
			t.Fatal(err)
		}
		out := map[string]admin.Moves{}
		for _, w := range stage.Workers().Workers {
			if m := w.Ranks[0].Moves; m != nil {
				out[w.Name] = *m
			}
		}
		return out
	}
	if got := moves(len(rec.recs) - 1); len(got) != 0 {
		t.Errorf("before any outcome: %+v", got)
	}
	got := moves(1)
	for name, want := range map[string]admin.Moves{"w-0": {Away: 1, Onto: 1}, "w-1": {Away: 1, Onto: 2}, "w-2": {}} {
		if m, ok := got[name]; !ok || m != want {
			t.Errorf("%s: %+v, want %+v", name, m, want)
		}
	}
}

// TestStageOfRetries: a request that was decided twice is one receipt, with the
// earlier decision, and what its outcome says.
func TestStageOfRetries(t *testing.T) {
	rec := newRecording(t)
	rec.decide(rec.prompt())
	again := rec.recs[len(rec.recs)-1]
	d := *again.Decision
	d.Attempt = 2
	again.Decision = &d
	rec.add(again)
	leg := receipt.NewLeg("decode", "w-1", "w-1/dp0", 2)
	leg.Status = 200
	rec.add(trace.Record{Kind: trace.KindOutcome, Outcome: &trace.Outcome{
		ID: d.ID, ReceivedUS: 5, Stream: true, Result: receipt.Outcome{Status: 200, CompletionTokens: 7}, Legs: []receipt.LegEntry{leg}, Notes: []string{"w-0 failed"},
	}})
	stage := newStage(t, rec.file(), PlayerOptions{}, 0)
	if err := stage.Control("step", len(rec.recs)); err != nil {
		t.Fatal(err)
	}
	list, _, err := stage.Receipts().List(receipt.Query{Limit: 5})
	if err != nil || len(list) != 1 {
		t.Fatalf("%d receipts, %v", len(list), err)
	}
	r := list[0]
	if len(r.Earlier) != 1 || len(r.Legs) != 1 {
		t.Fatalf("%d earlier decisions and %d legs, want one of each", len(r.Earlier), len(r.Legs))
	}
	type facts struct {
		ID                        string
		Attempt, Earlier          int
		Candidates, Tokens, Notes int
		Worker                    string
		Stream, Live              bool
		Revision                  uint64
		After                     time.Duration
	}
	got := facts{
		r.ID, r.Attempt, r.Earlier[0].Attempt, len(r.Decode.Candidates), r.Outcome.CompletionTokens, len(r.Notes),
		r.Legs[0].Worker, r.Stream, r.Live, r.ConfigRevision, r.Time.Sub(stage.start),
	}
	if d := cmp.Diff(facts{d.ID, 2, 1, testRanks, 7, 1, "w-1", true, false, 1, 5 * time.Microsecond}, got); d != "" {
		t.Errorf("receipt (-want +got):\n%s", d)
	}
	if len(r.Earlier[0].Decode.Candidates) == 0 {
		t.Error("the earlier decision has no candidates")
	}
	if st := stage.Status(); st.Traffic.Requests != 1 || st.Traffic.Retries != 1 || st.Traffic.Completed != 1 || st.Workers.Aggregated != testRanks {
		t.Errorf("status %+v", st.Traffic)
	}
}

// TestStageShowsTheRoutersSettings: the block size, the policy of each phase and the threshold
// are those that the recording states, wherever it states them, and none is made up.
func TestStageShowsTheRoutersSettings(t *testing.T) {
	for _, c := range []struct {
		name            string
		o               PlayerOptions
		prefill, decode selector.Policy
		policy          string
		auto            bool
	}{
		{"one policy", PlayerOptions{}, selector.KV, selector.KV, "kv", false},
		{"one for each phase", PlayerOptions{}, selector.LeastLoaded, selector.KV, "", false},
		{"another block size for ranks that state none", PlayerOptions{BlockSize: 4 * testBlock}, selector.KV, selector.KV, "kv", false},
		{"a threshold that is auto", PlayerOptions{}, selector.KV, selector.KV, "kv", true},
	} {
		rec := newRecording(t)
		rec.decide(rec.prompt())
		last := &rec.recs[len(rec.recs)-1]
		d := *last.Decision
		s := *d.Settings
		s.Prefill, s.Decode = c.prefill, c.decode
		in := *d.Input
		s.Rule.Auto, in.Rule.Auto = c.auto, c.auto
		in.Prefill.Policy, in.Decode.Policy = c.prefill, c.decode
		d.Settings, d.Input = &s, &in
		last.Decision = &d
		stage := newStage(t, rec.file(), c.o, 0)
		if st := stage.Status(); st.Policy != "" || st.PrefillPolicy != "" || st.DecodePolicy != "" || st.ThresholdAuto {
			t.Errorf("%s: before any decision the policies are %q, %q and %q, and the threshold is auto: %v", c.name, st.Policy, st.PrefillPolicy, st.DecodePolicy, st.ThresholdAuto)
		}
		for range 2 {
			if err := stage.Control("step", len(rec.recs)); err != nil {
				t.Fatal(err)
			}
			st := stage.Status()
			if st.BlockSizeTokens != testBlock {
				t.Errorf("%s: blocks of %d tokens, want %d", c.name, st.BlockSizeTokens, testBlock)
			}
			if st.Policy != c.policy || st.PrefillPolicy != string(c.prefill) || st.DecodePolicy != string(c.decode) {
				t.Errorf("%s: policies %q, %q and %q", c.name, st.Policy, st.PrefillPolicy, st.DecodePolicy)
			}
			if st.ThresholdAuto != c.auto || st.ThresholdTokens != s.Rule.Threshold {
				t.Errorf("%s: the threshold is %v", c.name, st.Threshold())
			}
			if err := stage.Control("back", len(rec.recs)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestStageAnswersStay: what was asked of a stage does not change while it plays
// on, and a rank whose engine publishes no KV events is not counted as untrusted.
func TestStageAnswersStay(t *testing.T) {
	stage, err := NewStage(func() (*trace.Reader, error) {
		return trace.Open("../../testdata/trace/vllm-0.32.0-1p1d-evictions.jsonl.zst", nil, trace.Options{})
	}, PlayerOptions{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer stage.Close()
	text := func(v any) string {
		raw, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	for !stage.ended {
		if err := stage.Control("step", 20); err != nil {
			t.Fatal(err)
		}
		was := []any{stage.Status(), stage.Workers(), stage.IndexStats()}
		before := text(was)
		if err := stage.Control("step", 20); err != nil {
			t.Fatal(err)
		}
		if after := text(was); after != before {
			t.Fatalf("an answer changed from\n%s to\n%s", before, after)
		}
	}
	for _, at := range []int{stage.Status().Index.UntrustedRank, stage.IndexStats().Totals.UntrustedRank} {
		if at != 2 {
			t.Errorf("%d ranks are untrusted at the end, want 2", at)
		}
	}
	stage.rank("quiet/dp0")
	if st := stage.Status(); st.Index.UntrustedRank != 2 || st.Workers.Ranks != 3 {
		t.Errorf("%d of %d ranks are untrusted", st.Index.UntrustedRank, st.Workers.Ranks)
	}
}
