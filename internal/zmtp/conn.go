package zmtp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

// Conn is one ZMTP connection after its handshake. One goroutine may call Recv
// while others call Send and Close.
//
// The context given to the function that made the Conn governs its whole life:
// when it ends, the transport closes and Recv and Send return its error.
type Conn struct {
	nc       net.Conn
	o        *Options
	role     roleKind
	name     string // for errors
	minor    byte
	peerType string
	identity string

	rbuf       []byte // unread input is rbuf[r:w]
	r, w       int
	pinged     bool // a PING is out and no byte has come since
	heartbeats bool
	expires    time.Time // when the peer's PING gives this end up, zero for never
	deadline   time.Time // that of the transport's reads

	wmu  sync.Mutex // guards the fields below and the order of writes
	wbuf []byte

	closing   chan struct{} // closed first; the transport is closed after it
	closeOnce sync.Once
	cause     error // why the Conn closed; readable once closing is closed
	joinOnce  sync.Once
	stopWatch func() bool
	watched   chan struct{} // closed when the context watch ran to its end
	onClose   func()        // a listener's account of its peers

	onSubscribe func(on bool, topic []byte) error // a Pub's side of commands
}

const (
	// A peer costs the small buffer until the first Recv, so that a crowd of
	// peers that only connect stays cheap.
	handshakeBuffer = 512
	streamBuffer    = 64 << 10 // SUB and DEALER: event streams
	requestBuffer   = 4 << 10  // PUB and ROUTER: subscriptions and requests
)

// newConn runs the handshake on nc and owns nc from its call on: on an error nc
// is closed. onClose, if any, is called once, when the Conn closes for any
// reason, a failed handshake included.
func newConn(ctx context.Context, nc net.Conn, role roleKind, o *Options, onClose func()) (*Conn, error) {
	c := &Conn{
		nc:      nc,
		o:       o,
		role:    role,
		name:    peerName(nc),
		rbuf:    make([]byte, handshakeBuffer),
		onClose: onClose,
		closing: make(chan struct{}),
		watched: make(chan struct{}),
	}
	c.stopWatch = context.AfterFunc(ctx, func() {
		defer close(c.watched)
		c.shut(context.Cause(ctx))
	})
	err := nc.SetDeadline(time.Now().Add(o.HandshakeTimeout))
	if err == nil {
		err = c.handshake()
	}
	if err == nil {
		err = nc.SetDeadline(time.Time{})
	}
	if err != nil {
		if c.isClosing() {
			err = c.cause
		}
		_ = c.Close()
		return nil, fmt.Errorf("zmtp: handshake with %s: %w", c.name, err)
	}
	if o.Heartbeat > 0 {
		c.watchPeer()
	}
	return c, nil
}

// watchPeer makes sure that the loss of a silent peer is noticed. PING came
// with ZMTP 3.1: a peer of 3.0 need not answer it and may take it for a
// fault. For such a peer the transport's own probes must do.
func (c *Conn) watchPeer() {
	if c.minor >= 1 {
		c.heartbeats = true
		return
	}
	if nc, ok := c.nc.(*net.TCPConn); ok {
		// Without them the connection is as before, only slower to be given up.
		_ = nc.SetKeepAliveConfig(net.KeepAliveConfig{
			Enable: true, Idle: max(c.o.Heartbeat, time.Second), Interval: max(c.o.HeartbeatTimeout/3, time.Second), Count: 3,
		})
	}
}

// RemoteAddr names the peer: tcp://host:port, or "ipc peer" when the peer's
// socket has no name.
func (c *Conn) RemoteAddr() string { return c.name }

// PeerType returns the socket type that the peer announced, such as "PUB".
func (c *Conn) PeerType() string { return c.peerType }

// PeerIdentity returns the identity that the peer announced, often empty. It is
// the peer's claim, neither unique nor safe to print unescaped.
func (c *Conn) PeerIdentity() string { return c.identity }

// Minor returns the negotiated minor version of ZMTP 3: 0 or 1.
func (c *Conn) Minor() int { return int(c.minor) }

// Close ends the connection and waits for what it started. It is safe to call
// more than once and together with Recv and Send, which then return ErrClosed.
func (c *Conn) Close() error {
	c.shut(ErrClosed)
	c.joinOnce.Do(func() {
		if !c.stopWatch() { // it has started: wait for its end
			<-c.watched
		}
	})
	return nil
}

// shut closes the transport, once, and records why.
func (c *Conn) shut(cause error) {
	c.closeOnce.Do(func() {
		c.cause = cause
		close(c.closing)
		_ = c.nc.Close() // nothing is lost that was not lost already
		if c.onClose != nil {
			c.onClose()
		}
	})
}

func (c *Conn) isClosing() bool {
	select {
	case <-c.closing:
		return true
	default:
		return false
	}
}

// fail closes the Conn because of err and returns the error to report: the
// reason of an earlier close wins over the transport error that it caused.
func (c *Conn) fail(op string, err error) error {
	c.shut(err)
	return fmt.Errorf("zmtp: %s %s: %w", op, c.name, c.cause)
}

// Recv reads the next message into m, whose former frames become invalid. It answers PINGs on
// the way, so a Conn that is not received from answers none.
//
// An error is final and the Conn is closed by it. It wraps io.EOF when the peer
// closed between messages, io.ErrUnexpectedEOF when within one, ErrProtocol or
// ErrLimit for a faulty peer, ErrHeartbeat for a silent one, ErrClosed after
// Close, and the context's cause after its end.
func (c *Conn) Recv(m *Message) error {
	m.reset()
	if c.isClosing() { // what is still buffered stays unread
		return c.fail("receive from", c.cause)
	}
	if len(c.rbuf) == handshakeBuffer {
		c.growBuffer()
	}
	if err := c.recv(m); err != nil {
		m.buf, m.ends = m.buf[:0], m.ends[:0]
		return c.fail("receive from", err)
	}
	m.seal()
	return nil
}

func (c *Conn) growBuffer() {
	size := requestBuffer
	if c.role == roleSub || c.role == roleDealer {
		size = streamBuffer
	}
	b := make([]byte, size)
	c.w = copy(b, c.buffered())
	c.r, c.rbuf = 0, b
}

func (c *Conn) recv(m *Message) error {
	lim := &c.o.Limits
	for {
		flags, size, err := c.header()
		if err != nil {
			if len(m.ends) > 0 {
				err = noEOF(err)
			}
			return err
		}
		if flags&flagCommand != 0 {
			if err := c.command(size); err != nil {
				return err
			}
			continue
		}
		switch {
		case size > uint64(lim.MaxFrameBytes):
			return fmt.Errorf("%w: frame of %d bytes, at most %d", ErrLimit, size, lim.MaxFrameBytes)
		case len(m.ends) >= lim.MaxFrames:
			return fmt.Errorf("%w: message of more than %d frames", ErrLimit, lim.MaxFrames)
		case uint64(len(m.buf))+size > uint64(lim.MaxMessageBytes):
			return fmt.Errorf("%w: message of more than %d bytes", ErrLimit, lim.MaxMessageBytes)
		}
		if m.buf, err = c.body(m.buf, int(size)); err != nil {
			return noEOF(err)
		}
		c.expires = time.Time{}
		m.ends = append(m.ends, len(m.buf))
		if flags&flagMore == 0 {
			return nil
		}
	}
}

// buffered returns the input that was read from the transport but not consumed.
func (c *Conn) buffered() []byte { return c.rbuf[c.r:c.w] }

// fill reads at least one more byte into rbuf. Callers never need more than
// rbuf holds.
func (c *Conn) fill() error {
	if c.r == c.w {
		c.r, c.w = 0, 0
	} else if c.w == len(c.rbuf) {
		copy(c.rbuf, c.rbuf[c.r:c.w])
		c.r, c.w = 0, c.w-c.r
	}
	n, err := c.read(c.rbuf[c.w:])
	c.w += n
	return err
}

// read reads at least one byte or fails. With heartbeats on, a silence first
// sends a PING and then fails; it fails as well when the time to live of the
// peer's PING has passed.
func (c *Conn) read(p []byte) (int, error) {
	for {
		deadline := c.expires
		if c.heartbeats {
			wait := c.o.Heartbeat
			if c.pinged {
				wait = c.o.HeartbeatTimeout
			}
			if at := time.Now().Add(wait); deadline.IsZero() || at.Before(deadline) {
				deadline = at
			}
		}
		if deadline != c.deadline {
			if err := c.nc.SetReadDeadline(deadline); err != nil {
				return 0, err
			}
			c.deadline = deadline
		}
		n, err := c.nc.Read(p)
		if n > 0 {
			c.pinged = false
			return n, nil // the error, if any, comes again with the next read
		}
		switch {
		case err == nil:
			continue
		case deadline.IsZero() || !errors.Is(err, os.ErrDeadlineExceeded):
			return 0, err
		case !c.expires.IsZero() && !time.Now().Before(c.expires):
			return 0, fmt.Errorf("%w: it sent nothing within the time to live of its PING", ErrHeartbeat)
		case !c.heartbeats:
			continue
		case c.pinged:
			return 0, ErrHeartbeat
		}
		if err := c.ping(); err != nil {
			return 0, err
		}
		c.pinged = true
	}
}

// header reads a frame header.
func (c *Conn) header() (flags byte, size uint64, err error) {
	for c.w-c.r < 2 {
		started := c.w > c.r
		if err := c.fill(); err != nil {
			if started {
				err = noEOF(err)
			}
			return 0, 0, err
		}
	}
	flags = c.rbuf[c.r]
	if flags&^(flagMore|flagLong|flagCommand) != 0 || flags&(flagMore|flagCommand) == flagMore|flagCommand {
		return 0, 0, fmt.Errorf("%w: frame flags %#02x", ErrProtocol, flags)
	}
	if flags&flagLong == 0 {
		size = uint64(c.rbuf[c.r+1])
		c.r += 2
		return flags, size, nil
	}
	for c.w-c.r < 9 {
		if err := c.fill(); err != nil {
			return 0, 0, noEOF(err)
		}
	}
	size = binary.BigEndian.Uint64(c.rbuf[c.r+1:])
	if size>>63 != 0 {
		return 0, 0, fmt.Errorf("%w: frame size %#x", ErrProtocol, size)
	}
	c.r += 9
	return flags, size, nil
}

// body appends n bytes of input to dst. It grows dst in steps, each filled
// before the next, so that an announced length alone costs no memory.
func (c *Conn) body(dst []byte, n int) ([]byte, error) {
	const step = 64 << 10
	k := min(n, c.w-c.r)
	dst = append(dst, c.rbuf[c.r:c.r+k]...)
	c.r += k
	n -= k
	for n > 0 {
		if n < len(c.rbuf)/2 { // the rest of a small frame: read ahead with it
			if err := c.fill(); err != nil {
				return dst, err
			}
			k = min(n, c.w-c.r)
			dst = append(dst, c.rbuf[c.r:c.r+k]...)
			c.r += k
			n -= k
			continue
		}
		if len(dst) == cap(dst) {
			dst = slices.Grow(dst, min(n, max(step, len(dst))))
		}
		k, err := c.read(dst[len(dst):min(cap(dst), len(dst)+n)])
		if err != nil {
			return dst, err
		}
		dst = dst[:len(dst)+k]
		n -= k
	}
	return dst, nil
}

// commandBody reads the body of a command into memory of its own. Commands are
// rare, except PING, which command answers from a small array.
func (c *Conn) commandBody(size uint64) ([]byte, error) {
	if size > uint64(c.o.Limits.MaxCommandBytes) {
		return nil, fmt.Errorf("%w: command of %d bytes, at most %d", ErrLimit, size, c.o.Limits.MaxCommandBytes)
	}
	return c.body(nil, int(size))
}

// command reads and executes a command that came between messages or frames.
// One that means nothing to this role is ignored, as in libzmq: a later
// version may have more of them.
func (c *Conn) command(size uint64) error {
	body, err := c.commandBody(size)
	if err != nil {
		return noEOF(err)
	}
	c.expires = time.Time{}
	name, data, err := splitCommand(body)
	if err != nil {
		return err
	}
	switch string(name) {
	case "PING":
		// Two bytes of time to live, then a context to echo, of at most 16.
		if len(data) < 2 {
			return fmt.Errorf("%w: PING of %d bytes", ErrProtocol, len(data))
		}
		data = data[:min(len(data), 2+16)]
		if ttl := c.timeToLive(data); ttl > 0 {
			c.expires = time.Now().Add(ttl)
		}
		return c.writeCommand("PONG", data[2:])
	case "SUBSCRIBE", "CANCEL":
		if c.onSubscribe != nil {
			return c.onSubscribe(name[0] == 'S', data)
		}
	case "ERROR":
		return fmt.Errorf("%w: peer reports error %s", ErrProtocol, errorReason(data))
	}
	return nil
}

// timeToLive reads that of a PING, in tenths of a second on the wire. libzmq
// 4.3.5 counts the milliseconds in 16 bits, so that 65.6 s are 64 ms. A
// simulated engine must not wait longer; the router's own end takes the time
// as it is sent.
func (c *Conn) timeToLive(data []byte) time.Duration {
	tenths := binary.BigEndian.Uint16(data)
	if c.role == roleSub || c.role == roleDealer {
		return time.Duration(tenths) * 100 * time.Millisecond
	}
	return time.Duration(tenths*100) * time.Millisecond
}

// ping asks whether the peer is there. It sets no time to live: libzmq would
// hang up once that has passed without anything from here, and while messages
// come a SUB has nothing to say.
func (c *Conn) ping() error { return c.writeCommand("PING", []byte{0, 0}) }

func (c *Conn) writeCommand(name string, data []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.wbuf = appendCommand(c.wbuf[:0], name, data)
	return c.flush()
}

// Send writes one message and returns once the transport took it. It blocks
// for at most Options.WriteTimeout on a peer that does not read. An error is
// final and closes the Conn. Send on a SUB is refused.
func (c *Conn) Send(frames ...[]byte) error {
	if len(frames) == 0 {
		return errors.New("zmtp: message without frames")
	}
	if c.role == roleSub {
		return errors.New("zmtp: a SUB connection cannot send")
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.wbuf = appendMessage(c.wbuf[:0], frames)
	if err := c.flush(); err != nil {
		return c.fail("send to", err)
	}
	return nil
}

// flush writes wbuf. The caller holds wmu.
func (c *Conn) flush() error {
	if err := c.nc.SetWriteDeadline(time.Now().Add(c.o.WriteTimeout)); err != nil {
		return err
	}
	_, err := c.nc.Write(c.wbuf)
	if cap(c.wbuf) > keepBuffer {
		c.wbuf = nil
	}
	return err
}

// subscribe sends the SUB's topics in the form of the negotiated version.
func (c *Conn) subscribe() error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.wbuf = c.wbuf[:0]
	for _, t := range c.o.Topics {
		if c.minor >= 1 {
			c.wbuf = appendCommand(c.wbuf, "SUBSCRIBE", []byte(t))
		} else {
			c.wbuf = appendFrame(c.wbuf, append([]byte{1}, t...), false)
		}
	}
	return c.flush()
}
