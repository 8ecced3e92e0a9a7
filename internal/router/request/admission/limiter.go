// Package admission decides how many requests may be in progress, lets a
// bounded number of others wait for a bounded time, and bounds the memory that
// all of them take before they are decided about.
package admission

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// ErrFull reports that the queue was full; ErrTimeout that no slot came free in time;
// ErrHopeless that the request would have waited longer than it may; ErrClosed that the
// router drains.
var (
	ErrFull     = errors.New("too many requests: the queue is full")
	ErrTimeout  = errors.New("too many requests: waited too long in the queue")
	ErrHopeless = errors.New("too many requests: the queue is longer than this one may wait")
	ErrClosed   = errors.New("the router is draining and takes no new requests")
)

// Limits of a Limiter.
type Limits struct {
	// Inflight is the greatest number of requests in progress; 0 is no limit.
	Inflight int
	// Queue is how many may wait; when it is full, Enter fails immediately.
	Queue int
	// Timeout is the longest wait in the queue.
	Timeout time.Duration
}

// Limiter admits a limited number of requests to be in progress, each in a slot. Others
// wait in a queue. It is safe for concurrent use.
//
// A request comes (Arrive), is read, and then requests a slot (Enter): the router notices
// only once a body is read that its client leaves, and until then the request would keep
// the slot from others.
type Limiter struct {
	present  atomic.Int64 // arrived and not gone
	inflight atomic.Int64
	limit    atomic.Int64 // of inflight
	draining atomic.Bool
	queue    *Queue

	mu   sync.Mutex
	idle chan struct{} // closed when draining and no request is present
}

// NewLimiter makes an open limiter.
func NewLimiter(limits Limits) *Limiter {
	l := &Limiter{idle: make(chan struct{}), queue: NewQueue(limits.Queue, limits.Timeout, 0)}
	l.limit.Store(int64(limits.Inflight))
	return l
}

// SetLimits changes the limits; requests in progress stay.
func (l *Limiter) SetLimits(limits Limits) {
	l.limit.Store(int64(limits.Inflight))
	l.queue.SetLimits(limits.Queue, limits.Timeout)
}

// Arrive counts a request that has come. On success the caller must call Depart
// exactly once, when everything else is done. A limiter that drains waits for those
// that have arrived.
func (l *Limiter) Arrive() error {
	l.present.Add(1) // before the check: either Close sees it, or it sees Close
	if l.draining.Load() {
		l.Depart()
		return ErrClosed
	}
	return nil
}

// Depart ends what Arrive began.
func (l *Limiter) Depart() {
	if l.present.Add(-1) == 0 && l.draining.Load() {
		l.closeIdle()
	}
}

// closeIdle closes idle once no request is present.
func (l *Limiter) closeIdle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.present.Load() != 0 {
		return
	}
	select {
	case <-l.idle:
	default:
		close(l.idle)
	}
}

// TryEnter takes a free slot for a request that has arrived. On success the
// caller must call Leave exactly once.
func (l *Limiter) TryEnter() bool {
	return (l.limit.Load() <= 0 || l.queue.waiting.Load() == 0) && l.take()
}

// take takes a slot if one is free.
func (l *Limiter) take() bool {
	limit := l.limit.Load()
	if limit <= 0 {
		l.inflight.Add(1)
		return true
	}
	for {
		n := l.inflight.Load()
		if n >= limit {
			return false
		}
		if l.inflight.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Enter waits for a slot for a request that has arrived. On success the caller
// must call Leave exactly once. A request whose client leaves meanwhile leaves the queue immediately.
func (l *Limiter) Enter(ctx context.Context, c Claim) (Waited, error) {
	return l.queue.Enter(ctx, c, func() (string, bool) { return "a place", l.take() })
}

// Leave gives a slot back.
func (l *Limiter) Leave() {
	l.inflight.Add(-1)
	l.queue.Wake()
}

// Queue is where requests wait for a slot.
func (l *Limiter) Queue() *Queue { return l.queue }

// Close takes no new requests; those that have arrived are still served.
func (l *Limiter) Close() {
	l.draining.Store(true)
	l.closeIdle()
}

// Idle is closed once the limiter is closed and no request is present.
func (l *Limiter) Idle() <-chan struct{} { return l.idle }

// Present is the number of requests that have arrived and not departed: being
// read, waiting, or in progress.
func (l *Limiter) Present() int { return int(l.present.Load()) }

// Inflight is the number of requests in progress.
func (l *Limiter) Inflight() int { return int(l.inflight.Load()) }
