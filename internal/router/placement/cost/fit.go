package cost

import (
	"math"
	"time"
)

// fit is a leg's model in the making: weighted least squares over the outcomes, older ones
// counting less, in information form. Sums are kept and solved when a model is
// wanted, so that an outcome costs a few multiplications, and what is not known
// stays at what was assumed.
type fit struct {
	info   [terms][terms]float64 // Σ w·x·xᵀ
	moment [terms]float64        // Σ w·x·y
	square float64               // Σ w·y²
	// bands is what was seen by size.
	bands [bands]share
	// count is how many outcomes there were, seen how many of them count.
	count int
	seen  float64
	// last is when the newest one was.
	last time.Duration
	// model is the newest solution.
	model LegModel
	watch watch
}

// memory is how many outcomes count at most: older ones fade.
const memory = 400

// floor in ms is where errors stop to be judged relative to the time.
const floor = 20

// add counts an outcome: a leg took ms. It reports whether that is a drift.
// Of a slow rank it counts what another would have taken: the model is that of them all.
func (f *fit) add(leg *Work, ms float64, now time.Duration) Change {
	w := *leg
	ms, w.Times = ms/leg.times(), 0
	x := w.values()
	predicted := f.model.Time(&w)
	// Long waits differ by more than short ones: errors are relative. An outcome
	// that is far from what was expected weighs less.
	change := f.drift(&w, predicted, ms, now)
	f.fade(1 - 1.0/memory)
	weight := f.take(&x, ms, floor+max(predicted, ms)/2)
	own := &f.bands[band(w.Tokens)]
	for i := range x {
		own.values[i] += weight * x[i]
	}
	own.took += weight * ms
	f.last = now
	return change
}

// take counts what took ms where the terms had values x. Its error counts by scale.
func (f *fit) take(x *[terms]float64, ms, scale float64) (weight float64) {
	weight = 1 / (scale * scale)
	for i := range x {
		for j := range x {
			f.info[i][j] += weight * x[i] * x[j]
		}
		f.moment[i] += weight * x[i] * ms
	}
	f.square += weight * ms * ms
	f.seen++
	f.count++
	return weight
}

// off is by what share of itself the model's time is off on average, as a standard error; 1
// while nothing is known. Errors of long times are counted by half of the time.
func (f *fit) off() float64 {
	if f.seen <= terms {
		return 1
	}
	return min(math.Sqrt(f.variance()/f.seen)/2, 1)
}

// variance is the mean of the squared errors of outcomes, each by its scale.
func (f *fit) variance() float64 {
	rss := f.square
	for i := range f.info {
		rss -= 2 * f.model[i] * f.moment[i]
		for j := range f.info {
			rss += f.model[i] * f.info[i][j] * f.model[j]
		}
	}
	return max(rss, 0) / (f.seen - terms)
}

// solve makes the model from what was seen, and from an assumption. Where another fit
// has seen something it counts as a few outcomes like those, until this one has drifted
// and is no longer like it.
func (f *fit) solve(assumed *LegModel, like *fit) {
	a, b := f.info, f.moment
	if like != nil && like.seen > 0 && !f.watch.drifted {
		g := borrowed / max(like.seen, borrowed)
		for i := range a {
			for j := range a[i] {
				a[i][j] += g * like.info[i][j]
				b[i] += g * like.info[i][j] * assumed[j]
			}
		}
	}
	// A little of each term alone, or a term that was never seen has no solution.
	for i := range a {
		r := ridge(a[i][i])
		a[i][i] += r
		b[i] += r * assumed[i]
	}
	if l, ok := positive(a, b); ok {
		f.model, f.watch.made = l, f.count
	}
}

// ridge is how much an assumption weighs for a term that weighs so much itself.
func ridge(weight float64) float64 { return 1e-6 + 1e-4*weight }

// positive solves a·x = b with x ≥ 0: more work never takes less time. Terms that
// would be negative are left out, one after the other.
func positive(a [terms][terms]float64, b [terms]float64) (x LegModel, ok bool) {
	var out [terms]bool
	for range terms {
		if x, ok = cholesky(a, b, out); !ok {
			return x, false
		}
		worst := -1
		for i := range x {
			if x[i] < 0 && (worst < 0 || x[i]*math.Sqrt(a[i][i]) < x[worst]*math.Sqrt(a[worst][worst])) {
				worst = i
			}
		}
		if worst < 0 {
			return x, true
		}
		out[worst] = true
	}
	return LegModel{}, true
}

// cholesky solves a·x = b for a symmetric and positive a, without the terms of out,
// which are 0.
func cholesky(a [terms][terms]float64, b [terms]float64, out [terms]bool) (x LegModel, ok bool) {
	for i := range out {
		if out[i] {
			for j := range a {
				a[i][j], a[j][i] = 0, 0
			}
			a[i][i], b[i] = 1, 0
		}
	}
	var l [terms][terms]float64
	for i := range l {
		for j := 0; j <= i; j++ {
			s := a[i][j]
			for k := range j {
				s -= l[i][k] * l[j][k]
			}
			if i == j {
				if !(s > 0) || math.IsInf(s, 0) {
					return x, false
				}
				l[i][i] = math.Sqrt(s)
			} else {
				l[i][j] = s / l[j][j]
			}
		}
	}
	for i := range x {
		s := b[i]
		for k := range i {
			s -= l[i][k] * x[k]
		}
		x[i] = s / l[i][i]
	}
	for i := terms - 1; i >= 0; i-- {
		s := x[i]
		for k := i + 1; k < terms; k++ {
			s -= l[k][i] * x[k]
		}
		x[i] = s / l[i][i]
	}
	return x, true
}
