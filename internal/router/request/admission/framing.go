package admission

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"
)

// lengthName is the header that must not stand beside a chunked body.
const lengthName = "content-length"

// FramedListener returns a listener whose connections know whether a request may have both a
// Content-Length and chunks. net/http shows the chunks alone. A proxy in front that believed the
// length would take what follows the chunks for a part of the body, and an attacker's request
// could hide there. The server needs [FramingContext] and [FramingState].
func FramedListener(ln net.Listener) net.Listener { return framedListener{ln} }

type framedListener struct{ net.Listener }

// Accept implements net.Listener.
func (l framedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &Framing{Conn: c}, nil
}

// Framing is a connection that looks for the name of the header in what it reads. It looks at
// all bytes since the last moment at which the server had none of the next request, bodies
// too: it may be wrong about a body that has the name, and not the other way around.
//
// It sets deadlines of reads when a read needs them: most that net/http and the router set have
// another one after them before anything is read, and each costs as much as a short write.
type Framing struct {
	net.Conn

	mu sync.Mutex // guards the following; reads of net/http may be in the background
	// deadlines is how many more deadlines of reads net/http sets until it reads the next
	// head: one before it waits for its first bytes, and one when they have come.
	deadlines int
	seen      bool
	end       [len(lengthName) - 1]byte // of what was read
	kept      int                       // bytes of end
	reading   int                       // reads in progress
	// by is the deadline of reads, set that of the connection below: another one than by only
	// while nothing reads.
	by, set time.Time
}

type framingKey struct{}

// FramingContext is for [http.Server.ConnContext].
func FramingContext(ctx context.Context, c net.Conn) context.Context {
	if f, ok := c.(*Framing); ok {
		return context.WithValue(ctx, framingKey{}, f)
	}
	return ctx
}

// FramingState is for [http.Server.ConnState].
func FramingState(c net.Conn, s http.ConnState) {
	if f, ok := c.(*Framing); ok && s == http.StateIdle {
		f.mu.Lock()
		f.deadlines = 2
		f.mu.Unlock()
	}
}

// MayHaveLength reports whether the head of a request that is being served, whose context this
// is, may have a Content-Length. It is true for all where nothing is known, as over TLS.
func MayHaveLength(ctx context.Context) bool {
	f, ok := ctx.Value(framingKey{}).(*Framing)
	if !ok {
		return true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seen
}

// Read implements net.Conn.
func (f *Framing) Read(p []byte) (int, error) {
	f.mu.Lock()
	err := f.setDeadline()
	f.reading++
	f.mu.Unlock()
	var n int
	if err == nil {
		n, err = f.Conn.Read(p)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reading--
	if f.deadlines == 1 { // net/http had nothing of this request, or a few bytes of its first line
		f.seen, f.kept = false, 0
	}
	if !f.seen {
		f.look(p[:n])
	}
	return n, err
}

// SetReadDeadline implements net.Conn.
func (f *Framing) SetReadDeadline(at time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deadlines = max(0, f.deadlines-1)
	if f.by = at; f.reading == 0 {
		return nil
	}
	return f.setDeadline()
}

// SetDeadline implements net.Conn.
func (f *Framing) SetDeadline(at time.Time) error {
	return errors.Join(f.SetReadDeadline(at), f.SetWriteDeadline(at))
}

// setDeadline gives the connection below the deadline of reads.
func (f *Framing) setDeadline() error {
	if f.by.Equal(f.set) {
		return nil
	}
	f.set = f.by
	return f.Conn.SetReadDeadline(f.by)
}

// CloseWrite lets a server end an answer before it has read all of a request.
func (f *Framing) CloseWrite() error {
	if half, ok := f.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// look takes in what was read.
func (f *Framing) look(p []byte) {
	var seam [2 * len(f.end)]byte
	n := copy(seam[:], f.end[:f.kept])
	n += copy(seam[n:], p[:min(len(p), len(f.end))])
	f.seen = hasLengthName(seam[:n]) || hasLengthName(p)
	if len(p) < len(f.end) {
		p = seam[:n]
	}
	f.kept = copy(f.end[:], p[max(0, len(p)-len(f.end)):])
}

// hasLengthName looks for the hyphen, which is rarer than letters, and an L behind it.
func hasLengthName(p []byte) bool {
	const before, after = len("content"), len("-length")
	for i := 0; ; i++ {
		k := bytes.IndexByte(p[i:], '-')
		if k < 0 {
			return false
		}
		if i += k; i >= before && len(p)-i >= after && p[i+1]|0x20 == 'l' && bytes.EqualFold(p[i-before:i+after], []byte(lengthName)) {
			return true
		}
	}
}
