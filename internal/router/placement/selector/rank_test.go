package selector

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/route"
)

// rank runs a policy and gives the labels in order.
func rank(in Input) ([]string, *Ranking) {
	var out Ranking
	Pick(&in, &out)
	labels := make([]string, len(out.Order))
	for i, k := range out.Order {
		labels[i] = in.Candidates[k].Rank
	}
	return labels, &out
}

func named(labels ...string) []decision.Candidate {
	out := make([]decision.Candidate, len(labels))
	for i, l := range labels {
		out[i] = decision.Candidate{Rank: l, Slot: uint32(i)}
	}
	return out
}

func kvInput(c ...decision.Candidate) Input {
	return Input{Phase: route.Aggregated, Policy: KV, Weights: DefaultWeights(), ISL: 6400, BlockSize: 64, Candidates: c}
}

func TestParsePolicy(t *testing.T) {
	for _, p := range Policies() {
		if got, err := ParsePolicy(string(p)); err != nil || got != p {
			t.Errorf("ParsePolicy(%q) = %q, %v", p, got, err)
		}
	}
	if _, err := ParsePolicy("fastest"); err == nil || !strings.Contains(err.Error(), "least_loaded") {
		t.Errorf("ParsePolicy(fastest) = %v, want an error that lists the policies", err)
	}
}

// TestRoundRobinSortedCycles: full cycles in sorted order, whatever the order of discovery.
func TestRoundRobinSortedCycles(t *testing.T) {
	c := named("p3", "p1", "p2")
	var got []string
	for turn := range uint64(6) {
		l, _ := rank(Input{Phase: route.Prefill, Policy: RoundRobin, Candidates: c, Turn: turn})
		got = append(got, l[0])
	}
	if want := []string{"p1", "p2", "p3", "p1", "p2", "p3"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestRoundRobinRetriesTakeTheNext: who failed a request keeps its place in the
// order of that request, so that the next attempt goes to the one after it;
// whoever is out for everybody has none.
func TestRoundRobinRetriesTakeTheNext(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		var all, live []string
		c := named("a", "b", "c", "d", "e", "f", "g")[:rapid.IntRange(1, 7).Draw(t, "ranks")]
		for i := range c {
			all = append(all, c[i].Rank)
			if rapid.IntRange(0, 3).Draw(t, "down") == 0 {
				c[i].KeptOut = "unhealthy"
			} else {
				live = append(live, c[i].Rank)
			}
		}
		turn := rapid.Uint64().Draw(t, "turn")
		for try := range len(live) {
			got, _ := rank(Input{Policy: RoundRobin, Candidates: c, Turn: turn})
			if want := live[(turn%uint64(len(live))+uint64(try))%uint64(len(live))]; got[0] != want || len(got) != len(live)-try {
				t.Fatalf("attempt %d of turn %d goes to %q, want %s; live %q of %q", try+1, turn, got, want, live, all)
			}
			i := slices.IndexFunc(c, func(c decision.Candidate) bool { return c.Rank == got[0] })
			c[i].KeptOut, c[i].Tried = "failed in this request", true
		}
	})
}

// TestRoundRobinPhasesAreIndependent: each phase has its own turn.
func TestRoundRobinPhasesAreIndependent(t *testing.T) {
	var got []string
	for turn := range uint64(4) {
		p, _ := rank(Input{Phase: route.Prefill, Policy: RoundRobin, Candidates: named("p1"), Turn: turn * 3})
		d, _ := rank(Input{Phase: route.Decode, Policy: RoundRobin, Candidates: named("d2", "d1"), Turn: turn})
		got = append(got, p[0]+d[0])
	}
	if want := []string{"p1d1", "p1d2", "p1d1", "p1d2"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestRoundRobinSpreadsEvenly: 2P4D spreads evenly.
func TestRoundRobinSpreadsEvenly(t *testing.T) {
	n := map[string]int{}
	for turn := range uint64(40) {
		p, _ := rank(Input{Policy: RoundRobin, Candidates: named("p1", "p2"), Turn: turn})
		d, _ := rank(Input{Policy: RoundRobin, Candidates: named("d1", "d2", "d3", "d4"), Turn: turn})
		n[p[0]]++
		n[d[0]]++
	}
	if want := (map[string]int{"p1": 20, "p2": 20, "d1": 10, "d2": 10, "d3": 10, "d4": 10}); !gocmp.Equal(n, want) {
		t.Error(gocmp.Diff(want, n))
	}
}

func TestLeastLoaded(t *testing.T) {
	loaded := func(label string, running, waiting int) decision.Candidate {
		return decision.Candidate{Rank: label, HasLoad: true, Running: running, Waiting: waiting}
	}
	for _, tt := range []struct {
		name   string
		in     Input
		want   []string
		policy Policy
		tie    TieBreak
	}{
		{"19: 5+2 against 1+0", Input{Policy: LeastLoaded, Candidates: []decision.Candidate{loaded("a", 5, 2), loaded("b", 1, 0)}}, []string{"b", "a"}, LeastLoaded, TieNone},
		{"20: where a figure is missing, the router's own requests count", Input{Policy: LeastLoaded, Candidates: []decision.Candidate{{Rank: "a", ActiveRequests: 1}, loaded("b", 9, 9)}}, []string{"b", "a"}, LeastLoaded, TieNone},
		{"20: with two draws as well", Input{Policy: PowerOfTwo, Candidates: []decision.Candidate{{Rank: "a", ActiveRequests: 1}, loaded("b", 9, 9)}}, []string{"b", "a"}, PowerOfTwo, TieNone},
		{"20: and only eligible ranks count", Input{Policy: LeastLoaded, Candidates: []decision.Candidate{loaded("b", 9, 9), loaded("c", 1, 1), {Rank: "a", KeptOut: "draining"}}}, []string{"c", "b"}, LeastLoaded, TieNone},
		{"21: round robin ignores figures", Input{Policy: RoundRobin, Candidates: []decision.Candidate{loaded("a", 99, 9), loaded("b", 0, 0)}}, []string{"a", "b"}, RoundRobin, TieNone},
		{"the router's own account counts what the engine has not reported yet", Input{Policy: LeastLoaded, Candidates: []decision.Candidate{
			{Rank: "a", HasLoad: true, ActiveRequests: 3}, {Rank: "b", HasLoad: true, Running: 2},
		}}, []string{"b", "a"}, LeastLoaded, TieNone},
		{"ties go by the router's own requests", Input{Policy: LeastLoaded, Candidates: []decision.Candidate{
			{Rank: "a", HasLoad: true, Running: 3, ActiveRequests: 2}, {Rank: "b", HasLoad: true, Running: 3, ActiveRequests: 1},
		}}, []string{"b", "a"}, LeastLoaded, TieRequests},
		{"then by decode blocks", Input{Policy: LeastLoaded, Candidates: []decision.Candidate{
			{Rank: "a", HasLoad: true, DecodeBlocks: 9}, {Rank: "b", HasLoad: true, DecodeBlocks: 8},
		}}, []string{"b", "a"}, LeastLoaded, TieDecode},
		{"then by who waited longest", Input{Policy: LeastLoaded, Candidates: []decision.Candidate{
			{Rank: "a", HasLoad: true, LastTurn: 2}, {Rank: "b", HasLoad: true, LastTurn: 1},
		}}, []string{"b", "a"}, LeastLoaded, TieTurn},
		{"then by name", Input{Policy: LeastLoaded, Candidates: []decision.Candidate{loaded("b", 1, 0), loaded("a", 0, 1)}}, []string{"a", "b"}, LeastLoaded, TieLabel},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, out := rank(tt.in)
			if !slices.Equal(got, tt.want) || out.Policy != tt.policy || out.TieBreak != tt.tie {
				t.Errorf("got %v by %s, tie %q; want %v by %s, tie %q", got, out.Policy, out.TieBreak, tt.want, tt.policy, tt.tie)
			}
		})
	}
}

func TestKVCost(t *testing.T) {
	w := DefaultWeights()
	w.ActiveRequest = 2
	in := kvInput(
		decision.Candidate{Rank: "a", OverlapBlocks: 40, PrefillTokens: 640, DecodeBlocks: 128, ActiveRequests: 3, FreshTokens: 8192},
		decision.Candidate{Rank: "b"},
	)
	in.Weights = w
	for _, tt := range []struct {
		phase route.Phase
		cost  float64
		want  decision.Terms
	}{
		{route.Aggregated, 60 + 2.5 + 16 + 11.25 + 1 + 6, decision.Terms{Prefill: 100, OverlapCredit: 40, Queue: 2.5, Decode: 16, Stall: 11.25, Spread: 1, Request: 6}},
		{route.Decode, 60 + 2.5 + 16 + 1 + 6, decision.Terms{Prefill: 100, OverlapCredit: 40, Queue: 2.5, Decode: 16, Spread: 1, Request: 6}},
		{route.Prefill, 60 + 2.5 + 1 + 6, decision.Terms{Prefill: 100, OverlapCredit: 40, Queue: 2.5, Spread: 1, Request: 6}},
	} {
		in.Phase = tt.phase
		rank(in)
		got := &in.Candidates[0]
		if d := gocmp.Diff(tt.want, got.Terms); d != "" || got.Cost != tt.cost {
			t.Errorf("%s: cost %v, want %v; terms (-want +got)\n%s", tt.phase, got.Cost, tt.cost, d)
		}
	}
}

// TestStallSpeaksForUncachedPrompts: a cold prompt goes where fewer requests wait for it, one
// whose prefix is cached stays with its prefix; neither where another rank computes it.
func TestStallSpeaksForUncachedPrompts(t *testing.T) {
	for _, tt := range []struct {
		name   string
		phase  route.Phase
		cached int
		stall  float64
		want   string
	}{
		{"cold", route.Aggregated, 0, 1. / 16, "quiet"},
		{"cached", route.Aggregated, 98, 1. / 16, "busy"},
		{"no weight", route.Aggregated, 0, 0, "busy"},
		{"computed elsewhere", route.Decode, 0, 1. / 16, "busy"},
		{"prefill", route.Prefill, 0, 1. / 16, "busy"},
	} {
		// Without the term the busy rank is the cheaper one: it was given less of late.
		in := kvInput(
			decision.Candidate{Rank: "busy", OverlapBlocks: tt.cached, ActiveRequests: 4},
			decision.Candidate{Rank: "quiet", FreshTokens: 64 * 128},
		)
		in.Phase, in.Weights.Stall = tt.phase, tt.stall
		if got, _ := rank(in); got[0] != tt.want {
			t.Errorf("%s: %v, want %s first: %+v", tt.name, got, tt.want, in.Candidates)
		}
	}
}

// TestTierCredits: blocks outside the device count behind those on it, each tier by its
// credit, and not at all without one.
func TestTierCredits(t *testing.T) {
	in := kvInput(
		decision.Candidate{Rank: "device", OverlapBlocks: 40},
		decision.Candidate{Rank: "host", OverlapBlocks: 20, Tiers: route.Tiers{CPU: 40}},
		decision.Candidate{Rank: "disk", OverlapBlocks: 20, Tiers: route.Tiers{Disk: 40}},
		decision.Candidate{Rank: "store", OverlapBlocks: 20, Tiers: route.Tiers{Remote: 40}},
	)
	credits := func() (c [4]float64) {
		for i := range c {
			c[i] = in.Candidates[i].OverlapCredit
		}
		return c
	}
	in.Weights = DefaultWeights()
	if order, _ := rank(in); !slices.Equal(order, []string{"host", "device", "disk", "store"}) || credits() != [4]float64{40, 52, 30, 20} {
		t.Errorf("order %v, credits %v", order, credits())
	}
	in.Weights.CreditCPU, in.Weights.CreditDisk, in.Weights.CreditRemote = 0, 0, 1
	if order, _ := rank(in); order[0] != "store" || credits() != [4]float64{40, 20, 20, 60} {
		t.Errorf("order %v, credits %v", order, credits())
	}
}

// TestStepTokens: what a hit saves of one step is nothing, whatever the prompt's length;
// ranks that are otherwise equal still go by their hits.
func TestStepTokens(t *testing.T) {
	for _, c := range []struct {
		isl, overlap int
		active       int // decode blocks of the rank with the hit
		credit       float64
		first        string
	}{
		{64, 4, 5, 0, "cold"},
		{64, 4, 0, 0, "warm"},
		{256, 16, 5, 0, "cold"},
		{320, 4, 5, 4, "warm"},
		{320, 20, 5, 4, "warm"},
		{320, 20, 40, 4, "cold"},
		{6400, 300, 2000, 300, "warm"},
	} {
		in := Input{Phase: route.Decode, Policy: KV, Weights: DefaultWeights(), ISL: c.isl, BlockSize: 16, Candidates: []decision.Candidate{
			{Rank: "cold"}, {Rank: "warm", OverlapBlocks: c.overlap, DecodeBlocks: c.active},
		}}
		if order, _ := rank(in); order[0] != c.first || in.Candidates[1].OverlapCredit != c.credit {
			t.Errorf("%+v: %s first, a credit of %v", c, order[0], in.Candidates[1].OverlapCredit)
		}
	}
}

// Costs of 18, 10 and 11, as in the worked example of Dynamo's documentation:
// the second is chosen.
func TestDynamoCost(t *testing.T) {
	in := Input{Phase: route.Aggregated, Policy: KVDynamo, Weights: DefaultWeights(), ISL: 10, BlockSize: 1, Candidates: []decision.Candidate{
		{Rank: "1", OverlapBlocks: 2},
		{Rank: "2", OverlapBlocks: 10},
		{Rank: "3", OverlapBlocks: 10, DecodeBlocks: 1},
	}}
	got, _ := rank(in)
	costs := []float64{in.Candidates[0].Cost, in.Candidates[1].Cost, in.Candidates[2].Cost}
	if want := []float64{18, 10, 11}; !slices.Equal(costs, want) || got[0] != "2" {
		t.Errorf("costs %v, order %v; want %v and 2 first", costs, got, want)
	}
	in = Input{Phase: route.Aggregated, Policy: KVDynamo, Weights: DefaultWeights(), ISL: 100, BlockSize: 64, Candidates: []decision.Candidate{
		{Rank: "a", OverlapBlocks: 1, PrefillTokens: 32, DecodeBlocks: 7},
	}}
	for phase, want := range map[route.Phase]float64{
		route.Aggregated: (32.0+100)/64 - 1 + 7 + 2, // fractional prefill, whole decode blocks
		route.Prefill:    (32.0+100)/64 - 1,
		route.Decode:     7 + 2 - 1,
	} {
		in.Phase = phase
		if rank(in); in.Candidates[0].Cost != want {
			t.Errorf("%s: cost %v, want %v", phase, in.Candidates[0].Cost, want)
		}
	}
}

func TestCreditDecay(t *testing.T) {
	in := kvInput(decision.Candidate{Rank: "a", OverlapBlocks: 50, PrefillTokens: 6400}, decision.Candidate{Rank: "b"})
	in.Weights.CreditDecay = 1
	rank(in)
	// a has one prompt's length more queued than b: half the credit.
	if got := in.Candidates[0].Terms.OverlapCredit; got != 25 {
		t.Errorf("credit %v, want 25", got)
	}
}

func TestKVTieBreaks(t *testing.T) {
	for _, tt := range []struct {
		name string
		a, b decision.Candidate
		want string
		tie  TieBreak
	}{
		// Both prompts are cached in full, one rank holds more of it.
		{"overlap", decision.Candidate{OverlapBlocks: 100}, decision.Candidate{OverlapBlocks: 101}, "b", TieOverlap},
		{"resident", decision.Candidate{ResidentBlocks: 2}, decision.Candidate{ResidentBlocks: 1}, "b", TieResident},
		{"turn", decision.Candidate{LastTurn: 9}, decision.Candidate{LastTurn: 8}, "b", TieTurn},
		{"label", decision.Candidate{}, decision.Candidate{}, "a", TieLabel},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.a.Rank, tt.b.Rank = "a", "b"
			got, out := rank(kvInput(tt.a, tt.b))
			if got[0] != tt.want || out.TieBreak != tt.tie || out.Tied != 2 {
				t.Errorf("%s first, tie %q of %d; want %s, %q, 2", got[0], out.TieBreak, out.Tied, tt.want, tt.tie)
			}
		})
	}
}

func TestDynamoDrawsAmongEquals(t *testing.T) {
	n := map[string]int{}
	for i := range uint64(3000) {
		in := Input{
			Policy: KVDynamo, Weights: DefaultWeights(), ISL: 64, BlockSize: 64, Draw: mix(i),
			Candidates: []decision.Candidate{{Rank: "a"}, {Rank: "b"}, {Rank: "c"}, {Rank: "worse", DecodeBlocks: 1}},
		}
		got, out := rank(in)
		n[got[0]]++
		if out.Tied != 3 || out.TieBreak != TieDraw || got[3] != "worse" {
			t.Fatalf("tied %d by %q, order %v", out.Tied, out.TieBreak, got)
		}
	}
	for _, l := range []string{"a", "b", "c"} {
		if n[l] < 850 || n[l] > 1150 {
			t.Errorf("%s was drawn %d times of 3000, want about 1000", l, n[l])
		}
	}
}

func TestTemperature(t *testing.T) {
	n := map[string]int{}
	const draws = 20000
	for i := range uint64(draws) {
		in := kvInput(decision.Candidate{Rank: "a", OverlapBlocks: 50}, decision.Candidate{Rank: "b", OverlapBlocks: 25}, decision.Candidate{Rank: "c"})
		in.Weights.Temperature = 0.5
		in.Draw = mix(i)
		got, out := rank(in)
		n[got[0]]++
		if !out.Sampled || len(got) != 3 {
			t.Fatalf("sampled %v, order %v", out.Sampled, got)
		}
	}
	// Normalised costs 0, 1/2 and 1: weights 1, e^-1, e^-2.
	sum := 1 + math.Exp(-1) + math.Exp(-2)
	for l, w := range map[string]float64{"a": 1, "b": math.Exp(-1), "c": math.Exp(-2)} {
		if got, want := float64(n[l])/draws, w/sum; math.Abs(got-want) > 0.015 {
			t.Errorf("%s: share %.3f, want %.3f", l, got, want)
		}
	}
}

func TestPowerOfTwo(t *testing.T) {
	c := make([]decision.Candidate, 8)
	for i := range c {
		c[i] = decision.Candidate{Rank: fmt.Sprintf("w%d", i), HasLoad: true, Running: i}
	}
	n := make([]int, len(c))
	const draws = 28000
	for i := range uint64(draws) {
		in := Input{Policy: PowerOfTwo, Candidates: c, Draw: mix(i)}
		var out Ranking
		Pick(&in, &out)
		first, second := out.Order[0], out.Order[1]
		if first > second {
			t.Fatalf("draw %d: the more loaded %d came before %d", i, first, second)
		}
		n[first]++
	}
	// Rank i is chosen when it is drawn with one of the 7-i more loaded ones.
	for i, got := range n {
		if want := draws * (7 - i) / 28; math.Abs(float64(got-want)) > 300 {
			t.Errorf("w%d was chosen %d times, want about %d", i, got, want)
		}
	}
	if got, _ := rank(Input{Policy: PowerOfTwo, Candidates: named("only"), Draw: 7}); !slices.Equal(got, []string{"only"}) {
		t.Errorf("one rank: %v", got)
	}
}

func TestRandomIsUniform(t *testing.T) {
	n := map[string]int{}
	for i := range uint64(4000) {
		got, _ := rank(Input{Policy: Random, Candidates: named("d", "c", "b", "a"), Draw: mix(i)})
		n[got[0]]++
	}
	for l, k := range n {
		if k < 850 || k > 1150 {
			t.Errorf("%s was drawn %d times of 4000", l, k)
		}
	}
}

// TestSessionHome: a session stays at its home, however loaded that is, while it can be
// chosen. A new one, and one that cannot stay, goes to the least loaded rank. Ranks of equal
// load are in the order of the session's hash, whatever this router has sent there last.
func TestSessionHome(t *testing.T) {
	c := named("a/dp0", "b/dp0", "c/dp0", "d/dp0")
	for i := range c {
		c[i].ActiveRequests = []int{3, 1, 2, 1}[i]
	}
	c[1].DecodeBlocks = 1
	for _, tt := range []struct {
		home string
		out  int // the candidate that is kept out, from 1
		want string
	}{
		{HomeNew, 0, "d/dp0 b/dp0 c/dp0 a/dp0"},
		{"a/dp0", 0, "a/dp0 d/dp0 b/dp0 c/dp0"},
		{"a/dp0", 1, "d/dp0 b/dp0 c/dp0"},
		{"a/dp0", 4, "a/dp0 b/dp0 c/dp0"},
		{"gone/dp0", 0, "d/dp0 b/dp0 c/dp0 a/dp0"},
	} {
		list := slices.Clone(c)
		if tt.out > 0 {
			list[tt.out-1].KeptOut = "draining"
		}
		if got, out := rank(Input{Policy: Session, SessionKey: 7, Home: tt.home, Candidates: list}); strings.Join(got, " ") != tt.want || out.Policy != Session {
			t.Errorf("home %q, without %d: %v by %s, want %s", tt.home, tt.out, got, out.Policy, tt.want)
		}
	}
	many := make([]decision.Candidate, 200)
	for i := range many {
		many[i] = decision.Candidate{Rank: fmt.Sprintf("w%03d/dp0", i), LastTurn: uint64(i * 7 % 200), ActiveRequests: i % 2}
	}
	if got, _ := rank(Input{Policy: Session, SessionKey: 7, Home: "w199/dp0", Candidates: many, Limit: 4}); got[0] != "w199/dp0" || len(got) != 4 {
		t.Errorf("%v are the best of many, want the home before all", got)
	}
	for key := uint64(1); key < 50; key++ {
		idle := named("a/dp0", "b/dp0", "c/dp0", "d/dp0")
		hash, _ := rank(Input{Policy: Session, SessionKey: key, Candidates: idle})
		idle[key%4].LastTurn = key
		if got, out := rank(Input{Policy: Session, SessionKey: key, Home: HomeNew, Candidates: idle}); !slices.Equal(got, hash) || out.Tied != 4 || out.TieBreak != TieSession {
			t.Errorf("session %d: %v with a tie of %d by %q, want %v", key, got, out.Tied, out.TieBreak, hash)
		}
	}
}

// TestSession: where no home was looked for, a session is where its hash has it.
func TestSession(t *testing.T) {
	c := make([]decision.Candidate, 16)
	for i := range c {
		c[i] = decision.Candidate{Rank: fmt.Sprintf("w%02d/dp0", i), HasLoad: true, Running: i}
	}
	home := func(key uint64, c []decision.Candidate) (first, second string) {
		l, _ := rank(Input{Policy: Session, SessionKey: key, Candidates: c})
		return l[0], l[1]
	}
	n := map[string]int{}
	gone := 5
	without := slices.Delete(slices.Clone(c), gone, gone+1)
	for i := range 4000 {
		key := HashSession(fmt.Sprintf("session-%d", i))
		first, second := home(key, c)
		n[first]++
		// Removal moves only the sessions of the rank that left, each to its
		// second choice.
		after, _ := home(key, without)
		if first != c[gone].Rank && after != first {
			t.Fatalf("session %d moved from %s to %s though %s left", i, first, after, c[gone].Rank)
		}
		if first == c[gone].Rank && after != second {
			t.Fatalf("session %d went to %s, its second choice was %s", i, after, second)
		}
	}
	for l, k := range n {
		if k < 180 || k > 320 {
			t.Errorf("%s has %d of 4000 sessions, want about 250", l, k)
		}
	}
	got, out := rank(Input{Policy: Session, Candidates: c})
	if got[0] != "w00/dp0" || out.Policy != LeastLoaded {
		t.Errorf("without a key: %s by %s, want the least loaded", got[0], out.Policy)
	}
	if HashSession("") != 0 || HashSession("x") == 0 {
		t.Error("only the empty name must hash to 0")
	}
}

func TestBusyThresholds(t *testing.T) {
	busy := Busy{DecodeBlocksShare: 0.7, PrefillTokens: 5000, Waiting: 4, KVUsage: 0.9}
	for _, tt := range []struct {
		name string
		c    decision.Candidate
		code string
		text string
	}{
		{"decode blocks", decision.Candidate{KVBlocks: 100, DecodeBlocks: 71}, ExcludedDecodeBlocks, "71%"},
		{"decode blocks at the limit", decision.Candidate{KVBlocks: 100, DecodeBlocks: 70}, "", ""},
		{"decode blocks of unknown capacity", decision.Candidate{DecodeBlocks: 1e6}, "", ""},
		{"prefill tokens", decision.Candidate{PrefillTokens: 5001}, ExcludedPrefillTokens, "5001"},
		{"waiting", decision.Candidate{HasLoad: true, Waiting: 5}, ExcludedWaiting, "5 requests"},
		{"kv usage", decision.Candidate{HasLoad: true, KVUsage: 0.91}, ExcludedKVUsage, "kv 91% > 90%"},
		{"kv usage not reported", decision.Candidate{HasLoad: true, KVUsage: math.NaN()}, "", ""},
		{"load not reported", decision.Candidate{Waiting: 50, KVUsage: 1}, "", ""},
		{"draining", decision.Candidate{KeptOut: "draining"}, ExcludedGiven, "draining"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.c.Rank = "x"
			in := kvInput(tt.c, decision.Candidate{Rank: "other"})
			in.Busy = busy
			_, out := rank(in)
			code, why := in.Candidates[0].ExcludedCode, in.Why(0)
			if code != tt.code || !strings.Contains(why, tt.text) || (why == "") != (code == "") {
				t.Errorf("code %q, text %q; want %q with %q", code, why, tt.code, tt.text)
			}
			if (code == "") != slices.Contains(out.Order, 0) {
				t.Errorf("order %v with exclusion %q", out.Order, code)
			}
		})
	}
}

func TestVerdicts(t *testing.T) {
	drain, full := decision.Candidate{Rank: "d", KeptOut: "draining"}, decision.Candidate{Rank: "f", PrefillTokens: 10}
	for _, tt := range []struct {
		name string
		c    []decision.Candidate
		veto []string
		want Verdict
		err  error
	}{
		{"none", nil, nil, NoCandidates, ErrNoCandidates},
		{"excluded", []decision.Candidate{drain}, nil, AllExcluded, ErrAllExcluded},
		{"busy", []decision.Candidate{full}, nil, AllBusy, ErrAllBusy},
		{"excluded and busy", []decision.Candidate{drain, full}, nil, AllBusy, ErrAllBusy},
		{"vetoed", []decision.Candidate{{Rank: "a"}}, []string{"another connector"}, AllExcluded, ErrAllExcluded},
		{"chosen", []decision.Candidate{drain, full, {Rank: "a"}}, nil, Chosen, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, p := range Policies() {
				_, out := rank(Input{Policy: p, Candidates: tt.c, Veto: tt.veto, Busy: Busy{PrefillTokens: 5}})
				if out.Verdict != tt.want || !errors.Is(out.Err(), tt.err) {
					t.Errorf("%s: %s, %v; want %s, %v", p, out.Verdict, out.Err(), tt.want, tt.err)
				}
				if _, ok := out.Best(); ok != (tt.err == nil) {
					t.Errorf("%s: Best says %v", p, ok)
				}
			}
		})
	}
}

func drawInput(t *rapid.T) Input {
	in := Input{
		Phase:   rapid.SampledFrom([]route.Phase{route.Prefill, route.Decode, route.Aggregated}).Draw(t, "phase"),
		Policy:  rapid.SampledFrom(Policies()).Draw(t, "policy"),
		Weights: DefaultWeights(),
		ISL:     rapid.IntRange(0, 5000).Draw(t, "isl"), BlockSize: rapid.SampledFrom([]int{0, 1, 16, 64}).Draw(t, "bs"),
		Draw: rapid.Uint64().Draw(t, "draw"), Turn: rapid.Uint64().Draw(t, "turn"), SessionKey: rapid.Uint64Range(0, 3).Draw(t, "key"),
		Home: rapid.SampledFrom([]string{"", HomeNew, "w000", "w007"}).Draw(t, "home"),
		Busy: Busy{PrefillTokens: 400},
	}
	in.Weights.Temperature = rapid.SampledFrom([]float64{0, 0, 0.5}).Draw(t, "temperature")
	small := rapid.IntRange(0, 3)
	for i := range rapid.IntRange(0, 40).Draw(t, "n") {
		c := decision.Candidate{
			Rank: fmt.Sprintf("w%03d", i), Slot: uint32(i), OverlapBlocks: small.Draw(t, "o"), ActiveRequests: small.Draw(t, "r"),
			PrefillTokens: 100 * rapid.IntRange(0, 5).Draw(t, "p"), DecodeBlocks: small.Draw(t, "d"), LastTurn: uint64(small.Draw(t, "t")),
			ResidentBlocks: small.Draw(t, "b"), HasLoad: rapid.Bool().Draw(t, "l"), Running: small.Draw(t, "run"),
		}
		if rapid.IntRange(0, 9).Draw(t, "x") == 0 {
			c.KeptOut = "draining"
		}
		in.Candidates = append(in.Candidates, c)
	}
	return in
}

// Invariant 11: the same input gives the same ranking, in whatever order the
// candidates come and whatever the Ranking held before; an order holds every
// eligible rank once; a Limit only cuts it.
func TestRankProperties(t *testing.T) {
	var reused Ranking
	property.Check(t, func(t *rapid.T) {
		in := drawInput(t)
		want, out := rank(in)
		scored := slices.Clone(in.Candidates)
		for i := range in.Candidates {
			c := &in.Candidates[i] // as a ranking among others may have left it
			c.Cost, c.Terms, c.Excluded, c.ExcludedCode = -1, decision.Terms{Queue: 7}, "vetoed", ExcludedGiven
		}
		Pick(&in, &reused)
		if d := gocmp.Diff(scored, in.Candidates); d != "" {
			t.Fatalf("candidates that were ranked before are scored otherwise (-first +again)\n%s", d)
		}
		if !slices.Equal(reused.Order, out.Order) || reused.Verdict != out.Verdict || reused.TieBreak != out.TieBreak {
			t.Fatalf("a reused ranking gives %v, a new one %v", reused.Order, out.Order)
		}
		eligible := 0
		for i, c := range in.Candidates {
			in := slices.Contains(out.Order, i)
			if in != (c.ExcludedCode == "") {
				t.Fatalf("candidate %d: excluded %q, in order %v", i, c.ExcludedCode, in)
			}
			if in {
				eligible++
			}
		}
		if len(out.Order) != eligible || out.Eligible != eligible {
			t.Fatalf("order %v has not the %d eligible ranks once each", out.Order, eligible)
		}
		shuffled := in
		shuffled.Candidates = rapid.Permutation(in.Candidates).Draw(t, "order")
		if got, _ := rank(shuffled); !slices.Equal(got, want) {
			t.Fatalf("%s: shuffled candidates give %v, want %v", in.Policy, got, want)
		}
		limited := in
		limited.Limit = rapid.IntRange(1, 5).Draw(t, "limit")
		if got, _ := rank(limited); !slices.Equal(got, want[:min(limited.Limit, len(want))]) {
			t.Fatalf("%s: limit %d gives %v, want %v", in.Policy, limited.Limit, got, want)
		}
	})
}

// The few best of many are those that sorting all of them would put first,
// however they lie.
func TestFewOfMany(t *testing.T) {
	for name, cost := range map[string]func(i, n int) float64{
		"falling": func(i, n int) float64 { return float64(n - i) },
		"rising":  func(i, _ int) float64 { return float64(i) },
		"equal":   func(int, int) float64 { return 3 },
		"a pipe":  func(i, n int) float64 { return float64(min(i, n-i)) },
		"a tent":  func(i, n int) float64 { return float64(max(i, n-i)) },
		// Every place that a sample looks at is among the best, then among the worst.
		"good samples": func(i, n int) float64 { return float64(min(i%(n/sampled), 1)*n + i) },
		"bad samples":  func(i, n int) float64 { return float64(i - min(i%(n/sampled), 1)*n) },
		"scattered":    func(i, n int) float64 { return float64(i * 7919 % n) },
		"no numbers":   func(i, _ int) float64 { return []float64{1, math.NaN(), math.Inf(1), math.Inf(-1)}[i%4] },
	} {
		for _, n := range []int{123, 124, 125, 500, 2048, 3001} {
			in := Input{Candidates: make([]decision.Candidate, n)}
			all := make([]int, n)
			for i := range all {
				in.Candidates[i] = decision.Candidate{Rank: fmt.Sprintf("w%04d", i*7%n), Cost: cost(i, n)}
				all[i] = i
			}
			compare := func(a, b int) int { c, _ := compareKV(&in, a, b); return c }
			few := slices.Clone(all)
			order(all, 0, compare)
			for _, limit := range []int{1, 2, 7, 31, 32, 300} {
				order(few, limit, compare)
				if k := min(limit, n); !slices.Equal(few[:k], all[:k]) {
					t.Errorf("%s, %d of %d: %v, want %v", name, limit, n, few[:k], all[:k])
				}
				if rest := slices.Sorted(slices.Values(few)); rest[0] != 0 || rest[n-1] != n-1 || len(slices.Compact(rest)) != n {
					t.Errorf("%s, %d of %d: an element was lost", name, limit, n)
				}
				for i := range few {
					few[i] = i
				}
			}
		}
	}
}

// Policy kv's order is a total order by its documented rules.
func TestKVOrderMatchesModel(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		in := drawInput(t)
		in.Policy, in.Weights.Temperature = KV, 0
		var out Ranking
		Pick(&in, &out)
		model := slices.Clone(out.Order)
		slices.SortStableFunc(model, func(a, b int) int {
			x, y := in.Candidates[a], in.Candidates[b]
			return cmp.Or(cmp.Compare(x.Cost, y.Cost), cmp.Compare(y.OverlapBlocks, x.OverlapBlocks),
				cmp.Compare(x.ResidentBlocks, y.ResidentBlocks), cmp.Compare(x.LastTurn, y.LastTurn), cmp.Compare(x.Rank, y.Rank))
		})
		if !slices.Equal(model, out.Order) {
			t.Fatalf("order %v, model %v", out.Order, model)
		}
	})
}

func benchInput(n int, p Policy) Input {
	in := Input{Phase: route.Aggregated, Policy: p, Weights: DefaultWeights(), ISL: 8192, BlockSize: 16, SessionKey: 42, Home: HomeNew, Draw: 1 << 60, Limit: 4}
	for i := range n {
		in.Candidates = append(in.Candidates, decision.Candidate{
			Rank: fmt.Sprintf("worker-%03d/dp%d", (i*37)%n, i%8), Slot: uint32(i),
			OverlapBlocks: (i * 31) % 400, PrefillTokens: (i * 997) % 20000, DecodeBlocks: (i * 613) % 9000, HasLoad: true, Running: i % 13, FreshTokens: (i * 7919) % 300000,
		})
	}
	return in
}

func TestRankAllocatesNothing(t *testing.T) {
	for _, p := range Policies() {
		in := benchInput(64, p)
		var out Ranking
		Pick(&in, &out)
		if n := testing.AllocsPerRun(50, func() { Pick(&in, &out) }); n != 0 {
			t.Errorf("%s: %v allocations", p, n)
		}
	}
}

func BenchmarkRank(b *testing.B) {
	for _, p := range []Policy{KV, LeastLoaded, RoundRobin, Session} {
		for _, n := range []int{64, 256} {
			b.Run(fmt.Sprintf("%s/%d", p, n), func(b *testing.B) {
				in := benchInput(n, p)
				var out Ranking
				b.ReportAllocs()
				for b.Loop() {
					Pick(&in, &out)
				}
			})
		}
	}
}
