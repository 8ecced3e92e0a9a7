package simulate

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// TestSlowRankCostsMore: of eight prefill ranks one becomes three times slower. What the
// router measures of it makes its path dearer: it computes fewer tokens than without, and
// the fleet's late first tokens are not as late. The engines say so, not the router.
func TestSlowRankCostsMore(t *testing.T) {
	const begin, end, rate = time.Minute, 4 * time.Minute, 40
	all := mixed(end, rate)
	type outcome struct {
		*Result
		last, mean float64 // tokens computed by the slow rank, and by the others on average
	}
	policy := selector.KVBlocks // by times a slow rank gets little work even where none is judged
	with := func(factor float64, faults ...Fault) (o outcome) {
		t.Helper()
		r, res, err := play(t.Context(), arrivals.FromSlice(all), Setup{
			Fleet: fleet(t, "8p8d:block=16,kv_blocks=4096"), Seed: 1, TTFT: 2 * time.Second, ITL: 12 * time.Millisecond, Faults: faults, CountFrom: begin + 30*time.Second,
			Options:    decide.Options{Decode: policy, Prefill: policy, Weights: selector.DefaultWeights(), Rule: decide.Rule{Threshold: 512, Auto: true}},
			SlowFactor: factor,
		})
		if err != nil {
			t.Fatal(err)
		}
		o.Result = res
		for _, k := range r.ranks[:8] {
			o.mean += float64(k.computed) / 7
		}
		o.last = float64(r.ranks[7].computed)
		o.mean -= o.last / 7
		return o
	}
	fault := Fault{begin, SlowOne, 3}
	without, slow := with(0, fault), with(2, fault)
	t.Logf("judged: %.0f tokens on the slow rank, %.0f on each other, TTFT %+v; without a judgement: %.0f, %.0f, %+v", slow.last, slow.mean, slow.TTFT, without.last, without.mean, without.TTFT)
	if slow.last > without.last/2 || slow.last > slow.mean/2 {
		t.Errorf("the slow rank computed %.0f tokens, without a judgement %.0f; the others %.0f each", slow.last, without.last, slow.mean)
	}
	if slow.TTFT.P95 > .95*without.TTFT.P95 || slow.TTFT.P99 > without.TTFT.P99 || slow.Good < without.Good-.005 {
		t.Errorf("TTFT %+v, %.3f good; without a judgement %+v, %.3f good", slow.TTFT, slow.Good, without.TTFT, without.Good)
	}
	policy = selector.KV
	times := with(2, fault)
	t.Logf("by times, judged: %.0f tokens on the slow rank, %.0f on each other, TTFT %+v", times.last, times.mean, times.TTFT)
	if times.last > times.mean/2 || times.TTFT.P95 > .95*without.TTFT.P95 || times.TTFT.P99 > .8*without.TTFT.P99 || times.Good < slow.Good-.005 {
		t.Errorf("by times the slow rank computed %.0f tokens, the others %.0f each: TTFT %+v, %.3f good", times.last, times.mean, times.TTFT, times.Good)
	}
	if testing.Short() {
		return
	}
	// Of eight that are alike none costs more.
	none, judged := with(0), with(2)
	t.Logf("all alike: %.0f tokens on one rank, %.0f on each other, TTFT %+v", judged.last, judged.mean, judged.TTFT)
	if judged.TTFT != none.TTFT || judged.last != none.last {
		t.Errorf("all alike: TTFT %+v, without a judgement %+v", judged.TTFT, none.TTFT)
	}
}

// TestSlowDecodeRankAnswersLess: of four engines that answer one becomes three times slower.
// Requests go to the others, and are answered sooner; some go there still, so that the router
// sees when it is well.
func TestSlowDecodeRankAnswersLess(t *testing.T) {
	const begin, noticed, end, rate = time.Minute, 90 * time.Second, 4 * time.Minute, 12
	all := mixed(end, rate)
	for i := range all {
		all[i].OSL *= 3
	}
	policy := selector.KVBlocks // by times slow answers are avoided even where no rank is judged
	with := func(factor float64, from time.Duration, faults ...Fault) *Result {
		t.Helper()
		res, err := Run(t.Context(), arrivals.FromSlice(all), Setup{
			Fleet: fleet(t, "4p4d:block=16,kv_blocks=4096"), Seed: 1, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond, Faults: faults, CountFrom: from,
			Options:    decide.Options{Decode: policy, Prefill: policy, Weights: selector.DefaultWeights(), Rule: decide.Rule{Threshold: 512, Auto: true}},
			SlowFactor: factor,
		})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	fault := Fault{begin, SlowDecode, 3}
	without, slow := with(0, noticed, fault), with(2, noticed, fault)
	t.Logf("judged: %.3f good, E2E %+v; without a judgement: %.3f, %+v", slow.Good, slow.E2E, without.Good, without.E2E)
	// Not a tenth more of them good, as when a block of decode load counted 1/64: with 1/8 the blocks
	// that a slow rank holds for longer keep most requests from it already.
	if slow.Good < without.Good+.02 || slow.E2E.P95 > .7*without.E2E.P95 {
		t.Errorf("%.3f good, E2E %+v; without a judgement %.3f, %+v", slow.Good, slow.E2E, without.Good, without.E2E)
	}
	policy = selector.KV
	if slow = with(2, noticed, fault); slow.Good < without.Good+.1 || slow.E2E.P95 > .7*without.E2E.P95 {
		t.Errorf("by times: %.3f good, E2E %+v; by blocks without a judgement %.3f, %+v", slow.Good, slow.E2E, without.Good, without.E2E)
	}
	// A minute after it is well again it answers as many as the others do.
	well, like := with(2, noticed+time.Minute, fault, Fault{noticed, SlowDecode, 1}), with(2, noticed+time.Minute)
	t.Logf("well again: %.3f good, E2E %+v; never slow: %.3f, %+v", well.Good, well.E2E, like.Good, like.E2E)
	if well.Good < like.Good-.02 || well.E2E.P95 > 1.1*like.E2E.P95 {
		t.Errorf("well again: %.3f good, E2E %+v; never slow %.3f, %+v", well.Good, well.E2E, like.Good, like.E2E)
	}
}
