package main

import (
	"errors"
	"testing"
)

// TestCapacity: the search finds the limit of a made-up function from either side, in a
// bounded number of steps.
func TestCapacity(t *testing.T) {
	for _, limit := range []float64{0.002, 0.3, 1, 7.3, 900} {
		for _, start := range []float64{0.01, 1, 100} {
			steps := 0
			got, err := capacity(start, 0.05, func(v float64) (bool, error) {
				steps++
				return v <= limit, nil
			})
			if err != nil || got > limit || got < limit/1.05 {
				t.Errorf("limit %v from %v: %v, %v", limit, start, got, err)
			}
			if steps > 25 {
				t.Errorf("limit %v from %v: %d steps", limit, start, steps)
			}
		}
	}
}

// TestNoCapacity: a function without a limit ends the search with an error, and so does an
// error of the function.
func TestNoCapacity(t *testing.T) {
	for _, always := range []bool{true, false} {
		if got, err := capacity(1, 0.05, func(float64) (bool, error) { return always, nil }); err == nil {
			t.Errorf("a function that is always %t has the limit %v", always, got)
		}
	}
	broken := errors.New("broken")
	calls := 0
	if _, err := capacity(1, 0.05, func(float64) (bool, error) {
		if calls++; calls == 3 {
			return false, broken
		}
		return calls == 1, nil
	}); !errors.Is(err, broken) {
		t.Errorf("%v, want %v", err, broken)
	}
}
