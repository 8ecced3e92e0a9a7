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
			for _, c := range l.Crossings(1) {
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
	if c := l.Crossings(1); c != nil {
		t.Errorf("without a model %+v", c)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range 100 {
		w, ms := outcome(rng, engines["power"], 24000)
		l.Took(PrefillLeg, &w, time.Duration(ms*float64(time.Millisecond)), time.Duration(i)*time.Second)
		w = Work{Tokens: 100 * i}
		l.Took(TransferLeg, &w, time.Duration(5+i)*time.Millisecond, time.Duration(i)*time.Second)
	}
	all := l.Crossings(1)
	if len(all) != len(crossingLoads) {
		t.Fatalf("%+v", all)
	}
	for _, c := range all {
		if c.Low != 0 || c.High != Never {
			t.Errorf("%+v", c)
		}
	}
}

// TestCrossingOfPrices: once the time of a step is known the crossing follows the prices that
// decide. On engines whose steps take a time that the model can say, the interval holds the
// length from which on the paths truly cost the same, and a decision changes where Tokens is.
func TestCrossingOfPrices(t *testing.T) {
	const others = 0.5
	e, fast := engines["square"], func(n float64) float64 { return engines["square"](n, n) / 2 }
	moves := func(n float64) float64 { return 25 + 0.001*n }
	pause := func(n float64) float64 { return 4 + 0.006*n }
	constants := Tuned
	constants.Keep = 0 // what leaves a cache is no time that could be true
	holds, narrow := map[int]int{}, map[int]int{}
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 12))
		l := NewLearner(Objective{For: ForE2E})
		l.Set(constants)
		noise := func() float64 { return math.Exp(0.1 * rng.NormFloat64()) }
		for i := range 300 {
			now := time.Duration(i) * time.Second
			took := func(leg LegKind, w *Work, ms float64) {
				l.Took(leg, w, time.Duration(ms*float64(time.Millisecond)), now)
			}
			w, ms := outcome(rng, e, 24000)
			took(LocalLeg, &w, ms)
			w, ms = outcome(rng, func(n, context float64) float64 { return e(n, context) / 2 }, 24000)
			took(PrefillLeg, &w, ms)
			w = Work{Tokens: rng.IntN(24000), Running: rng.IntN(24)}
			took(TransferLeg, &w, moves(float64(w.Tokens))*noise())
			for range 5 {
				var a Running
				n, prompts := 100+rng.IntN(8000), rng.IntN(2)
				on := Decoding{Running: 1 + rng.Int32N(32)}
				l.Ran(&a, 1, now, on)
				ms := 16 * (5 + 0.1*float64(on.Running))
				if prompts > 0 {
					ms += pause(float64(n))
				}
				on.Prompts, on.Computed = uint32(prompts), uint32(prompts*n)
				l.Ran(&a, 17, now+time.Duration(ms*noise()*float64(time.Millisecond)), on)
			}
		}
		m := l.Model()
		if !m.Timed() {
			t.Fatal("no prices")
		}
		for _, c := range l.Crossings(others) {
			running := float64(c.Running)
			truth := first(func(n int) bool {
				x := float64(n)
				local := e(x, x) + 0.7*e(0, 0) + 0.4*running + others*running*pause(x)
				return local > fast(x)+0.7*fast(0)+moves(x)
			})
			if c.Low <= truth && truth <= c.High {
				holds[c.Running]++
			} else {
				t.Logf("seed %d, %d running: %d, learned %d to %d to %d", seed, c.Running, truth, c.Low, c.Tokens, c.High)
			}
			if c.High-c.Low < truth+1000 {
				narrow[c.Running]++
			}
			for _, n := range []int{c.Tokens - 1, c.Tokens} {
				w := Work{Tokens: n, Context: n, Running: c.Running, Answering: int32(c.Running)}
				q := Paths{Local: w, Prefill: Work{Tokens: n, Context: n}, Transfer: Work{Tokens: n, Running: c.Running}}
				if now := m.Compare(&Request{ISL: n, Others: others}, &q); n > 0 && m.RemoteCheaper(now.Local, now.Remote) != (n == c.Tokens) {
					t.Errorf("seed %d, %d running: %d tokens cost %+v, and the crossing is %d", seed, c.Running, n, now, c.Tokens)
				}
			}
		}
	}
	for _, running := range crossingLoads {
		if holds[running] < 93 || narrow[running] < 90 {
			t.Errorf("%d running: the interval holds the truth in %d of 100, and says something in %d", running, holds[running], narrow[running])
		}
	}
}

func BenchmarkCrossings(b *testing.B) {
	l := known(Objective{For: ForGoodput, TTFT: 2 * time.Second, ITL: 25 * time.Millisecond})
	for b.Loop() {
		if len(l.Crossings(1)) != len(crossingLoads) {
			b.Fatal("no crossings")
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
