package replay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
)

func TestPlay(t *testing.T) {
	rec := newRecording(t).run(100)
	raw := rec.file()
	whole := play(t, raw, Options{})
	want := whole.Counts
	want.Batches, want.Gaps = 100, 0
	if d := cmp.Diff(want, whole.Counts); d != "" {
		t.Errorf("what was counted (-want +got):\n%s", d)
	}
	if whole.Decisions != 100 || len(whole.Ranks) != testRanks || whole.ApplyMax == 0 {
		t.Errorf("%d decisions, %d ranks, %v at most for a batch", whole.Decisions, len(whole.Ranks), whole.ApplyMax)
	}
	// Up to a line.
	var at int64
	rep := play(t, raw, Options{At: 50, Each: func(rec *trace.Record, p *Player) error {
		at = rec.Line
		return Show(io.Discard, rec, p)
	}})
	if at != 50 || rep.Lines != 50 {
		t.Errorf("stopped at line %d of %d", at, rep.Lines)
	}
	// A window of time.
	from, to := whole.Span/3, 2*whole.Span/3
	if rep = play(t, raw, Options{From: from, To: to}); rep.Decisions >= 60 || rep.Decisions < 10 || rep.Span > to {
		t.Errorf("%d decisions in a third, span %v", rep.Decisions, rep.Span)
	}
	// A gap that nothing accounts for.
	for i := range rec.recs {
		if rec.recs[i].Kind == trace.KindBatch && rec.recs[i].Batch.Seq == 3 {
			if rep = play(t, rec.file(i), Options{}); rep.Counts.Gaps != 1 || rep.Counts.Missing != 1 {
				t.Errorf("gaps %d, missing %d", rep.Counts.Gaps, rep.Counts.Missing)
			}
			break
		}
	}
	// In time: ten times faster than recorded.
	start := time.Now()
	play(t, raw, Options{Speed: 10})
	if took := time.Since(start); took < whole.Span/10-10*time.Millisecond {
		t.Errorf("%v of trace at 10x took %v", whole.Span, took)
	}
}

// TestRedecide: the same settings change nothing, round robin nearly all.
func TestRedecide(t *testing.T) {
	raw := newRecording(t).run(200).file()
	change := func(text string) []Change {
		c, err := ParseChange(text)
		if err != nil {
			t.Fatal(err)
		}
		return []Change{c}
	}
	d, err := Redecide(t.Context(), open(t, raw), change("policy=kv"))
	if err != nil || d.Decisions != 200 || d.Changed != 0 || d.RecordedHit != d.WhatIfHit {
		t.Errorf("%+v, %v", d, err)
	}
	d, err = Redecide(t.Context(), open(t, raw), change("routing.policy=round_robin"))
	if err != nil {
		t.Fatal(err)
	}
	if d.Ranks < 100 || len(d.Examples) != 5 {
		t.Errorf("%d other ranks, want 100 or more; %d examples, want 5", d.Ranks, len(d.Examples))
	}
	if d.WhatIfHit >= d.RecordedHit || d.Regret <= 0 {
		t.Errorf("hits %v, recorded %v, regret %v", d.WhatIfHit, d.RecordedHit, d.Regret)
	}
	// Whether cached blocks on a decode rank save computing or a transfer
	// follows the threshold that is asked about.
	for _, text := range []string{"threshold=0", "threshold=100000"} {
		if d, err = Redecide(t.Context(), open(t, raw), change(text)); err != nil || d.Decisions != 200 || d.Failed != 0 {
			t.Errorf("%s: %+v, %v", text, d, err)
		}
	}
	for _, bad := range []string{"policy", "policy=best", "moon=1", "threshold=-1", "threshold=auto", "isl=-1", "temperature=x", "spread=inf", "busy_kv_usage=7", "connector=pigeon", "seed=1", "tokens.path=x"} {
		if _, err := ParseChange(bad); err == nil {
			t.Errorf("%s is taken", bad)
		}
	}
}

// TestWhatIfReachesTheDecision: every setting that a what-if may name is one of
// those that a decision is made again with, and none is half set.
func TestWhatIfReachesTheDecision(t *testing.T) {
	plan := decide.Rule{Threshold: 5, On: decide.OnEffISL, Fallback: decide.FallbackLocal, PrefillGate: 5, LoadCredit: decide.LoadCredit}
	with := func(list ...Change) string {
		r := Changed(decide.Options{Rule: plan, Decode: selector.KV, Prefill: selector.Session, Weights: selector.DefaultWeights(), Busy: selector.Busy{Waiting: 5}}, list)
		return fmt.Sprintf("%+v %s %s %+v %+v", r.Rule, r.Prefill, r.Decode, r.Weights, r.Busy)
	}
	asRecorded := fmt.Sprintf("%+v %s %s %+v %+v", plan, selector.Session, selector.KV, selector.DefaultWeights(), selector.Busy{Waiting: 5})
	if got := with(); got != asRecorded {
		t.Errorf("no change gives\n%s\nof\n%s", got, asRecorded)
	}
	change := func(text string) Change {
		c, err := ParseChange(text)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	for _, key := range ChangeKeys() {
		values := []string{"0.5"}
		if row := settings.Lookup("routing." + key); row == nil {
			values[0] = "7"
		} else if row.Values != nil {
			values = row.Values
		} else {
			switch row.At(&settings.Config{}).(type) {
			case *int, *decide.Threshold:
				values[0] = "7"
			}
		}
		said := map[string]string{}
		for _, value := range values {
			text := with(change(key + "=" + value))
			if was, twice := said[text]; twice {
				t.Errorf("%s=%s gives what %s=%s gives", key, value, key, was)
			}
			said[text] = value
		}
		if _, unchanged := said[asRecorded]; unchanged && len(values) == 1 {
			t.Errorf("%s=%s changes nothing", key, values[0])
		}
	}
	for _, c := range []struct{ text, say string }{
		{"isl=9", "{Threshold:9 Auto:false On:isl "}, {"eff_isl=9", "{Threshold:9 Auto:false On:eff_isl "}, {"policy=random", " random random "},
		{"prefill-policy=random", " random kv "}, {"routing.decode_policy=random", " session random "}, {"prefill_policy=", " kv kv "},
	} {
		if got := with(change(c.text)); !strings.Contains(got, c.say) {
			t.Errorf("%s gives %s, want %q in it", c.text, got, c.say)
		}
	}
	if got := with(change("decode_policy=random"), change("policy=least_loaded"), change("prefill_policy=random")); !strings.Contains(got, " random least_loaded ") {
		t.Errorf("one after the other: %s", got)
	}
}

// TestStartGateAsRecorded: decisions of a threshold that was auto are made again with the
// gate of their recording, also where there was none yet.
func TestStartGateAsRecorded(t *testing.T) {
	for _, c := range []struct {
		recorded int
		change   []string
		want     int
	}{{0, nil, 0}, {5, nil, 5}, {5, []string{"policy=random"}, 5}, {5, []string{"threshold=9"}, 0}} {
		var list []Change
		for _, text := range c.change {
			one, err := ParseChange(text)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, one)
		}
		s := decide.Options{Rule: decide.Rule{Threshold: 2048, Auto: true, StartGate: c.recorded}, Decode: selector.KV, Prefill: selector.KV}
		if got := Changed(s, list).Rule.StartGate; got != c.want {
			t.Errorf("recorded with %d, %v: %d, want %d", c.recorded, c.change, got, c.want)
		}
	}
}

// TestConvert: lines of Dynamo's recorder are played the same as a recording of our own,
// and the decisions of a recording are Mooncake's requests.
func TestConvert(t *testing.T) {
	again := func(p []byte) func() (*trace.Reader, error) {
		return func() (*trace.Reader, error) { return trace.NewReader(bytes.NewReader(p), "t", trace.Options{}) }
	}
	dynamo := []byte(`{"timestamp":0,"event":{"worker_id":7,"event":{"event_id":0,"data":{"stored":{"parent_hash":null,"blocks":[{"block_hash":1,"tokens_hash":11},{"block_hash":2,"tokens_hash":12},{"block_hash":3,"tokens_hash":13}]}}}}}
{"timestamp":1,"event":{"worker_id":8,"event":{"event_id":0,"dp_rank":1,"data":{"stored":{"parent_hash":null,"blocks":[{"block_hash":4,"tokens_hash":11}]}}}}}
{"timestamp":2,"event":{"worker_id":7,"event":{"event_id":1,"data":{"removed":{"block_hashes":[3]}}}}}
`)
	var own bytes.Buffer
	if n, err := Convert(again(dynamo), &own, ConvertOptions{To: trace.Own}); err != nil || n != 3 {
		t.Fatalf("%d records, %v", n, err)
	}
	want, got := play(t, dynamo, Options{}), play(t, own.Bytes(), Options{})
	if want.Blocks != 3 || want.Distinct != 2 || want.Checksum == "" {
		t.Errorf("%d blocks (%d distinct), checksum %q", want.Blocks, want.Distinct, want.Checksum)
	}
	if got.Blocks != want.Blocks || got.Checksum != want.Checksum {
		t.Errorf("%d blocks of %q after the conversion, want %d of %q", got.Blocks, got.Checksum, want.Blocks, want.Checksum)
	}
	raw := newRecording(t).run(150).file()
	var moon bytes.Buffer
	if _, err := Convert(again(raw), &moon, ConvertOptions{To: trace.Mooncake}); err != nil {
		t.Fatal(err)
	}
	src, err := arrivals.FromTrace(again(moon.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	if s, err := arrivals.Describe(src); err != nil || s.Requests != 150 || s.BlockSize != 512 {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := Convert(again(raw), &moon, ConvertOptions{To: trace.Capture}); err == nil {
		t.Error("captures can be written")
	}
}

// TestRecordingInTheMiddle: a rank whose feed began before the recording may hold
// anything until a batch or a word of the router's says more.
func TestRecordingInTheMiddle(t *testing.T) {
	rec := newRecording(t).run(60)
	rec.recs[0].RankInfo.New = false // and so of others
	for i := range rec.recs {
		rec.recs[i].RankInfo.New = false
	}
	whole := play(t, rec.file(), Options{Verify: true}).Verify
	if whole.Proven != 60 || whole.Unknown != 0 { // their first batches are number 0
		t.Errorf("%+v", whole)
	}
	cut := *rec
	cut.recs = append(slices.Clone(rec.recs[:2*testRanks]), rec.recs[len(rec.recs)/2:]...)
	v := play(t, cut.file(), Options{Verify: true}).Verify
	if v.Divergent() != 0 || v.Equal != v.Decisions {
		t.Errorf("%d of %d decisions are equal, %d divergent", v.Equal, v.Decisions, v.Divergent())
	}
	if v.InputsDiffer != 0 || v.Unknown == 0 || v.Unproven == 0 {
		t.Errorf("inputs: %d differ, %d are unknown, %d taken on trust; first %+v", v.InputsDiffer, v.Unknown, v.Unproven, v.FirstInput)
	}
	// What was taken as it was recorded is no reason for another choice.
	for i := range cut.recs {
		if d := cut.recs[i].Decision; d != nil {
			other := *d
			other.DecodeRank = "x/dp0"
			cut.recs[i].Decision = &other
		}
	}
	v = play(t, cut.file(), Options{Verify: true}).Verify
	if v.Real != v.Decisions || v.Unknown == 0 {
		t.Errorf("%d of %d decisions differ, %d inputs are unknown", v.Real, v.Decisions, v.Unknown)
	}
	if v.First == nil || !strings.Contains(v.First.Because[0], "the inputs are the same") {
		t.Errorf("first %+v", v.First)
	}
	if v.FirstTaken == nil || !strings.Contains(v.FirstTaken.Because[0], "began with is not in the recording") {
		t.Errorf("first with recorded figures %+v", v.FirstTaken)
	}
}

// TestReturnedWithCopy: a rank that left and came back with another router's copy does not have
// the blocks that it had before, and may have any that the recording lacks.
func TestReturnedWithCopy(t *testing.T) {
	r := newRecording(t)
	had, copied := r.prompt(), []uint32{}
	for i := range 4 * testBlock {
		copied = append(copied, uint32(99_000+i))
	}
	r.batch(0, had)
	r.decide(had)
	r.add(trace.Record{Kind: trace.KindRank, Rank: rankName(0), RankInfo: trace.RankInfo{BlockSize: testBlock, Kept: true}})
	r.add(trace.Record{Kind: trace.KindFeed, Rank: rankName(0), Trusted: true})
	r.now += time.Second // past all that a decision may have seen
	found := func() int {
		d := r.recs[len(r.recs)-1].Decision
		return d.Input.Decode.Candidates[0].OverlapBlocks
	}
	r.decide(had)
	if n := found(); n != 0 {
		t.Errorf("%d blocks of before are found", n)
	}
	r.decide(copied)
	d := r.recs[len(r.recs)-1].Decision
	d.Input.Decode.Candidates[0].OverlapBlocks = 4
	plan(d)
	v := play(t, r.file(), Options{Verify: true}).Verify
	if v.Decisions != 3 || v.Proven != 2 || v.Unproven != 1 || v.Unknown != 1 || v.InputsDiffer != 0 {
		t.Errorf("%+v, %+v", v, v.FirstInput)
	}
}

// TestForgottenIsReported: a trace that describes more than is kept says so in its report,
// and what refers to it is unverifiable.
func TestForgottenIsReported(t *testing.T) {
	raw := newRecording(t).run(3).file()
	i := bytes.Index(raw, []byte(`{"kind":"decision"`))
	var many bytes.Buffer
	for n := range 3 << 15 {
		fmt.Fprintf(&many, `{"kind":"worker","t_us":1,"n":%d,"worker":"x"}`+"\n", 1000+n)
	}
	rep := play(t, slices.Concat(raw[:i], many.Bytes(), raw[i:]), Options{Verify: true})
	var text strings.Builder
	if err := rep.Text(&text); err != nil {
		t.Fatal(err)
	}
	if v := rep.Verify; rep.Forgotten == 0 || v.Unverifiable != 3 || !strings.Contains(v.FirstLack, "is not in the recording") || !strings.Contains(text.String(), "more settings and workers than are kept") {
		t.Errorf("%+v\n%s", v, &text)
	}
}

// TestReportJSON: the report can be written, whatever is in it.
func TestReportJSON(t *testing.T) {
	rep := play(t, newRecording(t).run(3).file(), Options{Verify: true})
	if _, err := json.Marshal(rep); err != nil {
		t.Error(err)
	}
	if _, err := Play(t.Context(), open(t, append(newRecording(t).file(), "{bad\n"...)), Options{}); err == nil {
		t.Error("a bad line is passed over")
	} else if line := new(trace.LineError); !errors.As(err, &line) || line.Line != 11 {
		t.Errorf("error %v", err)
	}
}

// BenchmarkReplay is what a core does with a recording in the project's own
// format, parsing included: blocks stored or removed per second.
func BenchmarkReplay(b *testing.B) {
	for _, form := range []string{"batches", "hashes"} {
		b.Run(form, func(b *testing.B) {
			raw, blocks := benchTrace(b, form == "hashes")
			b.SetBytes(int64(len(raw)))
			b.ReportAllocs()
			for b.Loop() {
				r, err := trace.NewReader(bytes.NewReader(raw), "t", trace.Options{})
				if err != nil {
					b.Fatal(err)
				}
				rep, err := Play(b.Context(), r, Options{})
				if err != nil {
					b.Fatal(err)
				}
				if n := rep.Counts.Stored + rep.Counts.Removed; n != blocks {
					b.Fatalf("%d blocks, want %d", n, blocks)
				}
			}
			b.ReportMetric(float64(blocks)*float64(b.N)/b.Elapsed().Seconds(), "blocks/s")
		})
	}
}

// benchTrace is 16 ranks that store chains of 32 blocks and remove the oldest.
func benchTrace(b *testing.B, hashes bool) ([]byte, uint64) {
	const chains, ranks, keep = 500, 16, 200
	p, _ := trace.AppendHeader(nil, trace.Header{BlockSize: testBlock})
	rng := rand.New(rand.NewPCG(3, 4))
	blocks := uint64(0)
	var held [ranks][][]uint64
	for seq := range uint64(chains) {
		for rank := range ranks {
			tokens := make([]uint32, 32*testBlock)
			names := make([]uint64, 32)
			for i := range tokens {
				tokens[i] = rng.Uint32N(150000)
			}
			for i := range names {
				names[i] = rng.Uint64()
			}
			rec := trace.Record{Kind: trace.KindBatch, Rank: rankName(rank), Batch: trace.Batch{Seq: seq}}
			batch := kvevent.Batch{Rank: -1, Events: []kvevent.Event{{Kind: kvevent.Stored, Group: -1, Hashes: names, Tokens: tokens, BlockSize: testBlock}}}
			blocks += 32
			held[rank] = append(held[rank], names)
			var gone []uint64
			if len(held[rank]) > keep {
				for i := range held[rank][0] {
					gone = append(gone, held[rank][0][31-i])
				}
				held[rank] = held[rank][1:]
				batch.Events = append(batch.Events, kvevent.Event{Kind: kvevent.Removed, Group: -1, Hashes: gone})
				blocks += 32
			}
			var err error
			if hashes {
				rec.Kind, rec.Event = trace.KindEvent, trace.Event{ID: seq, Op: trace.Stored, Names: names, Locals: blockhash.Locals(nil, tokens, testBlock, blockhash.Key{}), Start: -1}
				if p, err = trace.AppendRecord(p, &rec); err != nil {
					b.Fatal(err)
				}
				if gone == nil {
					continue
				}
				rec.Event = trace.Event{ID: seq, Op: trace.Removed, Names: gone, Start: -1}
			} else {
				rec.Batch.Payload = kvevent.AppendBatch(nil, &batch, kvevent.Encoding{})
			}
			if p, err = trace.AppendRecord(p, &rec); err != nil {
				b.Fatal(err)
			}
		}
	}
	return p, blocks
}
