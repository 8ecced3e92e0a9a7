package cost

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// TestFollowsDrift: engines that become three times slower, or faster, are noticed within
// 45 outcomes (of one a second), reported once, and known again after 90; meanwhile
// costs go on to decide.
func TestFollowsDrift(t *testing.T) {
	for name, e := range engines {
		for _, factor := range []float64{3, 1. / 3} {
			for seed := range uint64(10) {
				rng := rand.New(rand.NewPCG(seed, 5))
				l := taught(rng, e, 500)
				other := func(n, context float64) float64 { return factor * e(n, context) }
				noticed, reports := -1, 0
				for i := range 90 {
					w, ms := outcome(rng, other, 24000)
					switch l.Took(PrefillLeg, &w, time.Duration(ms*float64(time.Millisecond)), time.Duration(500+i)*time.Second) {
					case Drifted:
						noticed = i
						reports++
					case Doubted:
						t.Errorf("%s x%.2g, seed %d: doubted after %d", name, factor, seed, i)
					}
					if l.Model() == nil {
						t.Fatalf("%s x%.2g, seed %d: no model after %d", name, factor, seed, i)
					}
				}
				if reports != 1 || noticed > 45 {
					t.Errorf("%s x%.2g, seed %d: reported %d times, last after %d", name, factor, seed, reports, noticed)
				}
				w := Work{Tokens: 8000, Context: 12000}
				if is := other(8000, 12000) + 0.7*other(0, 0); math.Abs(l.Model().Prefill.Time(&w)-is) > 0.25*is {
					t.Errorf("%s x%.2g, seed %d: 8,000 tokens take %.0f ms, predicted are %.0f", name, factor, seed, is, l.Model().Prefill.Time(&w))
				}
			}
		}
	}
}

// TestNoDriftOfNothing: outcomes that scatter, around laws that the fit cannot say, are no
// drift.
func TestNoDriftOfNothing(t *testing.T) {
	for name, e := range engines {
		for seed := range uint64(10) {
			rng := rand.New(rand.NewPCG(seed, 6))
			l := NewLearner(Objective{For: ForTTFT})
			for i := range 2000 {
				for _, leg := range []LegKind{LocalLeg, PrefillLeg} {
					w, ms := outcome(rng, e, 24000)
					ms *= math.Exp(0.2 * rng.NormFloat64())
					if c := l.Took(leg, &w, time.Duration(ms*float64(time.Millisecond)), time.Duration(i)*time.Second); c != 0 {
						t.Errorf("%s, seed %d: %d after %d", name, seed, c, i)
					}
				}
			}
		}
	}
}

// TestBadSpell: a fleet that is now so, now so has no model, that is the threshold decides;
// when it stays as it is, costs decide again.
func TestBadSpell(t *testing.T) {
	for name, e := range engines {
		rng := rand.New(rand.NewPCG(8, 8))
		l := taught(rng, e, 200)
		changes := map[Change]int{}
		now := 200
		play := func(n int, factor float64) {
			for range n {
				w, ms := outcome(rng, e, 24000)
				changes[l.Took(PrefillLeg, &w, time.Duration(factor*ms*float64(time.Millisecond)), time.Duration(now)*time.Second)]++
				now++
			}
		}
		play(80, 5)
		if l.Model() == nil || changes[Drifted] != 1 {
			t.Errorf("%s: after one drift %v", name, changes)
		}
		play(80, 1)
		if l.Model() != nil || changes[Doubted] != 1 {
			t.Errorf("%s: after two drifts %v", name, changes)
		}
		if k := l.Known(0); k.Model != nil || l.Crossings(1) != nil {
			t.Errorf("%s: in doubt %+v", name, k)
		}
		for range 4 {
			play(80, 5)
			play(80, 1)
		}
		if changes[Doubted] != 1 {
			t.Errorf("%s: the doubt was reported %d times", name, changes[Doubted])
		}
		before := changes[Learned]
		play(200, 1)
		m := l.Model()
		if m == nil || changes[Learned] != before+1 {
			t.Fatalf("%s: after a calm time %v", name, changes)
		}
		w := Work{Tokens: 8000, Context: 12000}
		if is := e(8000, 12000) + 0.7*e(0, 0); math.Abs(m.Prefill.Time(&w)-is) > 0.25*is {
			t.Errorf("%s: 8,000 tokens take %.0f ms, predicted are %.0f", name, is, m.Prefill.Time(&w))
		}
	}
}
