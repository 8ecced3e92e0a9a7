package stats

import (
	"math"
	"slices"
)

// Mean of xs; NaN without values.
func Mean(xs []float64) float64 {
	if len(xs) == 0 {
		return math.NaN()
	}
	var s float64
	for _, x := range xs {
		s += x
	}
	return s / float64(len(xs))
}

// Variance is the sample variance with n-1; NaN with fewer than two values.
func Variance(xs []float64) float64 {
	if len(xs) < 2 {
		return math.NaN()
	}
	m, s := Mean(xs), 0.0
	for _, x := range xs {
		s += (x - m) * (x - m)
	}
	return s / float64(len(xs)-1)
}

// CV is the coefficient of variation, sd/mean, corrected for the bias of the
// standard deviation of few values; NaN with fewer than two values.
func CV(xs []float64) float64 {
	m := Mean(xs)
	if len(xs) < 2 || m == 0 {
		return math.NaN()
	}
	n := float64(len(xs))
	// E[s] = c4·σ for normal values.
	lg1, _ := math.Lgamma(n / 2)
	lg2, _ := math.Lgamma((n - 1) / 2)
	c4 := math.Sqrt(2/(n-1)) * math.Exp(lg1-lg2)
	return math.Sqrt(Variance(xs)) / c4 / math.Abs(m)
}

// Quantile is the q-quantile of xs (0 ≤ q ≤ 1) by linear interpolation between
// order statistics; NaN without values. xs is not changed.
func Quantile(xs []float64, q float64) float64 {
	s := slices.Clone(xs)
	slices.Sort(s)
	return SortedQuantile(s, q)
}

// Median is the 0.5-quantile.
func Median(xs []float64) float64 { return Quantile(xs, 0.5) }

// SortedQuantile is Quantile of values in order.
func SortedQuantile(s []float64, q float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	at := q * float64(len(s)-1)
	i := int(at)
	if i >= len(s)-1 {
		return s[len(s)-1]
	}
	f := at - float64(i)
	if f == 0 || s[i] == s[i+1] {
		return s[i] // infinities must not meet
	}
	return s[i]*(1-f) + s[i+1]*f
}

// An Interval is an estimate with its confidence limits.
type Interval struct {
	Value float64 `json:"value"`
	Low   float64 `json:"low"`
	High  float64 `json:"high"`
	// N is how many independent values it rests on.
	N int `json:"n"`
}

// Excludes reports whether x is outside the interval.
func (i Interval) Excludes(x float64) bool { return x < i.Low || x > i.High }

// Map applies a monotone function to value and limits.
func (i Interval) Map(f func(float64) float64) Interval {
	a, b := f(i.Low), f(i.High)
	return Interval{Value: f(i.Value), Low: math.Min(a, b), High: math.Max(a, b), N: i.N}
}

// MeanInterval is the mean of xs with a Student interval of the given level
// (0.95). With one value the interval is infinite.
func MeanInterval(xs []float64, level float64) Interval {
	m := Mean(xs)
	if len(xs) < 2 {
		return Interval{Value: m, Low: math.Inf(-1), High: math.Inf(1), N: len(xs)}
	}
	h := StudentQuantile(0.5+level/2, float64(len(xs)-1)) * math.Sqrt(Variance(xs)/float64(len(xs)))
	return Interval{Value: m, Low: m - h, High: m + h, N: len(xs)}
}

// Line fits a straight line by least squares and gives its rise between the
// smallest and the largest x. With fewer than three points, or all at one x,
// the interval is infinite around 0.
func Line(x, y []float64, level float64) Interval {
	open := Interval{Low: math.Inf(-1), High: math.Inf(1), N: len(x)}
	if len(x) < 3 || len(x) != len(y) {
		return open
	}
	mx, my := Mean(x), Mean(y)
	var sxx, sxy float64
	for i := range x {
		sxx += (x[i] - mx) * (x[i] - mx)
		sxy += (x[i] - mx) * (y[i] - my)
	}
	if sxx == 0 {
		return open
	}
	slope := sxy / sxx
	var rss float64
	for i := range x {
		e := y[i] - my - slope*(x[i]-mx)
		rss += e * e
	}
	n := float64(len(x))
	span := slices.Max(x) - slices.Min(x)
	h := StudentQuantile(0.5+level/2, n-2) * math.Sqrt(rss/(n-2)/sxx)
	return Interval{Value: slope * span, Low: (slope - h) * span, High: (slope + h) * span, N: len(x)}
}

// StudentQuantile is the p-quantile of Student's t with df degrees of freedom.
func StudentQuantile(p, df float64) float64 {
	if p == 0.5 {
		return 0
	}
	if p < 0.5 {
		return -StudentQuantile(1-p, df)
	}
	low, high := 0.0, 2.0
	for studentCDF(high, df) < p && high < 1e9 {
		high *= 2
	}
	for range 200 {
		mid := (low + high) / 2
		if studentCDF(mid, df) < p {
			low = mid
		} else {
			high = mid
		}
		if high-low < 1e-12*high {
			break
		}
	}
	return (low + high) / 2
}

func studentCDF(t, df float64) float64 {
	return 1 - 0.5*betaInc(df/2, 0.5, df/(df+t*t))
}

// betaInc is the regularised incomplete beta function, by its continued
// fraction (modified Lentz).
func betaInc(a, b, x float64) float64 {
	switch {
	case x <= 0:
		return 0
	case x >= 1:
		return 1
	case x > (a+1)/(a+b+2):
		return 1 - betaInc(b, a, 1-x)
	}
	la, _ := math.Lgamma(a)
	lb, _ := math.Lgamma(b)
	lab, _ := math.Lgamma(a + b)
	front := math.Exp(lab-la-lb+a*math.Log(x)+b*math.Log(1-x)) / a
	const tiny = 1e-300
	f, c, d := 1.0, 1.0, 0.0
	for i := range 500 {
		m := float64(i / 2)
		var num float64
		switch {
		case i == 0:
			num = 1
		case i%2 == 0:
			num = m * (b - m) * x / ((a + 2*m - 1) * (a + 2*m))
		default:
			num = -(a + m) * (a + b + m) * x / ((a + 2*m) * (a + 2*m + 1))
		}
		if d = 1 + num*d; math.Abs(d) < tiny {
			d = tiny
		}
		d = 1 / d
		if c = 1 + num/c; math.Abs(c) < tiny {
			c = tiny
		}
		f *= c * d
		if math.Abs(1-c*d) < 1e-14 {
			break
		}
	}
	return front * (f - 1)
}
