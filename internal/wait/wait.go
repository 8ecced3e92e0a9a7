// Package wait lets time pass, and stops when a context ends.
package wait

import (
	"context"
	"time"
)

// For waits for d and reports whether ctx still lasts.
func For(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// Every is a loop that goes round each time that d has passed, until ctx ends:
//
//	for range wait.Every(ctx, d) {
func Every(ctx context.Context, d time.Duration) func(yield func() bool) {
	return func(yield func() bool) {
		tick := time.NewTicker(d)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if !yield() {
				return
			}
		}
	}
}

// Until asks now and each time that d has passed whether something is so. It
// reports whether it was before ctx ended.
func Until(ctx context.Context, d time.Duration, so func() bool) bool {
	if so() {
		return true
	}
	for range Every(ctx, d) {
		if so() {
			return true
		}
	}
	return false
}

// Poke wakes who waits on c, a channel of one, now or when it comes to wait.
func Poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // it has not seen the last one yet, and sees this with it
	}
}
