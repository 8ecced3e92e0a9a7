package attempt

import (
	"sync"
	"time"
)

// Budget keeps retries a bounded share of the traffic, so that a fleet in
// trouble is not hit by a multiple of its load. A floor lets a quiet router
// retry at all. The zero value is ready.
type Budget struct {
	mu     sync.Mutex
	window [2]budgetCount // the present and the last ten seconds
	turned time.Time
}

type budgetCount struct{ requests, retries float64 }

const (
	budgetWindow = 10 * time.Second
	budgetFloor  = 10
)

func (b *Budget) rotate(now time.Time) {
	if d := now.Sub(b.turned); d >= budgetWindow {
		b.window[1] = b.window[0]
		if d >= 2*budgetWindow {
			b.window[1] = budgetCount{}
		}
		b.window[0] = budgetCount{}
		b.turned = now
	}
}

// Request counts a request.
func (b *Budget) Request(now time.Time) {
	b.mu.Lock()
	b.rotate(now)
	b.window[0].requests++
	b.mu.Unlock()
}

// Take asks for a retry and counts it when it is granted. There may be share of them for each
// request (0.2: one for five).
func (b *Budget) Take(now time.Time, share float64) bool {
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

// Return gives back a retry that was granted and not made.
func (b *Budget) Return(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rotate(now)
	for i := range b.window {
		if w := &b.window[i]; w.retries > 0 {
			w.retries--
			return
		}
	}
}
