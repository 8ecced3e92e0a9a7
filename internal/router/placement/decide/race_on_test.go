//go:build race

package decide

import (
	"testing"

	"github.com/dynctl/dynctl/internal/workers"
)

// TestReleasedMemoryShows: who still reads candidates, peers and rankings after they
// were given back finds nothing that could be taken for a decision.
func TestReleasedMemoryShows(t *testing.T) {
	list := []*workers.Worker{well("d", workers.Decode), well("p", workers.Prefill)}
	for name, give := range map[string]func(*Run){"compacted": (*Run).Compact, "released": (*Run).Release} {
		var r Run
		r.Begin(prompt(100))
		r.NextPlan(usual(), list, 16, nothing{})
		in, plan := r.In, r.Plan
		give(&r)
		for _, c := range [...]string{in.Decode.Candidates[0].Rank, in.Prefill.Candidates[0].KeptOut, plan.prefillVeto[:1][0]} {
			if c != "released memory" {
				t.Errorf("%s: a late reader finds %q", name, c)
			}
		}
		if in.DecodePeers[0].Worker != nil || in.PrefillPeers[0].Rank != nil {
			t.Errorf("%s: a late reader finds the peers", name)
		}
		for _, i := range [...]int{plan.Decode.Order[0], plan.Prefill.Order[0]} {
			if i < 1000 {
				t.Errorf("%s: a late reader finds rank %d", name, i)
			}
		}
	}
}
