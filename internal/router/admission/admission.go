// Package admission decides how many requests may be in progress and lets a
// bounded number of others wait for a bounded time.
package admission

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// ErrFull says that the queue had no place left; ErrTimeout that a place in
// progress did not come free in time; ErrClosed that the gate drains.
var (
	ErrFull    = errors.New("too many requests: the queue is full")
	ErrTimeout = errors.New("too many requests: waited too long in the queue")
	ErrClosed  = errors.New("the router is draining and takes no new requests")
)

// Limits of a Gate.
type Limits struct {
	// Inflight is the greatest number of requests in progress; 0 is no limit.
	Inflight int
	// Queue is how many may wait; when it is full, Enter fails at once.
	Queue int
	// Timeout is the longest wait in the queue.
	Timeout time.Duration
}

// Gate admits requests. First come, first served. It is safe for concurrent use.
type Gate struct {
	inflight atomic.Int64
	rejected atomic.Uint64

	mu     sync.Mutex
	limits Limits
	queue  []*waiter // oldest first
	closed bool
	idle   chan struct{} // closed when draining and nothing is in progress
}

type waiter struct {
	admitted chan struct{}
	done     bool
}

// New makes an open gate.
func New(l Limits) *Gate { return &Gate{limits: l, idle: make(chan struct{})} }

// SetLimits changes the limits; requests in progress stay.
func (g *Gate) SetLimits(l Limits) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.limits = l
	g.admitLocked()
}

// Enter waits for a place. On success the caller must call Leave exactly once.
func (g *Gate) Enter(ctx context.Context) error {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return ErrClosed
	}
	if g.limits.Inflight <= 0 || (int(g.inflight.Load()) < g.limits.Inflight && len(g.queue) == 0) {
		g.inflight.Add(1)
		g.mu.Unlock()
		return nil
	}
	if len(g.queue) >= g.limits.Queue {
		g.mu.Unlock()
		g.rejected.Add(1)
		return ErrFull
	}
	w := &waiter{admitted: make(chan struct{})}
	g.queue = append(g.queue, w)
	timeout := g.limits.Timeout
	g.mu.Unlock()

	timer := time.NewTimer(timeout)
	defer timer.Stop()
	var err error
	select {
	case <-w.admitted:
		return nil
	case <-timer.C:
		err = ErrTimeout
	case <-ctx.Done():
		err = ctx.Err()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if w.done {
		// Admitted at the same moment: the place is ours, give it back.
		g.inflight.Add(-1)
		g.admitLocked()
		return err
	}
	w.done = true
	g.queue = slices.DeleteFunc(g.queue, func(o *waiter) bool { return o == w })
	if errors.Is(err, ErrTimeout) {
		g.rejected.Add(1)
	}
	return err
}

// Leave gives a place back.
func (g *Gate) Leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inflight.Add(-1)
	g.admitLocked()
}

// admitLocked lets the oldest waiters in while there is room.
func (g *Gate) admitLocked() {
	for len(g.queue) > 0 && (g.limits.Inflight <= 0 || int(g.inflight.Load()) < g.limits.Inflight) {
		w := g.queue[0]
		g.queue[0] = nil
		g.queue = g.queue[1:]
		w.done = true
		g.inflight.Add(1)
		close(w.admitted)
	}
	if len(g.queue) == 0 {
		g.queue = nil
	}
	if g.closed && g.inflight.Load() == 0 && len(g.queue) == 0 {
		select {
		case <-g.idle:
		default:
			close(g.idle)
		}
	}
}

// Close takes no new requests; those that wait are still served.
func (g *Gate) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	g.admitLocked()
}

// Idle is closed once the gate is closed and nothing is in progress.
func (g *Gate) Idle() <-chan struct{} { return g.idle }

// Inflight is the number of requests in progress.
func (g *Gate) Inflight() int { return int(g.inflight.Load()) }

// Queued is the number of requests that wait.
func (g *Gate) Queued() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.queue)
}

// Rejected counts the requests that found the queue full or waited too long.
func (g *Gate) Rejected() uint64 { return g.rejected.Load() }

// Closed reports whether the gate drains.
func (g *Gate) Closed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closed
}
