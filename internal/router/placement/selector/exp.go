package selector

import "math"

// ln2 in two parts: the first has so few bits that a whole number of some
// thousands times it is exact.
const (
	ln2High = 0x1.62e42feep-1
	ln2Low  = math.Ln2 - ln2High
)

// expSeries are the factors 1/k! of the powers of r in e^r, highest first; what
// follows that of r^13 is below half a bit.
var expSeries = [...]float64{
	1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
	1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 1.0 / 2, 1, 1,
}

// exp is e to the power of x for x of 0 or less, and 0 where that is below the
// smallest normal number. It is math.Exp within two units of the last bit, and has the
// same bits on every processor, which math.Exp has not.
func exp(x float64) float64 {
	if !(x > -708) {
		return 0
	}
	// x = n·ln 2 + r, so that r is within half of ln 2 around 0.
	n := math.Floor(float64(x*math.Log2E) + 0.5)
	r := x - float64(n*ln2High) - float64(n*ln2Low)
	sum := 0.0
	for _, c := range expSeries {
		sum = c + float64(r*sum)
	}
	return float64(sum * math.Float64frombits(uint64(1023+int(n))<<52))
}
