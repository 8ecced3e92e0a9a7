package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
)

// How the rest of a body is found.
const (
	bodyDone   = iota
	bodyLength // left bytes more
	bodyToEnd  // until the connection ends
	chunkSize  // a chunk's size line comes next
	chunkData  // left bytes of a chunk, then an empty line
	chunkEnd   // the line end after a chunk
	chunkTail  // trailers
)

const (
	smallSize = 4 << 10
	largeSize = 32 << 10
	// maxChunkLine is the longest size line of a chunk in bytes, extensions
	// included.
	maxChunkLine = 256
)

var (
	smallPool = sync.Pool{New: func() any { return new([smallSize]byte) }}
	largePool = sync.Pool{New: func() any { return new([largeSize]byte) }}
)

func smallBuffer() []byte { return smallPool.Get().(*[smallSize]byte)[:] }

func keepBuffer(b []byte) {
	switch cap(b) {
	case smallSize:
		smallPool.Put((*[smallSize]byte)(b[:smallSize]))
	case largeSize:
		largePool.Put((*[largeSize]byte)(b[:largeSize]))
	}
}

// Head is what an answer begins with.
type Head struct {
	Status int
	Header Header
	// ContentLength is the size of the body in bytes, or -1 if the answer does not say.
	ContentLength int64
	// Addr is the engine's host and port.
	Addr string
}

// Response is the answer to a leg. Its body is read by Next or ReadAll, by one goroutine.
type Response struct {
	Head

	client *Client
	pool   *pool
	conn   *conn
	ctx    context.Context
	stop   func() bool // ends the watch over ctx
	idle   time.Duration
	// patience is what is left for all pauses of the body together: 0 is without a bound, and
	// less than 0 nothing.
	patience time.Duration
	life     *workers.Life
	watch    Watch     // nil when the wait has no further look at the engine
	until    time.Time // when a wait under watch ends; zero for never
	came     time.Time // when the newest bytes came

	buf    []byte // buf[r:w] has arrived and is not used yet
	r, w   int
	state  int
	left   int64 // bytes of the body or of the chunk still to come
	tail   int   // bytes of trailers so far
	broken bool  // the connection cannot be used again
	closed bool
}

// Begins is the head of the answer.
func (r *Response) Begins() *Head { return &r.Head }

// Done reports whether the whole body has been handed out.
func (r *Response) Done() bool { return r.state == bodyDone }

// lent makes small buffers the memory of connections that wait.
type lent struct{}

func (lent) Take() []byte  { return smallBuffer() }
func (lent) Give(p []byte) { keepBuffer(p) }

// fill reads once more into the buffer, which it first makes room in. What has
// been used is overwritten. An empty small buffer is given back for the wait:
// ten thousand streams wait for a token most of the time.
func (r *Response) fill() error {
	if r.r == r.w && len(r.buf) == smallSize && r.conn.lends != nil {
		keepBuffer(r.buf)
		r.buf, r.r, r.w = nil, 0, 0
		var err error
		r.buf, r.w, err = r.conn.lends.ReadLent(lent{})
		if r.w > 0 {
			return nil
		}
		return err
	}
	if r.r > 0 && (r.r == r.w || r.w == len(r.buf)) {
		r.w = copy(r.buf, r.buf[r.r:r.w])
		r.r = 0
	}
	if r.w == len(r.buf) {
		bigger := make([]byte, 1<<bits.Len(uint(len(r.buf))))
		copy(bigger, r.buf)
		keepBuffer(r.buf)
		r.buf = bigger
	}
	n, err := r.conn.nc.Read(r.buf[r.w:])
	r.w += n
	if n > 0 {
		return nil // an error comes back with the next read
	}
	if err == nil {
		return io.ErrNoProgress
	}
	return err
}

// allow lets the reads that follow pause for d from now on, 0 for ever.
func (r *Response) allow(d time.Duration, now time.Time) error {
	if r.watch == nil {
		return r.conn.readWithin(d, now)
	}
	if r.until = (time.Time{}); d > 0 {
		r.until = now.Add(d)
	}
	return r.look(now)
}

// look asks the watch how long to wait on.
func (r *Response) look(now time.Time) error {
	more, giveUp := r.watch.Wait(now)
	if giveUp {
		return errSilent
	}
	if more <= 0 {
		r.watch = nil
		return r.conn.readUntil(r.until)
	}
	by := now.Add(more)
	if !r.until.IsZero() && r.until.Before(by) {
		by = r.until
	}
	// To be woken early, and to look again, is cheaper than to move the deadline for each answer.
	if set := r.conn.readBy; set.After(now.Add(more/2)) && !set.After(by) {
		return nil
	}
	return r.conn.readUntil(by)
}

// read is fill, which it continues for as long as the watch wants to wait.
func (r *Response) read() error {
	for {
		err := r.fill()
		now := time.Now()
		if err == nil {
			r.came = now
			r.life.Sign(now)
			return nil
		}
		if r.watch == nil || !errors.Is(err, os.ErrDeadlineExceeded) || !r.until.IsZero() && !now.Before(r.until) {
			return err
		}
		if err := r.look(now); err != nil {
			return err
		}
		if len(r.buf) == 0 {
			r.buf = smallBuffer()
		}
	}
}

// errDrips ends an answer whose pauses together are too long. It is a timeout.
var errDrips = fmt.Errorf("the whole answer took too long: %w", os.ErrDeadlineExceeded)

// wait reads once more, within the time for a pause and for all of them.
func (r *Response) wait() error {
	d, last := r.idle, false
	if r.patience != 0 && (d <= 0 || r.patience < d) {
		d, last = r.patience, true
	}
	if d < 0 {
		return errDrips
	}
	began := time.Now()
	err := r.allow(d, began)
	if err == nil {
		err = r.read()
	}
	if r.patience != 0 && err == nil {
		if r.patience -= r.came.Sub(began); r.patience == 0 {
			r.patience = -1
		}
	}
	if last && errors.Is(err, os.ErrDeadlineExceeded) {
		return errDrips
	}
	return err
}

// Next is the next piece of the body as soon as there is one, without copying
// it: valid until the next call. It is io.EOF after the last piece, and a
// [*Failure] when the answer breaks off or pauses for too long.
func (r *Response) Next() ([]byte, error) {
	for {
		p, err := r.take()
		if err != nil {
			return nil, r.fail(err)
		}
		if len(p) > 0 {
			return p, nil
		}
		if r.state == bodyDone {
			return nil, io.EOF
		}
		if r.closed {
			return nil, r.fail(context.Canceled)
		}
		if len(r.buf) == smallSize && r.r == r.w && (r.state == bodyLength || r.state == chunkData) && r.left > smallSize {
			keepBuffer(r.buf)
			r.buf, r.r, r.w = largePool.Get().(*[largeSize]byte)[:], 0, 0
		}
		if err := r.wait(); err != nil {
			if errors.Is(err, io.EOF) {
				if r.state == bodyToEnd {
					r.state = bodyDone
					return nil, io.EOF
				}
				err = errClosedEarly
			}
			return nil, r.fail(err)
		}
	}
}

// take hands out what is in the buffer. Of a chunked body it joins the data of
// all chunks there, by moving them over the lines between.
func (r *Response) take() ([]byte, error) {
	switch r.state {
	case bodyDone:
		return nil, nil
	case bodyToEnd:
		p := r.buf[r.r:r.w]
		r.r = r.w
		return p, nil
	case bodyLength:
		n := int(min(r.left, int64(r.w-r.r)))
		p := r.buf[r.r : r.r+n]
		r.r += n
		if r.left -= int64(n); r.left == 0 {
			r.state = bodyDone
		}
		return p, nil
	}
	start, end := -1, -1
	for r.state != bodyDone {
		if r.state == chunkData {
			n := int(min(r.left, int64(r.w-r.r)))
			if n == 0 {
				break
			}
			if start < 0 {
				start, end = r.r, r.r+n
			} else {
				end += copy(r.buf[end:], r.buf[r.r:r.r+n])
			}
			r.r += n
			if r.left -= int64(n); r.left == 0 {
				r.state = chunkEnd
			}
			continue
		}
		ok, err := r.chunkLine()
		if err != nil {
			if end > start {
				// Hand out what is good; the error comes with the next call.
				break
			}
			return nil, err
		}
		if !ok {
			break
		}
	}
	if end <= start {
		return nil, nil
	}
	return r.buf[start:end], nil
}

// chunkLine reads one line between the chunks if all of it is there.
func (r *Response) chunkLine() (ok bool, err error) {
	b := r.buf[r.r:r.w]
	k := 0
	for k < len(b) && b[k] != '\n' {
		k++
	}
	limit := maxChunkLine
	if r.state == chunkTail {
		limit = maxHead
	}
	if k == len(b) || k > limit {
		if k > limit {
			return false, malformed("a line between chunks is too long")
		}
		return false, nil
	}
	line := b[:k]
	if k > 0 && line[k-1] == '\r' {
		line = line[:k-1]
	}
	switch r.state {
	case chunkEnd:
		if len(line) != 0 {
			return false, malformed("a chunk is longer than its size")
		}
		r.state = chunkSize
	case chunkSize:
		size, good := parseSize(line)
		if !good {
			return false, malformed("the size of a chunk is not a number")
		}
		if r.left = size; size == 0 {
			r.state = chunkTail
		} else {
			r.state = chunkData
		}
	case chunkTail:
		if r.tail += k + 1; r.tail > maxHead {
			return false, errHeadSize
		}
		if len(line) == 0 {
			r.state = bodyDone
		}
	}
	r.r += k + 1
	return true, nil
}

// parseSize reads the hexadecimal size of a chunk; extensions are ignored.
func parseSize(line []byte) (int64, bool) {
	var n int64
	i := 0
	for ; i < len(line); i++ {
		c := line[i]
		var d byte
		switch {
		case c >= '0' && c <= '9':
			d = c - '0'
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			d = c | 0x20 - 'a' + 10
		case c == ';' || c == ' ' || c == '\t':
			return n, i > 0
		default:
			return 0, false
		}
		if i >= 15 {
			return 0, false
		}
		n = n<<4 | int64(d)
	}
	return n, i > 0
}

func (r *Response) fail(err error) error {
	r.broken = true
	f := &Failure{Kind: kindOf(r.ctx, err), Addr: r.Addr, Op: "read the answer", Sent: true, Started: true, Err: err}
	f.Late = f.Kind == Timeout && errors.Is(err, errDrips)
	if r.ctx.Err() != nil {
		f.Err = r.ctx.Err()
	}
	return f
}

// ReadAll reads the whole body, of at most limit bytes. The slice is the
// caller's.
func (r *Response) ReadAll(limit int64) ([]byte, error) {
	if r.ContentLength > limit {
		return nil, r.fail(errBodySize)
	}
	out := make([]byte, 0, max(r.ContentLength, 512))
	for {
		p, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		if int64(len(out)+len(p)) > limit {
			return out, r.fail(errBodySize)
		}
		out = append(out, p...)
	}
}

// Close ends the exchange. A connection whose answer was read to its end is
// kept for the next request; any other is closed, which makes the engine stop.
func (r *Response) Close() {
	if r.closed {
		return
	}
	r.closed = true
	canceled := !r.stop()
	reusable := r.state == bodyDone && !r.broken && !canceled && r.r == r.w
	keepBuffer(r.buf)
	r.buf, r.r, r.w = nil, 0, 0
	if reusable {
		r.conn.idleSince = r.came
		r.client.put(r.pool, r.conn)
		return
	}
	r.conn.close()
}

// abort is Close for an exchange without an answer.
func (r *Response) abort() {
	r.broken = true
	r.Close()
}
