package main

import (
	"math"
	"runtime"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// unknowns is the number of constants of a profile that are fitted.
const unknowns = 6

// profileOf reads logarithms of the constants.
func profileOf(x [unknowns]float64) engine.Profile {
	var p engine.Profile
	for i := range 3 {
		p.Prefill[i], p.Decode[i] = math.Exp(x[i]), math.Exp(x[3+i])
	}
	return p
}

// residuals are the logarithms of simulated over measured times, TTFT and TPOT of each row.
func residuals(p engine.Profile, rows []row) ([]float64, error) {
	out := make([]float64, 2*len(rows))
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i, r := range rows {
		g.Go(func() error {
			got, err := aggregated(p, r.load)
			if err != nil {
				return err
			}
			if r.TTFT > 0 {
				out[2*i] = math.Log(got.TTFT / r.TTFT)
			}
			if r.TPOT > 0 {
				out[2*i+1] = math.Log(got.TPOT / r.TPOT)
			}
			return nil
		})
	}
	return out, g.Wait()
}

// loss is the sum of squares of small residuals, and grows less with large ones, so that a
// few strange rows do not decide.
func loss(r []float64) (sum float64) {
	for _, v := range r {
		w := weight(v)
		sum += v * v * w * (2 - w)
	}
	return sum
}

// wide is the residual from which a row counts less.
const wide = 0.2

func weight(v float64) float64 { return min(1, wide/max(math.Abs(v), 1e-12)) }

// start is where every fit begins: about a model of 30B parameters. It hardly matters.
var start = [unknowns]float64{math.Log(15), math.Log(0.05), math.Log(5e-7), math.Log(8), math.Log(0.05), math.Log(1e-4)}

// longest is the longest answer in tokens of a row that is fitted. Simulating longer ones
// would take nearly all of the time; those among the held-out rows judge the fit.
const longest = 1024

// digits rounds to four significant digits.
func digits(v float64) float64 {
	scale := math.Pow(10, 3-math.Floor(math.Log10(v)))
	return math.Round(v*scale) / scale
}

// fit finds the constants for which the simulator is closest to the rows.
func fit(rows []row) (engine.Profile, error) {
	x, err := descend(start, rows)
	p := profileOf(x)
	for i := range 3 {
		p.Prefill[i], p.Decode[i] = digits(p.Prefill[i]), digits(p.Decode[i])
	}
	return p, err
}

// descend is Levenberg and Marquardt's method on the logarithms of the constants. Each
// derivative is a run of the simulator; between two sets of them Broyden's rule corrects
// what a step has shown to be wrong.
func descend(x [unknowns]float64, rows []row) ([unknowns]float64, error) {
	const h, most = 0.05, 12
	r, err := residuals(profileOf(x), rows)
	if err != nil {
		return x, err
	}
	var jac [unknowns][]float64
	damping, fresh := 0.1, false
	for rounds := 0; rounds < most; {
		if jac[0] == nil {
			for j := range unknowns {
				y := x
				y[j] += h
				if jac[j], err = residuals(profileOf(y), rows); err != nil {
					return x, err
				}
				for i := range jac[j] {
					jac[j][i] = (jac[j][i] - r[i]) / h
				}
			}
			rounds, fresh = rounds+1, true
		}
		var a [unknowns][unknowns + 1]float64
		for j := range unknowns {
			for k := range unknowns {
				for i := range r {
					a[j][k] += weight(r[i]) * jac[j][i] * jac[k][i]
				}
			}
			a[j][j] += damping*a[j][j] + 1e-4
			for i := range r {
				a[j][unknowns] -= weight(r[i]) * jac[j][i] * r[i]
			}
		}
		step, length := solve(a), 0.0
		y := x
		for j := range step {
			step[j] = min(max(step[j], -1), 1)
			y[j] += step[j]
			length += step[j] * step[j]
		}
		moved, err := residuals(profileOf(y), rows)
		if err != nil {
			return x, err
		}
		before, after := loss(r), loss(moved)
		for i := range moved {
			wrong := moved[i] - r[i]
			for j := range step {
				wrong -= jac[j][i] * step[j]
			}
			for j := range step {
				jac[j][i] += wrong * step[j] / length
			}
		}
		switch {
		case after < before*(1-1e-3):
			x, r = y, moved
			damping, fresh = damping/3, fresh && after < before*0.9
		case fresh && damping > 10:
			return x, nil // not even a small step along true derivatives helps
		case fresh:
			damping *= 5
		default:
			jac[0], damping = nil, 0.1
		}
	}
	return x, nil
}

// solve is Gauss's elimination of a system that is positive definite.
func solve(a [unknowns][unknowns + 1]float64) (x [unknowns]float64) {
	for i := range unknowns {
		for r := i + 1; r < unknowns; r++ {
			f := a[r][i] / a[i][i]
			for c := i; c <= unknowns; c++ {
				a[r][c] -= f * a[i][c]
			}
		}
	}
	for i := unknowns - 1; i >= 0; i-- {
		x[i] = a[i][unknowns]
		for j := i + 1; j < unknowns; j++ {
			x[i] -= a[i][j] * x[j]
		}
		x[i] /= a[i][i]
	}
	return x
}
