package experiment

import (
	"maps"
	"math"
	"math/rand/v2"
	"testing"
)

// TestResumedRunsRecommendTheSame: runs that are interrupted once or twice, at any
// cell, and go on against engines that were started again, recommend what the run
// without an interruption does, within one step of the refinement. 95 of 100 must.
func TestResumedRunsRecommendTheSame(t *testing.T) {
	runs := uint64(100)
	if testing.Short() {
		runs = 10
	}
	same, without := uint64(0), uint64(0)
	for seed := range runs {
		p, rng := profiles[seed%uint64(len(profiles))], rand.New(rand.NewPCG(seed, 18))
		s := testSpec(seed + 1)
		s.MaxRepeats = 15
		whole := runner(newWorld(t, p, 0.03, seed+1), s)
		want, err := whole.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if want.Recommend == nil {
			without++
			t.Logf("seed %d recommends nothing: %s", seed, want.Sentence)
			continue
		}
		done := map[string]CellResult{}
		var got *Result
		for part := range uint64(3) {
			// A plan is repeated with other prompts, as --resume does it.
			again := s
			again.Salt += string('a' + rune(part))
			r := runner(newWorld(t, p, 0.03, seed+1+1000*(part+1)), again)
			r.Done = maps.Clone(done)
			r.OnCell = func(c CellResult) error { done[c.Cell.ID] = c; return nil }
			if stop := len(done) + 1 + rng.IntN(len(want.Cells)); part < 2 {
				r.Stop = func() bool { return len(done) >= stop }
			}
			if got, err = r.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got.Partial == "" {
				break
			}
		}
		step := refinement(whole.adaptive(want.Groups[0].Group), float64(want.Recommend.EffISL))
		if got.Recommend != nil && math.Abs(float64(got.Recommend.EffISL-want.Recommend.EffISL)) <= step {
			same++
		} else {
			t.Logf("seed %d: %s\nuninterrupted: %s", seed, got.Sentence, want.Sentence)
		}
	}
	t.Logf("%d of %d resumed runs recommend the same within a step, %d recommend nothing uninterrupted", same, runs-without, without)
	if 100*same < 95*(runs-without) || without > runs/10 {
		t.Errorf("%d of %d, want 95 of 100", same, runs-without)
	}
}
