package stats

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
)

// A Point is what was measured at one x: for each repeat the log of how much
// better the second arm is than the first, log(first/second) of a latency.
// NaN stands for a repeat that has no value.
type Point struct {
	// X is positive (tokens); the fit is over its logarithm.
	X float64
	// D has one value for each repeat, in the order of the repeats.
	D []float64
}

// Answer is the kind of a crossover.
type Answer string

// The answers.
const (
	// Crosses: below At the first arm is better, above it the second.
	Crosses Answer = "crosses"
	// FirstWins and SecondWins: no crossing within the range.
	FirstWins  Answer = "first_wins"
	SecondWins Answer = "second_wins"
	// Cliff: the arms change places in one jump between two neighbours, so
	// that a number between them would be invented.
	Cliff Answer = "cliff"
	// Bracket: too noisy for a number, Low and High are all that is known.
	Bracket Answer = "bracket"
	// Unknown: not enough points.
	Unknown Answer = "unknown"
)

// A Crossover is where the second arm becomes the better one.
type Crossover struct {
	Answer Answer
	// At is the estimate; NaN unless Answer is Crosses or Cliff.
	At float64
	// Low and High are the confidence limits; Low may be 0 and High +Inf when
	// the data do not exclude that the crossing lies outside the range.
	Low, High float64
	// Step is the distance of the neighbours of At, in units of X.
	Step float64
	// Margin is, for FirstWins and SecondWins, by how much at least the winner
	// leads at every point (0.09 for 9 %), by the points' own intervals in Diff;
	// 0 when one of them does not exclude a tie.
	Margin float64
	// Fit has the isotonic value for each point, Diff the mean with its interval.
	Fit  []float64
	Diff []Interval
}

// CrossOptions set the method.
type CrossOptions struct {
	// Level of the interval; 0 means 0.95.
	Level float64
	// Samples of the bootstrap; 0 means 2000.
	Samples int
	Seed    uint64
	// Noisy makes the answer Bracket in the place of a number.
	Noisy bool
}

// maxSpread is the widest interval, high over low, that is given as a number
// with limits; a wider one, or one that is open, is a bracket.
const maxSpread = 8

// priorDF is the weight, in degrees of freedom, that the pooled variance has
// in the variance of one point: five repeats alone know little about it.
const priorDF = 4

// guard widens the level that is requested of the bootstrap: the isotonic fit has
// flat parts that a bootstrap does not see, and the points near the crossing
// were chosen after a look at the data. With it, simulated runs contain the
// truth at least as often as the level says (docs/bench.md has the table).
const guard = 0.5

// Cross estimates where the second arm becomes better. The points may come in
// any order.
//
// The fit is the isotonic regression of the mean log ratios over log x. The
// interval is a parametric bootstrap around the means: every sample draws a
// variance of its own for each point (Student, the repeats' variance drawn
// towards the pooled one), and one effect for each repeat that is common to
// all points, sized by the correlation that the repeats show. A plain
// percentile bootstrap over five repeats would be too narrow.
func Cross(points []Point, o CrossOptions) Crossover {
	o.Level = cmp.Or(o.Level, 0.95)
	o.Samples = cmp.Or(o.Samples, 2000)
	var ps []Point
	for _, p := range points {
		if clean := finite(p.D); len(clean) > 0 && p.X > 0 {
			ps = append(ps, p)
		}
	}
	slices.SortFunc(ps, func(a, b Point) int { return cmp.Compare(a.X, b.X) })
	c := Crossover{Answer: Unknown, At: math.NaN(), Low: 0, High: math.Inf(1), Fit: []float64{}, Diff: []Interval{}}
	if len(ps) < 2 {
		return c
	}
	m := newModel(ps)
	var f fitter
	blocks := f.fit(m.x, m.mean, m.weight)
	c.Fit = values(blocks, len(ps))
	for i := range ps {
		df := m.df[i]
		h := StudentQuantile(0.5+o.Level/2, df) * math.Sqrt(m.variance[i]/m.n[i])
		c.Diff = append(c.Diff, Interval{Value: m.mean[i], Low: m.mean[i] - h, High: m.mean[i] + h, N: int(m.n[i])})
	}
	at, side := zero(blocks)

	rng := rand.New(rand.NewPCG(o.Seed, 0x63726f7373))
	samples := make([]float64, o.Samples)
	y := make([]float64, len(ps))
	for s := range samples {
		m.draw(rng, y)
		x, sd := zero(f.fit(m.x, y, m.weight))
		switch {
		case sd < 0:
			x = math.Inf(1)
		case sd > 0:
			x = math.Inf(-1)
		}
		samples[s] = x
	}
	slices.Sort(samples)
	tail := (1 - o.Level) / 2 * guard
	low, high := math.Exp2(SortedQuantile(samples, tail)), math.Exp2(SortedQuantile(samples, 1-tail))
	c.Low, c.High = low, high
	switch {
	case side < 0 && low > ps[len(ps)-1].X:
		c.Answer, c.Margin = FirstWins, margin(c.Diff, func(d Interval) float64 { return -d.High })
	case side > 0 && high < ps[0].X:
		c.Answer, c.Margin = SecondWins, margin(c.Diff, func(d Interval) float64 { return d.Low })
	case side != 0:
		// The fit has no crossing, but the data do not exclude one.
		c.Answer = Bracket
	case o.Noisy, low == 0, math.IsInf(high, 1), high > maxSpread*low:
		c.Answer = Bracket
	default:
		c.Answer, c.At = Crosses, math.Exp2(at)
		i := slices.IndexFunc(ps, func(p Point) bool { return p.X > c.At })
		if i <= 0 {
			i = len(ps) - 1
		}
		c.Step = ps[i].X - ps[i-1].X
		if cliff(m, i) {
			c.Answer = Cliff
			c.Low, c.High = math.Min(c.Low, ps[i-1].X), math.Max(c.High, ps[i].X)
		}
	}
	return c
}

// margin is the least of what the intervals grant the winner, whose end of an
// interval towards 0 is lead.
func margin(diffs []Interval, lead func(Interval) float64) float64 {
	least := math.Inf(1)
	for _, d := range diffs {
		least = math.Min(least, lead(d))
	}
	return math.Expm1(math.Max(least, 0))
}

// cliff reports whether the step between points i-1 and i is a jump: both
// sides differ clearly from 0, the step is large, and it is far out of
// proportion to the slopes around it.
func cliff(m *model, i int) bool {
	se := func(k int) float64 { return math.Sqrt(m.variance[k] / m.n[k]) }
	if m.mean[i-1] > -4*se(i-1) || m.mean[i] < 4*se(i) {
		return false
	}
	jump, width := m.mean[i]-m.mean[i-1], m.x[i]-m.x[i-1]
	if jump < 0.25 {
		return false
	}
	steepest := 0.0
	for _, k := range []int{i - 1, i + 1} {
		if k >= 1 && k < len(m.x) {
			steepest = math.Max(steepest, math.Abs(m.mean[k]-m.mean[k-1])/(m.x[k]-m.x[k-1]))
		}
	}
	return steepest > 0 && jump/width > 6*steepest
}

// model is the points as means with variances.
type model struct {
	x, mean, variance, n, df, weight []float64
	common                           float64   // variance of the effect of a repeat
	effects                          []float64 // memory of draw
	repeats                          [][]int   // which repeats each point has
}

func newModel(ps []Point) *model {
	m := &model{}
	var pool, poolDF float64
	own := make([]float64, len(ps))
	reps := 0
	for i, p := range ps {
		d := finite(p.D)
		n := float64(len(d))
		m.x, m.mean, m.n = append(m.x, math.Log2(p.X)), append(m.mean, Mean(d)), append(m.n, n)
		if n > 1 {
			own[i] = Variance(d)
			pool += own[i] * (n - 1)
			poolDF += n - 1
		}
		var have []int
		for r, v := range p.D {
			if !math.IsNaN(v) && !math.IsInf(v, 0) {
				have = append(have, r)
			}
		}
		m.repeats = append(m.repeats, have)
		reps = max(reps, len(p.D))
	}
	if poolDF > 0 {
		pool /= poolDF
	}
	pool = cmp.Or(pool, 1e-12)
	for i := range ps {
		prior := math.Min(priorDF, poolDF)
		df := prior + m.n[i] - 1
		v := (prior*pool + (m.n[i]-1)*own[i]) / math.Max(df, 1)
		if poolDF == 0 { // one repeat each: nothing is known, so claim little
			v, df = 0.01, 1
		}
		m.variance, m.df = append(m.variance, v), append(m.df, math.Max(df, 1))
		m.weight = append(m.weight, m.n[i]/v)
	}
	m.common = commonVariance(ps, m, reps)
	m.effects = make([]float64, reps)
	return m
}

// commonVariance estimates the variance of what all points of one repeat have
// in common, from how much the mean residual of a repeat varies beyond what
// independent residuals would.
func commonVariance(ps []Point, m *model, reps int) float64 {
	var sum, expect, k float64
	for r := range reps {
		var s, v, n float64
		for i, p := range ps {
			if r < len(p.D) && !math.IsNaN(p.D[r]) && !math.IsInf(p.D[r], 0) && m.n[i] > 1 {
				scale := math.Sqrt(m.n[i] / (m.n[i] - 1))
				s += (p.D[r] - m.mean[i]) * scale
				v += m.variance[i]
				n++
			}
		}
		if n >= 2 {
			sum += (s / n) * (s / n)
			expect += v / (n * n)
			k++
		}
	}
	if k < 2 {
		return 0
	}
	// Only what exceeds chance clearly is taken for an effect.
	if excess := (sum - expect*1.8) / k; excess > 0 {
		return excess
	}
	return 0
}

// draw fills y with one bootstrap sample of the means.
func (m *model) draw(rng *rand.Rand, y []float64) {
	if m.common > 0 {
		sd := math.Sqrt(m.common)
		for r := range m.effects {
			m.effects[r] = rng.NormFloat64() * sd
		}
	}
	for i := range y {
		// A Student variate: a normal one over the root of a χ²/df.
		t := rng.NormFloat64() / math.Sqrt(chiSquare(rng, m.df[i])/m.df[i])
		y[i] = m.mean[i] + t*math.Sqrt(m.variance[i]/m.n[i])
		if m.common > 0 {
			var e float64
			for _, r := range m.repeats[i] {
				e += m.effects[r]
			}
			y[i] += e / m.n[i]
		}
	}
}

// chiSquare draws from χ² with df degrees of freedom (Marsaglia and Tsang's
// gamma method, 2000).
func chiSquare(rng *rand.Rand, df float64) float64 { return 2 * Gamma(rng, df/2) }

// Gamma draws from the gamma distribution with the given shape and scale 1.
func Gamma(rng *rand.Rand, shape float64) float64 {
	if shape < 1 {
		return Gamma(rng, shape+1) * math.Pow(rng.Float64(), 1/shape)
	}
	d := shape - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := rng.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v = v * v * v
		u := rng.Float64()
		if u < 1-0.0331*x*x*x*x || math.Log(u) < 0.5*x*x+d*(1-v+math.Log(v)) {
			return d * v
		}
	}
}

func finite(xs []float64) []float64 {
	return slices.DeleteFunc(slices.Clone(xs), func(x float64) bool { return math.IsNaN(x) || math.IsInf(x, 0) })
}
