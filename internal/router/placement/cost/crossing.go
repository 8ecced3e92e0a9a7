package cost

import (
	"math"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
)

// MaxCrossing is up to how many tokens a crossing is looked for.
const MaxCrossing = 1 << 17

// Never is a crossing that was not found up to MaxCrossing: all prompts are cheaper
// where they are.
const Never = MaxCrossing + 1

// Crossing is from how many tokens on a prompt is cheaper on a prefill rank, if none of
// it is cached, nothing else waits, and so many answers run on the decode rank.
type Crossing struct {
	// Running is the answers that run on the decode rank.
	Running int
	// Tokens is what the cost models in force predict; the truth is between Low and High with a
	// confidence of about 95 %. Each is 0 where all prompts are cheaper on a prefill
	// rank, and Never where none is.
	Low, Tokens, High int
}

// crossingLoads are the answers on a decode rank for which there are crossings.
var crossingLoads = [...]int{0, 8, 32}

// sure is how many standard errors an interval reaches to either side.
const sure = 1.96

// crossings are those of a model by load, as sure as the fits are of which it was made.
func crossings(m *Model, fits *[legKinds]fit) []Crossing {
	var errors [legKinds]uncertainty
	for i := range errors {
		errors[i] = fits[i].uncertainty()
	}
	all := make([]Crossing, len(crossingLoads))
	for i, running := range crossingLoads {
		// gain is what remote saves, more or less by err.
		gain := func(n int) (ms, err float64) {
			q := Paths{
				Local:    Work{Tokens: n, Context: n, Running: running, Answering: int32(running)},
				Prefill:  Work{Tokens: n, Context: n},
				Transfer: Work{Tokens: n, Running: running, Answering: int32(running)},
			}
			one := Request{ISL: n, Others: 1}
			c, quote := m.Compare(&one, &q), m.Quote(&one)
			stalled := m.Stall * float64(running)
			if own := m.Local.compute(&q.Local); m.Timed() && own > 0 {
				var t decision.Times
				quote.Local(&q.Local, &t)
				stalled = t.Pause / own
			}
			lv, lm := errors[LocalLeg].of(&q.Local, stalled)
			pv, pm := errors[PrefillLeg].of(&q.Prefill, 0)
			tv, tm := errors[TransferLeg].of(&q.Transfer, 0)
			// What is beyond the limit costs less than it takes: its error is, too. Near the
			// limit it may cost more.
			err = sure*math.Sqrt(lv+pv+tv) + lm + pm + tm
			local, remote := m.Local.Time(&q.Local), m.Prefill.Time(&q.Prefill)+m.Transfer.Time(&q.Transfer)
			return c.Local - c.Remote, err * max(m.steepest(local, err), m.steepest(remote, err))
		}
		all[i] = Crossing{
			Running: running,
			Low:     first(func(n int) bool { ms, err := gain(n); return ms+err > 0 }),
			Tokens:  first(func(n int) bool { ms, _ := gain(n); return ms > 0 }),
			High:    first(func(n int) bool { ms, err := gain(n); return ms-err > 0 }),
		}
	}
	return all
}

// first is the first number of tokens for which is holds: 0 where it is that of a
// prompt of one token, Never where there is none.
func first(is func(n int) bool) int {
	if is(1) {
		return 0
	}
	for low, high := 1, 2; low < MaxCrossing; low, high = high, min(high+max(high/16, 1), MaxCrossing) {
		if !is(high) {
			continue
		}
		for high-low > 1 {
			if mid := (low + high) / 2; is(mid) {
				high = mid
			} else {
				low = mid
			}
		}
		return high
	}
	return Never
}

// bands are those of work by its tokens, each four times the one before: where a leg's model
// cannot say how an engine is, it is off in some of them.
const bands = 6

func band(w *Work) int {
	b := 0
	for n := w.Tokens; n > 256 && b < bands-1; n /= 4 {
		b++
	}
	return b
}

// share is what was seen in a band: Σ w·x and Σ w·y.
type share struct {
	values [terms]float64
	took   float64
}

// uncertainty is how far a leg's model can be off.
type uncertainty struct {
	model LegModel
	// known says that the rest is; without, the model can be off by anything.
	known bool
	// inverse is the covariance of the model's coefficients.
	inverse [terms]LegModel
	// misfit is by what share of its time the model is off in a band.
	misfit [bands]float64
}

// uncertainty is that of the newest model, from the fit's own outcomes: what stands in for
// them says nothing of how they will be.
func (f *fit) uncertainty() uncertainty {
	u := uncertainty{model: f.model}
	if f.seen <= terms {
		return u
	}
	a, variance := f.info, f.variance()
	for i := range a {
		a[i][i] += ridge(a[i][i])
	}
	for i := range terms {
		var b [terms]float64
		b[i] = variance
		var ok bool
		if u.inverse[i], ok = cholesky(a, b, [terms]bool{}); !ok {
			return u
		}
	}
	u.known = true
	for k := range u.misfit {
		said := 0.0
		for i, v := range f.bands[k].values {
			said += f.model[i] * v
		}
		if said > 0 {
			u.misfit[k] = math.Abs(f.bands[k].took/said - 1)
		}
	}
	return u
}

// of is by how much the cost of w can be off, whose tokens stall answers at so many ms
// a ms: the variance of chance, and what the model's form is off by.
func (u *uncertainty) of(w *Work, stalled float64) (variance, misfit float64) {
	if !u.known {
		return math.Inf(1), 0
	}
	x := w.values()
	x[termCompute] *= 1 + stalled
	x[termAttention] *= 1 + stalled
	for i := range x {
		for j := range x {
			variance += x[i] * u.inverse[i][j] * x[j]
		}
	}
	// What tokens take is the difference of two times: of a prompt that has them, and of
	// one that has none. Both can be off.
	misfit = u.model.Time(w) * u.misfit[band(w)]
	if stalled > 0 {
		none := Work{Running: w.Running}
		misfit += stalled * (misfit + u.model.Time(&none)*u.misfit[band(&none)])
	}
	return max(variance, 0), misfit
}
