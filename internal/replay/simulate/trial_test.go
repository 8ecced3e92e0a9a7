package simulate

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// TestPriceFollowsTheLoad: chats on two prefill ranks, which cannot take many prompts. What
// a stall costs follows from trials, so that prompts do not wait there for nothing: first
// tokens come nearly as soon as with the best fixed threshold, and more requests are good.
// The engines say so, not the trials.
func TestPriceFollowsTheLoad(t *testing.T) {
	all, err := arrivals.Generate(arrivals.Options{Shape: "chats", Requests: 2000, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	with := func(rule decide.Rule) *Result {
		t.Helper()
		res, err := Run(t.Context(), arrivals.FromSlice(all), Setup{
			Fleet: fleet(t, "2p14d:block=64,kv_blocks=16384"), Seed: 1, Speedup: 8, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond,
			Settings: decide.Settings{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights(), Rule: rule},
		})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	fixed, auto := with(decide.Rule{Threshold: 8192}), with(decide.Rule{Threshold: 2048, Auto: true})
	t.Logf("threshold 8,192: %.3f good, TTFT %+v; auto: %.3f, %+v", fixed.Good, fixed.TTFT, auto.Good, auto.TTFT)
	if auto.Good < fixed.Good || auto.TTFT.P95 > 2*fixed.TTFT.P95 {
		t.Errorf("threshold 8,192: %.3f good, TTFT %+v; auto: %.3f, %+v", fixed.Good, fixed.TTFT, auto.Good, auto.TTFT)
	}
}
