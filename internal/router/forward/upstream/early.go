package upstream

import (
	"net/http"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

const (
	// earlySize is the size in bytes of the largest body that is sent without
	// regard to an answer: the buffers of the system take it.
	earlySize = 32 << 10
	// earlyAfter is how long the sending of a larger one goes on until an
	// answer is listened for.
	earlyAfter = 100 * time.Millisecond
	// lastWord is how long an answer is waited for when a request could not be
	// sent to its end.
	lastWord = time.Second
)

// early listens, while a body is sent that the engine does not take, for an
// answer: one that refuses a request (413, 400) may be all that it does.
type early struct {
	timer *time.Timer
	r     *Response
	leg   *Leg
	head  chan error // how reading the head ended, if it was begun
}

var earlyPool = sync.Pool{New: func() any { return &early{head: make(chan error, 1)} }}

// listen prepares for an early answer; nil where none is listened for.
func (r *Response) listen(leg *Leg) *early {
	if api.Size(leg.Body) <= earlySize {
		return nil
	}
	// The last answer's deadline is none of this one's. If that fails, so does
	// the sending.
	_ = r.conn.readWithin(0, time.Time{})
	r.conn.sending.Store(sendRuns)
	e := earlyPool.Get().(*early)
	e.r, e.leg = r, leg
	if e.timer == nil {
		e.timer = time.AfterFunc(r.client.earlyAfter, e.read)
	} else {
		e.timer.Reset(r.client.earlyAfter)
	}
	return e
}

func (e *early) read() {
	err := e.r.readHead(e.leg)
	if err == nil && e.r.Status >= http.StatusMultipleChoices {
		e.r.conn.stopSending()
	}
	e.head <- err
}

// stop reports whether nobody has listened so far; nobody will then.
func (e *early) stop() bool {
	if e == nil {
		return true
	}
	if !e.timer.Stop() {
		return false
	}
	e.r, e.leg = nil, nil
	earlyPool.Put(e)
	return true
}

// awaitHead reads the head of the answer, which e may be doing already: no watch looks at the
// engine then.
func (r *Response) awaitHead(e *early, leg *Leg, timeout time.Duration) error {
	if !e.stop() {
		if r.conn.readWithin(timeout, time.Now()) != nil {
			r.conn.close() // ends the reading, too
		}
		return <-e.head
	}
	r.watch = leg.Watch
	if err := r.allow(timeout, time.Now()); err != nil {
		return err
	}
	return r.readHead(leg)
}
