package router_test

import (
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
)

// TestOffloadedBlocksCount: prompts that have left the devices come back from the hosts'
// memory of the engine that has them, are predicted so, and say what they would say
// elsewhere.
func TestOffloadedBlocksCount(t *testing.T) {
	t.Parallel()
	r := start(t, "2a:profile=instant,kv_blocks=24,cpu_blocks=400")
	var beyond uint32
	for round := range 3 {
		for i := range 8 {
			prompt := ids(150+i, i)
			want := right(prompt)
			a, got := r.complete(prompt)
			if got != want {
				t.Errorf("prompt %d: %q, want %q", i, got, want)
			}
			c := r.receipt(a.header.Get("X-Dynctl-Decision"))
			at := slices.IndexFunc(c.Decode.Candidates, func(c0 decision.Candidate) bool { return c0.Rank == c.Decode.Chosen })
			if at < 0 {
				t.Fatalf("no candidate was chosen: %+v", c.Decode)
			}
			chosen := c.Decode.Candidates[at]
			counted, found := 16*(chosen.OverlapBlocks+int(chosen.CPU)), a.completion(t).Usage.PromptTokensDetails.CachedTokens
			if counted > found || round > 0 && found == 0 {
				t.Errorf("round %d, prompt %d: %d blocks on the device and %d beyond were counted, %d tokens were there", round, i, chosen.OverlapBlocks, chosen.CPU, found)
			}
			beyond += chosen.CPU
			r.synced()
		}
	}
	if beyond < 50 {
		t.Errorf("%d blocks beyond the devices were counted", beyond)
	}
	for _, name := range []string{"aggregated-0", "aggregated-1"} {
		w := r.worker(name)
		if f := w.Ranks[0].Feed; !f.TiersReported || f.Tiers.CPU == 0 || float64(f.Tiers.CPU) != r.metric(`dynctl_feed_tier_blocks{dp_rank="0",tier="cpu",worker="`+name+`"}`) {
			t.Errorf("%s: %+v", name, f)
		}
		if s := r.counters(name); s.External == 0 {
			t.Errorf("%s has loaded nothing: %+v", name, s)
		}
	}
}
