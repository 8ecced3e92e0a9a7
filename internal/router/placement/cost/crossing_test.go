package cost

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// TestCrossingHoldsTheTruth: on closed-form engines, whose law is not that of the fit,
// the interval of the crossing holds the true one in at least 93 of 100 seeds, at each
// load, and is no excuse: it says something, but of an engine that takes the same time
// for all short prompts, which no law of the fit's form comes near to.
func TestCrossingHoldsTheTruth(t *testing.T) {
	for name, e := range engines {
		// A prefill rank computes in a half of the time; a transfer takes a while.
		fast := func(n, context float64) float64 { return e(n, context) / 2 }
		moves := func(n float64) float64 { return 25 + 0.001*n }
		holds, bounded := map[int]int{}, map[int]int{}
		for seed := range uint64(100) {
			rng := rand.New(rand.NewPCG(seed, 11))
			l := NewLearner(Objective{For: ForE2E})
			for i := range 300 {
				now := time.Duration(i) * time.Second
				w, ms := outcome(rng, e, 24000)
				l.Took(LocalLeg, &w, time.Duration(ms*float64(time.Millisecond)), now)
				w, ms = outcome(rng, fast, 24000)
				l.Took(PrefillLeg, &w, time.Duration(ms*float64(time.Millisecond)), now)
				w = Work{Tokens: rng.IntN(24000), Running: rng.IntN(24)}
				ms = moves(float64(w.Tokens)) * math.Exp(0.1*rng.NormFloat64())
				l.Took(TransferLeg, &w, time.Duration(ms*float64(time.Millisecond)), now)
			}
			for _, c := range l.Known().Crossings {
				running := float64(c.Running)
				truth := first(func(n int) bool {
					x := float64(n)
					local := e(x, x) + 0.7*e(0, 0) + 0.4*running + running*(e(x, x)-e(1, 1))
					return local > fast(x, x)+0.7*fast(0, 0)+moves(x)
				})
				if c.Low <= truth && truth <= c.High {
					holds[c.Running]++
				} else {
					t.Logf("%s, seed %d, %d running: %d, learned %d to %d to %d", name, seed, c.Running, truth, c.Low, c.Tokens, c.High)
				}
				if c.High < Never && float64(c.High-c.Low) < 2*float64(truth)+1000 {
					bounded[c.Running]++
				}
			}
		}
		for _, running := range crossingLoads {
			if holds[running] < 93 {
				t.Errorf("%s, %d running: the interval holds the truth in %d of 100", name, running, holds[running])
			}
			if name != "roofline" && bounded[running] < 90 {
				t.Errorf("%s, %d running: the interval says something in %d of 100", name, running, bounded[running])
			}
		}
	}
}

// TestCrossingUnknown: a kind of rank that was never seen computing says nothing of the
// crossing, although its costs are taken from the other kind.
func TestCrossingUnknown(t *testing.T) {
	l := NewLearner(Objective{For: ForTTFT})
	if k := l.Known(); k.Crossings != nil {
		t.Errorf("without a model %+v", k.Crossings)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range 100 {
		w, ms := outcome(rng, engines["power"], 24000)
		l.Took(PrefillLeg, &w, time.Duration(ms*float64(time.Millisecond)), time.Duration(i)*time.Second)
		w = Work{Tokens: 100 * i}
		l.Took(TransferLeg, &w, time.Duration(5+i)*time.Millisecond, time.Duration(i)*time.Second)
	}
	k := l.Known()
	if len(k.Crossings) != len(crossingLoads) {
		t.Fatalf("%+v", k)
	}
	for _, c := range k.Crossings {
		if c.Low != 0 || c.High != Never {
			t.Errorf("%+v", c)
		}
	}
}

func TestFirst(t *testing.T) {
	for _, want := range []int{2, 3, 17, 2048, 99_999, MaxCrossing} {
		if got := first(func(n int) bool { return n >= want }); got != want {
			t.Errorf("%d for %d", got, want)
		}
	}
	if got := first(func(int) bool { return true }); got != 0 {
		t.Errorf("%d where all are", got)
	}
	if got := first(func(int) bool { return false }); got != Never {
		t.Errorf("%d where none is", got)
	}
}
