package replay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/bench/replay/workload"
	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/router/blockhash"
	"github.com/dynctl/dynctl/internal/router/decide"
	"github.com/dynctl/dynctl/internal/router/decision"
	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/kvevent"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/router/receipt"
	"github.com/dynctl/dynctl/internal/router/selector"
	"github.com/dynctl/dynctl/internal/router/trace"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// recording is a made-up run of a router over a few ranks, written as serve
// would: batches of real msgpack, decisions with what the index knew then.
type recording struct {
	t     testing.TB
	p     *Player
	rng   *rand.Rand
	now   time.Duration
	recs  []trace.Record
	seq   map[string]uint64
	names map[string][]uint64
	made  int
	// offloads says that ranks tell of copies in the memory of their hosts.
	offloads bool
	// hybrid says that ranks tell of a second cache group, whose blocks they keep of every
	// other batch only.
	hybrid bool
}

const (
	testBlock = 16
	testRanks = 4
)

func rankName(i int) string { return fmt.Sprintf("w-%d/dp0", i) }

func newRecording(t testing.TB) *recording {
	r := &recording{t: t, p: NewPlayer(PlayerOptions{}), rng: rand.New(rand.NewPCG(1, 2)), seq: map[string]uint64{}, names: map[string][]uint64{}}
	t.Cleanup(func() { r.p.Close() })
	for i := range testRanks {
		r.add(trace.Record{Kind: trace.KindRank, Rank: rankName(i), RankInfo: trace.RankInfo{Slot: uint32(i), BlockSize: testBlock, New: true}})
		r.add(trace.Record{Kind: trace.KindFeed, Rank: rankName(i), Trusted: true})
	}
	return r
}

func (r *recording) add(rec trace.Record) {
	r.t.Helper()
	r.now += time.Duration(r.rng.IntN(900)+100) * time.Microsecond
	rec.Time = r.now
	if rec.Kind == trace.KindBatch {
		rec.Batch.Received = r.now - 50*time.Microsecond
	}
	if err := r.p.Play(&rec); err != nil {
		r.t.Fatal(err)
	}
	r.recs = append(r.recs, rec)
}

// prompt is one of a few that share prefixes.
func (r *recording) prompt() []uint32 {
	group, n := r.rng.IntN(6), testBlock*(1+r.rng.IntN(12))
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(group*1000 + i)
	}
	return out
}

// batch stores what a rank misses of a prompt, and now and then removes.
func (r *recording) batch(i int, tokens []uint32) {
	name := rankName(i)
	var names []uint64
	for k := range len(tokens) / testBlock {
		names = append(names, workload.Mix(uint64(i)<<32^uint64(tokens[0])<<8^uint64(k)))
	}
	b := kvevent.Batch{TS: 1, Rank: 0, Events: []kvevent.Event{{Kind: kvevent.Stored, Group: -1, Hashes: names, Tokens: tokens, BlockSize: testBlock}}}
	if r.hybrid {
		full := &b.Events[0]
		full.Group, full.CacheKind = 0, kvevent.FullAttention
		window := *full
		window.Group, window.CacheKind, window.SlidingWindow = 1, kvevent.SlidingWindow, 2*testBlock
		b.Events = append(b.Events, window)
		if r.seq[name]%2 == 1 {
			b.Events = append(b.Events, kvevent.Event{Kind: kvevent.Removed, Group: 1, Hashes: names[len(names)-1:]})
		}
	}
	if r.offloads && r.seq[name]%3 == 0 { // as vLLM's offloading connector tells of a copy in the host's memory
		b.Events = append(b.Events, kvevent.Event{Kind: kvevent.Stored, Group: -1, Medium: kvevent.CPU, MediumName: "CPU", Hashes: names})
	}
	if len(r.names[name]) > 0 && r.rng.IntN(4) == 0 {
		last := len(r.names[name]) - 1
		b.Events = append(b.Events, kvevent.Event{Kind: kvevent.Removed, Group: -1, Hashes: r.names[name][last:]})
		r.names[name] = r.names[name][:last]
	}
	r.names[name] = append(r.names[name], names...)
	r.add(trace.Record{Kind: trace.KindBatch, Rank: name, Batch: trace.Batch{Seq: r.seq[name], Payload: kvevent.AppendBatch(nil, &b, kvevent.Encoding{})}})
	r.seq[name]++
}

// decide makes a decision from the index as it is.
func (r *recording) decide(tokens []uint32) {
	locals := blockhash.Locals(nil, tokens, testBlock, blockhash.Key{})
	var q kvindex.Query
	r.p.Overlap(locals, &q)
	in := &decide.Input{Rule: testSettings.Rule}
	in.Facts = disagg.Facts{Kind: api.Completion, ISL: len(tokens), Source: disagg.FromIDs, MaxTokens: 5, Splittable: true}
	in.Decode = selector.Input{Phase: selector.Decode, Policy: selector.KV, Weights: testSettings.Weights, ISL: len(tokens), BlockSize: testBlock, Draw: r.rng.Uint64(), Turn: uint64(r.made)}
	in.Prefill = selector.Input{Phase: selector.Prefill, Policy: selector.KV}
	for i := range testRanks {
		rank := r.p.ranks[rankName(i)]
		s, _ := r.p.index.RankStats(rank.slot)
		held, beyond := rank.usable(&q, prompt(locals, len(tokens)))
		in.Decode.Candidates = append(in.Decode.Candidates, decision.Candidate{
			Rank: rank.name, Slot: uint32(i), OverlapBlocks: held / testBlock, Tiers: beyond.Scale(1, testBlock),
			ResidentBlocks: int(s.Blocks), ActiveRequests: r.rng.IntN(3), KVUsage: -1,
		})
		in.DecodePeers = append(in.DecodePeers, disagg.Peer{Worker: testWorkers[i]})
	}
	d := &trace.Decision{
		ID: fmt.Sprint("d", r.made), Attempt: 1, BeganUS: (r.now - 20*time.Microsecond).Microseconds(), BlockSize: testBlock, Locals: locals,
		Revision: 1, Settings: testSettings, Input: in, Rules: decide.Rules,
	}
	var m maker
	m.load(d)
	d.SetPlan(in, m.decide())
	copy(in.Decode.Candidates, m.in.Decode.Candidates)
	for i := range in.Decode.Candidates {
		in.Decode.Candidates[i].Terms = decision.Terms{}
	}
	r.made++
	r.add(trace.Record{Kind: trace.KindDecision, Decision: d})
}

var (
	testSettings = &decide.Settings{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights(), Rule: decide.Rule{Threshold: 1 << 20}}
	testWorkers  = func() (list []*workers.Worker) {
		for i := range testRanks {
			list = append(list, &workers.Worker{Name: fmt.Sprint("w-", i), Engine: workers.VLLM, Role: workers.Aggregated})
		}
		return list
	}()
)

func (r *recording) run(n int) *recording {
	for range n {
		p := r.prompt()
		r.decide(p)
		r.batch(r.rng.IntN(testRanks), p)
	}
	return r
}

// file writes the records but those left out.
func (r *recording) file(skip ...int) []byte {
	p, err := trace.AppendHeader(nil, trace.Header{Source: "test", Start: time.Unix(1_800_000_000, 0)})
	if err != nil {
		r.t.Fatal(err)
	}
	book := trace.NewBook()
	for i := range r.recs {
		if len(skip) > 0 && i == skip[0] {
			continue
		}
		if p, err = book.AppendRecord(p, &r.recs[i]); err != nil {
			r.t.Fatal(err)
		}
	}
	return p
}

func open(t testing.TB, raw []byte) *trace.Reader {
	t.Helper()
	r, err := trace.NewReader(bytes.NewReader(raw), "t", trace.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func play(t testing.TB, raw []byte, o Options) *Report {
	t.Helper()
	rep, err := Play(t.Context(), open(t, raw), o)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

// TestVerify: a whole recording comes out the same; without one of its batches
// the first decision that suffers is named with the batch that is missing.
func TestVerify(t *testing.T) {
	rec := newRecording(t).run(400)
	rep := play(t, rec.file(), Options{Verify: true})
	if v := rep.Verify; v.Equal != 400 || v.Decisions != 400 || v.InputsDiffer != 0 || v.First != nil || v.FirstInput != nil {
		t.Fatalf("%d of %d equal, %d other inputs, first %+v", v.Equal, v.Decisions, v.InputsDiffer, v.First)
	}
	if want := fmt.Sprintf("%016x", rec.p.index.Checksum()); rep.Checksum != want {
		t.Errorf("checksum %s, want %s", rep.Checksum, want)
	}
	// Leave out each of some batches: whoever decides next on that rank's
	// blocks must be told.
	told, every, enough := 0, 19, 8
	if testing.Short() {
		every, enough = 97, 1
	}
	for i := range rec.recs {
		if rec.recs[i].Kind != trace.KindBatch || i%every != 0 {
			continue
		}
		v := play(t, rec.file(i), Options{Verify: true}).Verify
		if v.FirstInput == nil {
			continue // nothing ever asked for these blocks
		}
		told++
		b := rec.recs[i].Batch
		text := strings.Join(v.FirstInput.Because, "\n")
		if want := fmt.Sprintf("%s: recorded overlap", rec.recs[i].Rank); !strings.Contains(text, want) {
			t.Errorf("without batch %d of %s: %s", b.Seq, rec.recs[i].Rank, text)
		}
		last := b.Seq+1 == rec.seq[rec.recs[i].Rank]
		if want := fmt.Sprintf("batch %d of this rank is missing", b.Seq); !last && v.FirstInput.Line > int64(i)+40 && !strings.Contains(text, want) {
			t.Errorf("without batch %d of %s: no word of it in %s", b.Seq, rec.recs[i].Rank, text)
		}
		if v.Equal != v.Decisions && v.First == nil {
			t.Error("divergence without the first one")
		}
	}
	if told < enough {
		t.Errorf("only %d left out batches were noticed", told)
	}
}

// TestVerifyTiers: decisions that saw blocks of another tier are made again with them,
// and whoever lacks them says so.
func TestVerifyTiers(t *testing.T) {
	rec := newRecording(t)
	rec.offloads = true
	rec.run(200)
	saw := 0
	for i := range rec.recs {
		if d := rec.recs[i].Decision; d != nil && slices.ContainsFunc(d.Input.Decode.Candidates, func(c decision.Candidate) bool { return c.CPU > 0 }) {
			saw++
		}
	}
	if v := play(t, rec.file(), Options{Verify: true}).Verify; v.Proven != 200 || v.InputsDiffer != 0 || saw < 20 {
		t.Fatalf("%d of 200 proven, %d other inputs, %d saw another tier; first %+v", v.Proven, v.InputsDiffer, saw, v.First)
	}
	for i := range rec.recs {
		d := rec.recs[i].Decision
		if d == nil {
			continue
		}
		if at := slices.IndexFunc(d.Input.Decode.Candidates, func(c decision.Candidate) bool { return c.CPU > 0 }); at >= 0 {
			d.Input.Decode.Candidates[at].CPU += 3
			break
		}
	}
	v := play(t, rec.file(), Options{Verify: true}).Verify
	if v.InputsDiffer != 1 || v.FirstInput == nil || !strings.Contains(strings.Join(v.FirstInput.Because, ""), " cpu, 0 disk, 0 remote) blocks, replayed ") {
		t.Errorf("a recorded figure that no cache had is not told: %+v", v)
	}
}

// TestVerifyGroups: decisions over hybrid ranks are made again with what all cache groups
// can go on from; who hears of one group only says that they differ.
func TestVerifyGroups(t *testing.T) {
	rec := newRecording(t)
	rec.hybrid = true
	rec.run(200)
	if v := play(t, rec.file(), Options{Verify: true}).Verify; v.Proven != 200 || v.InputsDiffer != 0 {
		t.Fatalf("%d of 200 proven, %d other inputs; first %+v", v.Proven, v.InputsDiffer, v.First)
	}
	var d kvevent.Decoder
	var b kvevent.Batch
	for i := range rec.recs {
		if rec.recs[i].Kind != trace.KindBatch {
			continue
		}
		if err := d.Decode(rec.recs[i].Batch.Payload, &b); err != nil {
			t.Fatal(err)
		}
		b.Events = slices.DeleteFunc(b.Events, func(e kvevent.Event) bool { return e.Group == 1 })
		rec.recs[i].Batch.Payload = kvevent.AppendBatch(nil, &b, kvevent.Encoding{})
	}
	if v := play(t, rec.file(), Options{Verify: true}).Verify; v.InputsDiffer < 20 {
		t.Errorf("without the second group %d of 200 decisions have other inputs", v.InputsDiffer)
	}
}

// TestVerifyRace: a decision that saw a batch before it was recorded, or was
// recorded after one that it did not see, is reproduced; one that saw what
// arrived later is not.
func TestVerifyRace(t *testing.T) {
	build := func(t *testing.T, swap bool, late time.Duration) []byte {
		r := newRecording(t)
		p := make([]uint32, 4*testBlock)
		for i := range p {
			p[i] = uint32(i)
		}
		r.batch(0, p)
		r.batch(1, p[:testBlock])
		r.now += time.Second // out of everybody's sight
		r.batch(1, p)
		r.decide(p)
		n := len(r.recs)
		b, d := &r.recs[n-2], &r.recs[n-1]
		if swap {
			// The decision is recorded first, the batch afterwards.
			*b, *d = *d, *b
			b.Time, d.Time = d.Time-100*time.Microsecond, b.Time+200*time.Microsecond
			b.Decision.BeganUS = (b.Time - 20*time.Microsecond).Microseconds()
			d.Batch.Received = b.Time + late
		} else {
			// The batch was being applied while the decision was made.
			d.Decision.BeganUS = (b.Time - 10*time.Microsecond).Microseconds()
		}
		return r.file()
	}
	for _, tt := range []struct {
		name   string
		swap   bool
		late   time.Duration
		differ uint64
	}{
		{"applied meanwhile", false, 0, 0},
		{"arrived before, recorded after", true, -30 * time.Microsecond, 0},
		{"arrived after", true, 30 * time.Microsecond, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := play(t, build(t, tt.swap, tt.late), Options{Verify: true}).Verify
			if v.Decisions != 1 || v.InputsDiffer != tt.differ {
				t.Errorf("%d decisions, %d with other inputs, want %d; %+v", v.Decisions, v.InputsDiffer, tt.differ, v.FirstInput)
			}
		})
	}
}

// TestUntrusted: entries of a feed that is not trusted count for nothing.
func TestUntrusted(t *testing.T) {
	r := newRecording(t)
	p := r.prompt()
	r.batch(0, p)
	r.decide(p)
	r.add(trace.Record{Kind: trace.KindFeed, Rank: rankName(0), Trusted: false})
	r.decide(p)
	r.add(trace.Record{Kind: trace.KindClear, Rank: rankName(0), Clear: trace.Clear{Anew: true, Reason: "gone"}})
	r.seq[rankName(0)], r.names[rankName(0)] = 0, nil
	r.add(trace.Record{Kind: trace.KindFeed, Rank: rankName(0), Trusted: true})
	r.batch(0, p)
	r.decide(p)
	var seen []int
	for _, rec := range r.recs {
		if rec.Kind == trace.KindDecision {
			seen = append(seen, rec.Decision.Input.Decode.Candidates[0].OverlapBlocks)
		}
	}
	if seen[0] == 0 || seen[1] != 0 || seen[2] != seen[0] {
		t.Fatalf("overlaps %v", seen)
	}
	if v := play(t, r.file(), Options{Verify: true}).Verify; v.Equal != 3 || v.InputsDiffer != 0 {
		t.Errorf("%+v", v)
	}
}

func TestPlay(t *testing.T) {
	rec := newRecording(t).run(100)
	raw := rec.file()
	whole := play(t, raw, Options{})
	if whole.Decisions != 100 || whole.Counts.Batches != 100 || whole.Counts.Gaps != 0 || len(whole.Ranks) != testRanks || whole.ApplyMax == 0 {
		t.Errorf("%+v", whole)
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
	if err != nil || d.Ranks < 100 || d.WhatIfHit >= d.RecordedHit || d.Regret <= 0 || len(d.Examples) != 5 {
		t.Errorf("%+v, %v", d, err)
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
		r := Changed(decide.Settings{Rule: plan, Decode: selector.KV, Prefill: selector.Session, Weights: selector.DefaultWeights(), Busy: selector.Busy{Waiting: 5}}, list)
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
		value := "0.5"
		if row := settings.Lookup("routing." + key); row == nil {
			value = "7"
		} else if row.Values != nil {
			value = row.Values[len(row.Values)-2]
			if row.Default == value {
				value = row.Values[len(row.Values)-1]
			}
		} else {
			switch row.At(&settings.Config{}).(type) {
			case *int, *decide.Threshold:
				value = "7"
			}
		}
		if with(change(key+"="+value)) == asRecorded {
			t.Errorf("%s=%s changes nothing", key, value)
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

// TestConvert: own batches become Dynamo's recorder lines, and playing those
// leaves the very index that the batches left.
func TestConvert(t *testing.T) {
	rec := newRecording(t).run(150)
	raw := rec.file()
	again := func(p []byte) func() (*trace.Reader, error) {
		return func() (*trace.Reader, error) { return trace.NewReader(bytes.NewReader(p), "t", trace.Options{}) }
	}
	var dynamo, own, dynamo2 bytes.Buffer
	c, err := Convert(again(raw), &dynamo, ConvertOptions{To: trace.DynamoEvents})
	if err != nil || c.Inexact != 0 || c.Left[trace.KindDecision] != 150 {
		t.Fatalf("%+v, %v", c, err)
	}
	want := play(t, raw, Options{})
	got := play(t, dynamo.Bytes(), Options{Player: PlayerOptions{BlockSize: testBlock}})
	if want.Checksum == "" || got.Blocks != want.Blocks || got.Distinct != want.Distinct {
		t.Errorf("%d blocks (%d distinct) after the conversion, %d (%d) before", got.Blocks, got.Distinct, want.Blocks, want.Distinct)
	}
	if _, err := Convert(again(dynamo.Bytes()), &own, ConvertOptions{To: trace.Own}); err != nil {
		t.Fatal(err)
	}
	if _, err := Convert(again(own.Bytes()), &dynamo2, ConvertOptions{To: trace.DynamoEvents}); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(dynamo.String(), dynamo2.String()); d != "" {
		t.Errorf("Dynamo → own → Dynamo differs:\n%.2000s", d)
	}
	// Decisions are requests, too.
	var moon bytes.Buffer
	if _, err := Convert(again(raw), &moon, ConvertOptions{To: trace.Mooncake}); err != nil {
		t.Fatal(err)
	}
	src, err := workload.FromTrace(again(moon.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	if s, err := workload.Describe(src); err != nil || s.Requests != 150 || s.BlockSize != 512 {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := Convert(again(raw), &moon, ConvertOptions{To: trace.Capture}); err == nil {
		t.Error("captures can be written")
	}
}

// TestCaptures plays the captures of real engines and of an independent
// simulator.
func TestCaptures(t *testing.T) {
	for name, blocks := range map[string]int64{"kvevents-vllm-0.32.0-real.jsonl.gz": 1, "kvevents-vllm-format.jsonl.gz": 1} {
		t.Run(name, func(t *testing.T) {
			r, err := trace.Open(filepath.Join("..", "..", "..", "testdata", "captures", name), nil, trace.Options{})
			if err != nil {
				t.Fatal(err)
			}
			rep, err := Play(t.Context(), r, Options{})
			r.Close()
			if err != nil {
				t.Fatal(err)
			}
			if rep.Blocks < blocks || rep.Counts.Unreadable != 0 || rep.Counts.Gaps != 0 || len(rep.Ranks) != 5 {
				t.Errorf("%+v", rep.Counts)
			}
		})
	}
}

// TestOwnCapture verifies the recordings that are kept in testdata: runs of a
// router before real vLLM engines with evictions.
func TestOwnCapture(t *testing.T) {
	paths, err := filepath.Glob(filepath.Join("..", "..", "..", "testdata", "trace", "*.jsonl.*"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	for _, path := range paths {
		r, err := trace.Open(path, nil, trace.Options{})
		if err != nil {
			t.Fatal(err)
		}
		rep, err := Play(t.Context(), r, Options{Verify: true})
		r.Close()
		if err != nil {
			t.Fatal(err)
		}
		v := rep.Verify
		if v.Decisions == 0 || v.Proven != v.Decisions || v.InputsDiffer != 0 || v.Unknown != 0 || v.Unverifiable != 0 {
			t.Errorf("%s: %d of %d decisions, %d other inputs, %d unknown; %+v", path, v.Equal, v.Decisions, v.InputsDiffer, v.Unknown, v.First)
		}
		if rep.Counts.Removed == 0 {
			t.Errorf("%s has no evictions", path)
		}
	}
}

// TestVerifyCountsApart: what cannot be made again is neither equal nor divergent,
// what a router with other rules decided is no defect, and a cost that differs in its
// last bit, or another reason, is one.
func TestVerifyCountsApart(t *testing.T) {
	base := newRecording(t).run(30)
	at := slices.IndexFunc(base.recs, func(r trace.Record) bool { return r.Decision != nil && r.Decision.ID == "d20" })
	for _, c := range []struct {
		name   string
		change func(d *trace.Decision, in *decide.Input)
		rules  int
		want   VerifyReport
		tell   string
	}{
		{"nothing", nil, decide.Rules, VerifyReport{Equal: 30, Proven: 30}, ""},
		{"nothing by other rules", nil, decide.Rules + 1, VerifyReport{Equal: 30, Proven: 30}, ""},
		{"unverifiable", func(d *trace.Decision, _ *decide.Input) { d.Unverifiable, d.DecodeRank = "the moon", "x/dp0" }, decide.Rules, VerifyReport{Equal: 29, Proven: 29, Unverifiable: 1}, "CANNOT BE MADE AGAIN  d20: the moon"},
		{"another rank", func(d *trace.Decision, _ *decide.Input) { d.DecodeRank = "x/dp0" }, decide.Rules, VerifyReport{Equal: 29, Proven: 29, Real: 1}, "the inputs are the same"},
		{"another rank by other rules", func(d *trace.Decision, _ *decide.Input) { d.DecodeRank = "x/dp0" }, 1, VerifyReport{Equal: 29, Proven: 29, OtherRules: 1}, "had rules 1, this dynctl has"},
		{"the last bit of a cost", func(_ *trace.Decision, in *decide.Input) {
			c := &in.Decode.Candidates[3].Cost
			*c = math.Nextafter(*c, 1e9)
		}, decide.Rules, VerifyReport{Equal: 29, Proven: 29, Real: 1}, "the inputs are the same"},
		{"another reason", func(d *trace.Decision, _ *decide.Input) { d.Reason = "forced_local" }, decide.Rules, VerifyReport{Equal: 29, Proven: 29, Real: 1}, "forced_local"},
	} {
		t.Run(c.name, func(t *testing.T) {
			rec := *base
			rec.recs = slices.Clone(base.recs)
			d := *rec.recs[at].Decision
			in := *d.Input
			in.Decode.Candidates = slices.Clone(in.Decode.Candidates)
			d.Input = &in
			if c.change != nil {
				c.change(&d, &in)
			}
			rec.recs[at].Decision = &d
			raw := bytes.Replace(rec.file(), fmt.Appendf(nil, `"rules":%d`, decide.Rules), fmt.Appendf(nil, `"rules":%d`, c.rules), 1)
			rep := play(t, raw, Options{Verify: true})
			v := rep.Verify
			got := VerifyReport{Equal: v.Equal, Proven: v.Proven, Unverifiable: v.Unverifiable, OtherRules: v.OtherRules, Real: v.Real, TieBreaks: v.TieBreaks}
			if d := cmp.Diff(c.want, got, cmpopts.IgnoreUnexported(VerifyReport{})); d != "" || v.Decisions != 30 || v.Equal+v.Divergent()+v.Unverifiable != 30 {
				t.Errorf("%d decisions (-want +got):\n%s", v.Decisions, d)
			}
			if wrong := 30 - c.want.Proven; v.Match() != 1-float64(wrong)/30 {
				t.Errorf("match %v", v.Match())
			}
			var text strings.Builder
			if err := rep.Text(&text); err != nil || !strings.Contains(text.String(), c.tell) {
				t.Errorf("%v, no %q in\n%s", err, c.tell, &text)
			}
			// A what-if leaves out what cannot be made again, and a conversion keeps all
			// of it as it was.
			change, err := ParseChange("policy=kv")
			if err != nil {
				t.Fatal(err)
			}
			if r, err := Redecide(t.Context(), open(t, raw), []Change{change}); err != nil || r.Unverifiable != c.want.Unverifiable || r.Decisions+r.Unverifiable != 30 {
				t.Errorf("what if: %+v, %v", r, err)
			}
			var again bytes.Buffer
			if _, err := Convert(func() (*trace.Reader, error) { return trace.NewReader(bytes.NewReader(raw), "t", trace.Options{}) }, &again, ConvertOptions{To: trace.Own}); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(v, play(t, again.Bytes(), Options{Verify: true}).Verify, cmpopts.IgnoreUnexported(VerifyReport{}), cmpopts.IgnoreFields(Divergence{}, "Line")); d != "" {
				t.Errorf("after a conversion (-before +after):\n%s", d)
			}
		})
	}
}

// TestUnknownWhenItWasDecided: a rank whose cache was not known when a decision was
// made was not, though it was cleared, and so known, before the decision is judged.
func TestUnknownWhenItWasDecided(t *testing.T) {
	rec := newRecording(t).run(30)
	for at, r := range rec.recs {
		if r.Decision == nil {
			continue
		}
		cs := r.Decision.Input.Decode.Candidates
		i := slices.IndexFunc(cs, func(c decision.Candidate) bool { return c.OverlapBlocks > 0 })
		if i < 0 {
			continue
		}
		rank := cs[i].Rank
		late := *rec
		late.recs = slices.DeleteFunc(slices.Clone(rec.recs[:at+1]), func(r trace.Record) bool { return r.Kind == trace.KindBatch && r.Rank == rank })
		for i := range late.recs {
			late.recs[i].RankInfo.New = false
		}
		late.recs = append(late.recs, trace.Record{Kind: trace.KindClear, Time: r.Time + time.Millisecond, Rank: rank, Clear: trace.Clear{Anew: true, Reason: "it began anew"}})
		v := play(t, late.file(), Options{Verify: true}).Verify
		if v.OnTrust == 0 || v.InputsDiffer != 0 || v.OnTrust+v.Proven != v.Decisions {
			t.Errorf("without what %s held before: %+v, %+v", rank, v, v.FirstInput)
		}
		return
	}
	t.Fatal("no decision knows a cached block")
}

// TestKeptRecordingsVerify: every decision of the recordings of real engines that are
// kept is made again the same, whatever version they are of.
func TestKeptRecordingsVerify(t *testing.T) {
	files, err := filepath.Glob("../../../testdata/trace/*.jsonl.zst")
	if err != nil {
		t.Fatal(err)
	}
	versions := map[string]bool{}
	for _, path := range files {
		r, err := trace.Open(path, nil, trace.Options{})
		if err != nil {
			t.Fatal(err)
		}
		versions[r.Header().Schema] = true
		rep, err := Play(t.Context(), r, Options{Verify: true})
		if err != nil {
			t.Fatal(err)
		}
		if v := rep.Verify; v.Decisions < 70 || v.Proven != v.Decisions {
			t.Errorf("%s: %d of %d decisions are proven", path, v.Proven, v.Decisions)
		}
		r.Close()
	}
	if len(versions) != 2 {
		t.Errorf("recordings of versions %v are kept, want both", versions)
	}
}

// TestVersion1Converts: the recordings of version 1 are of version 2 after a
// conversion, by the same rules, and every decision is made again the same.
func TestVersion1Converts(t *testing.T) {
	path := filepath.Join("..", "..", "..", "testdata", "trace", "vllm-0.32.0-1p1d-evictions.jsonl.zst")
	first := func() (*trace.Reader, error) { return trace.Open(path, nil, trace.Options{}) }
	r, err := first()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if r.Header().Schema != "dynctl.trace/v1" {
		t.Fatalf("%s is of %s", path, r.Header().Schema)
	}
	before, err := Play(t.Context(), r, Options{Verify: true})
	if err != nil {
		t.Fatal(err)
	}
	var own, twice bytes.Buffer
	if _, err := Convert(first, &own, ConvertOptions{To: trace.Own}); err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(own.Bytes(), []byte(`{"schema":"dynctl.trace/v2"`)) || !bytes.Contains(own.Bytes()[:400], []byte(`"rules":1,`)) {
		t.Errorf("header %.400s", own.Bytes())
	}
	after := play(t, own.Bytes(), Options{Verify: true})
	if d := cmp.Diff(before.Verify, after.Verify, cmpopts.IgnoreUnexported(VerifyReport{})); d != "" || before.Checksum != after.Checksum || after.Verify.Proven != after.Verify.Decisions {
		t.Errorf("the conversion verifies otherwise (-before +after):\n%s", d)
	}
	if d := cmp.Diff(before.Records, after.Records); d != "" {
		t.Errorf("other records (-before +after):\n%s", d)
	}
	second := func() (*trace.Reader, error) {
		return trace.NewReader(bytes.NewReader(own.Bytes()), path, trace.Options{})
	}
	if _, err := Convert(second, &twice, ConvertOptions{To: trace.Own}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(own.Bytes(), twice.Bytes()) {
		t.Error("a conversion of version 2 is not the same again")
	}
	// What else reads recordings reads the same of both: requests, what-ifs, the
	// screen's stage.
	all := func(open func() (*trace.Reader, error)) (texts []string) {
		t.Helper()
		text := func(v any, err error) {
			t.Helper()
			raw, merr := json.Marshal(v)
			if err != nil || merr != nil {
				t.Fatal(err, merr)
			}
			texts = append(texts, string(raw))
		}
		src, err := workload.FromTrace(open)
		if err != nil {
			t.Fatal(err)
		}
		text(workload.Describe(src))
		r, err := open()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		change, err := ParseChange("threshold=0")
		if err != nil {
			t.Fatal(err)
		}
		d, err := Redecide(t.Context(), r, []Change{change})
		if err == nil {
			for i := range d.Examples {
				d.Examples[i].Line = 0 // there are lines more
			}
		}
		text(d, err)
		s, err := NewStage(open, PlayerOptions{}, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if err := s.Control("step", 400); err != nil {
			t.Fatal(err)
		}
		st := s.Status()
		st.Version = "" // of who wrote the file
		text(st, nil)
		text(s.Workers(), nil)
		list, _, err := s.Receipts().List(receipt.Query{Limit: 100})
		text(list, err)
		return texts
	}
	if d := cmp.Diff(all(first), all(second)); d != "" {
		t.Errorf("read otherwise after the conversion (-before +after):\n%s", d)
	}
}

// TestPartsOfDifferentRules: parts of different rules in one conversion keep theirs.
func TestPartsOfDifferentRules(t *testing.T) {
	raw := newRecording(t).run(5).file()
	older := bytes.Replace(raw, fmt.Appendf(nil, `"rules":%d`, decide.Rules), []byte(`"rules":1`), 1)
	var own bytes.Buffer
	if _, err := Convert(func() (*trace.Reader, error) {
		return trace.NewReader(bytes.NewReader(slices.Concat(older, raw)), "t", trace.Options{})
	}, &own, ConvertOptions{To: trace.Own}); err != nil {
		t.Fatal(err)
	}
	r := open(t, own.Bytes())
	var rules []int
	for {
		var rec trace.Record
		if err := r.Next(&rec); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if d := rec.Decision; d != nil {
			if rules = append(rules, d.Rules); d.Unverifiable != "" {
				t.Error(d.Unverifiable)
			}
		}
	}
	if want := slices.Concat(slices.Repeat([]int{1}, 5), slices.Repeat([]int{decide.Rules}, 5)); !slices.Equal(rules, want) {
		t.Errorf("rules %v, want %v", rules, want)
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
	if v.Divergent() != 0 || v.InputsDiffer != 0 || v.Unknown == 0 || v.OnTrust == 0 || v.Equal != v.Decisions {
		t.Errorf("%+v, first %+v", v, v.FirstInput)
	}
}

// TestForgottenIsTold: a trace that describes more than is kept says so in its report,
// and what refers to it is unverifiable.
func TestForgottenIsTold(t *testing.T) {
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

// FuzzVerify: whatever stands in a recording, its decisions are judged, shown and
// changed without a fault, and every one is counted once.
func FuzzVerify(f *testing.F) {
	rec := newRecording(f).run(6)
	raw := rec.file()
	f.Add(raw)
	f.Add(bytes.ReplaceAll(raw, []byte(`"engine":"vllm"`), []byte(`"engine":"sglang"`)))
	f.Add(bytes.ReplaceAll(raw, []byte(`"block_size_tokens":16`), []byte(`"block_size_tokens":-1`)))
	f.Add(bytes.ReplaceAll(raw, []byte(`"role":"aggregated"`), []byte(`"role":"decode"`)))
	f.Add(bytes.ReplaceAll(raw, []byte(`"decode":{`), []byte(`"prefill":{`)))
	f.Add(bytes.ReplaceAll(raw, []byte(`"kind":"settings"`), []byte(`"kind":"lost"`)))
	change, err := ParseChange("policy=session")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		o := trace.Options{Format: trace.Own, MaxBad: -1, MaxLine: 1 << 16}
		first := func() (*trace.Reader, error) { return trace.NewReader(bytes.NewReader(in), "t", o) }
		r, err := first()
		if err != nil {
			return
		}
		defer r.Close()
		rep, err := Play(t.Context(), r, Options{Verify: true, Player: PlayerOptions{MaxRanks: 64}, Each: func(rec *trace.Record, p *Player) error { return Show(io.Discard, rec, p) }})
		if err != nil {
			return
		}
		if v := rep.Verify; v.Equal+v.Divergent()+v.Unverifiable != v.Decisions || v.Proven+v.OnTrust != v.Equal {
			t.Errorf("%+v", v)
		}
		if r, err = first(); err == nil {
			_, err = Redecide(t.Context(), r, []Change{change})
			r.Close()
		}
		if err != nil {
			t.Error(err)
		}
		s, err := NewStage(first, PlayerOptions{MaxRanks: 64}, 0)
		if err != nil {
			return
		}
		defer s.Close()
		if s.Control("step", 200) == nil {
			s.Status()
			s.Workers()
		}
	})
}

// TestReportJSON: the report can be written, whatever is in it.
func TestReportJSON(t *testing.T) {
	rep := play(t, newRecording(t).run(3).file(), Options{Verify: true})
	if _, err := json.Marshal(rep); err != nil {
		t.Error(err)
	}
	if _, err := Play(t.Context(), open(t, append(newRecording(t).file(), "{bad\n"...)), Options{}); err == nil {
		t.Error("a bad line is passed over")
	} else if line := new(trace.LineError); !errors.As(err, &line) || line.Line != 10 {
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
