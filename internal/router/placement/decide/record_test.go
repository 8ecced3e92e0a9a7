package decide

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestKeptRanksAreEnough: in a large fleet the decision and its record are the same
// whether all ranks are put in order or those that are kept.
func TestKeptRanksAreEnough(t *testing.T) {
	rng := rand.New(rand.NewPCG(15, 2048))
	more := func(in *selector.Input, peers *[]workers.Peer, from *selector.Input, theirs []workers.Peer, n int) {
		for i, c := range from.Candidates {
			k := *theirs[i].Worker
			k.Name = fmt.Sprintf("%s-of-%d", k.Name, n)
			c.Rank, c.Slot = fmt.Sprintf("%s-of-%d", c.Rank, n), uint32(len(in.Candidates))
			in.Candidates = append(in.Candidates, c)
			*peers = append(*peers, workers.Peer{Worker: &k, Rank: theirs[i].Rank})
		}
	}
	longest, omitted := 0, 0
	for range 300 {
		in := someInput(rng)
		for n := range 120 {
			o := someInput(rng)
			more(&in.Decode, &in.DecodePeers, &o.Decode, o.DecodePeers, n)
			more(&in.Prefill, &in.PrefillPeers, &o.Prefill, o.PrefillPeers, n)
		}
		var all, kept Plan
		var want, got decision.Decision
		MakePlan(in, &all)
		all.Fill(&want, in, decision.Kept)
		in.Decode.Limit, in.Prefill.Limit = decision.Kept, decision.Kept
		MakePlan(in, &kept)
		kept.Fill(&got, in, decision.Kept)
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("%s, %s (-all in order +those kept)\n%s", in.Decode.Policy, in.Prefill.Policy, d)
		}
		longest, omitted = max(longest, all.Decode.Eligible), max(omitted, got.Decode.Omitted)
	}
	if longest < 200 || omitted < 200 {
		t.Errorf("no large fleet: %d ranks to choose from, %d omitted", longest, omitted)
	}
}
