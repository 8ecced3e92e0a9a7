package serving

import (
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// silence is what a request has spent on workers without a sign of life.
type silence struct {
	// gaveUp says that a leg was given up for it, which happens once in a request.
	gaveUp atomic.Bool
	// paid says that the retry which follows is taken out of the budget already.
	paid atomic.Bool
}

// vigil watches a leg while the client has no byte of it. It is [upstream.Watch].
type vigil struct {
	g      *Legs
	c      *Call
	phase  route.Phase
	worker *workers.Worker
	since  time.Time // when the leg began to wait
}

// Wait waits for as long as the worker shows signs of life, and without them for as long as
// the request has nowhere else to go.
func (v *vigil) Wait(now time.Time) (more time.Duration, giveUp bool) {
	if v.c.begun.Load() == hasBegun || v.c.silence.gaveUp.Load() {
		return 0, false
	}
	if v.since.IsZero() {
		v.since = now
	}
	last := v.since
	if sign := v.worker.State.Life().Last(); sign.After(last) {
		last = sign
	}
	if more = last.Add(v.g.Silence).Sub(now); more > 0 {
		return more, false
	}
	return v.g.Silence / 2, v.giveUp(now)
}

// giveUp takes what giving up the leg costs, and reports whether all of it was there.
func (v *vigil) giveUp(now time.Time) bool {
	c := v.c
	if !c.Routing.Run.MayMove(attempt.NewError(v.phase, v.worker, attempt.Silent, true, nil).Failure) || !c.silence.gaveUp.CompareAndSwap(false, true) {
		return false
	}
	if !v.g.Budget.Take(now, c.Routing.Settings.Retry.Budget) {
		c.silence.gaveUp.Store(false)
		return false
	}
	c.silence.paid.Store(true)
	return true
}
