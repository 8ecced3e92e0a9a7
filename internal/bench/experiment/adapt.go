package experiment

import (
	"cmp"
	"math"
	"slices"

	"github.com/dynctl/dynctl/internal/bench/stats"
)

// Adaptive decides what to measure next around a crossing. It is pure: the
// same data lead to the same next step, so that a run can be resumed.
type Adaptive struct {
	// Coarse are the points of the first pass, in effective tokens, ascending.
	Coarse []int
	// Grain is what added points are a multiple of (a KV block).
	Grain int
	// Repeats is how many a point gets at a time, MaxRepeats how many at most.
	Repeats, MaxRepeats int
}

// A Want has a point measured until it has this many repeats.
type Want struct {
	X, Repeats int
}

// Next says what would sharpen the answer most, given what each point has so
// far; nothing when the answer is sharp enough or cannot be made sharper.
//
// First come the quarter points of the coarse bracket with the crossing and of
// a neighbour that the interval reaches into. When the interval is still wider
// than a quarter to either side, the points near the crossing get more repeats.
func (a Adaptive) Next(have map[int]int, c stats.Crossover) []Want {
	if len(a.Coarse) < 2 || c.Answer == stats.FirstWins || c.Answer == stats.SecondWins || c.Answer == stats.Unknown {
		return nil
	}
	at := c.At
	if math.IsNaN(at) { // a bracket only: begin at its better known end
		switch {
		case math.IsInf(c.High, 1) && c.Low > 0:
			at = c.Low
		case c.Low == 0:
			at = c.High
		default:
			at = math.Sqrt(c.Low * c.High)
		}
	}
	home := a.bracket(at)
	var wants []Want
	step := math.Inf(1)
	for i := range len(a.Coarse) - 1 {
		lo, hi := a.Coarse[i], a.Coarse[i+1]
		reach := c.Low < float64(hi) && c.High > float64(lo)
		if i != home && (!reach || i < home-1 || i > home+1) {
			continue
		}
		// The crossing may be in any of these: the finest decides.
		step = math.Min(step, float64(hi-lo)/4)
		for q := 1; q <= 3; q++ {
			x := round(lo+(hi-lo)*q/4, a.Grain)
			if x > lo && x < hi && have[x] == 0 {
				wants = append(wants, Want{x, a.Repeats})
			}
		}
	}
	if len(wants) > 0 {
		return wants
	}
	if c.Answer == stats.Cliff || c.High-at <= step && at-c.Low <= step {
		return nil
	}
	// More repeats for the points that the estimate rests on.
	var xs []int
	for x := range have {
		if float64(x) >= at/2 && float64(x) <= at*2 {
			xs = append(xs, x)
		}
	}
	slices.SortFunc(xs, func(p, q int) int {
		return cmp.Or(cmp.Compare(math.Abs(math.Log(float64(p)/at)), math.Abs(math.Log(float64(q)/at))), cmp.Compare(p, q))
	})
	for _, x := range xs[:min(len(xs), 6)] {
		if have[x] < a.MaxRepeats {
			wants = append(wants, Want{x, min(have[x]+a.Repeats, a.MaxRepeats)})
		}
	}
	slices.SortFunc(wants, func(p, q Want) int { return cmp.Compare(p.X, q.X) })
	return wants
}

// bracket is the coarse interval that x lies in or is nearest to.
func (a Adaptive) bracket(x float64) int {
	for i := range len(a.Coarse) - 2 {
		if x < float64(a.Coarse[i+1]) {
			return i
		}
	}
	return len(a.Coarse) - 2
}

func round(x, grain int) int {
	if grain <= 1 {
		return x
	}
	return (x + grain/2) / grain * grain
}
