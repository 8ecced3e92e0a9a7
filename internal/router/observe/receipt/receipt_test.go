package receipt

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/route"
)

var update = flag.Bool("update", false, "rewrite the golden files")

var at = time.Date(2026, 11, 21, 14, 23, 1, 160e6, time.UTC)

// remote fills the receipt of a chat that went remote.
func remote(r *Receipt) {
	r.RequestID, r.Endpoint, r.Model, r.Stream, r.ConfigRevision = "d77f-e9", "/v1/chat/completions", "small", true, 3
	r.Inputs = decision.Inputs{ISL: 3010, ISLSource: "local", BlockSize: 64, HashedBlocks: 47, Threshold: 2048, ThresholdOn: "eff_isl", Draw: 42}
	r.Path, r.Reason, r.ReasonText, r.EffISL, r.Connector = "remote", "eff_isl_above_threshold", "eff_isl 2946 >= 2048", 2946, "nixl"
	r.Decode = decision.Phase{Policy: "kv", Verdict: "chosen", Chosen: "decode-2/dp0", RunnerUp: "decode-1/dp0", MarginBlocks: 3.97, Eligible: 2, Candidates: r.Decode.Candidates}
	r.Decode.Add(&decision.Candidate{Rank: "decode-2/dp0", OverlapBlocks: 1, Cost: 46.22, Terms: decision.Terms{Prefill: 47.03, OverlapCredit: 1, Decode: 0.19}, KVUsage: 0.5, HasLoad: true, DecodeBlocks: 12}, r.Candidates())
	r.Decode.Add(&decision.Candidate{Rank: "decode-1/dp0", Slot: 1, Cost: 50.19, Terms: decision.Terms{Prefill: 47.03, Queue: 3, Decode: 0.16}, KVUsage: math.NaN(), PrefillTokens: 768, DecodeBlocks: 10}, r.Candidates())
	r.Decode.Add(&decision.Candidate{Rank: "decode-0/dp0", Slot: 2, KVUsage: 0.91, HasLoad: true, Excluded: "busy: kv 91% > 90%", ExcludedCode: "kv_usage"}, r.Candidates())
	r.Prefill = decision.Phase{Policy: "kv", Verdict: "chosen", Chosen: "prefill-1/dp0", Eligible: 1, Candidates: r.Prefill.Candidates}
	r.Prefill.Add(&decision.Candidate{Rank: "prefill-1/dp0", Cost: 47.03, Terms: decision.Terms{Prefill: 47.03}, KVUsage: -1}, r.Candidates())
	r.Predicted = decision.Prediction{CachedTokens: 64, RemoteTokens: 2946, Local: decision.Work{Compute: 2946, Queued: 0}, Remote: decision.Work{Compute: 3010, Queued: 512, Transfer: 2946}, HasRemote: true}
	i := r.AddLeg(NewLeg("prefill", "prefill-1", "prefill-1/dp0", 1))
	l := r.Leg(i)
	l.DispatchMS, l.FirstByteMS, l.EndMS, l.Status = 0.4, 570.2, 570.3, 200
	i = r.AddLeg(NewLeg("decode", "decode-2", "decode-2/dp0", 1))
	l = r.Leg(i)
	l.DispatchMS = 570.5
}

func finish(r *Receipt) {
	l := r.Leg(1)
	l.FirstByteMS, l.EndMS, l.Status = 611, 1840.5, 200
	r.Outcome = Outcome{Status: 200, Finish: "length", PromptTokens: 3010, CachedTokens: 64, CompletionTokens: 128, TTFTMS: 611, E2EMS: 1840.5, ITL: Gaps{Count: 127, MeanMS: 9.7, P50MS: 9.5, P99MS: 14, MaxMS: 20}}
}

// TestTiersAreColumns: a tier has a column where a candidate has blocks in it, and none
// otherwise.
func TestTiersAreColumns(t *testing.T) {
	p := decision.Phase{Policy: "kv", Verdict: "chosen", Chosen: "a/dp0", RunnerUp: "b/dp0", Eligible: 2}
	p.Add(&decision.Candidate{Rank: "a/dp0", OverlapBlocks: 2, Tiers: route.Tiers{CPU: 7}, Cost: 2.4, Terms: decision.Terms{Prefill: 10, OverlapCredit: 7.6}}, 2)
	p.Add(&decision.Candidate{Rank: "b/dp0", OverlapBlocks: 3, Tiers: route.Tiers{Remote: 6}, Cost: 7, Terms: decision.Terms{Prefill: 10, OverlapCredit: 3}}, 2)
	var b strings.Builder
	phase(&b, "2 decode  ", &p)
	var rows [][]string
	for line := range strings.Lines(b.String()) {
		rows = append(rows, strings.Fields(line))
	}
	if len(rows) != 4 || !slices.Equal(rows[1][:4], []string{"RANK", "OVERLAP", "CPU", "REMOTE"}) ||
		!slices.Equal(rows[2][:5], []string{">", "a/dp0", "2", "7", "0"}) || !slices.Equal(rows[3][:4], []string{"b/dp0", "3", "0", "6"}) {
		t.Errorf("shown as\n%s", b.String())
	}
	if !strings.Contains(b.String(), "its cache counts 4.6 blocks more, tiers beside the device included") {
		t.Errorf("the reason is missing:\n%s", b.String())
	}
}

// TestPromptLine: an estimate says that it does not count images, and an expected answer is
// shown where there is one.
func TestPromptLine(t *testing.T) {
	line := func(in decision.Inputs) string {
		var b strings.Builder
		if err := (&Receipt{Decision: decision.Decision{Inputs: in}}).Explain(&b); err != nil {
			t.Fatal(err)
		}
		_, after, _ := strings.Cut(b.String(), "1 prompt     ")
		text, _, _ := strings.Cut(after, "\n")
		return text
	}
	in := decision.Inputs{ISL: 20, ISLSource: "estimate", HashedBlocks: 1, Approximate: true, Multimodal: true, Output: 150}
	if got, want := line(in), "20 tokens (estimate of its text, and media by what was learned of others), 1 text chunks: overlaps are approximate; each answer is expected to have 150 tokens"; got != want {
		t.Errorf("%s", got)
	}
	in = decision.Inputs{ISL: 20, ISLSource: "engine", HashedBlocks: 1, BlockSize: 16, Multimodal: true}
	if got, want := line(in), "20 tokens (engine) -> 1 full blocks of 16"; got != want {
		t.Errorf("%s", got)
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("%s (-want +got)\n%s", name, d)
	}
}

func TestGolden(t *testing.T) {
	ring := NewRing(Options{Epoch: 0xd1c7})
	running := ring.Begin(at)
	running.Update(remote)
	done := ring.Begin(at)
	done.Update(remote)
	done.Finish(finish)
	local := ring.Begin(at)
	local.Update(func(r *Receipt) {
		remote(r)
		r.Path, r.Reason, r.ReasonText, r.Connector = "local", "eff_isl_below_threshold", "eff_isl 2946 < 4096", ""
		r.Legs = r.Legs[:0]
		r.Decode.Candidates[1].Cost, r.Decode.MarginBlocks = r.Decode.Candidates[0].Cost, 0
		r.Decode.Tied, r.Decode.TieBreak = 2, "overlap"
		l := r.Leg(r.AddLeg(NewLeg("decode", "decode-2", "decode-2/dp0", 1)))
		l.DispatchMS, l.EndMS, l.Error, l.RetryReason = 0.5, 2.5, "connection refused", "refused before the first byte"
		r.Decode.Candidates[1].OverlapBlocks, r.Decode.Candidates[1].CacheUnknown = 0, true
		r.Note("decode-2 refused; decode-1 took over")
	})
	local.Finish(func(r *Receipt) {
		r.Outcome.Status, r.Outcome.ErrorCode, r.Outcome.Error, r.Outcome.Cancelled = 499, "client_closed", "client_closed: the client closed the connection: connection refused", true
	})
	none := ring.Begin(at)
	none.Finish(func(r *Receipt) {
		r.Reason, r.ReasonText = "no_decode_worker", "no decode worker serves model x"
		r.Decode.Verdict, r.Decode.Policy = "no_candidates", "kv"
		r.Outcome.Status, r.Outcome.ErrorCode = 503, "no_decode_worker"
	})
	for name, l := range map[string]Live{"running.txt": running, "remote.txt": done, "local.txt": local, "none.txt": none} {
		r, ok := ring.Find(l.ID())
		if !ok {
			t.Fatalf("%s: receipt is gone", name)
		}
		var b bytes.Buffer
		if err := r.Explain(&b); err != nil {
			t.Fatal(err)
		}
		golden(t, name, b.Bytes())
	}
	r, _ := ring.Find(done.ID())
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "remote.json", append(b, '\n'))
	var back Receipt
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(*r, back, cmpopts.IgnoreUnexported(Receipt{})); d != "" {
		t.Errorf("read back: %s", d)
	}
}

func TestLiveAndFinished(t *testing.T) {
	ring := NewRing(Options{Capacity: 4})
	l := ring.Begin(at)
	if !l.Update(remote) {
		t.Fatal("a running receipt cannot be changed")
	}
	copied, ok := ring.Find(l.ID())
	if !ok || !copied.Live || copied.Decode.Chosen != "decode-2/dp0" {
		t.Fatalf("live copy: %+v", copied)
	}
	copied.Decode.Candidates[0].Rank, copied.Legs[0].Worker = "changed", "changed"
	if again, _ := ring.Find(l.ID()); again.Decode.Candidates[0].Rank == "changed" || again.Legs[0].Worker == "changed" {
		t.Error("a copy shares memory with the ring")
	}
	if !l.Finish(finish) || l.Finish(finish) || l.Update(func(r *Receipt) { r.Model = "changed" }) {
		t.Error("a receipt finishes once and does not change afterwards")
	}
	if r, _ := ring.Find(l.ID()); r.Live || r.Model != "small" || r.Outcome.Status != 200 {
		t.Errorf("finished: %+v", r)
	}
	if (Live{}).Update(remote) || (Live{}).Finish(nil) || (Live{}).ID() != "" {
		t.Error("the zero handle does something")
	}
}

// TestEveryAttemptStays: what an attempt was decided from is not changed by the
// next one, whose memory it does not share, nor by who holds a copy; there is room
// for so many attempts and candidates, and what had none is counted and reported.
func TestEveryAttemptStays(t *testing.T) {
	const attempts, ranks = maxEarlier + 4, earlierCandidates + 3
	l := NewRing(Options{}).Begin(at)
	for n := range attempts {
		l.Update(func(r *Receipt) {
			r.Begin(n + 1)
			for _, p := range []*decision.Phase{&r.Decode, &r.Prefill} {
				p.Policy, p.Verdict = "kv", "chosen"
				for i := range ranks {
					p.Add(&decision.Candidate{Rank: fmt.Sprintf("attempt-%d/dp%d", n+1, i)}, r.Candidates())
				}
			}
		})
	}
	r, ok := l.ring.Find(l.ID())
	if !ok {
		t.Fatal("the receipt is gone")
	}
	type kept struct{ Attempt, Candidates, Earlier, EarlierOmitted int }
	if d := cmp.Diff(kept{attempts, ranks, maxEarlier, attempts - 1 - maxEarlier}, kept{r.Attempt, len(r.Decode.Candidates), len(r.Earlier), r.EarlierOmitted}); d != "" {
		t.Fatalf("what is kept (-want +got):\n%s", d)
	}
	for n, d := range r.Earlier {
		for _, p := range []*decision.Phase{&d.Decode, &d.Prefill} {
			if d.Attempt != n+1 || len(p.Candidates) != earlierCandidates || p.Omitted != ranks-earlierCandidates {
				t.Errorf("attempt %d is %d, with %d candidates and %d omitted", n+1, d.Attempt, len(p.Candidates), p.Omitted)
			}
			for i, c := range p.Candidates {
				if want := fmt.Sprintf("attempt-%d/dp%d", n+1, i); c.Rank != want {
					t.Errorf("candidate %s is now %s", want, c.Rank)
				}
			}
		}
	}
	var text strings.Builder
	if err := r.Explain(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"attempt 1\n", "attempt-1/dp0", "attempt 16\n", "attempt-16/dp7", "and 3 attempts more\n", "attempt 20, the last\n", "attempt-20/dp10"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("explain says no %q", want)
		}
	}
	r.Earlier[0].Reason, r.Earlier[0].Decode.Candidates[0].Rank = "changed", "changed"
	if again, _ := l.ring.Find(l.ID()); again.Earlier[0].Reason == "changed" || again.Earlier[0].Decode.Candidates[0].Rank == "changed" {
		t.Error("a copy shares memory with the ring")
	}
}

// TestOtherIDs: a receipt that was given another id, as those of a recording are,
// is found by it, and the cursor of a list does not depend on it.
func TestOtherIDs(t *testing.T) {
	ring := NewRing(Options{Capacity: 4, Epoch: 1})
	for i := range 6 {
		l := ring.Begin(at)
		l.Update(func(r *Receipt) { r.ID, r.RequestID = fmt.Sprint("id-", i), fmt.Sprint("req-", i) })
		l.Finish(nil)
	}
	for i := range 6 {
		for _, id := range []string{fmt.Sprint("id-", i), fmt.Sprint("req-", i)} {
			if r, ok := ring.Find(id); ok != (i >= 2) || ok && r.ID != fmt.Sprint("id-", i) {
				t.Errorf("%s: %v, %v", id, r, ok)
			}
		}
	}
	var got []string
	for cursor := ""; ; {
		list, next, err := ring.List(Query{Limit: 3, Before: cursor})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			got = append(got, r.ID)
		}
		if cursor = next; cursor == "" {
			break
		}
	}
	if want := "[id-5 id-4 id-3 id-2]"; fmt.Sprint(got) != want {
		t.Errorf("the list is %v, want %s", got, want)
	}
}

// A handle does not reach the receipt that uses its memory next.
func TestStaleHandle(t *testing.T) {
	ring := NewRing(Options{Capacity: 1})
	var old []Live
	for range 5 {
		l := ring.Begin(at)
		l.Finish(nil)
		old = append(old, l)
	}
	now := ring.Begin(at)
	for _, l := range old {
		if l.Update(func(r *Receipt) { r.Model = "stale" }) || l.Finish(nil) {
			t.Error("a stale handle works")
		}
	}
	if r, ok := ring.Find(now.ID()); !ok || r.Model != "" {
		t.Errorf("%+v", r)
	}
}

// The outcome of a long request is kept though newer decisions pushed it out
// while it ran.
func TestPushedOutComesBack(t *testing.T) {
	ring := NewRing(Options{Capacity: 4})
	long := ring.Begin(at)
	long.Update(func(r *Receipt) { r.RequestID = "long" })
	for range 9 {
		ring.Begin(at).Finish(nil)
	}
	if _, ok := ring.Find(long.ID()); ok {
		t.Error("it was not pushed out")
	}
	if got := ring.Stats(); got != (Stats{Total: 10, Live: 1, Capacity: 4, PushedOut: 1}) {
		t.Errorf("%+v", got)
	}
	if !long.Finish(finish) {
		t.Error("it cannot be finished")
	}
	if r, ok := ring.Find(long.ID()); !ok || r.Outcome.Status != 200 {
		t.Errorf("by id: %v", ok)
	}
	if r, ok := ring.Find("long"); !ok || r.ID != long.ID() {
		t.Errorf("by request: %v", ok)
	}
}

func TestLookups(t *testing.T) {
	ring := NewRing(Options{Capacity: 8, Epoch: 7})
	var ids []string
	for i := range 5 {
		l := ring.Begin(at)
		l.Update(func(r *Receipt) { r.RequestID = fmt.Sprint("req-", i%2) })
		ids = append(ids, l.ID())
	}
	if r, ok := ring.Find("req-0"); !ok || r.ID != ids[4] {
		t.Errorf("the newest of a request id is %v", r)
	}
	for _, id := range []string{"", "x", "0000000700000000000", "00000008000000000001", "00000007000000000009", "00000007000000000000", strings.Repeat("0", 5000)} {
		if _, ok := ring.Find(id); ok {
			t.Errorf("Find(%.30q) found something", id)
		}
	}
	if _, ok := ring.Find("nobody"); ok {
		t.Error("an unknown request id was found")
	}
}

func TestList(t *testing.T) {
	ring := NewRing(Options{Capacity: 16, Epoch: 7})
	for i := range 20 {
		l := ring.Begin(at)
		l.Update(func(r *Receipt) {
			r.RequestID = fmt.Sprint("r", i)
			r.Path = []string{"local", "remote"}[i%2]
			r.Model = []string{"a", "b"}[i/10]
			r.Decode.Chosen = fmt.Sprintf("decode-%d/dp0", i%3)
		})
		if i%4 != 0 {
			l.Finish(func(r *Receipt) { r.Outcome.Status = 200 + 300*(i%5/4) })
		}
	}
	all := func(q Query) (got []string) {
		t.Helper()
		for {
			list, cursor, err := ring.List(q)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range list {
				got = append(got, r.RequestID)
			}
			if cursor == "" {
				return got
			}
			if len(list) != q.Limit {
				t.Fatalf("a page of %d with limit %d has a cursor", len(list), q.Limit)
			}
			q.Before = cursor
		}
	}
	for _, tt := range []struct {
		name string
		q    Query
		want string
	}{
		{"all, newest first", Query{}, "r19 r18 r17 r16 r15 r14 r13 r12 r11 r10 r9 r8 r7 r6 r5 r4"},
		{"pages", Query{Limit: 3}, "r19 r18 r17 r16 r15 r14 r13 r12 r11 r10 r9 r8 r7 r6 r5 r4"},
		{"pages that end with the list", Query{Limit: 4}, "r19 r18 r17 r16 r15 r14 r13 r12 r11 r10 r9 r8 r7 r6 r5 r4"},
		{"path", Query{Path: "remote", Limit: 2}, "r19 r17 r15 r13 r11 r9 r7 r5"},
		{"model", Query{Model: "a"}, "r9 r8 r7 r6 r5 r4"},
		{"live", Query{State: "live"}, "r16 r12 r8 r4"},
		{"done", Query{State: "done", Model: "a"}, "r9 r7 r6 r5"},
		{"worker", Query{Worker: "decode-1"}, "r19 r16 r13 r10 r7 r4"},
		{"rank", Query{Worker: "decode-1/dp0", Model: "a"}, "r7 r4"},
		{"no part of a name", Query{Worker: "decode"}, ""},
		{"status", Query{MinStatus: 500}, "r19 r14 r9"},
		{"text", Query{Text: "r1"}, "r19 r18 r17 r16 r15 r14 r13 r12 r11 r10"},
	} {
		if got := strings.Join(all(tt.q), " "); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
	if _, _, err := ring.List(Query{Before: "nonsense"}); err == nil {
		t.Error("a foreign cursor is accepted")
	}
	if l, _, err := ring.List(Query{Before: ring.id(0)}); err != nil || len(l) != 0 {
		t.Errorf("before the first: %d, %v", len(l), err)
	}
}

func TestBounds(t *testing.T) {
	ring := NewRing(Options{Capacity: 2, Candidates: 3})
	l := ring.Begin(at)
	l.Update(func(r *Receipt) {
		for range 10 {
			r.Decode.Add(&decision.Candidate{Cost: math.Inf(1), KVUsage: math.NaN()}, r.Candidates())
		}
		for i := range 20 {
			r.Leg(r.AddLeg(NewLeg("decode", "w", "w/dp0", i))).Error = strings.Repeat("x", 5000)
			r.Note(strings.Repeat("n", 5000))
		}
		r.Outcome.Error = strings.Repeat("e", 5000)
	})
	r, _ := ring.Find(l.ID())
	type kept struct{ Candidates, CandidatesOmitted, Legs, LegsOmitted, Notes int }
	if d := cmp.Diff(kept{3, 7, maxLegs, 4, maxNotes}, kept{len(r.Decode.Candidates), r.Decode.Omitted, len(r.Legs), r.LegsOmitted, len(r.Notes)}); d != "" {
		t.Errorf("what is kept (-want +got):\n%s", d)
	}
	if len(r.Legs[0].Error) != maxText || len(r.Notes[0]) != maxText || len(r.Outcome.Error) != maxText {
		t.Error("a text is too long")
	}
	if _, err := json.Marshal(r); err != nil {
		t.Errorf("a receipt that is no JSON: %v", err)
	}
	if err := r.Explain(&bytes.Buffer{}); err != nil {
		t.Error(err)
	}
}

func TestOnFinish(t *testing.T) {
	var got []string
	ring := NewRing(Options{OnFinish: func(r *Receipt) { got = append(got, fmt.Sprintf("%s %v %d", r.RequestID, r.Live, r.Outcome.Status)) }})
	l := ring.Begin(at)
	l.Update(func(r *Receipt) { r.RequestID = "a" })
	l.Finish(func(r *Receipt) { r.Outcome.Status = 200 })
	l.Finish(nil)
	if d := cmp.Diff([]string{"a false 200"}, got); d != "" {
		t.Error(d)
	}
}

// Many write and read at once; no reader ever sees parts of two receipts.
func TestConcurrent(t *testing.T) {
	ring := NewRing(Options{Capacity: 16})
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	check := func(r *Receipt) {
		for _, c := range r.Decode.Candidates {
			if c.Rank != r.RequestID {
				t.Errorf("a receipt of %q holds a candidate of %q", r.RequestID, c.Rank)
			}
		}
	}
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				list, _, err := ring.List(Query{})
				if err != nil {
					t.Error(err)
				}
				for _, r := range list {
					check(r)
					if r, ok := ring.Find(r.ID); ok {
						check(r)
					}
				}
				if r, ok := ring.Find("w3"); ok {
					check(r)
				}
			}
		})
	}
	for w := range 6 {
		writers.Go(func() {
			name := fmt.Sprint("w", w)
			for i := range 500 {
				l := ring.Begin(at)
				l.Update(func(r *Receipt) {
					r.RequestID = name
					for range 1 + i%5 {
						r.Decode.Add(&decision.Candidate{Rank: name}, r.Candidates())
					}
				})
				if i%3 == 0 {
					ring.Begin(at).Finish(nil)
				}
				if !l.Finish(func(r *Receipt) { r.Outcome.Status = 200 }) {
					t.Error("a running receipt cannot be finished")
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	if s := ring.Stats(); s.Live != 0 || s.Total != 6*(500+167) {
		t.Errorf("%+v", s)
	}
	if n := len(ring.free); n > 16 {
		t.Errorf("%d free entries are kept", n)
	}
}

func write(ring *Ring, ranks int) {
	l := ring.Begin(at)
	l.Update(func(r *Receipt) {
		r.RequestID, r.Path = "x", "remote"
		for range ranks {
			r.Decode.Add(&decision.Candidate{Rank: "decode-0/dp0", Cost: 1}, r.Candidates())
			r.Prefill.Add(&decision.Candidate{Rank: "prefill-0/dp0", Cost: 1}, r.Candidates())
		}
		r.AddLeg(NewLeg("prefill", "p", "p/dp0", 1))
		r.AddLeg(NewLeg("decode", "d", "d/dp0", 1))
	})
	l.Finish(func(r *Receipt) { r.Outcome.Status = 200 })
}

// In steady state a receipt costs one allocation: its id.
func TestWriteAllocations(t *testing.T) {
	ring := NewRing(Options{Capacity: 8})
	for range 64 {
		write(ring, 16)
	}
	if n := testing.AllocsPerRun(200, func() { write(ring, 16) }); n > 1 {
		t.Errorf("%v allocations, want at most 1", n)
	}
}

func BenchmarkWrite(b *testing.B) {
	for _, ranks := range []int{4, 64} {
		b.Run(fmt.Sprint(ranks), func(b *testing.B) {
			ring := NewRing(Options{Capacity: 4096})
			for range 3 * 4096 {
				write(ring, ranks)
			}
			b.ReportAllocs()
			for b.Loop() {
				write(ring, ranks)
			}
		})
	}
}

func BenchmarkByRequest(b *testing.B) {
	ring := NewRing(Options{Capacity: 4096})
	for range 2 * 4096 {
		write(ring, 4)
	}
	for b.Loop() {
		ring.Find("nobody")
	}
}

// TestWhySession: a session that stays lives on its rank; one that is new or could not stay
// was placed by load, and the receipt says which.
func TestWhySession(t *testing.T) {
	for home, want := range map[string]string{
		"":        "a/dp0 by session: the session lives there\n",
		"a/dp0":   "a/dp0 by session: the session lives there\n",
		"new":     "a/dp0 by session: a new session; 2 requests, runner-up b/dp0 has 2; tie of 2 ranks, first by the session's hash\n",
		"old/dp0": "a/dp0 by session: the session could not stay on old/dp0; 2 requests, runner-up b/dp0 has 2; tie of 2 ranks, first by the session's hash\n",
	} {
		var b strings.Builder
		phase(&b, "2 decode  ", &decision.Phase{
			Policy: "session", Verdict: "chosen", Chosen: "a/dp0", RunnerUp: "b/dp0", Eligible: 2, Tied: 2, TieBreak: "session", Home: home,
			Candidates: []decision.Candidate{{Rank: "a/dp0", Cost: 2}, {Rank: "b/dp0", Cost: 2}},
		})
		if !strings.Contains(b.String(), want) {
			t.Errorf("home %q:\n%s\nwant %s", home, b.String(), want)
		}
	}
}
