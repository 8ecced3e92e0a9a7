package admission

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// Queue lets requests try for a slot, one at a time and in [FairOrder], and wait where no
// slot is free. One that comes to an empty queue tries immediately. It is safe for
// concurrent use.
type Queue struct {
	waiting  atomic.Int64 // in Enter
	rejected atomic.Uint64

	mu      sync.Mutex
	order   FairOrder
	timeout time.Duration
	poll    time.Duration
	polls   *time.Timer // runs while a request waits; nil without poll
	trying  *Waiter
	free    *sync.Cond // on mu: no request tries, or one waits
}

// NewQueue is an empty queue in which limit requests may wait for timeout. Where Wake
// is not called for every change, those that wait try again every poll; 0 is never.
func NewQueue(limit int, timeout, poll time.Duration) *Queue {
	q := &Queue{order: FairOrder{Limit: limit}, timeout: timeout, poll: poll}
	q.free = sync.NewCond(&q.mu)
	return q
}

// SetLimits changes how many may wait and how long. Those that wait stay.
func (q *Queue) SetLimits(queue int, timeout time.Duration) {
	q.mu.Lock()
	q.order.Limit, q.timeout = queue, timeout
	q.mu.Unlock()
	q.Wake()
}

// Waited is how a request came to its slot.
type Waited struct {
	// For is how long it waited; 0 when it got its slot immediately.
	For time.Duration
	// Ahead is how many waited in its queue when it came.
	Ahead int
}

// Enter returns once try has got a slot, or with ErrFull, ErrTimeout or the context's
// error. try is called on the caller's goroutine, while no other try is made; needs
// names what it found none of, and it is called again when something may have changed. It
// must not call the queue.
func (q *Queue) Enter(ctx context.Context, c Claim, try func() (needs string, ok bool)) (Waited, error) {
	if err := ctx.Err(); err != nil {
		return Waited{}, err
	}
	q.waiting.Add(1) // before the try: a slot that is freed after it finds a waiter
	defer q.waiting.Add(-1)
	w := &Waiter{Claim: c}
	q.mu.Lock()
	// A request that comes while another tries may still get a slot: a try takes
	// microseconds, so it is not refused for a full queue before its own.
	for q.trying != nil && q.order.Waiting() == 0 {
		q.free.Wait()
	}
	if q.order.Waiting() == 0 {
		q.trying = w
		q.mu.Unlock()
		if q.attempt(w, try) {
			return Waited{}, nil
		}
		q.mu.Lock()
	}
	q.free.Signal() // others that have come need not wait for an empty queue any more
	now := time.Now()
	timeout := q.timeout
	if c.Patience > 0 {
		timeout = min(timeout, c.Patience)
	}
	if d, known := q.order.EstimateWait(c.Queue, c.Band, now); known && c.Patience > 0 && d > c.Patience {
		q.mu.Unlock()
		q.rejected.Add(1)
		return Waited{}, ErrHopeless
	}
	w.ready = make(chan struct{}, 1)
	evicted, ok := q.order.Push(w, now)
	if evicted != nil {
		evicted.err = ErrFull
		q.rejected.Add(1)
		select {
		case evicted.ready <- struct{}{}:
		default: // it has a token already
		}
	}
	if !ok {
		q.mu.Unlock()
		q.rejected.Add(1)
		return Waited{}, ErrFull
	}
	q.pass()
	q.mu.Unlock()
	err := q.await(ctx, w, timeout, try)
	return Waited{For: time.Since(w.Since), Ahead: w.Ahead}, err
}

// Try is Enter for a request that does not wait: it tries only if no other tries or waits.
func (q *Queue) Try(try func() bool) bool {
	w := &Waiter{}
	q.mu.Lock()
	if q.trying != nil || q.order.Waiting() > 0 {
		q.mu.Unlock()
		return false
	}
	q.trying = w
	q.mu.Unlock()
	return q.attempt(w, func() (string, bool) { return "", try() })
}

// await tries whenever w is the next waiter.
func (q *Queue) await(ctx context.Context, w *Waiter, timeout time.Duration, try func() (string, bool)) error {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		select {
		case <-w.ready:
			if err := q.leftOut(w); err != nil {
				return err
			}
			if ctx.Err() != nil {
				return q.leave(w, ctx.Err())
			}
			if q.attempt(w, try) {
				return nil
			}
		case <-timer.C:
			return q.leave(w, ErrTimeout)
		case <-ctx.Done():
			return q.leave(w, ctx.Err())
		}
	}
}

// leftOut is why w was turned away; nil if it was not.
func (q *Queue) leftOut(w *Waiter) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w.err != nil && q.trying == w {
		q.trying = nil
		q.pass()
	}
	return w.err
}

// attempt lets w, the next waiter, try, and then passes on to the one after it.
func (q *Queue) attempt(w *Waiter, try func() (string, bool)) (ok bool) {
	q.mu.Lock()
	change := q.order.Change()
	w.trying = true
	q.mu.Unlock()
	needs := ""
	defer func() { // a try may panic
		q.mu.Lock()
		defer q.mu.Unlock()
		w.trying = false
		switch {
		case ok && w.in:
			q.order.Admit(w, time.Now())
		case needs == "":
			q.order.Remove(w)
		case !ok:
			q.order.Failed(w, needs, change)
		}
		q.trying = nil
		q.pass()
		q.free.Signal()
	}()
	needs, ok = try()
	return ok
}

// pass lets the next waiter try. The caller holds mu.
func (q *Queue) pass() {
	if q.poll > 0 && (q.polls != nil) != (q.order.Waiting() > 0) {
		if q.polls == nil {
			q.polls = time.AfterFunc(q.poll, q.look)
		} else {
			q.polls.Stop()
			q.polls = nil
		}
	}
	if q.trying != nil {
		return
	}
	if w := q.order.Next(); w != nil {
		q.trying = w
		select {
		case w.ready <- struct{}{}:
		default: // it has a token already
		}
	}
}

// leave takes a waiter out that gives up.
func (q *Queue) leave(w *Waiter, err error) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.trying == w {
		q.trying = nil
	}
	q.order.Remove(w)
	q.pass()
	if w.err != nil {
		return w.err
	}
	if errors.Is(err, ErrTimeout) {
		q.rejected.Add(1)
	}
	return err
}

// Wake lets those in the queue try again, because something may have come free. With an
// empty queue it costs one read.
func (q *Queue) Wake() {
	if q.waiting.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.order.Changed()
	q.pass()
}

// look is Wake by the clock.
func (q *Queue) look() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.polls == nil {
		return
	}
	q.order.Changed()
	q.pass()
	q.polls.Reset(q.poll)
}

// Waiting is the number of requests that wait.
func (q *Queue) Waiting() int {
	if q.waiting.Load() == 0 {
		return 0
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.order.Waiting()
}

// Rejected counts the requests that found no room, waited too long, or would have.
func (q *Queue) Rejected() uint64 { return q.rejected.Load() }

// EstimateWait is how long a request that came to a queue now would wait for a slot, by the
// rate at which waiters recently got theirs; false where that is not known.
func (q *Queue) EstimateWait(queue string) (time.Duration, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.order.EstimateWait(queue, Low, time.Now())
}

// States are the queues in which requests wait.
func (q *Queue) States() []QueueState {
	if q.waiting.Load() == 0 {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.order.States(time.Now())
}
