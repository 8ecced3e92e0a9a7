package router

import (
	"sync"
	"time"
)

// retryBudget keeps retries a bounded share of the traffic, so that a fleet in
// trouble is not hit by a multiple of its load. A floor lets a quiet router
// retry at all.
type retryBudget struct {
	mu     sync.Mutex
	window [2]budgetCount // the present and the last ten seconds
	turned time.Time
}

type budgetCount struct{ requests, retries float64 }

const (
	budgetWindow = 10 * time.Second
	budgetFloor  = 10
)

func (b *retryBudget) rotate(now time.Time) {
	if d := now.Sub(b.turned); d >= budgetWindow {
		b.window[1] = b.window[0]
		if d >= 2*budgetWindow {
			b.window[1] = budgetCount{}
		}
		b.window[0] = budgetCount{}
		b.turned = now
	}
}

// request counts a request.
func (b *retryBudget) request(now time.Time) {
	b.mu.Lock()
	b.rotate(now)
	b.window[0].requests++
	b.mu.Unlock()
}

// take asks for a retry and counts it when it is granted.
func (b *retryBudget) take(now time.Time, share float64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rotate(now)
	requests := b.window[0].requests + b.window[1].requests
	retries := b.window[0].retries + b.window[1].retries
	if retries >= budgetFloor+share*requests {
		return false
	}
	b.window[0].retries++
	return true
}
