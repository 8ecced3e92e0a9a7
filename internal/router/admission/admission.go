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

// Claim is whose request wants a place, and what it is worth.
type Claim struct {
	// Tenant takes turns with others; those of one are served in their order.
	Tenant string
	// Tokens is what the request will take, Weight the tenant's share against that
	// of others; less than 1 counts as 1.
	Tokens, Weight int
}

// Gate admits requests. Where they wait, the places that come free are shared between
// tenants by tokens and weight: a tenant that has been given less than its share comes
// first. It is safe for concurrent use.
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

	// clock is the tag of what was admitted last from the queue, given the tag at
	// which each tenant's next request begins, in tokens by weight. A tenant whose tag
	// the clock has passed needs none.
	clock float64
	given map[string]float64
	// left are the times at which places came free while others waited, the oldest at
	// leftAt once all are in use.
	left   [64]time.Time
	leftAt int
}

type waiter struct {
	admitted chan struct{}
	done     bool
	err      error // why it was turned away; set before admitted is closed
	tenant   string
	begin    float64 // the tag that orders waiters
}

// New makes an open gate.
func New(l Limits) *Gate {
	return &Gate{limits: l, idle: make(chan struct{}), given: map[string]float64{}}
}

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

// TryEnter takes a place that is free for a request that has arrived. On success the
// caller must call Leave exactly once.
func (g *Gate) TryEnter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.limits.Inflight <= 0 || (int(g.inflight.Load()) < g.limits.Inflight && len(g.queue) == 0) {
		g.inflight.Add(1)
		return true
	}
	return false
}

// Enter waits for a place for a request that has arrived. On success the caller
// must call Leave exactly once. Who gives up meanwhile leaves the queue at once.
func (g *Gate) Enter(ctx context.Context, c Claim) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if g.TryEnter() {
		return nil
	}
	g.mu.Lock()
	if len(g.queue) >= g.limits.Queue && !g.makeRoom(c.Tenant) {
		g.mu.Unlock()
		g.rejected.Add(1)
		return ErrFull
	}
	begin := max(g.clock, g.given[c.Tenant])
	g.given[c.Tenant] = begin + float64(max(1, c.Tokens))/float64(max(1, c.Weight))
	w := &waiter{admitted: make(chan struct{}), tenant: c.Tenant, begin: begin}
	g.queue = append(g.queue, w)
	g.admitLocked() // a place may have come free since it was tried
	timeout := g.limits.Timeout
	g.mu.Unlock()

	timer := time.NewTimer(timeout)
	defer timer.Stop()
	var err error
	select {
	case <-w.admitted:
		if w.err != nil {
			return w.err
		}
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
	if w.done && w.err != nil {
		return w.err
	}
	if w.done {
		// Admitted at the same moment: the place is ours, give it back.
		g.inflight.Add(-1)
		g.admitLocked()
		return err
	}
	w.done = true
	g.queue = slices.DeleteFunc(g.queue, func(o *waiter) bool { return o == w })
	g.forget()
	if errors.Is(err, ErrTimeout) {
		g.rejected.Add(1)
	}
	return err
}

// makeRoom turns the newest waiter of the tenant with most of them away, if that
// has more than one that comes has: nobody fills the queue for all. The caller holds
// mu.
func (g *Gate) makeRoom(tenant string) bool {
	count := map[string]int{}
	most := ""
	for _, w := range g.queue {
		if count[w.tenant]++; count[w.tenant] > count[most] {
			most = w.tenant
		}
	}
	if len(g.queue) == 0 || most == tenant || count[most] <= count[tenant]+1 {
		return false
	}
	for i := len(g.queue) - 1; i >= 0; i-- {
		if w := g.queue[i]; w.tenant == most {
			g.queue = slices.Delete(g.queue, i, i+1)
			w.done, w.err = true, ErrFull
			g.given[most] = w.begin // it was given nothing
			g.rejected.Add(1)
			close(w.admitted)
			return true
		}
	}
	return false
}

// Leave gives a place back.
func (g *Gate) Leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inflight.Add(-1)
	if len(g.queue) > 0 {
		g.left[g.leftAt%len(g.left)] = time.Now()
		g.leftAt++
	}
	g.admitLocked()
}

// lookBack is how old a place that came free may be to tell how fast they do.
const lookBack = 30 * time.Second

// Wait is how long a request that came now would wait for a place, by the rate at
// which places came free of late; false where that is not known.
func (g *Gate) Wait() (time.Duration, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	n, oldest := 0, now
	for _, at := range g.left[:min(g.leftAt, len(g.left))] {
		if now.Sub(at) <= lookBack {
			n++
			if at.Before(oldest) {
				oldest = at
			}
		}
	}
	if n < 2 || !now.After(oldest) {
		return 0, false
	}
	return now.Sub(oldest) / time.Duration(n) * time.Duration(len(g.queue)+1), true
}

// admitLocked lets waiters in while there is room, the least tag first, the oldest
// of equal ones.
func (g *Gate) admitLocked() {
	for len(g.queue) > 0 && (g.limits.Inflight <= 0 || int(g.inflight.Load()) < g.limits.Inflight) {
		next := 0
		for i, w := range g.queue {
			if w.begin < g.queue[next].begin {
				next = i
			}
		}
		w := g.queue[next]
		g.queue = slices.Delete(g.queue, next, next+1)
		g.clock = max(g.clock, w.begin)
		w.done = true
		g.inflight.Add(1)
		close(w.admitted)
	}
	g.forget()
}

// forget drops what is remembered of tenants once nobody waits: all begin alike.
func (g *Gate) forget() {
	if len(g.queue) == 0 && len(g.given) > 0 {
		g.queue, g.clock = nil, 0
		clear(g.given)
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
