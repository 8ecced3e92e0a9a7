package replay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// everyField lets reports be compared with what they hold inside.
var everyField = cmp.Exporter(func(reflect.Type) bool { return true })

// TestVerify: a whole recording comes out the same; without one of its batches
// the first decision that suffers is named with the batch that is missing.
func TestVerify(t *testing.T) {
	rec := newRecording(t).run(400)
	rep := play(t, rec.file(), Options{Verify: true})
	want := *rep.Verify
	want.Equal, want.Decisions, want.InputsDiffer, want.First, want.FirstInput = 400, 400, 0, nil, nil
	if d := cmp.Diff(want, *rep.Verify, everyField); d != "" {
		t.Fatalf("the whole recording (-want +got):\n%s", d)
	}
	if want := fmt.Sprintf("%016x", rec.p.index.Checksum()); rep.Checksum != want {
		t.Errorf("checksum %s, want %s", rep.Checksum, want)
	}
	// Leave out each of some batches: the next decision on that rank's blocks must be
	// reported.
	noticed, every, enough := 0, 19, 8
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
		noticed++
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
	if noticed < enough {
		t.Errorf("only %d left out batches were noticed", noticed)
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
		t.Errorf("a recorded figure that no cache had is not reported: %+v", v)
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

// TestVerifyWithinBatch: a decision may find a rank between two events of a batch, or with
// a part of what one of them stores, since readers of the index wait for nobody. What the
// next part of a recording may explain is unknown.
func TestVerifyWithinBatch(t *testing.T) {
	p := make([]uint32, 11*testBlock)
	for i := range p {
		p[i] = uint32(i)
	}
	stored := func(from, to int) kvevent.Event {
		e := kvevent.Event{Kind: kvevent.Stored, Group: -1, Tokens: p[from*testBlock : to*testBlock], BlockSize: testBlock}
		for k := from; k < to; k++ {
			e.Hashes = append(e.Hashes, uint64(100+k))
		}
		if from > 0 {
			e.Parent, e.HasParent = uint64(100+from-1), true
		}
		return e
	}
	removed := func(e kvevent.Event) kvevent.Event {
		return kvevent.Event{Kind: kvevent.Removed, Group: -1, Hashes: e.Hashes}
	}
	more := []kvevent.Event{stored(4, 9), stored(9, 10)}
	const complete, lacksEnd, lacksBatch, lacksBoth = 0, 1, 2, 3
	for _, c := range []struct {
		name            string
		batch           []kvevent.Event // after four blocks were stored
		overlap         int             // as recorded
		file            int
		differ, unknown uint64
	}{
		{"before", more, 4, complete, 0, 0},
		{"between two events", more, 9, complete, 0, 0},
		{"within an event", more, 7, complete, 0, 0},
		{"after", more, 10, complete, 0, 0},
		{"less than ever", more, 3, complete, 1, 0},
		{"more than ever", more, 11, complete, 1, 0},
		{"after a removal", []kvevent.Event{removed(stored(0, 4)), stored(0, 9)}, 0, complete, 0, 0},
		{"in a removal", []kvevent.Event{removed(stored(2, 4)), stored(2, 9)}, 3, complete, 0, 0},
		{"less than was left", []kvevent.Event{removed(stored(2, 4)), stored(2, 9)}, 1, complete, 1, 0},
		{"explained without the end", more, 9, lacksEnd, 0, 0},
		{"less than ever without the end", more, 3, lacksEnd, 0, 1},
		{"in the next part", more, 9, lacksBoth, 0, 1},
		{"missing", more, 9, lacksBatch, 1, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRecording(t)
			batch := func(seq uint64, events ...kvevent.Event) {
				b := kvevent.Batch{TS: 1, Events: events}
				r.add(trace.Record{Kind: trace.KindBatch, Rank: rankName(1), Batch: trace.Batch{Seq: seq, Payload: kvevent.AppendBatch(nil, &b, kvevent.Encoding{})}})
			}
			batch(0, stored(0, 4))
			r.now += time.Second // out of everybody's sight
			r.decide(p)
			d := &r.recs[len(r.recs)-1]
			at, seen := d.Time, &d.Decision.Input.Decode.Candidates[1]
			if seen.OverlapBlocks != 4 {
				t.Fatalf("%d blocks found", seen.OverlapBlocks)
			}
			seen.OverlapBlocks, seen.ResidentBlocks = c.overlap, c.overlap
			plan(d.Decision)
			batch(1, c.batch...)
			last := len(r.recs) - 1
			r.recs[last].Batch.Received = at - 30*time.Microsecond
			if c.file&lacksBatch != 0 {
				r.recs = r.recs[:last]
			}
			raw := r.file()
			if c.file&lacksEnd != 0 {
				raw = raw[:bytes.LastIndex(raw, []byte(`{"kind":"end"`))]
			}
			v := play(t, raw, Options{Verify: true}).Verify
			if v.Decisions != 1 || v.InputsDiffer != c.differ || v.Unknown != c.unknown {
				t.Errorf("%d decisions, want 1; %d inputs differ, want %d; %d unknown, want %d: %+v", v.Decisions, v.InputsDiffer, c.differ, v.Unknown, c.unknown, v.FirstInput)
			}
			if c.unknown > 0 && v.Unproven != 1 {
				t.Errorf("%d taken on trust, want 1", v.Unproven)
			}
			if c.unknown > 0 && !strings.Contains(v.FirstTaken.Because[0], "after the end of this file") {
				t.Errorf("taken because %q", v.FirstTaken.Because)
			}
		})
	}
}

// TestVerifyNamesOfThePrompt: what a router found by the engine's names of a prompt's own
// blocks is not in a recording without tokens. Such overlaps are taken as recorded, for a
// reason of their own, which explains nothing else that differs.
func TestVerifyNamesOfThePrompt(t *testing.T) {
	tokens := make([]uint32, 11*testBlock)
	engine := blockhash.NewEngineNames("sha256", "")
	at, names := engine.Root(), []uint64(nil)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	for i := range 10 {
		at = engine.Next(nil, at, tokens[i*testBlock:(i+1)*testBlock], "")
		names = append(names, at.Short())
	}
	batch := func(seq uint64, events ...kvevent.Event) trace.Record {
		b := kvevent.Batch{TS: 1, Events: events}
		return trace.Record{Kind: trace.KindBatch, Rank: rankName(0), Batch: trace.Batch{Seq: seq, Payload: kvevent.AppendBatch(nil, &b, kvevent.Encoding{Form: kvevent.VLLMMap})}}
	}
	known := kvgroup.Traits{Chunk: 4 * testBlock, HashAlgorithm: "sha256"}
	type figures = []decision.Candidate
	const named, same = "more may be found by the engine's names", "the inputs are the same"
	for _, c := range []struct {
		name   string
		extra  []trace.Record // before the decision, unseen by it
		change func(d *trace.Decision, c figures)
		want   VerifyReport
		text   string
	}{
		{"as found", nil, nil, VerifyReport{Equal: 1, Unproven: 1, ByNames: 1}, named},
		{"with the tokens", nil, func(d *trace.Decision, _ figures) { d.Tokens = tokens }, VerifyReport{Equal: 1, Proven: 1}, ""},
		{"fewer than the tokens say", nil, func(d *trace.Decision, c figures) { d.Tokens, c[0].OverlapBlocks = tokens, 8 }, VerifyReport{TieBreaks: 1, InputsDiffer: 1}, "recorded overlap 8 blocks, replayed 10"},
		{"more than the tokens say", nil, func(d *trace.Decision, c figures) { d.Tokens, c[0].OverlapBlocks = tokens, 11 }, VerifyReport{Equal: 1, Proven: 1, InputsDiffer: 1}, "recorded overlap 11 blocks, replayed 10"},
		{"tokens under other hashes", nil, func(d *trace.Decision, _ figures) { d.Tokens = tokens[1:] }, VerifyReport{Equal: 1, Unproven: 1, ByNames: 1}, named},
		{"another rank's overlap", nil, func(_ *trace.Decision, c figures) { c[2].OverlapBlocks = 3 }, VerifyReport{Equal: 1, Unproven: 1, ByNames: 1, InputsDiffer: 1}, "w-2/dp0: recorded overlap 3 blocks, replayed 0"},
		{"blocks of another tier", nil, func(_ *trace.Decision, c figures) { c[0].CPU = 1 }, VerifyReport{Real: 1, InputsDiffer: 1}, "w-0/dp0: recorded overlap 10 (then 1 cpu"},
		{"more than the prompt has", nil, func(_ *trace.Decision, c figures) { c[0].OverlapBlocks = 12 }, VerifyReport{Real: 1, InputsDiffer: 1}, "recorded overlap 12 blocks, replayed 8"},
		{"a rank that is not trusted", []trace.Record{{Kind: trace.KindFeed, Rank: rankName(0)}}, nil, VerifyReport{Real: 1, InputsDiffer: 1}, "recorded overlap 10 blocks, replayed 0"},
		{"a batch is missing", []trace.Record{batch(2)}, nil, VerifyReport{Real: 1, InputsDiffer: 1}, "batch 1 of this rank is missing"},
		{"the size of a cache", nil, func(_ *trace.Decision, c figures) { c[0].ResidentBlocks = 20 }, VerifyReport{ByNames: 1, TieBreaks: 1}, "w-0/dp0: recorded 20 blocks held, replayed 0"},
		{"another choice", nil, func(d *trace.Decision, _ figures) { d.DecodeRank = "x/dp0" }, VerifyReport{ByNames: 1, Real: 1}, same},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRecording(t)
			r.texts = true
			r.batch(1, tokens[:10*testBlock])
			r.add(trace.Record{Kind: trace.KindRank, Rank: rankName(0), RankInfo: trace.RankInfo{BlockSize: testBlock, New: true, Traits: known}})
			r.add(trace.Record{Kind: trace.KindFeed, Rank: rankName(0), Trusted: true})
			// Of two whole chunks nothing is stored, nor published.
			r.add(batch(0, kvevent.Event{
				Kind: kvevent.Stored, CacheKind: kvevent.ChunkedLocal, Parent: names[7], HasParent: true, Hashes: names[8:], Tokens: tokens[8*testBlock : 10*testBlock], BlockSize: testBlock,
			}))
			r.now += time.Second // out of everybody's sight
			r.decide(tokens)
			last := len(r.recs) - 1
			d := r.recs[last].Decision
			list := d.Input.Decode.Candidates
			if n := list[0].OverlapBlocks; n != 10 || list[1].OverlapBlocks != 10 {
				t.Fatalf("%d and %d blocks found, not 10", n, list[1].OverlapBlocks)
			}
			for i := range list {
				list[i].ActiveRequests = 0 // so that the first two cost the same
			}
			if c.change != nil {
				c.change(d, list)
			}
			chosen := d.DecodeRank
			if plan(d); chosen == "x/dp0" {
				d.DecodeRank = chosen
			}
			for i := range c.extra {
				c.extra[i].Time = r.recs[last-1].Time
				c.extra[i].Batch.Received = c.extra[i].Time
			}
			r.recs = slices.Insert(r.recs, last, c.extra...)
			rep := play(t, r.file(), Options{Verify: true})
			v := rep.Verify
			got := *v
			got.First, got.FirstInput, got.FirstTaken, got.RecordedHit, got.ReplayedHit = nil, nil, nil, 0, 0
			c.want.Decisions = 1
			if d := cmp.Diff(c.want, got, cmpopts.IgnoreUnexported(VerifyReport{})); d != "" {
				t.Errorf("(-want +got):\n%s%+v\n%+v", d, v.First, v.FirstInput)
			}
			var text strings.Builder
			if err := rep.Text(&text); err != nil || !strings.Contains(text.String(), c.text) || strings.Contains(text.String(), "began with is not in the recording") {
				t.Errorf("%v, %q is to be in\n%s", err, c.text, &text)
			}
			if v.First != nil && !strings.Contains(strings.Join(v.First.Because, "\n"), c.text) {
				t.Errorf("because %q, not %q", v.First.Because, c.text)
			}
			raw, err := json.Marshal(rep)
			if want := fmt.Sprintf(`"partly_unknown":0,"found_by_names":%d`, v.ByNames); err != nil || !strings.Contains(string(raw), want) {
				t.Errorf("%v, no %s in %s", err, want, raw)
			}
			if byName := v.FirstTaken != nil && strings.Contains(v.FirstTaken.Because[0], named); byName != (v.ByNames > 0) {
				t.Errorf("first with recorded figures: %+v", v.FirstTaken)
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
	r.add(trace.Record{Kind: trace.KindClear, Rank: rankName(0), Clear: trace.Clear{ForgotPublisher: true, Reason: "gone"}})
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

// TestCaptures plays the captures of real engines and of an independent
// simulator.
func TestCaptures(t *testing.T) {
	for _, name := range []string{"kvevents-vllm-0.32.0-real.jsonl.gz", "kvevents-vllm-format.jsonl.gz"} {
		t.Run(name, func(t *testing.T) {
			rep := playFile(t, filepath.Join("..", "..", "testdata", "captures", name), Options{})
			if rep.Blocks == 0 || rep.Counts.Unreadable != 0 || rep.Counts.Gaps != 0 || len(rep.Ranks) != 5 {
				t.Errorf("%+v", rep.Counts)
			}
		})
	}
}

// TestOwnCapture verifies the recordings that are kept in testdata: runs of a
// router before real vLLM engines with evictions.
func TestOwnCapture(t *testing.T) {
	paths, err := filepath.Glob(filepath.Join("..", "..", "testdata", "trace", "vllm-*.jsonl.*"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	for _, path := range paths {
		rep := playFile(t, path, Options{Verify: true})
		v := rep.Verify
		want := *v
		want.Proven, want.InputsDiffer, want.Unknown, want.Unverifiable = v.Decisions, 0, 0, 0
		if d := cmp.Diff(want, *v, everyField); d != "" || v.Decisions == 0 {
			t.Errorf("%s: %d decisions, first %+v (-want +got):\n%s", path, v.Decisions, v.First, d)
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
		text   string
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
			if err := rep.Text(&text); err != nil || !strings.Contains(text.String(), c.text) {
				t.Errorf("%v, no %q in\n%s", err, c.text, &text)
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
		late.recs = append(late.recs, trace.Record{Kind: trace.KindClear, Time: r.Time + time.Millisecond, Rank: rank, Clear: trace.Clear{ForgotPublisher: true, Reason: "it started over"}})
		v := play(t, late.file(), Options{Verify: true}).Verify
		if v.Unproven == 0 || v.InputsDiffer != 0 || v.Unproven+v.Proven != v.Decisions {
			t.Errorf("without what %s held before: %+v, %+v", rank, v, v.FirstInput)
		}
		return
	}
	t.Fatal("no decision knows a cached block")
}

// TestKeptRecordingsVerify: every decision of the recordings that are kept is made again the
// same, whatever version they are of: costs to the last bit, whoever chose what a stall is
// worth. Those that explored are counted apart, as made by other rules. Some are of policy kv
// with the cost in time, and most of their decisions compare times.
func TestKeptRecordingsVerify(t *testing.T) {
	files, err := filepath.Glob("../../testdata/trace/*.jsonl.zst")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Fatal("no recordings are kept")
	}
	explored := map[string]uint64{"sim-2p4d-auto-explore.jsonl.zst": 3}
	for _, path := range files {
		other, timed := explored[filepath.Base(path)], uint64(0)
		v := playFile(t, path, Options{Verify: true, Each: func(rec *trace.Record, _ *Player) error {
			if d := rec.Decision; d != nil && d.Input.Decode.Policy == selector.KV && d.Input.Costs.Timed() {
				timed++
			}
			return nil
		}}).Verify
		if strings.Contains(path, "-times.") && timed*10 < v.Decisions*8 {
			t.Errorf("%s: %d of %d decisions compare times, want 80 %%", path, timed, v.Decisions)
		}
		if v.Decisions < 70 || v.Proven+other != v.Decisions || v.OtherRules != other {
			t.Errorf("%s: %d of %d decisions are proven, %d are of other rules, want %d; %+v", path, v.Proven, v.Decisions, v.OtherRules, other, v.First)
		} else if other > 0 && (v.First == nil || len(v.First.Because) != 1) {
			t.Errorf("%s: the first that explored has no one reason: %+v", path, v.First)
		} else if other > 0 && (!strings.Contains(v.First.Because[0], "routing.explore") || !strings.HasPrefix(v.First.Recorded, "local ")) {
			t.Errorf("%s: the first that explored was recorded as %q and differs by %q", path, v.First.Recorded, v.First.Because[0])
		}
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
		if v := rep.Verify; v.Equal+v.Divergent()+v.Unverifiable != v.Decisions || v.Proven+v.Unproven != v.Equal {
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
