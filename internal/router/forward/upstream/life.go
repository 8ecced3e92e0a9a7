package upstream

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// errNoLife ends a leg whose engine gave no sign of life in time.
var errNoLife = fmt.Errorf("the engine gave no sign of life: %w", context.DeadlineExceeded)

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
