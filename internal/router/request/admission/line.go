package admission

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// Line lets requests try for a place, one at a time and in the order of Turns, and wait
// where there is none. One that comes to an empty line tries at once. It is safe for
// concurrent use.
type Line struct {
	waiting  atomic.Int64 // in Enter
	rejected atomic.Uint64

	mu      sync.Mutex
	turns   Turns
	timeout time.Duration
	poll    time.Duration
	polls   *time.Timer // runs while a request waits; nil without poll
	trying  *Waiter
	free    *sync.Cond // on mu: no request tries, or one waits
}

// NewLine is an empty line in which queue requests may wait for timeout. Where Wake
// is not called for every change, those that wait try again every poll; 0 is never.
func NewLine(queue int, timeout, poll time.Duration) *Line {
	l := &Line{turns: Turns{Limit: queue}, timeout: timeout, poll: poll}
	l.free = sync.NewCond(&l.mu)
	return l
}

// SetLimits changes how many may wait and how long. Those that wait stay.
func (l *Line) SetLimits(queue int, timeout time.Duration) {
	l.mu.Lock()
	l.turns.Limit, l.timeout = queue, timeout
	l.mu.Unlock()
	l.Wake()
}

// Waited is how a request came to its place.
type Waited struct {
	// For is how long it waited; 0 when it got its place at once.
	For time.Duration
	// Ahead is how many waited in its queue when it came.
	Ahead int
}

// Enter returns once try has got a place, or with ErrFull, ErrTimeout or the context's
// error. try is called on the caller's goroutine, while no other try is made; needs
// names what it found none of, and it is called again when something may have changed. It
// must not call the line.
func (l *Line) Enter(ctx context.Context, c Claim, try func() (needs string, ok bool)) (Waited, error) {
	if err := ctx.Err(); err != nil {
		return Waited{}, err
	}
	l.waiting.Add(1) // before the try: a place that is freed after it finds a waiter
	defer l.waiting.Add(-1)
	w := &Waiter{Claim: c}
	l.mu.Lock()
	// A request that comes while another tries may still get a place: a try takes
	// microseconds, so it is not refused for a full queue before its own.
	for l.trying != nil && l.turns.Waiting() == 0 {
		l.free.Wait()
	}
	if l.turns.Waiting() == 0 {
		l.trying = w
		l.mu.Unlock()
		if l.attempt(w, try) {
			return Waited{}, nil
		}
		l.mu.Lock()
	}
	l.free.Signal() // others that have come need not wait for an empty line any more
	now := time.Now()
	timeout := l.timeout
	if c.Patience > 0 {
		timeout = min(timeout, c.Patience)
	}
	if d, known := l.turns.Wait(c.Queue, c.Band, now); known && c.Patience > 0 && d > c.Patience {
		l.mu.Unlock()
		l.rejected.Add(1)
		return Waited{}, ErrHopeless
	}
	w.turn = make(chan struct{}, 1)
	evicted, ok := l.turns.Push(w, now)
	if evicted != nil {
		evicted.err = ErrFull
		l.rejected.Add(1)
		select {
		case evicted.turn <- struct{}{}:
		default: // it has a token already
		}
	}
	if !ok {
		l.mu.Unlock()
		l.rejected.Add(1)
		return Waited{}, ErrFull
	}
	l.pass()
	l.mu.Unlock()
	err := l.await(ctx, w, timeout, try)
	return Waited{For: time.Since(w.Since), Ahead: w.Ahead}, err
}

// Try is Enter for a request that does not wait: it tries only if no other tries or waits.
func (l *Line) Try(try func() bool) bool {
	w := &Waiter{}
	l.mu.Lock()
	if l.trying != nil || l.turns.Waiting() > 0 {
		l.mu.Unlock()
		return false
	}
	l.trying = w
	l.mu.Unlock()
	return l.attempt(w, func() (string, bool) { return "", try() })
}

// await tries whenever it is w's turn.
func (l *Line) await(ctx context.Context, w *Waiter, timeout time.Duration, try func() (string, bool)) error {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		select {
		case <-w.turn:
			if err := l.leftOut(w); err != nil {
				return err
			}
			if ctx.Err() != nil {
				return l.leave(w, ctx.Err())
			}
			if l.attempt(w, try) {
				return nil
			}
		case <-timer.C:
			return l.leave(w, ErrTimeout)
		case <-ctx.Done():
			return l.leave(w, ctx.Err())
		}
	}
}

// leftOut is why w was turned away; nil if it was not.
func (l *Line) leftOut(w *Waiter) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.err != nil && l.trying == w {
		l.trying = nil
		l.pass()
	}
	return w.err
}

// attempt lets w, whose turn it is, try, and gives the turn on.
func (l *Line) attempt(w *Waiter, try func() (string, bool)) (ok bool) {
	l.mu.Lock()
	change := l.turns.Change()
	w.trying = true
	l.mu.Unlock()
	needs := ""
	defer func() { // a try may panic
		l.mu.Lock()
		defer l.mu.Unlock()
		w.trying = false
		switch {
		case ok && w.in:
			l.turns.Admit(w, time.Now())
		case needs == "":
			l.turns.Remove(w)
		case !ok:
			l.turns.Failed(w, needs, change)
		}
		l.trying = nil
		l.pass()
		l.free.Signal()
	}()
	needs, ok = try()
	return ok
}

// pass gives the turn to the next waiter. The caller holds mu.
func (l *Line) pass() {
	if l.poll > 0 && (l.polls != nil) != (l.turns.Waiting() > 0) {
		if l.polls == nil {
			l.polls = time.AfterFunc(l.poll, l.look)
		} else {
			l.polls.Stop()
			l.polls = nil
		}
	}
	if l.trying != nil {
		return
	}
	if w := l.turns.Next(); w != nil {
		l.trying = w
		select {
		case w.turn <- struct{}{}:
		default: // it has a token already
		}
	}
}

// leave takes a waiter out that gives up.
func (l *Line) leave(w *Waiter, err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.trying == w {
		l.trying = nil
	}
	l.turns.Remove(w)
	l.pass()
	if w.err != nil {
		return w.err
	}
	if errors.Is(err, ErrTimeout) {
		l.rejected.Add(1)
	}
	return err
}

// Wake lets those in line try again, because something may have come free. With an empty
// line it costs one read.
func (l *Line) Wake() {
	if l.waiting.Load() == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.turns.Changed()
	l.pass()
}

// look is Wake by the clock.
func (l *Line) look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.polls == nil {
		return
	}
	l.turns.Changed()
	l.pass()
	l.polls.Reset(l.poll)
}

// Waiting is the number of requests that wait.
func (l *Line) Waiting() int {
	if l.waiting.Load() == 0 {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.turns.Waiting()
}

// Rejected counts the requests that found no room, waited too long, or would have.
func (l *Line) Rejected() uint64 { return l.rejected.Load() }

// Wait is how long a request that came to a queue now would wait for a place, by the
// rate at which waiters recently got theirs; false where that is not known.
func (l *Line) Wait(queue string) (time.Duration, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.turns.Wait(queue, Low, time.Now())
}

// States are the queues in which requests wait.
func (l *Line) States() []QueueState {
	if l.waiting.Load() == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.turns.States(time.Now())
}
