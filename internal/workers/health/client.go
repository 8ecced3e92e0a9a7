package health

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
)

// maxAnswer bounds every answer that a worker can make the router keep.
const maxAnswer = 8 << 20

// probeClient sends the small requests of probes to workers.
type probeClient struct {
	client  *http.Client
	timeout time.Duration
	header  http.Header // of every request
	bodies  sync.Pool   // *bytes.Buffer
}

// newProbeClient makes one; a nil transport stands for one of its own, which
// takes no proxy from the environment: engines are neighbours.
func newProbeClient(rt http.RoundTripper, conf func() *tls.Config, timeout time.Duration, header http.Header) *probeClient {
	if rt == nil {
		dialer := &net.Dialer{Timeout: timeout, KeepAlive: 15 * time.Second}
		rt = &http.Transport{
			DialContext:            dialer.DialContext,
			DialTLSContext:         workers.DialTLS(dialer, conf),
			MaxIdleConnsPerHost:    2,
			IdleConnTimeout:        30 * time.Second,
			DisableCompression:     true,
			MaxResponseHeaderBytes: 64 << 10,
		}
	}
	return &probeClient{
		client: &http.Client{
			Transport:     rt,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		timeout: timeout,
		header:  header,
		bodies:  sync.Pool{New: func() any { return new(bytes.Buffer) }},
	}
}

func (a *probeClient) close() { a.client.CloseIdleConnections() }

// statusError is an answer other than 2xx.
type statusError struct {
	what   string // method and path
	status int
}

func (e *statusError) Error() string {
	text := fmt.Sprintf("%s answers %d", e.what, e.status)
	if e.status == http.StatusUnauthorized || e.status == http.StatusForbidden {
		text += " (state api_key_file if the engine wants a key)"
	}
	if e.status == http.StatusLoopDetected {
		text += " (the worker is this router itself: no request is sent to it; take it out of the workers)"
	}
	return text
}

// silence is a request that got no answer in time.
type silence struct {
	what    string // method and path
	timeout time.Duration
	// connected says that the worker's port took the connection.
	connected bool
}

func (e *silence) Error() string { return fmt.Sprintf("%s: no answer within %s", e.what, e.timeout) }

// notThere reports whether the error says that the engine lacks the path, or
// keeps it from us, so that asking again soon is of no use.
func notThere(err error) bool {
	e, ok := errors.AsType[*statusError](err)
	return ok && e.status >= 300 && e.status < 500 && e.status != http.StatusTooManyRequests && e.status != http.StatusRequestTimeout
}

// get asks the worker and hands the body of a 2xx answer to use, which must not
// keep it.
func (a *probeClient) get(ctx context.Context, w *workers.Worker, path string, use func(body []byte) error) error {
	return a.send(ctx, w, http.MethodGet, path, nil, use)
}

// send is get by another method, with a JSON body.
func (a *probeClient) send(ctx context.Context, w *workers.Worker, method, path string, body []byte, use func(body []byte) error) error {
	what := method + " " + path
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	var dialed, connected atomic.Bool // dialing may last longer than the request
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		ConnectStart: func(string, string) { dialed.Store(true) },
		ConnectDone: func(_, _ string, err error) {
			if err == nil {
				connected.Store(true)
			}
		},
	})
	req, err := http.NewRequestWithContext(ctx, method, w.URL.String()+path, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	maps.Copy(req.Header, a.header)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set("User-Agent", "dynctl")
	req.Header["Idempotency-Key"] = nil // not sent; net/http asks again when the engine closed the idle connection
	if w.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+w.APIKey)
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return a.explain(what, err, connected.Load() || !dialed.Load())
	}
	defer resp.Body.Close()
	w.State.Life().Sign(time.Now())
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		// What is left of a short answer is read, so that the connection serves again.
		_, _ = io.CopyN(io.Discard, resp.Body, 4<<10)
		return &statusError{what, resp.StatusCode}
	}
	buf := a.bodies.Get().(*bytes.Buffer)
	buf.Reset()
	defer func() {
		if buf.Cap() <= 1<<20 {
			a.bodies.Put(buf)
		}
	}()
	n, err := buf.ReadFrom(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return a.explain(what, err, true)
	case n > maxAnswer:
		return fmt.Errorf("%s: the answer is longer than %d bytes", what, maxAnswer)
	case use == nil:
		return nil
	}
	return use(buf.Bytes())
}

// explain shortens what net/http reports of a failed request. connected says that the
// request had a connection.
func (a *probeClient) explain(what string, err error, connected bool) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return &silence{what, a.timeout, connected}
	}
	return fmt.Errorf("%s: %w", what, err)
}
