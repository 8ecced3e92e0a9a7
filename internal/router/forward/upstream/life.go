package upstream

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// errNoLife ends a leg whose engine gave no sign of life in time.
var errNoLife = fmt.Errorf("the engine gave no sign of life: %w", context.DeadlineExceeded)

// errSilent ends a leg that its Watch gives up.
var errSilent = errors.New("the engine shows no sign of life: it answers no probe, sends no byte of any answer and no KV event")

// Watch decides how long a leg waits for bytes of its answer. It is used on the goroutine of
// the leg.
type Watch interface {
	// Wait is called when the leg begins to wait, and again whenever the time that it
	// returned last is over: more is how long the leg waits until the next call, 0 without
	// a further one. With giveUp the leg fails as [Silent].
	Wait(now time.Time) (more time.Duration, giveUp bool)
}

// life watches over the wait for the head of an answer. A nil one has nothing to
// watch.
type life struct {
	timer *time.Timer
	state atomic.Uint32
}

const (
	lifeWatched uint32 = iota
	lifeSeen           // the wait is over
	lifeMissed         // the connection was closed
)

// watch begins to watch the engine, if that is wanted. The request is sent.
func (l *Leg) watch(cn *conn) *life {
	if l.Alive == nil {
		return nil
	}
	w, sent, alive := &life{}, time.Now(), l.Alive
	w.timer = time.AfterFunc(l.AliveBy.Sub(sent), func() {
		if !alive(sent) && w.state.CompareAndSwap(lifeWatched, lifeMissed) {
			cn.close()
		}
	})
	return w
}

// ended ends the watch and reports whether the connection was left alone.
func (w *life) ended() bool {
	if w == nil {
		return true
	}
	w.timer.Stop()
	return w.state.CompareAndSwap(lifeWatched, lifeSeen)
}
