// Package pair carries out the two legs of a request that are sent together: which ends which,
// and when. It imports nothing of the router, so that its tests have neither requests nor
// workers.
package pair

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Grace is how long a prefill leg may outlast its decode leg, and how long a leg continues
// after the other one has failed in a way that may be its own, too.
const Grace = time.Second

// Legs are a prefill leg and the decode leg that waits for its KV.
type Legs interface {
	// Prefill runs a leg to its end. Decode runs the other one until it has begun to answer;
	// ctx is for its whole answer. They are called at the same time, each once; a decode leg
	// that is held is not called before the prefill leg has called written, and never where
	// that fails first.
	Prefill(ctx context.Context, connects, written func()) error
	Decode(ctx context.Context) error
	// Prepare gets what a decode leg that is held needs, while the prefill leg, which has called
	// connects, makes its connection. It returns before Decode is called; ctx is the same.
	Prepare(ctx context.Context)
	// Begun reports whether the decode leg has begun to answer. Stop reports whether it has
	// not, and then it may not begin any more: it waits for its context to end.
	Begun() bool
	Stop() bool
	// Both reports whether what made one leg fail may make the other one fail as well:
	// that one is given Grace to show it.
	Both(err error) bool
	// Panicked is called with a panic of the prefill leg, where the stack still shows
	// it: on another goroutine than the handler's it would end the process.
	Panicked(p any)
}

// Runner runs a prefill leg beside its decode leg, and waits: on goroutines, or one step
// after the other under a clock of its own.
type Runner interface {
	// Go runs f beside the caller.
	Go(f func())
	// Wait waits until done is closed or ctx ends, and for limit at most; 0 is for as long
	// as it takes.
	Wait(ctx context.Context, done <-chan struct{}, limit time.Duration)
}

// Ending is how a pair ended.
type Ending struct {
	// Err is nil when the decode leg has answered.
	Err error
	// Cancelled says that Err is the prefill leg's, which cancelled the decode leg.
	Cancelled bool
	// Waiting says that the prefill leg had not ended when the decode leg failed.
	Waiting bool
	// Other is the failure of the other leg, if it failed without being cancelled.
	Other error
}

// Pair is a decode leg that has begun to answer, and the prefill leg beside it.
type Pair struct {
	ctx         context.Context
	run         Runner
	done        chan struct{} // the prefill leg has ended
	stopPrefill context.CancelFunc
	stopDecode  context.CancelCauseFunc
}

// hold keeps a decode leg from being sent.
type hold struct {
	state atomic.Uint32
	over  chan struct{} // closed when it has been let go, or never will be
	// first is closed when the leg is to be prepared, or the hold is over.
	first chan struct{}
	once  sync.Once // closes first
}

// The states of a hold.
const (
	isHeld uint32 = iota
	letGo
	neverSent
)

// prepare has the decode leg be prepared, unless the hold is over.
func (h *hold) prepare() {
	if h != nil {
		h.once.Do(func() { close(h.first) })
	}
}

// end closes both channels, over first: a leg that need not be prepared is not.
func (h *hold) end() {
	close(h.over)
	h.prepare()
}

// release lets the decode leg go. Only the first call of release and keep has an effect.
func (h *hold) release() {
	if h != nil && h.state.CompareAndSwap(isHeld, letGo) {
		h.end()
	}
}

// keep has the decode leg never be sent, and reports whether it was still held. The caller
// then ends the hold.
func (h *hold) keep() bool { return h != nil && h.state.CompareAndSwap(isHeld, neverSent) }

// unsent reports, after the wait for its end, whether the decode leg must not be sent.
func (h *hold) unsent(ctx context.Context) bool {
	return h != nil && (ctx.Err() != nil || h.state.Load() == neverSent)
}

// Begin runs both legs until the decode leg has begun to answer, or the pair has failed. With
// held the decode leg is not sent before the request of the prefill leg was written. The
// failure of one leg cancels the other, except that a decode leg that has begun to answer
// has the KV it needs. Where Ending.Err is nil, the caller reads the answer and then calls
// [Pair.End]; otherwise the prefill leg has been joined, also after a panic of the decode
// leg. A nil run is goroutines.
func Begin(ctx context.Context, run Runner, legs Legs, held bool) (_ *Pair, end Ending) {
	if run == nil {
		run = goroutines{}
	}
	dctx, stopDecode := context.WithCancelCause(ctx)
	pctx, stopPrefill := context.WithCancel(ctx)
	decoded, broke := make(chan struct{}), make(chan struct{})
	p := &Pair{ctx, run, make(chan struct{}), stopPrefill, stopDecode}
	var h *hold
	if held {
		h = &hold{over: make(chan struct{}), first: make(chan struct{})}
	}
	begun := false
	defer func() {
		if !begun {
			p.End(false)
		}
	}()
	var failed error // of the prefill leg; to be read after broke or done
	run.Go(func() {
		defer close(p.done)
		if failed = prefill(pctx, legs, h.prepare, h.release); failed == nil {
			h.release()
		} else if !legs.Begun() {
			close(broke)
			unsent := h.keep()
			if !unsent && legs.Both(failed) {
				run.Wait(pctx, decoded, Grace)
			}
			if legs.Stop() { // it has not begun meanwhile
				stopDecode(failed)
			}
			if unsent {
				h.end()
			}
		}
	})
	if held {
		run.Wait(ctx, h.first, 0)
		if ctx.Err() == nil && !ended(h.over) {
			legs.Prepare(dctx)
			run.Wait(ctx, h.over, 0)
		}
	}
	if h.unsent(ctx) {
		return nil, Ending{Err: context.Cause(dctx), Cancelled: ctx.Err() == nil}
	}
	err := legs.Decode(dctx)
	close(decoded)
	if err == nil {
		begun = true
		return p, Ending{}
	}
	// Asked before the prefill leg is stopped: what that says then is our own doing.
	if cause := context.Cause(dctx); cause != nil && ctx.Err() == nil {
		return nil, Ending{Err: cause, Cancelled: true}
	}
	end.Err, end.Waiting = err, !ended(p.done) && !ended(broke)
	if end.Waiting && legs.Both(err) {
		run.Wait(ctx, p.done, Grace)
	}
	if ended(broke) || ended(p.done) {
		end.Other = failed
	}
	return nil, end
}

// PrefillEnded reports whether the prefill leg has ended: what it was sent with may be given
// back then.
func (p *Pair) PrefillEnded() bool { return ended(p.done) }

// End joins the prefill leg, once the answer has ended. With whole, which says that it
// ended well, a prefill leg that is still under way is given Grace.
func (p *Pair) End(whole bool) {
	if whole && !ended(p.done) {
		p.run.Wait(context.WithoutCancel(p.ctx), p.done, Grace)
	}
	p.stopPrefill()
	p.run.Wait(context.WithoutCancel(p.ctx), p.done, 0)
	p.stopDecode(nil)
}

// goroutines is the Runner of sockets.
type goroutines struct{}

func (goroutines) Go(f func()) { go f() }

func (goroutines) Wait(ctx context.Context, done <-chan struct{}, limit time.Duration) {
	var over <-chan time.Time
	if limit > 0 {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		over = timer.C
	}
	select {
	case <-done:
	case <-over:
	case <-ctx.Done():
	}
}

func ended(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// prefill runs the prefill leg. A panic of it is an error.
func prefill(ctx context.Context, legs Legs, connects, written func()) (err error) {
	defer func() {
		if p := recover(); p != nil {
			legs.Panicked(p)
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return legs.Prefill(ctx, connects, written)
}
