package zmtp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/wait"
)

// DialSub connects to a publisher that binds endpoint, subscribes to
// o.Topics and returns the connection to receive from. The end of ctx, also
// after the return, closes it.
func DialSub(ctx context.Context, endpoint string, o Options) (*Conn, error) {
	return dial(ctx, endpoint, roleSub, o)
}

// DialDealer connects to a ROUTER that binds endpoint. The end of ctx, also
// after the return, closes the connection. The empty delimiter frame that a
// REP or a replay ROUTER expects is the caller's to send.
func DialDealer(ctx context.Context, endpoint string, o Options) (*Conn, error) {
	return dial(ctx, endpoint, roleDealer, o)
}

func dial(ctx context.Context, endpoint string, role roleKind, o Options) (*Conn, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	return dialPeer(ctx, endpoint, role, &o)
}

func dialPeer(ctx context.Context, endpoint string, role roleKind, o *Options) (*Conn, error) {
	nc, err := dialEndpoint(ctx, endpoint, o)
	if err != nil {
		return nil, err
	}
	c, err := newConn(ctx, nc, role, o, nil)
	if err != nil {
		return nil, err
	}
	if err := c.opened(); err != nil {
		return nil, err
	}
	return c, nil
}

// opened sends what a role has to send right after the handshake: a SUB its topics.
func (c *Conn) opened() error {
	if c.role != roleSub {
		return nil
	}
	if err := c.subscribe(); err != nil {
		err = c.fail("subscribe at", err)
		_ = c.Close()
		return err
	}
	return nil
}

// ListenerStats counts what happened at a bound socket since it was bound.
type ListenerStats struct {
	// Accepted counts peers that finished their handshake.
	Accepted uint64
	// Refused counts peers turned away because MaxPeers were connected.
	Refused uint64
	// Failed counts peers lost in the handshake, and Pub or Router peers ended
	// for breaking the protocol or a limit.
	Failed uint64
	// LastError is the reason of the latest such failure, or nil.
	LastError error
}

// listener accepts peers, runs their handshakes side by side and gives each to
// serve on a goroutine of its own.
type listener struct {
	ln       net.Listener
	endpoint string
	role     roleKind
	o        *Options
	// serve uses c and returns when it is done with it; the listener closes c
	// then. An error is counted, the ordinary end of a peer is not one.
	serve func(ctx context.Context, c *Conn) error

	ctx    context.Context // ends when the listener closes
	cancel context.CancelCauseFunc
	slots  chan struct{} // one per peer, held from accept to the end of its Conn
	wg     sync.WaitGroup
	tally
}

// tally is the account of a socket's peers.
type tally struct {
	accepted, refused, failed atomic.Uint64
	lastErr                   atomic.Pointer[error]
}

// failure counts err unless it only echoes the end of ctx, our own doing.
func (t *tally) failure(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	t.failed.Add(1)
	t.lastErr.Store(&err)
}

// Stats returns what has happened at this socket so far.
func (t *tally) Stats() ListenerStats {
	s := ListenerStats{Accepted: t.accepted.Load(), Refused: t.refused.Load(), Failed: t.failed.Load()}
	if p := t.lastErr.Load(); p != nil {
		s.LastError = *p
	}
	return s
}

func listen(ctx context.Context, endpoint string, role roleKind, o *Options, serve func(context.Context, *Conn) error) (*listener, error) {
	ln, bound, err := listenEndpoint(ctx, endpoint)
	if err != nil {
		return nil, err
	}
	l := &listener{ln: ln, endpoint: bound, role: role, o: o, serve: serve, slots: make(chan struct{}, o.MaxPeers)}
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	l.wg.Go(func() {
		<-l.ctx.Done()
		_ = ln.Close()
	})
	l.wg.Go(l.accept)
	return l, nil
}

func (l *listener) accept() {
	for {
		nc, err := l.ln.Accept()
		if err != nil {
			if l.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of file descriptors and the like: it passes, or it repeats at
			// this pace.
			l.failure(l.ctx, fmt.Errorf("zmtp: accept on %s: %w", l.endpoint, err))
			wait.For(l.ctx, 100*time.Millisecond)
			continue
		}
		select {
		case l.slots <- struct{}{}:
		default:
			l.refused.Add(1)
			_ = nc.Close()
			continue
		}
		l.wg.Go(func() { l.admit(nc) })
	}
}

func (l *listener) admit(nc net.Conn) {
	c, err := newConn(l.ctx, nc, l.role, l.o, func() { <-l.slots })
	if err != nil {
		l.failure(l.ctx, err)
		return
	}
	defer c.Close()
	if err := c.opened(); err != nil {
		l.failure(l.ctx, err)
		return
	}
	l.accepted.Add(1)
	if err := l.serve(l.ctx, c); err != nil {
		l.failure(l.ctx, err)
	}
}

// Close stops listening, closes every connection and waits for all that served
// them.
func (l *listener) Close() error {
	l.cancel(ErrClosed)
	l.wg.Wait()
	return nil
}

// peerFault keeps the errors that are a peer's fault and drops the ordinary
// ends of a connection.
func peerFault(err error) error {
	if errors.Is(err, ErrProtocol) || errors.Is(err, ErrLimit) || errors.Is(err, ErrHeartbeat) {
		return err
	}
	return nil
}

// SubListener is a SUB socket that binds and lets publishers connect. Every
// publisher is a Conn of its own, so that its owner knows from whom a message
// came and when a publisher was lost.
type SubListener struct {
	*listener
	ready chan *Conn
}

// ListenSub binds endpoint ("tcp://*:0" and the like for any free port). The
// end of ctx closes the socket and all its connections.
func ListenSub(ctx context.Context, endpoint string, o Options) (*SubListener, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	s := &SubListener{ready: make(chan *Conn)}
	s.listener, err = listen(ctx, endpoint, roleSub, &o, s.handOver)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// handOver waits for an Accept and then for the end of the Conn, so that the
// SubListener outlives what it started.
func (s *SubListener) handOver(ctx context.Context, c *Conn) error {
	select {
	case s.ready <- c:
		<-c.closing
		return peerFault(c.cause)
	case <-ctx.Done():
		return nil
	}
}

// Accept returns the next publisher that has connected and shaken hands, and to which the
// subscriptions have been sent. The caller owns and closes it. Publishers that are not
// accepted hold a place among MaxPeers and are not read from.
func (s *SubListener) Accept(ctx context.Context) (*Conn, error) {
	select {
	case c := <-s.ready:
		return c, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	}
}

// Endpoint returns the bound endpoint with its real port; a wildcard host stays
// "*".
func (l *listener) Endpoint() string { return l.endpoint }

// Router is a ROUTER socket that binds and serves each peer by a function of
// its own.
type Router struct{ *listener }

// ListenRouter binds endpoint and calls handle for every peer, each on its own
// goroutine, at most o.MaxPeers at a time. The peer is disconnected when handle
// returns; an error that handle returns is counted in Stats, except the
// ordinary end of the peer. Frames are those that the peer sent: the identity
// frame that libzmq's ROUTER puts in front stays implicit in the Conn. The end
// of ctx closes the socket and ends the ctx of the handlers, which Close joins.
func ListenRouter(ctx context.Context, endpoint string, o Options, handle func(ctx context.Context, c *Conn) error) (*Router, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	l, err := listen(ctx, endpoint, roleRouter, &o, func(ctx context.Context, c *Conn) error {
		err := handle(ctx, c)
		if errors.Is(err, io.EOF) || errors.Is(err, ErrClosed) {
			return nil
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return &Router{l}, nil
}
