package decide

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// priced is pair with a threshold that is auto and costs of 1 ms for 100 tokens,
// wherever they are computed or wait, and 1 ms for a transfer.
func priced(change ...func(*Input)) *Input {
	in := pair(2048)
	in.Rule.Auto = true
	compute := cost.LegModel{0, 10, 0, 10, 0}
	in.Costs = &cost.Model{Revision: 7, Local: compute, Prefill: compute, Transfer: cost.LegModel{1, 0, 0, 0, 0}, Stall: 1, Beyond: 1}
	for _, c := range change {
		c(in)
	}
	return in
}

func running(n int) func(*Input) {
	return func(in *Input) { in.Decode.Candidates[0].ActiveRequests = n }
}

func queued(decode, prefill int) func(*Input) {
	return func(in *Input) {
		in.Decode.Candidates[0].PrefillTokens, in.Prefill.Candidates[0].PrefillTokens = decode, prefill
	}
}

// gated is the start of a threshold that is auto.
func gated(in *Input) {
	Threshold{Tokens: 2048, Auto: true}.Apply(&in.Rule)
	in.Costs = nil
}

// TestAuto: the path that costs less is taken where both can be had and the costs are
// known; what is forced, a gate, or what keeps a request whole goes before.
func TestAuto(t *testing.T) {
	for _, c := range []struct {
		name          string
		in            *Input
		path          route.Path
		reason        route.Reason
		local, remote float64 // ms; 0 where costs did not decide
	}{
		{"idle", priced(), route.Local, route.ReasonLocalCheaper, 40.96, 41.96},
		{"answers on the decode rank wait", priced(running(3)), route.Remote, route.ReasonRemoteCheaper, 4 * 40.96, 41.96},
		{"prompts wait on the prefill rank", priced(running(3), queued(0, 20000)), route.Local, route.ReasonLocalCheaper, 4 * 40.96, 241.96},
		{"prompts wait on the decode rank", priced(queued(1000, 0)), route.Remote, route.ReasonRemoteCheaper, 50.96, 41.96},
		{"below the threshold", priced(isl(1000), running(9)), route.Remote, route.ReasonRemoteCheaper, 100, 11},
		{"too little is known", priced(func(in *Input) { in.Costs = nil }), route.Remote, route.ReasonAbove, 0, 0},
		{"too little is known, short", priced(isl(1000), func(in *Input) { in.Costs = nil }), route.Local, route.ReasonBelow, 0, 0},
		{"too little is known, prompts wait on the prefill rank", priced(queued(0, 32769), gated), route.Local, route.ReasonPrefillBusy, 0, 0},
		{"too little is known, as many wait on the decode rank", priced(queued(1, 32769), gated), route.Remote, route.ReasonAbove, 0, 0},
		{"too little is known, recorded without a gate", priced(queued(0, 32769), func(in *Input) { in.Costs = nil }), route.Remote, route.ReasonAbove, 0, 0},
		{"gate of the start, costs known", priced(running(9), queued(0, 32769), func(in *Input) { in.Rule.StartGate = 32768 }), route.Remote, route.ReasonRemoteCheaper, 409.6, 369.65},
		{"not auto", priced(func(in *Input) { in.Rule.Auto = false }), route.Remote, route.ReasonAbove, 0, 0},
		{"forced", priced(func(in *Input) { in.Force = route.ForceRemote }), route.Remote, route.ReasonForcedRemote, 0, 0},
		{"forced local", priced(running(9), func(in *Input) { in.Force = route.ForceLocal }), route.Local, route.ReasonForcedLocal, 0, 0},
		{"whole", priced(running(9), func(in *Input) { in.Facts.N = 2 }), route.Local, route.ReasonAnswers, 0, 0},
		{"no length", priced(running(9), func(in *Input) { in.Facts.Source = route.FromNothing }), route.Local, route.ReasonLengthUnknown, 0, 0},
		{"prefill gate", priced(running(9), queued(0, 6000), func(in *Input) { in.Rule.PrefillGate = 5000 }), route.Local, route.ReasonPrefillBusy, 409.6, 101.96},
		{"decode gate", priced(func(in *Input) {
			in.Rule.DecodeGate = .5
			in.Decode.Candidates[0].HasLoad, in.Decode.Candidates[0].KVUsage = true, .9
		}), route.Remote, route.ReasonDecodeBusy, 40.96, 41.96},
		{"no prefill rank", priced(func(in *Input) { in.Prefill.Candidates, in.PrefillPeers = nil, nil }), route.Local, route.ReasonNoPrefill, 0, 0},
		{"SGLang's decode rank cannot prefill", priced(func(in *Input) {
			for _, w := range []*workers.Worker{in.DecodePeers[0].Worker, in.PrefillPeers[0].Worker} {
				w.Engine, w.Connector = workers.SGLang, workers.ConnectorSGLang
			}
		}), route.Remote, route.ReasonDecodeOnly, 40.96, 41.96},
	} {
		var p Plan
		MakePlan(c.in, &p)
		near := func(a, b float64) bool { return a-b < 1e-9 && b-a < 1e-9 }
		if p.Path != c.path || p.Reason != c.reason {
			t.Errorf("%s: %s because %s, want %s because %s", c.name, p.Path, p.Reason, c.path, c.reason)
		}
		if !near(p.Costs.Local, c.local) || !near(p.Costs.Remote, c.remote) || (p.CostRevision == 7) != (c.local > 0) {
			t.Errorf("%s: costs %+v by revision %d, want %v and %v", c.name, p.Costs, p.CostRevision, c.local, c.remote)
		}
		var d decision.Decision
		p.Fill(&d, c.in, 1)
		if d.Predicted.LocalMS != p.Costs.Local || d.Predicted.RemoteMS != p.Costs.Remote || d.Predicted.CostRevision != p.CostRevision {
			t.Errorf("%s: the receipt has %+v", c.name, d.Predicted)
		}
		if unknown := strings.Contains(d.ReasonText, "costs are not known yet"); unknown != strings.HasPrefix(c.name, "too little") {
			t.Errorf("%s: %s", c.name, d.ReasonText)
		}
	}
}

// TestWordsOfGates: what a gate turned is told by what decided before it.
func TestWordsOfGates(t *testing.T) {
	prefillGate := func(in *Input) { in.Rule.PrefillGate = 5000 }
	decodeGate := func(in *Input) {
		in.Rule.DecodeGate = .5
		in.Decode.Candidates[0].HasLoad, in.Decode.Candidates[0].KVUsage = true, .9
	}
	fixed := func(in *Input) { in.Rule.Auto, in.Costs = false, nil }
	for _, c := range []struct {
		in   *Input
		want string
	}{
		{priced(isl(1000), running(20), queued(0, 6000), prefillGate), "remote costs less, but "},
		{priced(decodeGate), "local costs less, but "},
		{priced(queued(0, 6000), prefillGate, decodeGate), "remote wanted, but "}, // for the decode gate
		{priced(queued(0, 6000), prefillGate, fixed), "over the threshold, but "},
		{priced(queued(0, 6000), prefillGate, fixed, func(in *Input) { in.Rule.Threshold = 0 }), "remote wanted, but "},
		{priced(isl(1000), decodeGate, fixed), "below the threshold, but "},
		{priced(decodeGate, fixed, func(in *Input) { in.Facts.ISL, in.Facts.Source = 0, route.FromNothing }), "local wanted, but "},
		{priced(queued(0, 32769), gated), "over the threshold, but "},
	} {
		var p Plan
		MakePlan(c.in, &p)
		if got := p.Words(c.in); !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %q, want %q", p.Reason, got, c.want)
		}
	}
}

// TestAutoAsksForBothPaths: what an outcome is set against is there as soon as the
// threshold is auto, also before anything is known.
func TestAutoAsksForBothPaths(t *testing.T) {
	in := priced(running(2), queued(300, 500), func(in *Input) {
		in.Costs = nil
		in.Decode.Candidates[0].OverlapBlocks, in.Prefill.Candidates[0].OverlapBlocks = 32, 16
		in.Prefill.Candidates[0].ActiveRequests = 5
	})
	var p Plan
	MakePlan(in, &p)
	want := cost.Paths{
		Local:    cost.Work{Tokens: 3072, Context: 4096, Queued: 300, Running: 2, Found: 1024},
		Prefill:  cost.Work{Tokens: 3584, Context: 4096, Queued: 500, Running: 5, Found: 1024},
		Transfer: cost.Work{Tokens: 3072, Queued: 300, Running: 2},
	}
	if p.Paths != want {
		t.Errorf("%+v, want %+v", p.Paths, want)
	}
	if n := testing.AllocsPerRun(10, func() { MakePlan(in, &p) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestParseThreshold(t *testing.T) {
	for text, want := range map[string]Threshold{
		"0": {}, "2048": {Tokens: 2048}, "-1": {Tokens: -1}, "auto": {Tokens: 2048, Auto: true}, "auto:512": {Tokens: 512, Auto: true},
	} {
		got, err := ParseThreshold(text)
		if err != nil || got != want || got.String() != text {
			t.Errorf("%q: %+v (%s), %v", text, got, got, err)
		}
	}
	for _, text := range []string{"", "x", "1.5", "auto:", "auto:0", "auto:-3", "auto:x", "auto:1:2", "Auto"} {
		if _, err := ParseThreshold(text); err == nil {
			t.Errorf("%q is read", text)
		}
	}
	for text, want := range map[string]string{"512": "512", "auto:512": `"auto:512"`} {
		th, _ := ParseThreshold(text)
		if p, err := th.MarshalJSON(); err != nil || string(p) != want {
			t.Errorf("%s: %s, %v", text, p, err)
		}
	}
}

// TestSlowDecodeRank: a slow decode rank costs more under every policy of ours that looks at
// load, with a fixed threshold, too, until the others have as many times its work as it takes
// longer.
func TestSlowDecodeRank(t *testing.T) {
	two := func(own, others int) func(*Input) {
		return func(in *Input) {
			first := &in.Decode.Candidates[0]
			second := *first
			first.OverlapBlocks, first.ActiveRequests, first.DecodeBlocks = 10, own, 128*own
			second.Rank, second.ActiveRequests, second.DecodeBlocks = "second/dp0", others, 128*others
			in.Decode.Candidates = append(in.Decode.Candidates, second)
			in.DecodePeers = append(in.DecodePeers, in.DecodePeers[0])
		}
	}
	slow := func(times ...float64) func(*Input) {
		return func(in *Input) {
			for i, v := range times {
				in.Decode.Candidates[i].Times = v
			}
		}
	}
	policy := func(p selector.Policy) func(*Input) { return func(in *Input) { in.Decode.Policy = p } }
	fixed := func(in *Input) { in.Rule.Auto, in.Costs = false, nil }
	session := func(home int) func(*Input) {
		return func(in *Input) {
			in.Decode.Policy, in.Decode.SessionKey, in.Decode.Home = selector.Session, 1, selector.HomeNew
			if home >= 0 {
				in.Decode.Home = in.Decode.Candidates[home].Rank
			}
		}
	}
	for _, c := range []struct {
		name string
		in   *Input
		rank int
	}{
		{"none is slow", priced(two(0, 0)), 0},
		{"both are idle", priced(two(0, 0), slow(3)), 1},
		{"the other has room", priced(two(1, 3), slow(3)), 1},
		{"the other has more than its share", priced(two(1, 30), slow(3)), 0},
		{"the other is slow", priced(two(1, 3), slow(1, 3)), 0},
		{"both are", priced(two(1, 3), slow(3, 3)), 0},
		{"the other is kept out", priced(two(1, 3), slow(3), func(in *Input) { in.Decode.Candidates[1].KeptOut = "draining" }), 0},
		{"not auto", priced(two(1, 3), slow(3), fixed), 1},
		{"by blocks", priced(two(1, 3), slow(3), fixed, policy(selector.KVBlocks)), 1},
		{"by times", priced(two(1, 3), slow(3), timed, policy(selector.KV)), 1},
		{"by times, the other has more than its share", priced(two(1, 60), slow(1.5), timed, policy(selector.KV)), 0},
		{"by load", priced(two(1, 4), slow(3), fixed, policy(selector.LeastLoaded)), 1},
		{"by load, the other has more than its share", priced(two(1, 6), slow(3), fixed, policy(selector.LeastLoaded)), 0},
		{"of two drawn", priced(two(1, 4), slow(3), fixed, policy(selector.PowerOfTwo)), 1},
		{"Dynamo's function does not know", priced(two(0, 0), slow(3), fixed, policy(selector.KVDynamo)), 0},
		{"a session stays at its home", priced(two(1, 3), slow(3), session(0)), 0},
		{"a new session does not", priced(two(1, 4), slow(3), session(-1)), 1},
	} {
		var p Plan
		MakePlan(c.in, &p)
		if best, ok := p.Decode.Best(); !ok || p.Err != nil || p.DecodeIndex != c.rank || best != c.rank {
			t.Errorf("%s: rank %d, the ranking has %d (%v); want %d", c.name, p.DecodeIndex, best, p.Err, c.rank)
			for _, k := range c.in.Decode.Candidates {
				t.Logf("%s costs %.1f: %+v", k.Rank, k.Cost, k.Terms)
			}
		}
		if n := testing.AllocsPerRun(10, func() { MakePlan(c.in, &p) }); n != 0 {
			t.Errorf("%s: %v allocations", c.name, n)
		}
	}
}

// timed gives the costs of priced the time of steps: 5 ms, and 1 ms more for each answer and for
// 10,000 tokens of their contexts.
func timed(in *Input) {
	in.Costs.Prices = cost.Prices{Step: cost.StepModel{5, 1, 0.1, 0.05, 10, 1}, Others: 1, Answer: 1, Length: 100, Constants: cost.Tuned}
}

// TestSlowPrefillRank: a slow prefill rank costs more than its peers, whatever is known and
// however the path is chosen.
func TestSlowPrefillRank(t *testing.T) {
	two := func(in *Input) {
		second := in.Prefill.Candidates[0]
		second.Rank, second.PrefillTokens = "second/dp0", 2000
		in.Prefill.Candidates = append(in.Prefill.Candidates, second)
		in.PrefillPeers = append(in.PrefillPeers, in.PrefillPeers[0])
	}
	slow := func(times ...float64) func(*Input) {
		return func(in *Input) {
			for i, v := range times {
				in.Prefill.Candidates[i].Times = v
			}
		}
	}
	fixed := func(in *Input) { in.Rule.Auto, in.Costs = false, nil }
	for _, c := range []struct {
		name   string
		in     *Input
		path   route.Path
		rank   int
		remote float64
	}{
		{"none is slow", priced(two, running(9)), route.Remote, 0, 41.96},
		{"another, with a queue, costs less", priced(two, running(9), slow(3)), route.Remote, 1, 61.96},
		{"by times", priced(two, running(9), timed, slow(3)), route.Remote, 1, 0},
		{"another costs more", priced(two, running(9), slow(1.1)), route.Remote, 0, 46.056},
		{"the other one is slow", priced(two, running(9), slow(1, 3)), route.Remote, 0, 41.96},
		{"both are", priced(two, running(9), slow(3, 3)), route.Remote, 0, 123.88},
		{"so slow that the decode rank computes it", priced(running(1), slow(3)), route.Local, 0, 123.88},
		{"forced", priced(two, func(in *Input) { in.Force = route.ForceRemote }, slow(3)), route.Remote, 1, 0},
		{"not auto", priced(two, fixed, slow(3)), route.Remote, 1, 0},
	} {
		var p Plan
		MakePlan(c.in, &p)
		off := p.Costs.Remote - c.remote
		if p.Path != c.path || p.PrefillIndex != c.rank || (c.name != "by times") && (off > 1e-9 || off < -1e-9) {
			t.Errorf("%s: %s over rank %d for %v ms (%v); want %s, %d, %v", c.name, p.Path, p.PrefillIndex, p.Costs.Remote, p.Err, c.path, c.rank, c.remote)
		}
		if best, ok := p.Prefill.Best(); !ok || best != c.rank {
			t.Errorf("%s: the ranking has rank %d", c.name, best)
		}
	}
	// A slow decode rank costs as many times more where it computes. A transfer costs, and
	// teaches, what it does with any other.
	var p, like Plan
	MakePlan(priced(func(in *Input) { in.Decode.Candidates[0].Times = 2 }), &p)
	MakePlan(priced(), &like)
	costs, asked := like.Costs, like.Paths
	costs.Local, asked.Local.Times, asked.Transfer.Times = 2*costs.Local, 2, 2
	if d := cmp.Diff(costs, p.Costs); d != "" {
		t.Errorf("the costs with a slow decode rank (-want +got):\n%s", d)
	}
	if d := cmp.Diff(asked, p.Paths); d != "" {
		t.Errorf("what is asked of a slow decode rank (-want +got):\n%s", d)
	}
	if p.Path != route.Remote || like.Path != route.Local {
		t.Errorf("with a slow decode rank the path is %s, with one like the others %s", p.Path, like.Path)
	}
}

// TestFound: what is learned of a request includes how much of its prompt any rank holds, of
// whichever phase, and wherever it goes.
func TestFound(t *testing.T) {
	for _, held := range [][2]int{{0, 0}, {3, 1}, {1, 3}} {
		in := priced()
		in.Decode.Candidates[0].OverlapBlocks, in.Prefill.Candidates[0].OverlapBlocks = held[0], held[1]
		var p Plan
		MakePlan(in, &p)
		want := int32(max(held[0], held[1]) * in.Decode.BlockSize)
		if got := p.Paths; got.Local.Found != want || got.Prefill.Found != want {
			t.Errorf("%v blocks are held: %d and %d tokens, want %d", held, got.Local.Found, got.Prefill.Found, want)
		}
	}
}
