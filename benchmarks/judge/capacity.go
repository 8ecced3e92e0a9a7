package main

import (
	"fmt"
	"math"
)

// The least and the greatest value that capacity tries.
const (
	leastSpeed    = 1.0 / 1024
	greatestSpeed = 4096
)

// capacity returns the greatest value at which serves holds, less at most the share of
// precision (0.05). serves must hold below that value and not above it. The search doubles
// or halves start until it has both, and then bisects between their logarithms. It is an
// error when serves holds everywhere, or nowhere, between 1/1024 and 4,096.
func capacity(start, precision float64, serves func(value float64) (bool, error)) (float64, error) {
	held, missed := 0.0, 0.0 // 0 is not known
	for at := start; held == 0 || missed == 0; {
		if at < leastSpeed || at > greatestSpeed {
			return 0, fmt.Errorf("no limit found: at %.4g times its own pace it is still on the same side", at)
		}
		ok, err := serves(at)
		switch {
		case err != nil:
			return 0, err
		case ok:
			held, at = at, at*2
		default:
			missed, at = at, at/2
		}
	}
	for missed > held*(1+precision) {
		at := math.Sqrt(held * missed)
		ok, err := serves(at)
		switch {
		case err != nil:
			return 0, err
		case ok:
			held = at
		default:
			missed = at
		}
	}
	return held, nil
}
