package replay

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
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
	// offloads says that ranks publish copies in the memory of their hosts.
	offloads bool
	// hybrid says that ranks publish a second cache group, whose blocks they keep of every
	// other batch only.
	hybrid bool
	// texts says that ranks are asked with the prompts' tokens, as a router asks them.
	texts bool
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
		names = append(names, arrivals.Mix(uint64(i)<<32^uint64(tokens[0])<<8^uint64(k)))
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
	if r.offloads && r.seq[name]%3 == 0 { // as vLLM's offloading connector publishes a copy in the host's memory
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
	in.Facts = api.Facts{Kind: api.Completion, ISL: len(tokens), Source: route.FromIDs, MaxTokens: 5, Splittable: true}
	in.Decode = selector.Input{Phase: route.Decode, Policy: selector.KV, Weights: testSettings.Weights, ISL: len(tokens), BlockSize: testBlock, Draw: r.rng.Uint64(), Turn: uint64(r.made)}
	in.Prefill = selector.Input{Phase: route.Prefill, Policy: selector.KV}
	for i := range testRanks {
		rank := r.p.ranks[rankName(i)]
		s, _ := r.p.index.RankStats(rank.slot)
		asked := prompt(locals, len(tokens))
		if r.texts {
			asked.Text = new(kvgroup.Text)
			asked.Text.Set(tokens, "")
		}
		held, beyond := rank.usable(&q, asked)
		in.Decode.Candidates = append(in.Decode.Candidates, decision.Candidate{
			Rank: rank.name, Slot: uint32(i), OverlapBlocks: held / testBlock, Tiers: beyond.Scale(1, testBlock),
			ResidentBlocks: int(s.Blocks), ActiveRequests: r.rng.IntN(3), KVUsage: -1,
		})
		in.DecodePeers = append(in.DecodePeers, workers.Peer{Worker: testWorkers[i]})
	}
	d := &trace.Decision{
		ID: fmt.Sprint("d", r.made), Attempt: 1, BeganUS: (r.now - 20*time.Microsecond).Microseconds(), BlockSize: testBlock, Locals: locals,
		Revision: 1, Settings: testSettings, Input: in, Rules: decide.Rules,
	}
	plan(d)
	r.made++
	r.add(trace.Record{Kind: trace.KindDecision, Decision: d})
}

// plan makes a decision from its input.
func plan(d *trace.Decision) {
	var m maker
	m.load(d)
	d.SetPlan(d.Input, m.decide())
	copy(d.Input.Decode.Candidates, m.in.Decode.Candidates)
	for i := range d.Input.Decode.Candidates {
		d.Input.Decode.Candidates[i].Terms = decision.Terms{}
	}
}

var (
	testSettings = func() *decide.Options {
		weights := selector.DefaultWeights()
		weights.StepTokens = 0 // the prompts here are shorter than a step
		return &decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: weights, Rule: decide.Rule{Threshold: 1 << 20}}
	}()
	testWorkers = func() (list []*workers.Worker) {
		for i := range testRanks {
			list = append(list, &workers.Worker{Facts: workers.Facts{Engine: workers.VLLM, Role: workers.Aggregated}, Name: fmt.Sprint("w-", i)})
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

// newStage shows a recording until the test ends.
func newStage(t *testing.T, raw []byte, o PlayerOptions, speed float64) *Stage {
	t.Helper()
	s, err := NewStage(func() (*trace.Reader, error) { return trace.NewReader(bytes.NewReader(raw), "t", trace.Options{}) }, o, speed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// file writes the records but those left out.
func (r *recording) file(skip ...int) []byte {
	p, err := trace.AppendHeader(nil, trace.Header{Source: "test", Start: time.Unix(1_800_000_000, 0)})
	if err != nil {
		r.t.Fatal(err)
	}
	references := trace.NewReferences()
	for i := range r.recs {
		if len(skip) > 0 && i == skip[0] {
			continue
		}
		if p, err = references.AppendRecord(p, &r.recs[i]); err != nil {
			r.t.Fatal(err)
		}
	}
	if p, err = trace.AppendRecord(p, &trace.Record{Kind: trace.KindEnd, Time: r.now, End: &trace.End{Records: uint64(len(r.recs))}}); err != nil {
		r.t.Fatal(err)
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

func playFile(t testing.TB, path string, o Options) *Report {
	t.Helper()
	r, err := trace.Open(path, nil, trace.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	rep, err := Play(t.Context(), r, o)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}
