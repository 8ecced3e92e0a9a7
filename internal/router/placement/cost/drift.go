package cost

import (
	"math"
	"time"
)

// What a drift is: outcomes that, one after the other, are off by more than allowance (in
// logarithms: a factor of 1.4), until the excess adds up to alarm. An engine that becomes
// three times slower is noticed after six outcomes, if they took long enough to come.
const (
	allowance, alarm = 0.35, 4
	// lasting is how long it must go on: the prompts of one burst wait for each other,
	// and are off together.
	lasting = 30 * time.Second
	// minOutcomes is how many outcomes a leg's model is made of before what it misses is a drift.
	minOutcomes = 50
	// spell is within how many outcomes of one drift another shows that learning again
	// did not help, quiet how many without one end the doubt.
	spell, quiet = 200, 100
	// kept is for how many outcomes what was seen before a drift still counts, as if it
	// had taken as long as the newest.
	kept = 8
)

// watch is what a fit knows of its own errors.
type watch struct {
	// over and under are the excess of outcomes that took longer than said, or less.
	over, under excess
	// made is how many outcomes the newest model is made of, last how many there were at
	// the newest drift; drifted says that there was one.
	made, last int
	drifted    bool
}

// Change is a set of what an outcome brought; 0 is nothing.
type Change uint8

// The changes.
const (
	// Learned: paths can be compared now, and could not.
	Learned Change = 1 << iota
	// Drifted: the outcomes of a leg are no longer what the model predicts. It is learned again.
	Drifted
	// Timed: prices are known now, and were not.
	Timed
	// Doubted: learning again did not help. There is no model until it does.
	Doubted
)

// Has reports whether all of another set is in c.
func (c Change) Has(other Change) bool { return c&other == other }

// drift counts an outcome that took ms where the model predicted another time, and
// reports whether the fleet is no longer what the model predicts.
func (f *fit) drift(leg *Work, predicted, ms float64, now time.Duration) Change {
	w := &f.watch
	if leg.Queued > leg.Tokens {
		return 0 // it says more of those before it
	}
	if w.made < minOutcomes || w.drifted && w.made < w.last+minOutcomes {
		return 0
	}
	off := math.Log((floor + ms) / (floor + predicted))
	by := 0.0
	if over, under := w.over.add(off, now), w.under.add(-off, now); over {
		by = w.over.mean()
	} else if under {
		by = -w.under.mean()
	} else {
		return 0
	}
	again := w.drifted && f.count < w.last+spell
	*w = watch{made: w.made, last: f.count, drifted: true}
	f.slow(math.Exp(by))
	f.fade(kept / max(f.seen, kept))
	if again {
		return Doubted
	}
	return Drifted
}

// excess is by how much outcomes in a row are off beyond the allowance.
type excess struct {
	sum, n float64
	since  time.Duration
}

// add adds an error, and reports whether they are a drift.
func (e *excess) add(off float64, now time.Duration) bool {
	if e.n == 0 {
		e.since = now
	}
	e.sum, e.n = e.sum+off-allowance, e.n+1
	if e.sum <= 0 {
		*e = excess{}
	}
	return e.sum >= alarm && now-e.since >= lasting
}

// mean is the mean error.
func (e *excess) mean() float64 { return e.sum/e.n + allowance }

// slow takes all that was seen for outcomes that took that many times as long: the model is
// so from now on, until new outcomes say otherwise.
func (f *fit) slow(by float64) {
	for i := range f.model {
		f.model[i] *= by
		f.moment[i] /= by
		for j := range f.info[i] {
			f.info[i][j] /= by * by
		}
	}
	for k := range f.bands {
		b := &f.bands[k]
		for i := range b.values {
			b.values[i] /= by * by
		}
		b.took /= by
	}
}

// fade makes all that was seen count less.
func (f *fit) fade(by float64) {
	for i := range f.info {
		for j := range f.info[i] {
			f.info[i][j] *= by
		}
		f.moment[i] *= by
	}
	for k := range f.bands {
		b := &f.bands[k]
		for i := range b.values {
			b.values[i] *= by
		}
		b.took *= by
	}
	f.square *= by
	f.seen *= by
}
