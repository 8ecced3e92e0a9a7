package cost

import "math"

// MaxCrossing is up to how many tokens a crossing is looked for.
const MaxCrossing = 1 << 17

// Never is a crossing that was not found up to MaxCrossing: all prompts are cheaper
// where they are.
const Never = MaxCrossing + 1

// Crossing is from how many tokens on a prompt is prefilled remotely, if none of it is cached,
// nothing else waits, and that many answers run on the decode rank.
type Crossing struct {
	// Running is the answers that run on the decode rank.
	Running int
	// Tokens is from where on the model in force takes the remote path. Both paths truly cost the
	// same somewhere from Low to High, with a confidence of about 95 %: so far the model may be
	// off. Each is 0 where all prompts are cheaper on a prefill rank, and Never where none is.
	Low, Tokens, High int
}

// crossingLoads are the answers on a decode rank for which there are crossings.
var crossingLoads = [...]int{0, 8, 32}

// sure is how many standard errors an interval reaches to either side.
const sure = 1.96

// Crossings are where the revision in force changes the path, by load. They must not be changed. A ms of delay of others
// counts others, as in [Request]. None while the revision does not compare paths.
func (l *Learner) Crossings(others float64) []Crossing {
	l.mu.Lock()
	m, fits, steps, last := l.model.Load(), l.fits, l.steps, l.crossed // nobody waits for what follows
	l.mu.Unlock()
	if !m.Compares() {
		return nil
	}
	if last.revision == m.Revision && last.others == others {
		return last.list
	}
	x := crossings{model: *m, others: others}
	for i := range fits {
		x.errors[i] = fits[i].uncertainty()
	}
	x.errors[legKinds] = steps.uncertainty()
	if running := steps.info[stepOne][stepRunning]; running > 0 {
		x.held, x.cached = 1000*steps.info[stepOne][stepHeld]/running, 1000*steps.info[stepOne][stepCached]/running
	}
	all := make([]Crossing, len(crossingLoads))
	for i, running := range crossingLoads {
		x.running = running
		c := Crossing{
			Running: running,
			Low:     first(func(n int) bool { local, remote, err := x.costs(n); return local+err > remote }),
			Tokens:  first(func(n int) bool { q := x.paths(n); c := x.compare(n, &q); return m.RemoteCheaper(c.Local, c.Remote) }),
			High:    first(func(n int) bool { local, remote, err := x.costs(n); return local-err > remote }),
		}
		c.Low, c.High = min(c.Low, c.Tokens), max(c.High, c.Tokens) // costs that are nearly equal are local
		all[i] = c
	}
	l.mu.Lock()
	l.crossed = crossed{m.Revision, others, all}
	l.mu.Unlock()
	return all
}

// crossed are the crossings of a revision, kept because they take milliseconds to compute.
type crossed struct {
	revision uint64
	others   float64
	list     []Crossing
}

// crossings compares the paths of prompts of different lengths.
type crossings struct {
	model  Model
	others float64
	// errors are those of the legs' models and of the StepModel.
	errors [legKinds + 1]uncertainty
	// running is the answers on the decode rank; held and cached are as in Work of each, on average.
	running      int
	held, cached float64
}

// paths is the work of both paths of a prompt of n tokens.
func (x *crossings) paths(n int) Paths {
	running := float64(x.running)
	w := Work{
		Tokens: n, Context: n, Running: x.running, Answering: int32(x.running),
		Held: int32(min(running*x.held, math.MaxInt32)), HeldCached: int32(min(running*x.cached, math.MaxInt32)),
	}
	q := Paths{Local: w, Prefill: Work{Tokens: n, Context: n}, Transfer: w}
	q.Transfer.Context = 0
	return q
}

// compare is what both paths of a prompt of n tokens cost.
func (x *crossings) compare(n int, q *Paths) Costs {
	return x.model.Compare(&Request{ISL: n, Others: x.others}, q)
}

// costs are those of both paths, and by how much their difference may be off.
func (x *crossings) costs(n int) (local, remote, err float64) {
	m, q := &x.model, x.paths(n)
	now := x.compare(n, &q)
	variance, misfit := 0.0, 0.0
	for k, w := range [...]*Work{&q.Local, &q.Prefill, &q.Transfer, nil} {
		model := [...]*[terms]float64{(*[terms]float64)(&m.Local), (*[terms]float64)(&m.Prefill), (*[terms]float64)(&m.Transfer), (*[terms]float64)(&m.Step)}[k]
		if w == nil && !m.Timed() {
			continue
		}
		var slopes [terms]float64 // of the difference, by the model's coefficients
		for i, was := range model {
			step := 1e-3*was + 1e-6
			model[i] = was + step
			c := x.compare(n, &q)
			model[i] = was
			slopes[i] = (c.Local - c.Remote - (now.Local - now.Remote)) / step
		}
		u := &x.errors[k]
		variance += u.variance(&slopes)
		if w != nil {
			misfit += u.misfits((*LegModel)(model), w, &slopes)
		}
	}
	return now.Local, now.Remote, sure*math.Sqrt(variance) + misfit
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

// bands are those of prompts by their tokens, each four times the one before: where a leg's model
// cannot say how an engine is, it is off in some of them.
const bands = 6

func band(tokens int) int {
	b := 0
	for n := tokens; n > 256 && b < bands-1; n /= 4 {
		b++
	}
	return b
}

// share is what was seen in a band: Σ w·x and Σ w·y.
type share struct {
	values [terms]float64
	took   float64
}

// uncertainty is how far a fit's model can be off.
type uncertainty struct {
	// known says that the rest is; without, the model can be off by anything.
	known bool
	// inverse is the covariance of the model's coefficients.
	inverse [terms]LegModel
	// misfit is by what share of its time the model is off in a band.
	misfit [bands]float64
}

// uncertainty is that of the newest model, from the fit's own outcomes: what stands in for
// them says nothing of how they will be.
func (f *fit) uncertainty() (u uncertainty) {
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

// variance is that of what changes with the model's coefficients by slopes.
func (u *uncertainty) variance(slopes *[terms]float64) (sum float64) {
	for i, x := range slopes {
		if x != 0 && !u.known {
			return math.Inf(1)
		}
		for j, y := range slopes {
			sum += x * u.inverse[i][j] * y
		}
	}
	return max(sum, 0)
}

// misfits is by how much what changes with a leg's model by slopes is off because of the model's
// form.
func (u *uncertainty) misfits(l *LegModel, w *Work, slopes *[terms]float64) float64 {
	// What tokens cost beyond their time is the difference of two times: of a prompt that has
	// them, and of one that has none. Both can be off.
	none := Work{Running: w.Running}
	off := l.Time(w) * u.misfit[band(w.Tokens)]
	beyond := math.Abs(slopes[termCompute]/(float64(w.Tokens)/1000) - slopes[termOne])
	return math.Abs(slopes[termOne])*off + beyond*(off+l.Time(&none)*u.misfit[0])
}
