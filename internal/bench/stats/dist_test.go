package stats

import (
	"math"
	"math/rand/v2"
	"testing"
)

func near(t *testing.T, what string, got, want, tol float64) {
	t.Helper()
	if math.IsNaN(got) || math.Abs(got-want) > tol {
		t.Errorf("%s = %v, want %v", what, got, want)
	}
}

func TestStudentQuantiles(t *testing.T) {
	// Values of printed tables.
	for _, c := range []struct{ p, df, want float64 }{
		{0.975, 1, 12.7062}, {0.975, 4, 2.77645}, {0.95, 4, 2.13185}, {0.995, 10, 3.16927}, {0.975, 30, 2.04227}, {0.025, 4, -2.77645}, {0.975, 1e6, 1.95997},
	} {
		near(t, "quantile", StudentQuantile(c.p, c.df), c.want, 2e-4)
	}
}

func TestQuantileAndVariance(t *testing.T) {
	xs := []float64{4, 1, 3, 2}
	near(t, "median", Median(xs), 2.5, 1e-12)
	near(t, "p0", Quantile(xs, 0), 1, 0)
	near(t, "p100", Quantile(xs, 1), 4, 0)
	near(t, "variance", Variance(xs), 5.0/3, 1e-12)
	if !math.IsNaN(Mean(nil)) || !math.IsNaN(Median(nil)) || !math.IsNaN(Variance([]float64{1})) || !math.IsNaN(CV([]float64{1})) {
		t.Error("no values must give NaN")
	}
	if xs[0] != 4 {
		t.Error("the input was sorted in place")
	}
}

// Five values underestimate the standard deviation; CV must not.
func TestCVIsUnbiased(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var sum float64
	const n = 20000
	for range n {
		xs := make([]float64, 5)
		for i := range xs {
			xs[i] = 100 + 10*rng.NormFloat64()
		}
		sum += CV(xs)
	}
	near(t, "mean CV", sum/n, 0.1, 0.002)
}

func TestMeanIntervalCovers(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	hit := 0
	const n = 4000
	for range n {
		xs := make([]float64, 5)
		for i := range xs {
			xs[i] = 7 + rng.NormFloat64()
		}
		if !MeanInterval(xs, 0.95).Excludes(7) {
			hit++
		}
	}
	near(t, "coverage", float64(hit)/n, 0.95, 0.012)
	if i := MeanInterval([]float64{1}, 0.95); i.Excludes(1e9) {
		t.Error("one value excludes nothing")
	}
}

func TestLine(t *testing.T) {
	x, y := []float64{0, 1, 2, 3, 4}, []float64{1, 3.1, 4.9, 7.05, 8.95}
	r := Line(x, y, 0.95)
	near(t, "rise", r.Value, 8, 0.1)
	if r.Excludes(8) || !r.Excludes(7) {
		t.Errorf("interval %v", r)
	}
	if Line(x[:2], y[:2], 0.95).Excludes(1e6) || Line([]float64{1, 1, 1}, y[:3], 0.95).Excludes(1e6) {
		t.Error("no line can be known")
	}
}

func TestGammaMoments(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for _, shape := range []float64{0.5, 1, 4} {
		xs := make([]float64, 50000)
		for i := range xs {
			xs[i] = Gamma(rng, shape)
		}
		near(t, "mean", Mean(xs)/shape, 1, 0.03)
		near(t, "variance", Variance(xs)/shape, 1, 0.06)
	}
}
