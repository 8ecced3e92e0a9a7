// Package admission decides how many requests may be in progress, lets a
// bounded number of others wait for a bounded time, and bounds the memory that
// all of them take before they are decided about.
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
//
// A request comes (Arrive), is read, and then asks for a place (Enter): only
// once its body is read can its leaving be noticed, and a place that waits for a
// client that is gone is a place less for one that is there.
type Gate struct {
	present  atomic.Int64 // arrived and not gone
	inflight atomic.Int64
	rejected atomic.Uint64
	draining atomic.Bool

	mu     sync.Mutex
	limits Limits
	queue  []*waiter     // oldest first
	idle   chan struct{} // closed when draining and nobody is present
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

// Arrive tells that a request has come. On success the caller must call Depart
// exactly once, when everything else is done. A gate that drains waits for those
// that have arrived.
func (g *Gate) Arrive() error {
	g.present.Add(1) // before the look: either Close sees it, or it sees Close
	if g.draining.Load() {
		g.Depart()
		return ErrClosed
	}
	return nil
}

// Depart ends what Arrive began.
func (g *Gate) Depart() {
	if g.present.Add(-1) == 0 && g.draining.Load() {
		g.rest()
	}
}

// rest closes idle once nobody is present.
func (g *Gate) rest() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.present.Load() != 0 {
		return
	}
	select {
	case <-g.idle:
	default:
		close(g.idle)
	}
}

// Enter waits for a place for a request that has arrived. On success the caller
// must call Leave exactly once. Who gives up meanwhile leaves the queue at once.
func (g *Gate) Enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	g.mu.Lock()
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
		if err = ctx.Err(); err == nil {
			return nil
		}
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
}

// Close takes no new requests; those that have arrived are still served.
func (g *Gate) Close() {
	g.draining.Store(true)
	g.rest()
}

// Idle is closed once the gate is closed and nobody is present.
func (g *Gate) Idle() <-chan struct{} { return g.idle }

// Present is the number of requests that have arrived and not departed: being
// read, waiting, or in progress.
func (g *Gate) Present() int { return int(g.present.Load()) }

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
