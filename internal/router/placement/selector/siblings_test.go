package selector

import (
	"fmt"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/route"
)

// TestUnseenWork: near ties are drawn among as many ranks as unseen decisions warrant, and
// none is without them; more of the prompt in a cache is never given up for it.
func TestUnseenWork(t *testing.T) {
	in := &Input{Phase: route.Aggregated, Policy: KV, Weights: DefaultWeights(), ISL: 1600, BlockSize: 16}
	for i := range 8 {
		in.Candidates = append(in.Candidates, decision.Candidate{Rank: fmt.Sprint("r", i), KVUsage: -1, PrefillTokens: 16 * i})
	}
	among := func(s Siblings) map[string]bool {
		got := map[string]bool{}
		var out Ranking
		for turn := range uint64(500) {
			in.Turn, in.Siblings = turn, &s
			Pick(in, &out)
			got[in.Candidates[out.Order[0]].Rank] = true
		}
		return got
	}
	for _, c := range []struct {
		s    Siblings
		want int
	}{
		{Siblings{}, 1}, {Siblings{Router: 1}, 1},
		{Siblings{Router: 1, Unseen: 1, Tokens: 1600}, 2}, {Siblings{Router: 1, Unseen: 2.5, Tokens: 1600}, 4},
		{Siblings{Router: 1, Unseen: 1e9, Tokens: 1e-9}, 1}, {Siblings{Router: 1, Unseen: 1e9, Tokens: 1e9}, 8},
	} {
		if got := among(c.s); len(got) != c.want || !got["r0"] {
			t.Errorf("%+v: drawn among %v, want %d", c.s, got, c.want)
		}
	}
	in.Candidates[3].OverlapBlocks, in.Candidates[3].PrefillTokens = 50, 0
	if got := among(Siblings{Router: 1, Unseen: 3, Tokens: 1600}); len(got) != 1 || !got["r3"] {
		t.Errorf("drawn among %v, although one holds half of the prompt", got)
	}
}

// TestDrawNeedsAll: the first rank is the same whatever number of ranks is kept, since a recorded
// decision is made again with all of them.
func TestDrawNeedsAll(t *testing.T) {
	for _, policy := range []Policy{KV, KVBlocks, LeastLoaded} {
		in := &Input{Phase: route.Aggregated, Policy: policy, Weights: DefaultWeights(), ISL: 1600, BlockSize: 16, Siblings: &Siblings{Router: 7, Unseen: 3, Tokens: 1600}}
		for i := range 300 {
			in.Candidates = append(in.Candidates, decision.Candidate{Rank: fmt.Sprintf("r%03d", i), KVUsage: -1})
		}
		for turn := range uint64(50) {
			in.Turn = turn
			var all, kept Ranking
			Pick(in, &all)
			some := *in
			some.Limit = decision.Kept
			Pick(&some, &kept)
			if a, b := in.Candidates[all.Order[0]].Rank, in.Candidates[kept.Order[0]].Rank; a != b {
				t.Fatalf("%s, turn %d: %s of all, %s of those that are kept", policy, turn, a, b)
			}
		}
	}
}

// TestSampleOfEqualPrices: among ranks that count as equal the first may be the dearest; a draw by
// temperature still prefers the cheapest.
func TestSampleOfEqualPrices(t *testing.T) {
	in := &Input{Weights: Weights{Temperature: 0.1}, Candidates: []decision.Candidate{{Rank: "a", Cost: 100}, {Rank: "b", Cost: 98}, {Rank: "c", Cost: 99}}}
	took := map[string]int{}
	for i := range uint64(1000) {
		in.Draw = i << 54
		out := Ranking{Order: []int{0, 1, 2}}
		sample(in, &out)
		took[in.Candidates[out.Order[0]].Rank]++
	}
	if took["b"] < 900 {
		t.Errorf("taken %v, want the cheapest nearly always", took)
	}
}
