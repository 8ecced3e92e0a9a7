package door

import (
	"net/http"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// early is the head of a stream that goes out before the head of its answer, with comments
// behind it: so the client, and proxies before it, see that the request is alive. From then
// on a failure is an error event. It is no part of its exchange, which is used again: the
// timer's function may still run then.
type early struct {
	// mu is for the time before the head of the answer: the timer has a goroutine of its own.
	mu    sync.Mutex
	w     http.ResponseWriter
	out   *upstream.Writer
	every time.Duration
	timer *time.Timer // nil where only the engine's comments pass
	sent  bool        // the head is
	over  bool        // the timer may not write any more
}

func (r *reply) newEarly() *early {
	return &early{w: r.w, out: upstream.NewWriter(r.w, r.call.Routing.Settings.Timeouts.Write), sent: r.committed}
}

// keepAlive begins to send comments, if the request is for a stream of events and the settings
// want them. A stream of speech is sound.
func (r *reply) keepAlive() {
	every, ep := r.call.Routing.Settings.Timeouts.SSEKeepAlive, r.call.Endpoint
	if every <= 0 || !ep.Streamable || ep.Kind == api.Speech || !r.call.View.Stream {
		return
	}
	k := r.newEarly()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.every, k.timer = every, time.AfterFunc(every, k.beat)
	r.early = k
}

// beat sends a comment of the router.
func (k *early) beat() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.over && k.write([]byte(": waiting for the first token\n\n")) == nil {
		k.timer.Reset(k.every)
	}
}

// write sends a comment, after the head where that is not sent yet.
func (k *early) write(comment []byte) error {
	if !k.sent {
		k.sent = true
		h := k.w.Header()
		h["Content-Type"], h["Cache-Control"] = []string{"text/event-stream; charset=utf-8"}, []string{"no-cache"}
		k.w.WriteHeader(http.StatusOK)
	}
	_, err := k.out.Write(comment)
	return err
}

// Comment sends the client an engine's comments. A client that does not take them is noticed
// with the next piece of the stream.
func (r *reply) Comment(p []byte) {
	k := r.early
	if k == nil {
		k = r.newEarly()
		r.early = k
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.sent {
		r.call.Record.Headers(r.w.Header())
	}
	if k.write(p) == nil && k.timer != nil && !k.over {
		k.timer.Reset(k.every)
	}
}

// settle ends the time in which the timer may write.
func (r *reply) settle() {
	k := r.early
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.over = true; k.timer != nil {
		k.timer.Stop()
	}
	if k.sent && !r.committed {
		r.status, r.committed = http.StatusOK, true
	}
}

// opened reports whether the client has a head that is not that of the answer.
func (r *reply) opened() bool { return r.early != nil && r.early.sent }
