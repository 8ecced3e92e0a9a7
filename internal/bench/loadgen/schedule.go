package loadgen

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/dynctl/dynctl/internal/bench/stats"
)

// Arrival is how the gaps between planned sends are distributed.
type Arrival string

// The distributions of gaps. Gamma takes a burstiness: the shape, where 1 is
// Poisson, smaller is burstier and larger more even (as vllm bench's).
const (
	Constant Arrival = "constant"
	Poisson  Arrival = "poisson"
	GammaGap Arrival = "gamma"
)

// ParseArrival reads a distribution's name.
func ParseArrival(s string) (Arrival, error) {
	switch a := Arrival(s); a {
	case Constant, Poisson, GammaGap:
		return a, nil
	}
	return "", fmt.Errorf("arrival %q is not one of constant, poisson, gamma", s)
}

// Schedule plans n sends at a mean rate per second. The times are computed
// before the run and rescaled so that the last one lands on n/rate exactly,
// which takes the luck of the seed out of the load.
func Schedule(n int, rate float64, a Arrival, burstiness float64, seed uint64) ([]time.Duration, error) {
	if n < 1 || !(rate > 0) {
		return nil, fmt.Errorf("a schedule needs at least 1 request and a rate above 0, not %d at %v/s", n, rate)
	}
	if a == GammaGap && !(burstiness > 0) {
		return nil, fmt.Errorf("burstiness %v is not above 0", burstiness)
	}
	rng := rand.New(rand.NewPCG(seed, 0x7363686564))
	at := make([]float64, n)
	var sum float64
	for i := range at {
		switch a {
		case Poisson:
			sum += rng.ExpFloat64()
		case GammaGap:
			sum += stats.Gamma(rng, burstiness)
		default:
			sum++
		}
		at[i] = sum
	}
	scale := float64(n) / rate / sum * float64(time.Second)
	out := make([]time.Duration, n)
	for i := range at {
		out[i] = time.Duration(math.Round(at[i] * scale))
	}
	return out, nil
}
