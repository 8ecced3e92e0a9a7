// Package fakeengine is a fleet of engines without sockets, behind [serving.Transport], and
// the parts of a router that serve calls with it. A test that uses it in a synctest bubble
// decides, in virtual time, what each engine does with each request.
package fakeengine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/serving"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// Never is longer than any timeout of a test.
const Never = 1000 * time.Hour

// Answer is what an engine does with one request: after Wait it fails, or it sends the head
// of an answer and then its pieces.
type Answer struct {
	Wait time.Duration
	// Meets is the room in which SGLang's two engines meet: a prefill engine enters it with
	// its answer, and a decode engine, which Waits there, answers no earlier.
	Meets string
	Waits bool
	// Fail is the error instead of an answer; nil for none.
	Fail error
	// Panic says that the transport panics instead.
	Panic  bool
	Status int
	Header []string // as "Key: value"
	Pieces []Piece
}

// Piece is a piece of a body: after Wait its text comes, or the body ends with an error.
type Piece struct {
	Wait  time.Duration
	Text  string
	Fail  upstream.Kind // "" for none
	Panic bool
}

// JSON is an answer of known length.
func JSON(status int, body string, header ...string) Answer {
	return Answer{Status: status, Header: append([]string{"Content-Type: application/json", fmt.Sprintf("Content-Length: %d", len(body))}, header...), Pieces: []Piece{{Text: body}}}
}

// Stream is an event stream, each event a piece. An event that does not end with an empty
// line gets "data: " and that line.
func Stream(events ...string) Answer {
	a := Answer{Status: http.StatusOK, Header: []string{"Content-Type: text/event-stream"}}
	for _, e := range events {
		if !strings.HasSuffix(e, "\n\n") {
			e = "data: " + e + "\n\n"
		}
		a.Pieces = append(a.Pieces, Piece{Text: e})
	}
	return a
}

// Fails is a request that gets no answer; sent says that the engine may have read it.
func Fails(kind upstream.Kind, sent bool) Answer {
	return Answer{Fail: &upstream.Failure{Kind: kind, Op: "wait for the answer", Sent: sent, Err: errors.New("by the test")}}
}

// Stale is a request on a connection that the engine had closed as idle.
func Stale() Answer {
	return Answer{Fail: &upstream.Failure{Kind: upstream.Reset, Op: "wait for the answer", Sent: true, Reused: true, Idle: time.Second, Err: io.EOF}}
}

// Hangs is a request that gets no answer at all.
func Hangs() Answer { return Answer{Wait: Never, Status: http.StatusOK} }

// After is the answer after a time.
func (a Answer) After(d time.Duration) Answer {
	a.Wait += d
	return a
}

// Every is the answer with a pause before each piece but the first.
func (a Answer) Every(d time.Duration) Answer {
	a.Pieces = append([]Piece(nil), a.Pieces...)
	for i := range a.Pieces {
		if i > 0 {
			a.Pieces[i].Wait = d
		}
	}
	return a
}

// Then is the first n pieces of the answer, and then others.
func (a Answer) Then(n int, more ...Piece) Answer {
	a.Pieces = append(append([]Piece(nil), a.Pieces[:min(n, len(a.Pieces))]...), more...)
	return a
}

// Request is one request as an engine gets it.
type Request struct {
	Worker, Method, Path, ID string
	Header                   map[string]string // of the router
	Body                     []byte
	At                       time.Time

	// Ended is when the router was done with it, zero until then; Err is the error without
	// an answer. Canceled says that the router gave it up.
	Ended    time.Time
	Err      error
	Canceled bool
	closed   int
}

// Fleet is engines by the host of their URL, which is their name. It is safe for concurrent
// use.
type Fleet struct {
	mu     sync.Mutex
	play   map[string]func(*Request) Answer // by worker
	next   map[string][]Answer              // by worker; before play
	got    []*Request
	wrong  []string
	rooms  map[string]chan struct{} // closed when the prefill engine has come
	Serves func(*Request) Answer    // what a worker does without settings
	// Writes is how long it takes to write a request, and whether its connection is a new one;
	// nil for no time, on a connection that was there. lost says that the engine has closed one
	// that was kept.
	Writes func(*Request) (takes time.Duration, fresh, lost bool)
}

// Next sets what a worker does with its next requests.
func (f *Fleet) Next(worker string, a ...Answer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.next == nil {
		f.next = map[string][]Answer{}
	}
	f.next[worker] = append(f.next[worker], a...)
}

// Always sets what a worker does with all requests; nil for what a good engine does.
func (f *Fleet) Always(worker string, play func(*Request) Answer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.play == nil {
		f.play = map[string]func(*Request) Answer{}
	}
	f.play[worker] = play
}

// Requests are those so far to workers whose name has a prefix, in their order.
func (f *Fleet) Requests(prefix string) (list []*Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.got {
		if strings.HasPrefix(q.Worker, prefix) {
			list = append(list, q)
		}
	}
	return list
}

// Idle reports whether a request was answered whole, so that its connection can take another.
func (f *Fleet) Idle(q *Request) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !q.Ended.IsZero() && q.Err == nil
}

// Wrong is what the router has done with answers that it must not: each answer is closed
// once, and not read afterwards.
func (f *Fleet) Wrong() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := f.wrong
	for _, q := range f.got {
		if q.Ended.IsZero() {
			list = append(list, fmt.Sprintf("a request to %s has not ended", q.Worker))
		}
	}
	return list
}

func (f *Fleet) note(format string, a ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wrong = append(f.wrong, fmt.Sprintf(format, a...))
}

// take begins a request, and finds what its engine does with it.
func (f *Fleet) take(leg *upstream.Leg) (q *Request, a Answer) {
	q = &Request{
		Worker: leg.Base.Host, Method: leg.Method, Path: leg.Path, Header: map[string]string{}, Body: bytes.Join(leg.Body, nil), At: time.Now(),
	}
	for _, h := range leg.Set {
		q.Header[h.Key] = h.Value
	}
	q.ID = q.Header["X-Request-Id"]
	f.mu.Lock()
	f.got = append(f.got, q)
	next, play := f.next[q.Worker], f.play[q.Worker]
	if len(next) > 0 {
		f.next[q.Worker] = next[1:]
	}
	f.mu.Unlock()
	switch {
	case len(next) > 0:
		return q, next[0]
	case play != nil:
		return q, play(q)
	}
	return q, f.Serves(q)
}

// Do is [serving.Transport.Do].
func (f *Fleet) Do(ctx context.Context, leg *upstream.Leg) (serving.Response, error) {
	q, a := f.take(leg)
	fail := func(kind upstream.Kind, err error) error {
		return &upstream.Failure{Kind: kind, Addr: q.Worker, Op: "wait for the answer", Sent: true, Err: err}
	}
	var u *upstream.Failure
	if unsent := errors.As(a.Fail, &u) && !u.Sent; !unsent {
		fresh := false
		if f.Writes != nil {
			var takes time.Duration
			var lost bool
			if takes, fresh, lost = f.Writes(q); fresh && leg.Connects != nil {
				leg.Connects(lost)
			}
			if _, err := await(ctx, nil, takes); err != nil {
				f.end(q, err, true)
				return nil, fail(upstream.Canceled, err)
			}
		}
		if leg.Written != nil {
			leg.Written(fresh)
		}
	}
	limit, silent := leg.HeadTimeout, false
	lost := false // it gave no sign of life
	if leg.Alive != nil {
		if d := time.Until(leg.AliveBy); a.Wait > d && (limit == 0 || d < limit) {
			silent, _ = await(ctx, leg.Watch, d) // of an end of ctx the next wait hears
			if a.Wait, limit = a.Wait-d, limit-d; !leg.Alive(q.At) {
				a.Wait, limit, lost = Never, 1, true
			}
		}
	}
	late := limit > 0 && a.Wait > limit
	if late {
		a.Wait = limit
	}
	var err error
	if !silent {
		silent, err = await(ctx, leg.Watch, a.Wait)
	}
	if a.Meets != "" && err == nil && !late && !silent {
		late, err = f.meet(ctx, &a, limit-a.Wait)
	}
	switch {
	case err != nil:
		err = fail(upstream.Canceled, err)
	case silent:
		err = fail(upstream.Silent, errors.New("no sign of life"))
	case late:
		err = &upstream.Failure{Kind: upstream.Timeout, Addr: q.Worker, Op: "wait for the answer", Sent: true, Late: !lost, Err: errors.New("no answer in time")}
	case a.Panic:
		f.end(q, errors.New("a panic"), false)
		panic("the transport, by the test")
	default:
		err = a.Fail
	}
	if u, ok := errors.AsType[*upstream.Failure](err); ok && u.Addr == "" {
		again := *u
		again.Addr = q.Worker
		err = &again
	}
	if err != nil {
		f.end(q, err, ctx.Err() != nil)
		return nil, err
	}
	head, err := parse(q.Worker, leg.Method, a.Status, a.Header)
	if err != nil {
		panic(err) // a test's mistake
	}
	if leg.Method == http.MethodHead {
		a.Pieces = nil
	}
	leg.Life.Sign(time.Now())
	r := &response{f: f, q: q, ctx: ctx, watch: leg.Watch, life: leg.Life, idle: leg.IdleTimeout, patience: Never, head: head, left: a.Pieces}
	if leg.HeadTimeout > 0 && !head.Streams() {
		r.patience = leg.HeadTimeout
	}
	return r, nil
}

// meet enters a room, or waits there for as long as limit, if that is above 0.
func (f *Fleet) meet(ctx context.Context, a *Answer, limit time.Duration) (late bool, err error) {
	f.mu.Lock()
	room := f.rooms[a.Meets]
	if room == nil {
		room = make(chan struct{})
		if f.rooms == nil {
			f.rooms = map[string]chan struct{}{}
		}
		f.rooms[a.Meets] = room
	}
	f.mu.Unlock()
	if !a.Waits {
		close(room)
		return false, nil
	}
	if limit <= 0 {
		limit = Never
	}
	ctx2, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	select {
	case <-room:
		return false, nil
	case <-ctx2.Done():
		return ctx.Err() == nil, ctx.Err()
	}
}

func (f *Fleet) end(q *Request, err error, canceled bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	q.Ended, q.Err, q.Canceled = time.Now(), err, canceled
}

// await waits for d, or until the watch gives the engine up.
func await(ctx context.Context, watch upstream.Watch, d time.Duration) (silent bool, err error) {
	for watch != nil && d > 0 {
		more, giveUp := watch.Wait(time.Now())
		if giveUp {
			return true, nil
		}
		if more <= 0 || more >= d {
			break
		}
		if !wait.For(ctx, more) {
			return false, ctx.Err()
		}
		d -= more
	}
	if d <= 0 || !wait.For(ctx, d) {
		return false, ctx.Err()
	}
	return false, nil
}

// response is an answer. Only one goroutine reads it.
type response struct {
	f    *Fleet
	q    *Request
	ctx  context.Context //nolint:containedctx // of the whole answer
	idle time.Duration
	// patience is what is left for all pauses together.
	patience time.Duration
	watch    upstream.Watch
	life     *workers.Life
	head     *upstream.Head
	left     []Piece
	buf      []byte // of the newest piece, which the next one overwrites
	err      error
}

func (r *response) Begins() *upstream.Head { return r.head }

func (r *response) Done() bool { return len(r.left) == 0 && r.err == nil }

func (r *response) Next() ([]byte, error) {
	if r.q.closed > 0 {
		r.f.note("the answer of %s is read after it was closed", r.q.Worker)
	}
	for i := range r.buf {
		r.buf[i] = '?'
	}
	if r.err != nil {
		return nil, r.err
	}
	if len(r.left) == 0 {
		return nil, io.EOF
	}
	p := r.left[0]
	r.left = r.left[1:]
	late := r.idle > 0 && p.Wait > r.idle
	if late {
		p.Wait = r.idle
	}
	drips := p.Wait > r.patience
	if drips {
		late, p.Wait = true, r.patience
	}
	r.patience -= p.Wait
	kind := p.Fail
	switch silent, err := await(r.ctx, r.watch, p.Wait); {
	case err != nil:
		kind = upstream.Canceled
	case silent:
		kind = upstream.Silent
	case late:
		kind = upstream.Timeout
	case p.Panic:
		panic("the answer, by the test")
	}
	if kind != "" {
		r.err = &upstream.Failure{Kind: kind, Addr: r.q.Worker, Op: "read the answer", Sent: true, Started: true, Late: drips && kind == upstream.Timeout, Err: errors.New("by the test")}
		return nil, r.err
	}
	r.life.Sign(time.Now())
	r.buf = append(r.buf[:0], p.Text...)
	return r.buf, nil
}

func (r *response) ReadAll(limit int64) (all []byte, err error) {
	for {
		p, err := r.Next()
		all = append(all, p...)
		switch {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		case int64(len(all)) > limit:
			return nil, &upstream.Failure{Kind: upstream.Protocol, Addr: r.q.Worker, Op: "read the answer", Sent: true, Started: true, Err: errors.New("too large")}
		}
	}
}

func (r *response) Close() {
	if r.q.closed++; r.q.closed > 1 {
		r.f.note("the answer of %s is closed twice", r.q.Worker)
	}
	r.f.end(r.q, r.err, len(r.left) > 0)
}

// parse reads a head as the real client does.
func parse(addr, method string, status int, header []string) (*upstream.Head, error) {
	raw := fmt.Sprintf("HTTP/1.1 %d Word\r\n%s\r\n\r\n", status, strings.Join(header, "\r\n"))
	c := upstream.New(upstream.Options{Dial: func(context.Context, string, string) (net.Conn, error) {
		return &canned{from: strings.NewReader(raw)}, nil
	}})
	c.Close() // which keeps no connection then
	r, err := c.Do(context.Background(), &upstream.Leg{Base: &url.URL{Scheme: "http", Host: addr}, Path: "/", Method: method})
	if err != nil {
		return nil, err
	}
	r.Close()
	head := r.Head
	head.Addr = addr
	return &head, nil
}

// canned is a connection to what an engine has said.
type canned struct{ from io.Reader }

func (c *canned) Read(p []byte) (int, error)       { return c.from.Read(p) }
func (c *canned) Write(p []byte) (int, error)      { return len(p), nil }
func (c *canned) Close() error                     { return nil }
func (c *canned) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *canned) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (c *canned) SetDeadline(time.Time) error      { return nil }
func (c *canned) SetReadDeadline(time.Time) error  { return nil }
func (c *canned) SetWriteDeadline(time.Time) error { return nil }
