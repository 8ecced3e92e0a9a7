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

// ErrFull says that the queue had no place left; ErrTimeout that none in progress came
// free in time; ErrHopeless that the request would have waited longer than it may;
// ErrClosed that the gate drains.
var (
	ErrFull     = errors.New("too many requests: the queue is full")
	ErrTimeout  = errors.New("too many requests: waited too long in the queue")
	ErrHopeless = errors.New("too many requests: the queue is longer than this one may wait")
	ErrClosed   = errors.New("the router is draining and takes no new requests")
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

// Gate admits requests. Those for which there is no place wait in line. It is safe for
// concurrent use.
//
// A request comes (Arrive), is read, and then asks for a place (Enter): only
// once its body is read is it noticed that a client leaves, and until then it would keep
// a place from others.
type Gate struct {
	present  atomic.Int64 // arrived and not gone
	inflight atomic.Int64
	limit    atomic.Int64 // of inflight
	draining atomic.Bool
	line     *Line

	mu   sync.Mutex
	idle chan struct{} // closed when draining and no request is present
}

// New makes an open gate.
func New(l Limits) *Gate {
	g := &Gate{idle: make(chan struct{}), line: NewLine(l.Queue, l.Timeout, 0)}
	g.limit.Store(int64(l.Inflight))
	return g
}

// SetLimits changes the limits; requests in progress stay.
func (g *Gate) SetLimits(l Limits) {
	g.limit.Store(int64(l.Inflight))
	g.line.SetLimits(l.Queue, l.Timeout)
}

// Arrive counts a request that has come. On success the caller must call Depart
// exactly once, when everything else is done. A gate that drains waits for those
// that have arrived.
func (g *Gate) Arrive() error {
	g.present.Add(1) // before the check: either Close sees it, or it sees Close
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

// rest closes idle once no request is present.
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

// TryEnter takes a place that is free for a request that has arrived. On success the
// caller must call Leave exactly once.
func (g *Gate) TryEnter() bool {
	return (g.limit.Load() <= 0 || g.line.waiting.Load() == 0) && g.take()
}

// take takes a place if there is one.
func (g *Gate) take() bool {
	limit := g.limit.Load()
	if limit <= 0 {
		g.inflight.Add(1)
		return true
	}
	for {
		n := g.inflight.Load()
		if n >= limit {
			return false
		}
		if g.inflight.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Enter waits for a place for a request that has arrived. On success the caller
// must call Leave exactly once. A request whose client leaves meanwhile leaves the queue at once.
func (g *Gate) Enter(ctx context.Context, c Claim) (Waited, error) {
	return g.line.Enter(ctx, c, func() (string, bool) { return "a place", g.take() })
}

// Leave gives a place back.
func (g *Gate) Leave() {
	g.inflight.Add(-1)
	g.line.Wake()
}

// Line is where requests wait for the gate.
func (g *Gate) Line() *Line { return g.line }

// Close takes no new requests; those that have arrived are still served.
func (g *Gate) Close() {
	g.draining.Store(true)
	g.rest()
}

// Idle is closed once the gate is closed and no request is present.
func (g *Gate) Idle() <-chan struct{} { return g.idle }

// Present is the number of requests that have arrived and not departed: being
// read, waiting, or in progress.
func (g *Gate) Present() int { return int(g.present.Load()) }

// Inflight is the number of requests in progress.
func (g *Gate) Inflight() int { return int(g.inflight.Load()) }
