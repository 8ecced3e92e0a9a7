package stats

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

func TestIsotonic(t *testing.T) {
	x := []float64{1, 2, 3, 4, 5}
	got := values(new(fitter).fit(x, []float64{1, 3, 2, 4, 3.5}, []float64{1, 1, 1, 1, 1}), len(x))
	if diff := cmp.Diff([]float64{1, 2.5, 2.5, 3.75, 3.75}, got, cmpopts.EquateApprox(0, 1e-12)); diff != "" {
		t.Error(diff)
	}
}

// The fit never falls, keeps the weighted mean, and no other non-decreasing
// sequence on a grid is closer.
func TestIsotonicProperties(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "n")
		var x, y, w []float64
		for i := range n {
			x = append(x, float64(i))
			y = append(y, rapid.Float64Range(-5, 5).Draw(t, "y"))
			w = append(w, rapid.Float64Range(0.1, 5).Draw(t, "w"))
		}
		fit := values(new(fitter).fit(x, y, w), len(x))
		loss := func(f []float64) float64 {
			var s float64
			for i := range f {
				s += w[i] * (y[i] - f[i]) * (y[i] - f[i])
			}
			return s
		}
		var sy, sf, sw float64
		for i := range fit {
			if i > 0 && fit[i] < fit[i-1]-1e-9 {
				t.Fatalf("falls at %d: %v", i, fit)
			}
			sy, sf, sw = sy+w[i]*y[i], sf+w[i]*fit[i], sw+w[i]
		}
		if math.Abs(sy-sf) > 1e-6*sw {
			t.Fatalf("weighted mean %v became %v", sy/sw, sf/sw)
		}
		// Any other monotone sequence is no closer.
		other := make([]float64, n)
		v := rapid.Float64Range(-6, 0).Draw(t, "start")
		for i := range other {
			v += rapid.Float64Range(0, 2).Draw(t, "rise")
			other[i] = v
		}
		if loss(other) < loss(fit)-1e-9 {
			t.Fatalf("%v is closer than %v", other, fit)
		}
	})
}

func points(rng *rand.Rand, noise float64, reps int, d func(x float64) float64, xs ...float64) []Point {
	var out []Point
	for _, x := range xs {
		p := Point{X: x}
		for range reps {
			p.D = append(p.D, d(x)+noise*rng.NormFloat64())
		}
		out = append(out, p)
	}
	return out
}

var octaves = []float64{256, 512, 1024, 2048, 4096, 8192}

func TestAnswers(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	slope := func(x float64) float64 { return 0.3 * math.Log2(x/1500) }
	for _, c := range []struct {
		name string
		pts  []Point
		o    CrossOptions
		want Answer
	}{
		{"crosses", points(rng, 0.03, 5, slope, octaves...), CrossOptions{}, Crosses},
		{"first", points(rng, 0.03, 5, func(x float64) float64 { return slope(x) - 2 }, octaves...), CrossOptions{}, FirstWins},
		{"second", points(rng, 0.03, 5, func(x float64) float64 { return slope(x) + 2 }, octaves...), CrossOptions{}, SecondWins},
		{"noisy", points(rng, 0.03, 5, slope, octaves...), CrossOptions{Noisy: true}, Bracket},
		{"nothing but noise", points(rng, 0.5, 3, func(float64) float64 { return 0 }, octaves...), CrossOptions{}, Bracket},
		{"beyond the range, perhaps", points(rng, 0.4, 3, func(x float64) float64 { return slope(x) - 0.8 }, octaves...), CrossOptions{}, Bracket},
		{"cliff", points(rng, 0.02, 5, func(x float64) float64 {
			if x < 1500 {
				return -0.5 + 0.01*math.Log2(x/256)
			}
			return 0.5 + 0.01*math.Log2(x/2048)
		}, octaves...), CrossOptions{}, Cliff},
		{"one point", points(rng, 0.03, 5, slope, 1024), CrossOptions{}, Unknown},
		{"nothing", nil, CrossOptions{}, Unknown},
		{"no values", []Point{{X: 1, D: []float64{math.NaN()}}, {X: 2, D: []float64{math.Inf(1)}}}, CrossOptions{}, Unknown},
	} {
		got := Cross(c.pts, c.o)
		if got.Answer != c.want {
			t.Errorf("%s: %s [%v %v]", c.name, got.Answer, got.Low, got.High)
		}
		for _, at := range []float64{1500, got.At} {
			if c.want == Crosses && (at < got.Low || at > got.High) {
				t.Errorf("%s: %v is not in [%v %v]", c.name, at, got.Low, got.High)
			}
		}
	}
	first := Cross(points(rng, 0.001, 5, func(float64) float64 { return math.Log(0.8) }, octaves...), CrossOptions{})
	near(t, "margin", first.Margin, 0.25, 0.01)
	// What is claimed of every point is what the interval of the worst one grants.
	rng = rand.New(rand.NewPCG(3, 3))
	for _, sign := range []float64{-1, 1} {
		got := Cross(points(rng, 0.1, 5, func(float64) float64 { return sign * 0.5 }, octaves...), CrossOptions{})
		if got.Answer != FirstWins && got.Answer != SecondWins {
			t.Fatalf("%+v", got)
		}
		for i, d := range got.Diff {
			if lead := math.Min(math.Abs(d.Low), math.Abs(d.High)); d.Excludes(0) && math.Expm1(lead) < got.Margin-1e-12 || !d.Excludes(0) && got.Margin > 0 {
				t.Errorf("%s by at least %.3f, and point %d has %+.3f [%+.3f, %+.3f]", got.Answer, got.Margin, i, d.Value, d.Low, d.High)
			}
		}
	}
}

func TestCrossIsDeterministic(t *testing.T) {
	pts := points(rand.New(rand.NewPCG(2, 2)), 0.1, 5, func(x float64) float64 { return math.Log2(x / 900) }, octaves...)
	a, b := Cross(pts, CrossOptions{Seed: 5}), Cross(pts, CrossOptions{Seed: 5})
	if diff := cmp.Diff(a, b, cmpopts.EquateNaNs()); diff != "" {
		t.Error(diff)
	}
}

// An effect that all points of a repeat share does not average out over the
// points, and the interval must know.
func TestRepeatEffectsWidenTheInterval(t *testing.T) {
	width := func(shared float64) float64 {
		var sum float64
		for seed := range uint64(20) {
			rng := rand.New(rand.NewPCG(seed, 3))
			pts := points(rng, 0.03, 6, func(x float64) float64 { return 0.3 * math.Log2(x/1500) }, octaves...)
			for r := range 6 {
				e := shared * rng.NormFloat64()
				for i := range pts {
					pts[i].D[r] += e
				}
			}
			c := Cross(pts, CrossOptions{Samples: 500})
			sum += math.Log2(c.High / c.Low)
		}
		return sum / 20
	}
	if a, b := width(0), width(0.1); b < 1.5*a {
		t.Errorf("width %.3f without and %.3f with a shared effect", a, b)
	}
}

func BenchmarkCross(b *testing.B) {
	pts := points(rand.New(rand.NewPCG(1, 1)), 0.05, 5, func(x float64) float64 { return math.Log2(x / 900) }, octaves...)
	b.ReportAllocs()
	for b.Loop() {
		Cross(pts, CrossOptions{})
	}
}
