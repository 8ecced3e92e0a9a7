package upstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/quicksock"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	// sendTimeout bounds every pause of the engine while it takes the request.
	sendTimeout = 30 * time.Second
	// maxHead is the largest head of an answer in bytes.
	maxHead = 64 << 10
)

// Options set up a Client. A zero field means its default.
type Options struct {
	// DialTimeout bounds making a connection, TLS included; default 5 s.
	DialTimeout time.Duration
	// IdleConn is how long an unused connection is kept; default 4 s, less
	// than the 5 s after which uvicorn closes its side.
	IdleConn time.Duration
	// MaxIdle is the number of unused connections kept for one engine;
	// default 1024.
	MaxIdle int
	// TLS is the configuration of https engines, asked for by each connection; nil is the
	// system's roots.
	TLS func() *tls.Config
	// Dial makes TCP connections; default net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

func (o Options) withDefaults() Options {
	o.DialTimeout = cmp.Or(max(o.DialTimeout, 0), 5*time.Second)
	o.IdleConn = cmp.Or(max(o.IdleConn, 0), 4*time.Second)
	o.MaxIdle = cmp.Or(max(o.MaxIdle, 0), 1024)
	if o.Dial == nil {
		d := &net.Dialer{Timeout: o.DialTimeout, KeepAlive: 15 * time.Second}
		o.Dial = d.DialContext
	}
	return o
}

// HeaderField is one header of a request.
type HeaderField struct{ Key, Value string }

// Leg is one request to one engine.
type Leg struct {
	// Base is the engine's base URL; only scheme and host are used, and the
	// path is put before Path.
	Base *url.URL
	// Path is the request target after the base as it goes over the wire:
	// escaped, with the query.
	Path   string
	Method string
	// Header are the client's headers. Those that [api.ForwardRequestHeader] allows are passed
	// on.
	Header http.Header
	// Set are headers of the router; each takes the place of the client's.
	// Keys are in canonical form.
	Set []HeaderField
	// APIKey, when not empty, is sent as bearer token in the place of the
	// client's Authorization header.
	APIKey string
	// Body is the body in pieces (see [api.View.Segments]); they must not
	// change until the answer is closed.
	Body [][]byte
	// HeadTimeout bounds the wait for the head of the answer after the request
	// was sent; 0 for none. An answer that is no event stream has as long again
	// for all its pauses together. Like IdleTimeout it may last up to a quarter
	// longer.
	HeadTimeout time.Duration
	// IdleTimeout bounds every pause within the answer; 0 for none.
	IdleTimeout time.Duration
	// Alive, when set, says whether the engine has shown a sign of life since a
	// time. If it has shown none since the request was sent, and given no head of
	// an answer, the leg times out at AliveBy.
	Alive   func(since time.Time) bool
	AliveBy time.Time
	// Watch, when set, ends the wait for an engine that shows no sign of life.
	Watch Watch
	// Connects, when set, is called before a connection is made for the request; lost says that
	// the engine has closed one that was kept, as an engine does that ends.
	Connects func(lost bool)
	// Written, when set, is called once the request was written completely; fresh says that
	// its connection was made for it.
	Written func(fresh bool)
	// Life takes a sign of life for all bytes of the answer; nil for nothing.
	Life *workers.Life
}

// Client keeps connections to engines. It is safe for concurrent use.
type Client struct {
	opt Options
	// earlyAfter is that of the package; a test has less patience.
	earlyAfter time.Duration

	mu     sync.RWMutex // guards pools, timer and closed
	pools  map[poolKey]*pool
	timer  *time.Timer // closes idle connections; nil when there are none
	closed bool
}

type poolKey struct{ scheme, host string }

// pool holds the unused connections to one engine, the last used on top.
type pool struct {
	key  poolKey
	addr string
	mu   sync.Mutex // guards idle
	idle []*conn
}

// New makes a client.
func New(opt Options) *Client {
	return &Client{opt: opt.withDefaults(), earlyAfter: earlyAfter, pools: make(map[poolKey]*pool)}
}

// Close closes all unused connections and makes the client close the used ones
// when their answers are done.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
	}
	pools := c.pools
	c.pools = make(map[poolKey]*pool)
	c.mu.Unlock()
	for _, p := range pools {
		p.forget()
	}
}

// forget closes the unused connections.
func (p *pool) forget() {
	p.mu.Lock()
	idle := p.idle
	p.idle = nil
	p.mu.Unlock()
	for _, cn := range idle {
		cn.close()
	}
}

func (c *Client) pool(base *url.URL) *pool {
	key := poolKey{base.Scheme, base.Host}
	c.mu.RLock()
	p := c.pools[key]
	c.mu.RUnlock()
	if p != nil {
		return p
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if p = c.pools[key]; p == nil {
		p = &pool{key: key, addr: hostPort(base)}
		c.pools[key] = p
	}
	return p
}

func hostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = "80"
		if u.Scheme == "https" {
			port = "443"
		}
	}
	return net.JoinHostPort(u.Hostname(), port)
}

// take gives an unused connection that is still open, or nil; lost says that the engine has
// closed one.
func (p *pool) take(now time.Time, keep time.Duration) (_ *conn, lost bool) {
	for {
		p.mu.Lock()
		n := len(p.idle)
		if n == 0 {
			p.mu.Unlock()
			return nil, lost
		}
		cn := p.idle[n-1]
		p.idle[n-1] = nil
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		if now.Sub(cn.idleSince) < keep {
			if cn.alive() {
				return cn, lost
			}
			lost = true
		}
		cn.close()
	}
}

// put keeps a connection for the next request, unused since cn.idleSince.
func (c *Client) put(p *pool, cn *conn) {
	c.mu.RLock()
	closed, armed := c.closed, c.timer != nil
	// The pool may have been dropped while this connection was in use, and
	// nobody would look there.
	p = c.pools[p.key]
	ok := false
	if !closed && p != nil {
		p.mu.Lock()
		if ok = len(p.idle) < c.opt.MaxIdle; ok {
			p.idle = append(p.idle, cn)
		}
		p.mu.Unlock()
	}
	c.mu.RUnlock()
	if !ok {
		cn.close()
		return
	}
	if !armed {
		c.arm()
	}
}

func (c *Client) arm() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.timer == nil && !c.closed {
		c.timer = time.AfterFunc(c.opt.IdleConn, c.sweep)
	}
}

// sweep closes connections that were unused for too long and drops the pools
// of engines that are not asked any more. It runs while there are unused
// connections.
func (c *Client) sweep() {
	oldest := time.Now().Add(-c.opt.IdleConn)
	var old []*conn
	c.mu.Lock()
	left := 0
	for key, p := range c.pools {
		p.mu.Lock()
		k := 0
		for k < len(p.idle) && p.idle[k].idleSince.Before(oldest) {
			k++
		}
		old = append(old, p.idle[:k]...)
		rest := copy(p.idle, p.idle[k:])
		clear(p.idle[rest:])
		p.idle = p.idle[:rest]
		p.mu.Unlock()
		if rest == 0 {
			delete(c.pools, key)
		}
		left += rest
	}
	switch {
	case c.closed:
	case left > 0:
		c.timer.Reset(c.opt.IdleConn / 2)
	default:
		c.timer = nil
	}
	c.mu.Unlock()
	for _, cn := range old {
		cn.close()
	}
}

// Idle is the number of unused connections.
func (c *Client) Idle() int {
	c.mu.RLock()
	defer c.mu.RUnlock()
	n := 0
	for _, p := range c.pools {
		p.mu.Lock()
		n += len(p.idle)
		p.mu.Unlock()
	}
	return n
}

func (c *Client) dial(ctx context.Context, p *pool) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, c.opt.DialTimeout)
	defer cancel()
	nc, err := c.opt.Dial(ctx, "tcp", p.addr)
	if err != nil {
		return nil, err
	}
	if p.key.scheme != "https" {
		return newConn(quicksock.New(nc)), nil
	}
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.opt.TLS != nil {
		conf = c.opt.TLS().Clone()
	}
	if conf.ServerName == "" {
		conf.ServerName, _, _ = net.SplitHostPort(p.addr)
	}
	conf.NextProtos = []string{"http/1.1"}
	tc, cn := overTLS(nc, conf)
	if err := tc.HandshakeContext(ctx); err != nil {
		_ = nc.Close()
		return nil, err
	}
	return cn, nil
}

// Do sends a leg and waits for the head of its answer, whatever its status.
// The context governs the whole exchange: when it ends, the connection is
// closed, so that the engine notices, and every call fails. The caller must
// close the answer. The error is always a [*Failure].
//
// A reused connection that breaks before a byte of the answer has the request sent once more
// on a fresh one: where no byte of it was sent, and for GET and HEAD.
func (c *Client) Do(ctx context.Context, leg *Leg) (*Response, error) {
	p := c.pool(leg.Base)
	resend := leg.Method == http.MethodGet || leg.Method == http.MethodHead
	buf := headPool.Get().(*[]byte)
	head, err := appendHead((*buf)[:0], leg)
	defer keepHeadBuffer(buf, head)
	if err != nil {
		return nil, &Failure{Kind: Invalid, Addr: p.addr, Op: "send the request", Err: err}
	}
	if ctx.Err() != nil {
		return nil, &Failure{Kind: kindOf(ctx, ctx.Err()), Addr: p.addr, Op: "connect", Err: ctx.Err()}
	}
	lost := false
	for fresh := false; ; fresh = true {
		var cn *conn
		var idle time.Duration
		began := time.Now()
		if !fresh {
			cn, lost = p.take(began, c.opt.IdleConn)
		}
		reused := cn != nil
		if reused {
			idle = began.Sub(cn.idleSince)
		}
		if !reused {
			if leg.Connects != nil {
				leg.Connects(lost || fresh)
			}
			if cn, err = c.dial(ctx, p); err != nil {
				f := &Failure{Kind: Connect, Addr: p.addr, Op: "connect", Err: err}
				if k := kindOf(ctx, err); k == Canceled || k == Timeout {
					f.Kind = k
				}
				return nil, f
			}
			began = time.Now()
		}
		r, f := c.exchange(ctx, p, cn, leg, head, began)
		if f == nil {
			if !r.Streams() {
				r.patience = leg.HeadTimeout
			}
			return r, nil
		}
		f.Reused, f.Idle, f.After = reused, idle, time.Since(began)
		if reused && f.Kind == Reset && !f.Started && (!f.Sent || resend) {
			continue
		}
		if f.Stale() {
			p.forget() // others may be closed by now, too
		}
		return nil, f
	}
}

const opWait = "wait for the answer"

// exchange sends the request, from now on, and reads the head of the answer.
func (c *Client) exchange(ctx context.Context, p *pool, cn *conn, leg *Leg, head []byte, now time.Time) (*Response, *Failure) {
	r := &Response{Head: Head{Addr: p.addr}, client: c, pool: p, conn: cn, ctx: ctx, life: leg.Life, idle: leg.IdleTimeout}
	r.stop = context.AfterFunc(ctx, cn.closing)
	e := r.listen(leg)
	sent, err := cn.send(head, leg.Body, now)
	whole := e == nil || cn.sent()
	op := "send the request"
	switch {
	case err == nil:
		if leg.Written != nil && whole {
			leg.Written(cn.idleSince.IsZero())
		}
		life := leg.watch(cn)
		err = r.awaitHead(e, leg, leg.HeadTimeout)
		if !life.ended() { // the connection was closed for it
			err = errNoLife
		}
		if err == nil {
			// Stopped when nothing was left to send: the body arrived, but
			// nothing else will.
			r.broken = r.broken || !whole
			return r, nil
		}
		op = opWait
	case sent == 0:
		if !e.stop() { // what it may have read answers nothing
			cn.close()
			<-e.head //nolint:errcheck // what was read answers nothing
		}
	default:
		// An engine may answer (413, 400) without taking all of the body; its
		// answer is worth more than the broken pipe.
		if ctx.Err() != nil {
			cn.close()
		}
		if r.awaitHead(e, leg, lastWord) == nil {
			r.broken = true
			return r, nil
		}
	}
	f := &Failure{Addr: p.addr, Op: op, Kind: kindOf(ctx, err), Sent: sent > 0, Started: sent > 0 && r.w > 0, Err: err}
	f.Late = f.Kind == Timeout && f.Op == opWait && !errors.Is(err, errNoLife) && ctx.Err() == nil
	if ctx.Err() != nil { // the connection was closed for it
		f.Err = ctx.Err()
	}
	r.abort()
	return nil, f
}
