package quicksock

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// maxDirect is the largest write in bytes that is made directly: the kernel
// copies it in some microseconds, for which a stop of the world can wait.
const maxDirect = 32 << 10

// New makes reads and short writes of a TCP connection direct; any other
// connection is given back as it is.
func New(nc net.Conn) net.Conn {
	tcp, ok := nc.(*net.TCPConn)
	if !ok {
		return nc
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nc
	}
	c := &conn{TCPConn: tcp, raw: raw}
	// Made once, because a closure for each call would be an allocation.
	c.in.try, c.out.try, c.out.tryVec = c.in.read, c.out.write, c.out.writeVec
	return c
}

// conn is a connection with direct reads and writes. Everything else,
// deadlines and vectored writes included, is that of the TCP connection.
type conn struct {
	*net.TCPConn
	raw     syscall.RawConn
	in, out transfer
}

// transfer is one direction. The mutex lets several goroutines call, as
// [net.Conn] promises.
type transfer struct {
	mu    sync.Mutex // guards the fields below
	p     []byte
	n     int
	errno syscall.Errno
	try   func(fd uintptr) bool
	// tryVec is try for a vectored write.
	tryVec func(fd uintptr) bool
	// lender gives the memory for a read when there may be something to read.
	lender Lender
	vec    []syscall.Iovec // of a vectored write
}

// read is called when there may be something to read; false waits.
func (t *transfer) read(fd uintptr) bool {
	if t.lender != nil && t.p == nil {
		t.p = t.lender.Take()
	}
	for {
		n, _, errno := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(t.p))), uintptr(len(t.p)))
		switch errno {
		case 0:
			t.n = int(n)
			raceRead(fd, t.p, t.n)
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			if t.lender != nil {
				t.lender.Give(t.p)
				t.p = nil
			}
			return false
		default:
			t.errno = errno
		}
		return true
	}
}

// write is called when there may be room; false waits.
func (t *transfer) write(fd uintptr) bool {
	for t.n < len(t.p) {
		rest := t.p[t.n:]
		raceWrite()
		n, _, errno := syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(rest))), uintptr(len(rest)))
		switch errno {
		case 0:
			t.n += int(n)
			raceWritten(rest, int(n))
		case syscall.EINTR:
		case syscall.EAGAIN:
			return false
		default:
			t.errno = errno
			return true
		}
	}
	return true
}

// Read implements [net.Conn].
func (c *conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	t := &c.in
	t.mu.Lock()
	defer t.mu.Unlock()
	t.p, t.n, t.errno = p, 0, 0
	err := c.raw.Read(t.try)
	t.p = nil
	switch {
	case err != nil:
		return 0, renamed(err, "read")
	case t.errno != 0:
		return 0, c.failed("read", t.errno)
	case t.n == 0:
		return 0, io.EOF
	}
	return t.n, nil
}

// ReadLent implements [LendingReader].
func (c *conn) ReadLent(l Lender) ([]byte, int, error) {
	t := &c.in
	t.mu.Lock()
	defer t.mu.Unlock()
	t.p, t.n, t.errno, t.lender = nil, 0, 0, l
	err := c.raw.Read(t.try)
	p := t.p
	t.p, t.lender = nil, nil
	if p == nil { // it waited to the end
		p = l.Take()
	}
	switch {
	case err != nil:
		return p, 0, renamed(err, "read")
	case t.errno != 0:
		return p, 0, c.failed("read", t.errno)
	case t.n == 0:
		return p, 0, io.EOF
	}
	return p, t.n, nil
}

// Write implements [net.Conn].
func (c *conn) Write(p []byte) (int, error) {
	if len(p) == 0 || len(p) > maxDirect {
		return c.TCPConn.Write(p)
	}
	t := &c.out
	t.mu.Lock()
	defer t.mu.Unlock()
	t.p, t.n, t.errno = p, 0, 0
	err := c.raw.Write(t.try)
	t.p = nil
	switch {
	case err != nil:
		return t.n, renamed(err, "write")
	case t.errno != 0:
		return t.n, c.failed("write", t.errno)
	}
	return t.n, nil
}

// WriteAll implements [VectorWriter].
func (c *conn) WriteAll(pieces [][]byte) (int64, error) {
	t := &c.out
	t.mu.Lock()
	defer t.mu.Unlock()
	defer func() { clear(t.vec[:cap(t.vec)]) }()
	var done int64
	skip := 0 // bytes of pieces[0] that are written
	for {
		t.vec = t.vec[:0]
		room := maxVectorBytes
		for i, p := range pieces {
			if i == 0 {
				p = p[skip:]
			}
			if p = p[:min(len(p), room)]; len(p) > 0 {
				v := syscall.Iovec{Base: unsafe.SliceData(p)}
				v.SetLen(len(p))
				t.vec = append(t.vec, v)
				room -= len(p)
			}
			if room == 0 || len(t.vec) == maxVector {
				break
			}
		}
		if len(t.vec) == 0 {
			return done, nil
		}
		t.n, t.errno = 0, 0
		err := c.raw.Write(t.tryVec)
		done += int64(t.n)
		for n := skip + t.n; ; {
			if len(pieces) == 0 || n < len(pieces[0]) {
				skip = n
				break
			}
			n -= len(pieces[0])
			pieces = pieces[1:]
		}
		switch {
		case err != nil:
			return done, renamed(err, "write")
		case t.errno != 0:
			return done, c.failed("write", t.errno)
		}
	}
}

// writeVec is called when there may be room; false waits.
func (t *transfer) writeVec(fd uintptr) bool {
	for {
		raceWrite()
		n, _, errno := syscall.RawSyscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(t.vec))), uintptr(len(t.vec)))
		switch errno {
		case 0:
			t.n = int(n)
			raceWrittenVec(t.vec, t.n)
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return false
		default:
			t.errno = errno
		}
		return true
	}
}

func (c *conn) failed(op string, errno syscall.Errno) error {
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError(op, errno)}
}

// renamed gives an error of the raw connection the name of the plain call.
func renamed(err error, op string) error {
	if oe, ok := errors.AsType[*net.OpError](err); ok {
		oe.Op = op
	}
	return err
}
