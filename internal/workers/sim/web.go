package sim

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/workers/sim/fault"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
)

// keepAlive is how long a connection may be without a request: vLLM's
// VLLM_HTTP_TIMEOUT_KEEP_ALIVE, and what uvicorn has for itself, on which SGLang
// runs.
const keepAlive = 5 * time.Second

// web is the HTTP server of a process, whose listener can be taken away and
// given back.
type web struct {
	ctx    context.Context
	faults *fault.Source // nil without
	tls    *tls.Config   // nil for plain HTTP
	srv    *http.Server
	addr   string
	wg     sync.WaitGroup // Serve loops and handlers

	mu      sync.Mutex
	ln      net.Listener
	closed  bool
	active  map[net.Conn]struct{} // connections with a request or an answer on them
	allIdle chan struct{}         // closed when active becomes empty; nil when nobody waits
}

func newWeb(ctx context.Context, h http.Handler, faults *fault.Source, conf *tls.Config) *web {
	w := &web{ctx: ctx, faults: faults, tls: conf, active: make(map[net.Conn]struct{})}
	w.srv = &http.Server{
		Handler:           http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { w.serve(h, rw, r) }),
		ReadHeaderTimeout: 30 * time.Second,
		MaxHeaderBytes:    256 << 10,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ConnState:         w.state,
		ErrorLog:          log.New(io.Discard, "", 0), // aborted handlers are wanted here
	}
	return w
}

func (w *web) serve(h http.Handler, rw http.ResponseWriter, r *http.Request) {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		panic(http.ErrAbortHandler)
	}
	w.wg.Add(1)
	w.mu.Unlock()
	defer w.wg.Done()
	h.ServeHTTP(rw, r)
	if w.faults != nil && strings.HasPrefix(r.URL.Path, "/v1/") {
		if set, _ := w.faults.Set(); w.faults.Hit(set.LateRate) {
			if c, ok := r.Context().Value(connKey{}).(*conn); ok {
				c.late.Store(true)
			}
		}
	}
}

// state follows the connections. An answer is out only when its connection has
// become idle or closed, which is after its handler has returned.
func (w *web) state(c net.Conn, s http.ConnState) {
	if c, ok := c.(*conn); ok && w.faults != nil {
		set, _ := w.faults.Set()
		limit := cmp.Or(time.Duration(set.CloseIdle), keepAlive)
		c.rest(s == http.StateIdle, limit)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if s == http.StateActive {
		w.active[c] = struct{}{}
		return
	}
	delete(w.active, c)
	if len(w.active) == 0 && w.allIdle != nil {
		close(w.allIdle)
		w.allIdle = nil
	}
}

// idle returns a channel that is closed when no connection is active.
func (w *web) idle() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.allIdle
	if c == nil {
		c = make(chan struct{})
		if len(w.active) == 0 {
			close(c)
			return c
		}
		w.allIdle = c
	}
	return c
}

// listen binds addr and serves it.
func (w *web) listen(addr string) error {
	ln, err := sockets.Listen(w.ctx, addr)
	if err != nil {
		return fmt.Errorf("http: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		_ = ln.Close()
		return http.ErrServerClosed
	}
	w.ln, w.addr = ln, ln.Addr().String()
	w.wg.Go(func() {
		_ = w.srv.Serve(listener{ln, w.tls}) // ends when ln or the server is closed
	})
	return nil
}

// refuse takes the listener away, and idle connections with it, or gives it
// back. Requests that run go on. An error says that somebody else has the port,
// and connections are refused still.
func (w *web) refuse(on bool) error {
	w.mu.Lock()
	ln := w.ln
	if on {
		w.ln = nil
	}
	w.mu.Unlock()
	if on == (ln == nil) {
		return nil
	}
	w.srv.SetKeepAlivesEnabled(!on)
	if on {
		_ = ln.Close()
		return nil
	}
	err := w.listen(w.addr)
	if errors.Is(err, http.ErrServerClosed) {
		return nil // the engine ends at this moment
	}
	return err
}

// close cuts every connection and waits for the handlers.
func (w *web) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	_ = w.srv.Close() // everything is going
	w.wg.Wait()
}
