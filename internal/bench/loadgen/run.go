package loadgen

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
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
	// Base is the URL of the router or engine, Path the endpoint.
	Base, Path string
	Model      string
	// Concurrency is the number of slots of a closed loop.
	Concurrency int
	// Schedule, when set, makes an open loop: one planned time for each
	// request. Cap bounds what is in flight then (0: no bound); what waits for
	// the bound is late by its own fault and counted so.
	Schedule []time.Duration
	Cap      int
	// Timeout bounds one request; 0 means 10 minutes.
	Timeout time.Duration
	// SLO decides what counts as good; zero members are not asked for.
	SLO SLO
	// Keep is how many results are kept in memory.
	Keep int
	// OnResult is told of every request as it ends, one at a time; may be nil.
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
	e, err := parseEndpoint(o.Base)
	if err != nil {
		return nil, err
	}
	if o.Path == "" {
		o.Path = "/v1/completions"
	}
	if o.Timeout <= 0 {
		o.Timeout = 10 * time.Minute
	}
	if len(o.Schedule) == 0 && o.Concurrency < 1 {
		return nil, errors.New("a load needs a concurrency of at least 1 or a schedule")
	}
	g := &generator{
		o: o, e: e, src: src, start: time.Now(), rec: newRecorder(o.SLO, o.Keep),
		head: "POST " + e.prefix + o.Path + " HTTP/1.1\r\nHost: " + e.host + "\r\nUser-Agent: dynctl-bench\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\n",
	}
	g.ctx, g.cancel = context.WithCancel(ctx)
	defer g.cancel()
	// Whatever blocks on a connection ends with the run.
	stop := context.AfterFunc(g.ctx, g.closeAll)
	defer stop()
	if len(o.Schedule) > 0 {
		g.open()
	} else {
		g.closed()
	}
	g.cancel()
	g.closeAll()
	g.wg.Wait()
	return g.rec.summary(g.now(), o), ctx.Err()
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
	for i, k := range g.idle {
		if k == c {
			g.idle = append(g.idle[:i], g.idle[i+1:]...)
			break
		}
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
	b = appendInt(b, len(q.Body))
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
		_ = c.SetDeadline(g.start.Add(q.res.Sent + g.o.Timeout)) // a closed connection fails the write
		if q.res.counted = true; !q.res.again {
			g.rec.sent(q.res.Sent, g.o.Concurrency)
		}
		_, err := c.Write(q.req.wire)
		if err == nil {
			_, err = c.answer(q, g.now)
		}
		if err != nil && stale && q.res.FirstByte == 0 && !q.res.again && g.ctx.Err() == nil {
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

func (g *generator) kind(err error) string {
	var t interface{ Timeout() bool }
	switch {
	case g.ctx.Err() != nil:
		return kindCancelled
	case errors.As(err, &t) && t.Timeout():
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
	g.rec.ended(&q.res, pieces, g.o)
}

// smallWrite is what a socket takes at once, so that the pacing goroutine may
// write it itself.
const smallWrite = 16 << 10

// open sends at the planned times whatever the answers do.
func (g *generator) open() {
	next, back := g.ahead(0, 256)
	var flying sync.WaitGroup
	var slots chan struct{}
	if g.o.Cap > 0 {
		slots = make(chan struct{}, g.o.Cap)
	}
	for i, at := range g.o.Schedule {
		var q *call
		var ok bool
		if q, ok = <-next; !ok {
			break
		}
		if q.req.At > 0 {
			at = q.req.At
		}
		if !g.until(at) {
			break
		}
		if slots != nil {
			select {
			case slots <- struct{}{}:
			case <-g.ctx.Done():
			}
		}
		if i == len(g.o.Schedule)-1 {
			g.rec.slotDry(g.now())
		}
		q.begin(at)
		flying.Add(1)
		finish := func(q *call, c *conn) {
			g.done(q, c)
			if slots != nil {
				<-slots
			}
			select {
			case back <- q:
			default: // more in flight than were made ahead
			}
			flying.Done()
		}
		g.send(q, finish)
		// What is in flight does not come back in time: make another one.
		if len(back) == 0 {
			select {
			case back <- new(call):
			default:
			}
		}
	}
	ended := make(chan struct{})
	go func() { flying.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-g.ctx.Done():
		g.closeAll()
		<-ended
	}
}

// until waits for a time of the run and reports whether it was reached.
func (g *generator) until(at time.Duration) bool {
	for {
		d := at - g.now()
		switch {
		case g.ctx.Err() != nil:
			return false
		case d <= 20*time.Microsecond:
			return true
		case d > 3*time.Millisecond:
			t := time.NewTimer(d - 2*time.Millisecond)
			select {
			case <-t.C:
			case <-g.ctx.Done():
				t.Stop()
				return false
			}
		default:
			nap(max(d-50*time.Microsecond, 5*time.Microsecond))
		}
	}
}

// send starts a request on an idle connection, from the caller's goroutine if
// nothing can make it wait.
func (g *generator) send(q *call, finish func(*call, *conn)) {
	g.mu.Lock()
	var c *conn
	if n := len(g.idle); n > 0 {
		c, g.idle = g.idle[n-1], g.idle[:n-1]
	}
	g.mu.Unlock()
	if c != nil && len(q.req.wire) <= smallWrite {
		q.res.finish = finish
		q.res.Sent = g.now()
		g.rec.sent(q.res.Sent, 0)
		q.res.counted = true
		g.post(c, q, finish)
		return
	}
	g.wg.Go(func() {
		if c == nil {
			var err error
			if c, err = g.connect(); err != nil {
				q.res.Sent = g.now()
				g.rec.sent(q.res.Sent, 0)
				q.res.fail(g.connectKind(), err)
				finish(q, nil)
				return
			}
			g.wg.Go(func() { g.reader(c) })
		}
		q.res.finish = finish
		q.res.Sent = g.now()
		g.rec.sent(q.res.Sent, 0)
		q.res.counted = true
		g.post(c, q, finish)
	})
}

// post writes a request on a connection that has a reader. When the server
// closes the connection at this very moment, the reader may be gone before it
// sees the request; exactly one of the two then takes care of it.
func (g *generator) post(c *conn, q *call, finish func(*call, *conn)) {
	c.current.Store(q)
	if _, err := c.Write(q.req.wire); err != nil {
		c.Close() // its reader ends the request
	}
	if c.dead.Load() && c.current.CompareAndSwap(q, nil) {
		g.wg.Go(func() { g.retry(q, finish) })
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
		again := err != nil && q.res.FirstByte == 0 && !q.res.again && c.used && g.ctx.Err() == nil
		if err != nil && !again {
			q.res.fail(g.kind(err), err)
		}
		dead := c.closing || q.res.Status == 0 || errors.Is(err, errCut)
		finish := q.res.finish
		switch {
		case again:
			g.drop(c)
			g.retry(q, finish)
			return
		case dead:
			finish(q, c)
			g.drop(c)
			return
		}
		finish(q, c)
		g.mu.Lock()
		over := g.over
		if !over {
			g.idle = append(g.idle, c)
		}
		g.mu.Unlock()
		if over {
			g.drop(c)
			return
		}
	}
}

// retry sends a request again that met a connection which the server had
// closed; its time of sending stays the first one.
func (g *generator) retry(q *call, finish func(*call, *conn)) {
	sent := q.res.Sent
	q.res.again = true
	c, err := g.connect()
	if err == nil {
		c.current.Store(q)
		if _, err = c.Write(q.req.wire); err == nil {
			if _, err = c.answer(q, g.now); err == nil {
				q.res.Sent = sent
				finish(q, c)
				g.drop(c)
				return
			}
		}
		g.drop(c)
	}
	q.res.fail(g.kind(err), fmt.Errorf("sent again on a new connection: %w", err))
	finish(q, nil)
}
