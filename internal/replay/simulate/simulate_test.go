package simulate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/rig/external"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

func fleet(t testing.TB, text string) sim.Fleet {
	t.Helper()
	f, err := sim.ParseFleet(text)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// sessions are requests of which each turn repeats the one before.
func sessions(n, turns int) []arrivals.Request {
	var all []arrivals.Request
	for turn := range turns {
		for s := range n {
			q := arrivals.Request{Number: len(all), At: time.Duration(turn*n+s) * 100 * time.Millisecond}
			q.BlockSize, q.IDs, q.OSL = 64, trace.LocalIDs, 5+s%7
			for b := range 4 + 3*turn {
				q.Blocks = append(q.Blocks, uint64(s)<<32|uint64(b))
			}
			q.ISL = 64*len(q.Blocks) + 10
			q.Blocks = append(q.Blocks, uint64(s)<<48|uint64(turn))
			all = append(all, q)
		}
	}
	return all
}

// TestRunOfTwoModels: requests go to the workers of their model, and those for none that the
// fleet has to any.
func TestRunOfTwoModels(t *testing.T) {
	all := sessions(20, 2)
	for i := range all {
		all[i].Model = []string{"a", "b", "", "other"}[i%4]
	}
	for _, policy := range selector.Policies() {
		s := Setup{Fleet: fleet(t, "1p1d:block=16,kv_blocks=4096,model=a+1p1d:block=16,kv_blocks=4096,model=b"), Options: decide.Options{Decode: policy, Prefill: policy, Weights: selector.DefaultWeights()}, Seed: 1}
		named := map[string]uint64{}
		s.Placed = func(q *arrivals.Request, _ time.Duration) { named[q.Model]++ }
		r, res, err := play(t.Context(), arrivals.FromSlice(all), s)
		if err != nil || res.Completed != uint64(len(all)) || res.Remote != res.Completed {
			t.Fatalf("%s: %+v, %v", policy, res, err)
		}
		answered := map[string]uint64{}
		for _, k := range r.ranks {
			if k.worker.Role.CanDecode() {
				answered[k.worker.Models[0]] = k.requests
			}
		}
		if answered["a"] < named["a"] || answered["b"] < named["b"] || answered["a"]+answered["b"] != res.Completed {
			t.Errorf("%s: %v answered, %v named", policy, answered, named)
		}
	}
}

// TestGaps: how long nothing happens changes neither what a run takes nor what it finds,
// and long gaps are counted.
func TestGaps(t *testing.T) {
	const year = 365 * 24 * time.Hour
	for _, auto := range []bool{false, true} {
		s := Setup{
			Fleet:   fleet(t, "2p2d:block=16,kv_blocks=4096"),
			Options: decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights(), Rule: decide.Rule{Threshold: 300, Auto: auto, LoadCredit: decide.LoadCredit}},
			Seed:    1, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond, SlowFactor: 3,
		}
		run := func(gap time.Duration) (*Result, int) {
			t.Helper()
			all := sessions(20, 3)
			for i := range all {
				all[i].At += time.Duration(i/20) * gap
			}
			r, res, err := play(t.Context(), arrivals.FromSlice(all), s)
			if err != nil {
				t.Fatal(err)
			}
			if res.Completed != uint64(len(all)) {
				t.Errorf("%d of %d requests completed", res.Completed, len(all))
			}
			return res, r.steps
		}
		short, steps := run(2 * time.Hour)
		long, more := run(45 * year)
		if more != steps {
			t.Errorf("auto %v: %d steps with gaps of 45 years, %d with gaps of 2 hours", auto, more, steps)
		}
		if short.Gaps != 2 || short.GapBefore != 21 || long.Gaps != 2 || long.LongestGapS < (45*year-time.Minute).Seconds() {
			t.Errorf("auto %v: gaps %+v, %+v", auto, short, long)
		}
		if d := cmp.Diff(short, long, cmpopts.IgnoreFields(Result{}, "WallS", "VirtualS", "Goodput", "TokensPS", "LongestGapS", "GapBefore")); d != "" {
			t.Errorf("auto %v: gaps of 2 hours and of 45 years:\n%s", auto, d)
		}
		if res, _ := run(0); res.Gaps != 0 {
			t.Errorf("%d gaps in a trace without", res.Gaps)
		}
		s.Speedup = 0.1
		all := sessions(1, 2)
		all[1].At = 90 * year
		if _, err := Run(t.Context(), arrivals.FromSlice(all), s); err == nil || !strings.Contains(err.Error(), "request 2 arrives 900 years after the first") {
			t.Error(err)
		}
	}
}

// TestFiguresAfterAGap: what engines report is as old after a gap as without one.
func TestFiguresAfterAGap(t *testing.T) {
	all := sessions(2, 1)
	all[1].At = 24*time.Hour + 250*time.Millisecond
	s := Setup{Fleet: fleet(t, "1a:block=16,kv_blocks=4096"), Seed: 1}
	r, err := newRun(s)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	next, stop := iter.Pull2(arrivals.FromSlice(all))
	defer stop()
	r.next = next
	if err := r.arrive(); err != nil {
		t.Fatal(err)
	}
	var at []time.Duration
	r.every(time.Second, 0, func() { at = append(at, r.world.Now()) })
	for r.world.Step() {
	}
	// The last one of each second before an arrival, and those while requests are open.
	if last := 24 * time.Hour; len(at) > 10 || !slices.Contains(at, last) || slices.ContainsFunc(at, func(d time.Duration) bool { return d%time.Second != 0 }) {
		t.Errorf("figures are read at %v, want at whole seconds, and at %v", at, last)
	}
}

func TestRun(t *testing.T) {
	all := sessions(30, 6)
	src := arrivals.FromSlice(all)
	setup := Setup{Fleet: fleet(t, "4a:block=16,kv_blocks=4096"), Options: decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights()}, Seed: 1, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond}
	bound, err := arrivals.Bound(src, 16, 0)
	if err != nil {
		t.Fatal(err)
	}
	run := func(s Setup) *Result {
		t.Helper()
		r, err := Run(t.Context(), src, s)
		if err != nil {
			t.Fatal(err)
		}
		if r.Requests != uint64(len(all)) || r.Completed != r.Requests || r.Failed != 0 {
			t.Errorf("%d requests, %d completed, %d failed, want %d", r.Requests, r.Completed, r.Failed, len(all))
		}
		return r
	}
	kv := run(setup)
	if kv.HitRatio < 0.97*bound || kv.HitRatio > bound+1e-9 || kv.Regret != 0 {
		t.Errorf("kv hits %.3f of a bound of %.3f, regret %v", kv.HitRatio, bound, kv.Regret)
	}
	if kv.TTFT.P50 <= 0 || kv.TTFT.P99 < kv.TTFT.P50 || kv.E2E.P50 < kv.TTFT.P50 || kv.Good == 0 {
		t.Errorf("times %+v", kv)
	}
	if d := cmp.Diff(kv, run(setup), cmpopts.IgnoreFields(Result{}, "WallS")); d != "" {
		t.Errorf("the same run twice:\n%s", d)
	}
	rr := setup
	rr.Decode, rr.Prefill = selector.RoundRobin, selector.RoundRobin
	if r := run(rr); r.HitRatio >= kv.HitRatio || r.Regret <= 0 || r.Missed <= 0 {
		t.Errorf("round robin hits %.3f, kv %.3f; regret %v", r.HitRatio, kv.HitRatio, r.Regret)
	}
	// Remote prefill: all of it, none of it, and what lies between.
	pd := setup
	pd.Fleet = fleet(t, "2p2d:block=16,kv_blocks=4096")
	always := run(pd)
	pd.Rule = decide.Rule{Threshold: 1 << 20}
	never := run(pd)
	pd.Rule.Threshold = 250
	some := run(pd)
	if always.Remote != uint64(len(all)) || never.Remote != 0 || some.Remote == 0 || some.Remote == always.Remote {
		t.Errorf("remote %d, %d, %d of %d", always.Remote, never.Remote, some.Remote, len(all))
	}
	// By costs, learned in the run: both paths, the same each time, and none of it
	// without a prefill rank.
	pd.Rule = decide.Rule{Threshold: 250, Auto: true}
	auto := run(pd)
	if auto.Remote == 0 || auto.Remote == auto.Requests || auto.Rule() != "auto:250" || auto.TTFT.P95 > max(some.TTFT.P95, never.TTFT.P95) {
		t.Errorf("auto: %d remote, p95 %.0f ms; by the threshold %.0f, never %.0f", auto.Remote, auto.TTFT.P95, some.TTFT.P95, never.TTFT.P95)
	}
	if d := cmp.Diff(auto, run(pd), cmpopts.IgnoreFields(Result{}, "WallS")); d != "" {
		t.Errorf("auto twice:\n%s", d)
	}
	// What is assumed at the start counts until more is known.
	pd.Assume = 3
	if r := run(pd); r.TTFT == auto.TTFT || r.Remote == 0 || r.Remote == r.Requests {
		t.Errorf("auto with other start values: %d remote, %+v; else %+v", r.Remote, r.TTFT, auto.TTFT)
	}
	pd.Fleet = setup.Fleet
	if r := run(pd); r.Remote != 0 {
		t.Errorf("auto in an aggregated fleet: %d remote", r.Remote)
	}
	// Faster arrivals wait longer.
	hot := setup
	hot.Speedup = 50
	if r := run(hot); r.TTFT.P99 <= kv.TTFT.P99 || r.VirtualS >= kv.VirtualS {
		t.Errorf("50 times faster: p99 %v after %v", r.TTFT.P99, kv.TTFT.P99)
	}
	cut := setup
	cut.From, cut.To = 3*time.Second, 6*time.Second
	if r, err := Run(t.Context(), src, cut); err != nil || r.Requests != 30 {
		t.Errorf("a window of 3 s: %+v, %v", r, err)
	}
}

// TestSessions: policy session keeps the turns of a session together, whether a
// trace of requests names it or a recorded decision has its key.
func TestSessions(t *testing.T) {
	all := sessions(30, 6)
	var named, keyed bytes.Buffer
	for _, b := range []*bytes.Buffer{&named, &keyed} {
		head, err := trace.AppendHeader(nil, trace.Header{Source: "test", Start: time.Unix(1_800_000_000, 0)})
		if err != nil {
			t.Fatal(err)
		}
		b.Write(head)
	}
	references := trace.NewReferences()
	s := &decide.Options{Decode: selector.Session, Prefill: selector.Session, Weights: selector.DefaultWeights()}
	for i := range all {
		q, session := &all[i], fmt.Sprint("session ", i%30)
		r := q.Request
		r.Session = session
		d := trace.Decision{
			ID: fmt.Sprint(i), BeganUS: q.At.Microseconds(), BlockSize: q.BlockSize, Locals: q.Blocks, Settings: s,
			Input: &decide.Input{Facts: api.Facts{ISL: q.ISL, MaxTokens: int64(q.OSL)}, Decode: selector.Input{SessionKey: selector.HashSession(session)}},
		}
		for b, rec := range map[*bytes.Buffer]*trace.Record{
			&named: {Kind: trace.KindRequest, Time: q.At, Request: &r}, &keyed: {Kind: trace.KindDecision, Time: q.At, Decision: &d},
		} {
			line, err := references.AppendRecord(nil, rec)
			if err != nil {
				t.Fatal(err)
			}
			b.Write(line)
		}
	}
	setup := Setup{Fleet: fleet(t, "4a:block=16,kv_blocks=4096"), Options: *s, Seed: 1}
	alone, err := Run(t.Context(), arrivals.FromSlice(all), setup)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string]*bytes.Buffer{"requests": &named, "decisions": &keyed} {
		src, err := arrivals.FromTrace(func() (*trace.Reader, error) {
			return trace.NewReader(bytes.NewReader(b.Bytes()), name, trace.Options{})
		})
		if err != nil {
			t.Fatal(err)
		}
		bound, err := arrivals.Bound(src, 16, 0)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Run(t.Context(), src, setup)
		if err != nil || r.Completed != uint64(len(all)) || r.HitRatio < 0.99*bound || r.HitRatio < 1.4*alone.HitRatio {
			t.Errorf("%s: hits %.3f of a bound of %.3f, without sessions %.3f (%v)", name, r.HitRatio, bound, alone.HitRatio, err)
		}
	}
}

// TestSessionsAreBalanced: policy session spreads the sessions of agents over ranks that are
// busy, and keeps each where its blocks are.
func TestSessionsAreBalanced(t *testing.T) {
	for seed := range uint64(3) {
		all, err := arrivals.Generate(arrivals.Options{Shape: "agents", Requests: 720, Seed: seed, Head: 2048, Sessions: 24})
		if err != nil {
			t.Fatal(err)
		}
		r, err := Run(t.Context(), arrivals.FromSlice(all), Setup{
			Fleet:   fleet(t, "4a:block=64,kv_blocks=16384,max_model_len=1048576,max_batched_tokens=8192"),
			Options: decide.Options{Decode: selector.Session, Prefill: selector.Session, Weights: selector.DefaultWeights()},
			Seed:    1, Speedup: 3, ClosedLoop: true,
		})
		if err != nil || r.Completed != uint64(len(all)) || r.RequestImbalance > 1.25 || r.Missed > 0.01 {
			t.Errorf("seed %d: the busiest rank has %.2f times its share, %.3f of the prompts were cached elsewhere only (%v)", seed, r.RequestImbalance, r.Missed, err)
		}
	}
}

// TestDefaultServesAgents: policy kv serves agents better than Dynamo's function, and so does
// kv_blocks with the weights of today, and better than with the weight of decode load that once
// was the default. By that one nearly all sessions went to the one rank that has their head,
// and auto learned its costs there. Policy session finds the sessions of a generated trace.
func TestDefaultServesAgents(t *testing.T) {
	all, err := arrivals.Generate(arrivals.Options{Shape: "agents", Requests: 720, Seed: 1, Head: 2048, Sessions: 24})
	if err != nil {
		t.Fatal(err)
	}
	src, light := arrivals.FromSlice(all), selector.DefaultWeights()
	light.DecodeLoad = 1. / 64
	for _, c := range []struct {
		fleet string
		rule  decide.Rule
	}{{"4a", decide.Rule{}}, {"2p4d", decide.Rule{Threshold: 1024}}, {"2p4d", decide.Rule{Threshold: 2048, Auto: true}}} {
		c.rule.LoadCredit = decide.LoadCredit
		run := func(p selector.Policy, w selector.Weights) *Result {
			t.Helper()
			r, err := Run(t.Context(), src, Setup{
				Fleet:   fleet(t, c.fleet+":block=64,kv_blocks=2600,max_model_len=1048576,max_batched_tokens=8192"),
				Options: decide.Options{Decode: p, Prefill: p, Weights: w, Rule: c.rule},
				Seed:    1, Speedup: 3, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond,
			})
			if err != nil || r.Completed != uint64(len(all)) {
				t.Fatalf("%s: %+v, %v", p, r, err)
			}
			return r
		}
		kv, blocks, before := run(selector.KV, selector.DefaultWeights()), run(selector.KVBlocks, selector.DefaultWeights()), run(selector.KVBlocks, light)
		dynamo, session := run(selector.KVDynamo, selector.DefaultWeights()), run(selector.Session, selector.DefaultWeights())
		t.Logf("%s, threshold %s: good %.3f, by blocks %.3f, with 1/64 %.3f, kv_dynamo %.3f, session %.3f", c.fleet, kv.Rule(), kv.Good, blocks.Good, before.Good, dynamo.Good, session.Good)
		if blocks.Good < 1.15*before.Good || min(kv.Good, blocks.Good) < 1.05*dynamo.Good {
			t.Errorf("%s, threshold %s: %.3f are good, by blocks %.3f, with 1/64 %.3f, with kv_dynamo %.3f", c.fleet, kv.Rule(), kv.Good, blocks.Good, before.Good, dynamo.Good)
		}
		if session.Missed > 0.01 {
			t.Errorf("%s, threshold %s: session misses %.3f of the prompts", c.fleet, kv.Rule(), session.Missed)
		}
	}
}

// TestColdRanksGetWork: after a quiet time in which one rank of each kind had
// all requests, and has the prefix that all of them share, the others get their
// part of a steady load.
func TestColdRanksGetWork(t *testing.T) {
	const shared, own, block = 512, 512, 64
	var all []arrivals.Request
	at := time.Duration(0)
	for i := range 600 {
		q := arrivals.Request{Number: i, At: at}
		if at += 40 * time.Millisecond; i < 10 {
			at += 3 * time.Second
		}
		q.BlockSize, q.IDs, q.OSL = block, trace.LocalIDs, 100
		for b := range shared / block {
			q.Blocks = append(q.Blocks, uint64(b))
		}
		for b := range own / block {
			q.Blocks = append(q.Blocks, uint64(i+1)<<32|uint64(b))
		}
		q.ISL = len(q.Blocks) * block
		all = append(all, q)
	}
	for _, c := range []struct {
		name, fleet string
		threshold   int
	}{{"always remote", "2p4d", 0}, {"by threshold", "2p4d", 512}, {"aggregated", "4a", 0}} {
		for _, p := range []selector.Policy{selector.KV, selector.KVDynamo} {
			s := Setup{Fleet: fleet(t, c.fleet+":block=16,kv_blocks=8192"), Options: decide.Options{Decode: p, Prefill: p, Weights: selector.DefaultWeights(), Rule: decide.Rule{Threshold: c.threshold}}, Seed: 1}
			r, err := Run(t.Context(), arrivals.FromSlice(all), s)
			if err != nil || r.Completed != uint64(len(all)) {
				t.Fatalf("%s: %+v, %v", c.name, r, err)
			}
			if r.RequestImbalance > 1.25 {
				t.Errorf("%s, %s: the busiest of 4 ranks answered %.2f times its part", c.name, p, r.RequestImbalance)
			}
		}
	}
}

func TestRunFails(t *testing.T) {
	long := sessions(1, 1)
	long[0].ISL = 1 << 17
	r, err := Run(t.Context(), arrivals.FromSlice(long), Setup{Fleet: fleet(t, "1a"), Options: decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights()}})
	if err != nil || r.Failed != 1 || r.Completed != 0 {
		t.Errorf("a prompt beyond the model: %+v, %v", r, err)
	}
	if _, err := Run(t.Context(), arrivals.FromSlice(nil), Setup{}); err == nil {
		t.Error("a run without engines")
	}
	if _, err := Run(t.Context(), arrivals.FromSlice(nil), Setup{Fleet: fleet(t, "1a:block=16+1a:block=32")}); err == nil {
		t.Error("a run with two block sizes")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, arrivals.FromSlice(sessions(2, 2)), Setup{Fleet: fleet(t, "1a"), Options: decide.Options{Decode: selector.KV, Prefill: selector.KV}}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// TestConversation runs the hour of real conversations over 16 ranks: the kv
// policy keeps its promises of docs/lab/policies.md, and fast enough.
func TestConversation(t *testing.T) {
	if testing.Short() {
		t.Skip("an hour of requests, twice")
	}
	path := external.Conversation(t)
	src, err := arrivals.FromTrace(func() (*trace.Reader, error) { return trace.Open(path, nil, trace.Options{}) })
	if err != nil {
		t.Fatal(err)
	}
	const ranks, blocks = 16, 16384
	bound, err := arrivals.Bound(src, 64, ranks*(blocks-1))
	if err != nil {
		t.Fatal(err)
	}
	f := fleet(t, "16a:block=64,kv_blocks=16384,max_model_len=1048576")
	var got [2]*Result
	for i, p := range []selector.Policy{selector.KV, selector.LeastLoaded} {
		if got[i], err = Run(t.Context(), src, Setup{Fleet: f, Options: decide.Options{Decode: p, Prefill: p, Weights: selector.DefaultWeights()}, Seed: 1}); err != nil {
			t.Fatal(err)
		}
	}
	kv, least := got[0], got[1]
	t.Logf("kv %.2f%% of the bound %.2f%%, p99 TTFT %.0f ms, least_loaded %.0f ms; %.1f s", 100*kv.HitRatio/bound, 100*bound, kv.TTFT.P99, least.TTFT.P99, kv.WallS)
	if kv.HitRatio < 0.95*bound {
		t.Errorf("kv hits %.2f%% of prompt tokens, less than 95%% of %.2f%%", 100*kv.HitRatio, 100*bound)
	}
	if kv.TTFT.P99 > least.TTFT.P99 {
		t.Errorf("kv has p99 TTFT %.0f ms, least_loaded %.0f ms", kv.TTFT.P99, least.TTFT.P99)
	}
}

// TestRunOffloads: where engines keep outside their devices what these have no room for,
// prompts find it there, and the router expects what is found, less what it does not credit
// of a block there by default.
func TestRunOffloads(t *testing.T) {
	src := arrivals.FromSlice(sessions(30, 6))
	run := func(text string) *Result {
		t.Helper()
		r, err := Run(t.Context(), src, Setup{Fleet: fleet(t, text), Options: decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights()}, Seed: 1})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	device := run("4a:block=16,kv_blocks=160")
	host := run("4a:block=16,kv_blocks=160,cpu_blocks=400")
	store := run("4a:block=16,kv_blocks=160,cpu_blocks=400,storage=on")
	t.Logf("device %.3f, with the host's memory %.3f (expected %.3f), with a store %.3f (expected %.3f), of %.3f", device.HitRatio, host.HitRatio, host.Predicted, store.HitRatio, store.Predicted, store.Bound)
	if host.HitRatio < device.HitRatio+0.05 || store.HitRatio < host.HitRatio+0.05 {
		t.Error("what is outside the device is not found")
	}
	credit := selector.DefaultWeights()
	if got := host.Predicted / host.HitRatio; got > credit.CreditCPU+0.05 || got < credit.CreditCPU-0.02 {
		t.Errorf("%.4f was expected, %.4f found", host.Predicted, host.HitRatio)
	}
	if store.Predicted > store.HitRatio || store.Predicted < credit.CreditDisk*store.HitRatio {
		t.Errorf("with a store %.4f was expected, %.4f found", store.Predicted, store.HitRatio)
	}
	if host.Evictions == 0 || host.Evictions > 2*device.Evictions {
		t.Errorf("%d blocks left the devices, without more memory %d", host.Evictions, device.Evictions)
	}
}
