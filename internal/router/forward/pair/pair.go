// Package pair carries out the two legs of a request that are sent at once.
package pair

import (
	"context"
	"fmt"
	"time"
)

// Grace is how long a prefill leg may outlast its decode leg, and how long a leg goes on
// after the other one has failed in a way that may be its own, too.
const Grace = time.Second

// Legs are a prefill leg and the decode leg that waits for its KV.
type Legs interface {
	// Prefill and Decode run a leg to its end. They are called at once, each once.
	Prefill(ctx context.Context) error
	Decode(ctx context.Context) error
	// Begun reports whether the decode leg has begun to answer.
	Begun() bool
	// Both reports whether what made one leg fail may make the other one fail as well:
	// that one is given Grace to show it.
	Both(err error) bool
	// Panicked is called with a panic of the prefill leg, where the stack still shows
	// it: on another goroutine than the handler's it would end the process.
	Panicked(p any)
}

// Ending is how a pair ended.
type Ending struct {
	// Err is nil when the decode leg has answered.
	Err error
	// Cancelled says that Err is the prefill leg's, for which the decode leg was cancelled.
	Cancelled bool
	// Waiting says that the prefill leg had not ended when the decode leg failed.
	Waiting bool
	// Other is the failure of the other leg, if it failed by itself: not because it was
	// cancelled.
	Other error
}

// Run runs both legs. The failure of one cancels the other, except that a decode leg that
// has begun to answer has the KV it needs. The prefill leg is joined whatever happens, a
// panic of the decode leg included.
func Run(ctx context.Context, legs Legs) (end Ending) {
	dctx, stopDecode := context.WithCancelCause(ctx)
	defer stopDecode(nil)
	pctx, stopPrefill := context.WithCancel(ctx)
	done, decoded, broke := make(chan struct{}), make(chan struct{}), make(chan struct{})
	defer func() { stopPrefill(); <-done }()
	var failed error // of the prefill leg; to be read after broke or done
	go func() {
		defer close(done)
		if failed = prefill(pctx, legs); failed != nil && !legs.Begun() {
			close(broke)
			if legs.Both(failed) {
				waitFor(pctx, decoded)
			}
			stopDecode(failed)
		}
	}()
	err := legs.Decode(dctx)
	close(decoded)
	if err != nil {
		// Asked before the prefill leg is stopped: what that says then is our own doing.
		if cause := context.Cause(dctx); cause != nil && ctx.Err() == nil {
			return Ending{Err: cause, Cancelled: true}
		}
		end.Err, end.Waiting = err, !ended(done) && !ended(broke)
		if end.Waiting && legs.Both(err) {
			waitFor(ctx, done)
		}
		if ended(broke) || ended(done) {
			end.Other = failed
		}
		return end
	}
	if ended(done) {
		return Ending{}
	}
	waitFor(context.WithoutCancel(ctx), done)
	return Ending{}
}

// waitFor waits for the end of a leg, for Grace at most.
func waitFor(ctx context.Context, end <-chan struct{}) {
	timer := time.NewTimer(Grace)
	defer timer.Stop()
	select {
	case <-end:
	case <-timer.C:
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
func prefill(ctx context.Context, legs Legs) (err error) {
	defer func() {
		if p := recover(); p != nil {
			legs.Panicked(p)
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return legs.Prefill(ctx)
}
