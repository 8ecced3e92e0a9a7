package loadgen

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/bench/plan"

	"github.com/dynctl/dynctl/internal/wait"
)

// A Request is one request to send. The memory of Body is the caller's to
// reuse: it is handed back with the next Fill.
type Request struct {
	// ID is sent as X-Request-Id.
	ID string
	// Header has further header lines, each ended by CRLF; may be empty.
	Header string
	// Body is the JSON body.
	Body []byte
	// ISL and OSL are the tokens asked for.
	ISL, OSL int
	// Warm requests are sent and recorded but kept out of all figures.
	Warm bool
	// At overrides the schedule's time in an open loop when it is positive.
	At time.Duration

	wire []byte // head and body
}

// A Source makes requests. Fill is called ahead of time by one goroutine for
// each slot of a closed loop, or by one (slot 0) for an open loop; false says
// that there is nothing more for this slot.
type Source interface {
	Fill(slot int, q *Request) bool
}

// Options are what a run is made of.
type Options struct {
	// Base is the URL of the router or engine, whose completions are requested.
	Base string
	// TLS is how an https URL is spoken to; nil for the system's roots.
	TLS *tls.Config
	// APIKey is sent as bearer token; empty for none.
	APIKey string
	// Concurrency is the number of slots of a closed loop.
	Concurrency int
	// Schedule, when set, makes an open loop: one planned time for each
	// request. Cap bounds what is in flight then (0: no bound); what waits for
	// the bound is late by its own fault and counted so.
	Schedule []time.Duration
	Cap      int
	// Timeout bounds one request, which is given up between one and 1.25 times
	// that; 0 means 10 minutes.
	Timeout time.Duration
	// SLO decides what counts as good; zero members are not asked for.
	SLO plan.SLO
	// Keep is how many results are kept in memory.
	Keep int
	// OnResult is called with every request as it ends, one at a time; may be nil.
	// It must not keep its argument.
	OnResult func(*Result)
	// Progress, when set, is kept up to date while the run is under way.
	Progress *Progress
}

// call is a request under way.
type call struct {
	req Request
	res Result
}

// Run sends requests until the source is dry, the schedule is over or ctx ends.
// It returns what was measured also when it returns an error.
func Run(ctx context.Context, o Options, src Source) (*Summary, error) {
	e, err := parseEndpoint(o.Base, o.TLS)
	if err != nil {
		return nil, err
	}
	o.Timeout = cmp.Or(max(o.Timeout, 0), 10*time.Minute)
	if len(o.Schedule) == 0 && o.Concurrency < 1 {
		return nil, errors.New("a load needs a concurrency of at least 1 or a schedule")
	}
	g := &generator{
		o: o, e: e, src: src, start: time.Now(), rec: newRecorder(o.SLO, o.Keep),
		head: "POST " + e.prefix + "/v1/completions HTTP/1.1\r\nHost: " + e.host + "\r\nUser-Agent: dynctl-bench\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\n",
	}
	if o.APIKey != "" {
		g.head += "Authorization: Bearer " + o.APIKey + "\r\n"
	}
	g.ctx, g.cancel = context.WithCancel(ctx)
	defer g.cancel()
	// Whatever blocks on a connection ends with the run.
	stop := context.AfterFunc(g.ctx, g.closeAll)
	defer stop()
	var client *Starvation
	g.wg.Go(func() { client = witness(g.ctx, g.now) })
	if len(o.Schedule) > 0 {
		g.open()
	} else {
		g.closed()
	}
	g.cancel()
	g.closeAll()
	g.wg.Wait()
	s := g.rec.summary(g.now(), o)
	s.Client = client
	return s, ctx.Err()
}

type generator struct {
	o      Options
	e      *endpoint
	src    Source
	start  time.Time
	head   string
	rec    *recorder
	ctx    context.Context // of this run only
	cancel context.CancelFunc
	wg     sync.WaitGroup

	// Of an open loop: what is in flight, places under the bound (nil without
	// one) and calls to be used again.
	flying sync.WaitGroup
	slots  chan struct{}
	back   chan *call

	mu    sync.Mutex // guards the following
	conns map[*conn]struct{}
	idle  []*conn
	over  bool
}

func (g *generator) now() time.Duration { return time.Since(g.start) }

func (g *generator) add(c *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.over {
		return false
	}
	if g.conns == nil {
		g.conns = make(map[*conn]struct{})
	}
	g.conns[c] = struct{}{}
	return true
}

func (g *generator) drop(c *conn) {
	g.mu.Lock()
	delete(g.conns, c)
	if i := slices.Index(g.idle, c); i >= 0 {
		g.idle = slices.Delete(g.idle, i, i+1)
	}
	g.mu.Unlock()
	c.Close()
}

func (g *generator) closeAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.over = true
	for c := range g.conns {
		c.Close()
	}
}

func (g *generator) connect() (*conn, error) {
	c, err := g.e.dial()
	if err != nil {
		return nil, err
	}
	if !g.add(c) {
		c.Close()
		return nil, context.Canceled
	}
	return c, nil
}

// wire puts head and body into one piece of memory.
func (g *generator) wire(q *Request) {
	b := append(q.wire[:0], g.head...)
	if q.ID != "" {
		b = append(b, "X-Request-Id: "...)
		b = append(b, q.ID...)
		b = append(b, "\r\n"...)
	}
	b = append(b, q.Header...)
	b = append(b, "Content-Length: "...)
	b = strconv.AppendInt(b, int64(len(q.Body)), 10)
	b = append(b, "\r\n\r\n"...)
	q.wire = append(b, q.Body...)
}

// ahead makes a slot's requests while the ones before are under way.
func (g *generator) ahead(slot, depth int) (next chan *call, back chan *call) {
	next, back = make(chan *call, depth), make(chan *call, depth+1)
	for range depth + 1 {
		back <- new(call)
	}
	g.wg.Go(func() {
		defer close(next)
		for {
			var q *call
			select {
			case q = <-back:
			case <-g.ctx.Done():
				return
			}
			q.req = Request{Body: q.req.Body[:0], wire: q.req.wire}
			if !g.src.Fill(slot, &q.req) {
				return
			}
			g.wire(&q.req)
			select {
			case next <- q:
			case <-g.ctx.Done():
				return
			}
		}
	})
	return next, back
}

// closed keeps Concurrency requests in flight until each slot's source is dry.
func (g *generator) closed() {
	var slots sync.WaitGroup
	for slot := range g.o.Concurrency {
		next, back := g.ahead(slot, 1)
		slots.Go(func() {
			var c *conn
			defer func() {
				if c != nil {
					g.drop(c)
				}
			}()
			free := g.now()
			for q := range next {
				if g.ctx.Err() != nil {
					return
				}
				q.begin(free)
				c = g.exchange(c, q)
				free = g.now()
				g.done(q, c)
				back <- q
			}
			g.rec.slotDry(g.now())
		})
	}
	slots.Wait()
}

func (q *call) begin(intended time.Duration) {
	q.res = Result{
		ID: q.req.ID, ISL: q.req.ISL, OSL: q.req.OSL, Warm: q.req.Warm, Intended: intended,
		PromptTokens: -1, CachedTokens: -1, OutputTokens: -1,
	}
}

// exchange sends one request and reads its answer on c or on a new connection,
// and returns the connection for the next one.
func (g *generator) exchange(c *conn, q *call) *conn {
	for {
		if c == nil {
			var err error
			if c, err = g.connect(); err != nil {
				q.res.Sent = g.now()
				q.res.fail(g.connectKind(), err)
				g.rec.sent(g.now(), g.o.Concurrency)
				return nil
			}
		}
		stale := c.used
		q.res.Sent = g.now()
		if !q.res.again {
			g.rec.sent(q.res.Sent, g.o.Concurrency)
		}
		err := g.write(c, q)
		if err == nil {
			_, err = c.answer(q, g.now)
		}
		if err != nil && stale && g.harmless(q, err) {
			// The server had closed the idle connection: nothing was lost.
			g.drop(c)
			c, q.res.again = nil, true
			continue
		}
		if err != nil {
			q.res.fail(g.kind(err), err)
		}
		if c.closing || q.res.Status == 0 || err != nil && errors.Is(err, errCut) {
			g.drop(c)
			return nil
		}
		return c
	}
}

// write sends a request and sees to it that its connection does not wait for
// ever. Deadlines are moved only when they have come too near, because moving
// one costs as much as a short write.
func (g *generator) write(c *conn, q *call) error {
	if now := g.now(); c.until < now+g.o.Timeout {
		c.until = now + g.o.Timeout + g.o.Timeout/4
		_ = c.SetDeadline(g.start.Add(c.until)) // a closed connection fails the write
	}
	_, err := c.Write(q.req.wire)
	return err
}

// harmless reports whether a request that failed on a connection which had
// been idle met its end there, so that nothing was lost and it may be sent
// again. One that waited for its whole time did not.
func (g *generator) harmless(q *call, err error) bool {
	late := timedOut(err) && g.now()-q.res.Sent >= g.o.Timeout
	return q.res.FirstByte == 0 && !q.res.again && !late && g.ctx.Err() == nil
}

func timedOut(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

func (g *generator) kind(err error) string {
	switch {
	case g.ctx.Err() != nil:
		return kindCancelled
	case timedOut(err):
		return kindTimeout
	default:
		return kindFailed
	}
}

func (g *generator) connectKind() string {
	if g.ctx.Err() != nil {
		return kindCancelled
	}
	return kindConnect
}

func (g *generator) done(q *call, c *conn) {
	var pieces []piece
	if c != nil && q.res.Err == "" {
		pieces = c.pieces
	}
	g.rec.ended(&q.res, pieces, g.now(), g.o)
}

// smallWrite is what a socket takes at once, so that the pacing goroutine may
// write it itself.
const smallWrite = 16 << 10

// open sends at the planned times whatever the answers do.
func (g *generator) open() {
	if g.o.Cap > 0 {
		g.slots = make(chan struct{}, g.o.Cap)
	}
	var next chan *call
	next, g.back = g.ahead(0, 256)
	paced := make(chan struct{})
	go func() {
		defer close(paced)
		// The thread is never unlocked: it ends with the goroutine, and so do
		// its settings.
		runtime.LockOSThread()
		punctual()
		g.pace(next)
	}()
	<-paced
	ended := make(chan struct{})
	go func() { g.flying.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-g.ctx.Done():
		g.closeAll()
		<-ended
	}
}

// pace sends each request at its time.
func (g *generator) pace(next chan *call) {
	for i, at := range g.o.Schedule {
		q, ok := <-next
		if !ok {
			return
		}
		if q.req.At > 0 {
			at = q.req.At
		}
		if !g.until(at) {
			return
		}
		if g.slots != nil {
			select {
			case g.slots <- struct{}{}:
			case <-g.ctx.Done():
				return
			}
		}
		q.begin(at)
		g.flying.Add(1)
		g.send(q)
		if i == len(g.o.Schedule)-1 {
			g.rec.slotDry(g.now())
		}
		// What is in flight does not come back in time: make another one.
		if len(g.back) == 0 {
			select {
			case g.back <- new(call):
			default:
			}
		}
	}
}

// until waits for a time of the run and reports whether it was reached.
func (g *generator) until(at time.Duration) bool {
	for {
		d := at - g.now()
		switch {
		case g.ctx.Err() != nil:
			return false
		case d <= 0:
			return true
		case d > 3*time.Millisecond:
			wait.For(g.ctx, d-2*time.Millisecond)
		default:
			nap(d)
		}
	}
}

// finish ends a request of an open loop.
func (g *generator) finish(q *call, c *conn) {
	g.done(q, c)
	if g.slots != nil {
		<-g.slots
	}
	select {
	case g.back <- q:
	default: // more in flight than were made ahead
	}
	g.flying.Done()
}

// send starts a request on an idle connection, from the caller's goroutine if
// nothing can make it wait.
func (g *generator) send(q *call) {
	g.mu.Lock()
	var c *conn
	if n := len(g.idle); n > 0 {
		c, g.idle = g.idle[n-1], g.idle[:n-1]
	}
	g.mu.Unlock()
	if c != nil && len(q.req.wire) <= smallWrite {
		g.post(c, q)
		return
	}
	g.wg.Go(func() {
		if c == nil {
			var err error
			if c, err = g.connect(); err != nil {
				q.res.Sent = g.now()
				g.rec.sent(q.res.Sent, 0)
				q.res.fail(g.connectKind(), err)
				g.finish(q, nil)
				return
			}
			g.wg.Go(func() { g.reader(c) })
		}
		g.post(c, q)
	})
}

// post writes a request on a connection that has a reader. When the server
// closes the connection at this very moment, the reader may be gone before it
// sees the request; exactly one of the two then takes care of it.
func (g *generator) post(c *conn, q *call) {
	q.res.Sent = g.now()
	g.rec.sent(q.res.Sent, 0)
	c.current.Store(q)
	if err := g.write(c, q); err != nil {
		c.Close() // its reader ends the request
	}
	if c.dead.Load() && c.current.CompareAndSwap(q, nil) {
		g.wg.Go(func() { g.retry(q) })
	}
}

// reader reads the answers of one connection of an open loop.
func (g *generator) reader(c *conn) {
	for {
		q, err := c.answer(nil, g.now)
		if q == nil {
			g.drop(c)
			c.dead.Store(true)
			// A request may have been put on it at this moment.
			if q = c.current.Swap(nil); q == nil {
				return
			}
			err = errIdle
		}
		c.current.Store(nil)
		if err != nil && c.used && g.harmless(q, err) {
			g.drop(c)
			g.retry(q)
			return
		}
		if err != nil {
			q.res.fail(g.kind(err), err)
		}
		gone := c.closing || q.res.Status == 0 || errors.Is(err, errCut)
		g.finish(q, c)
		if !gone {
			g.mu.Lock()
			if gone = g.over; !gone {
				g.idle = append(g.idle, c)
			}
			g.mu.Unlock()
		}
		if gone {
			g.drop(c)
			return
		}
	}
}

// retry sends a request again that met a connection which the server had
// closed; its time of sending stays the first one.
func (g *generator) retry(q *call) {
	sent := q.res.Sent
	q.res.again = true
	c, err := g.connect()
	if err == nil {
		if err = g.write(c, q); err == nil {
			if _, err = c.answer(q, g.now); err == nil {
				q.res.Sent = sent
				g.finish(q, c)
				g.drop(c)
				return
			}
		}
		g.drop(c)
	}
	q.res.fail(g.kind(err), fmt.Errorf("sent again on a new connection: %w", err))
	g.finish(q, nil)
}
