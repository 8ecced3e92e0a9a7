package api

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
	"net"
	"net/http"
	"sync"
	"time"
)

// DefaultBodyLimit is the largest request body in bytes unless configured.
const DefaultBodyLimit = 64 << 20

// Buffers are kept by size class, from 4 KiB to 1 MiB. Larger ones are left to
// the garbage collector: a pool would hold on to the largest body ever seen.
const (
	minClass = 12
	maxClass = 20
)

// firstRead is the largest buffer in bytes that a body gets before any of it
// has come. From then on a buffer is at most four times what is in it.
const firstRead = 64 << 10

// Memory is what bodies may take in sum; it must not be nil.
type Memory interface {
	// Take takes that many bytes or, if there are not so many left, none.
	Take(bytes int64) bool
	// Give gives them back.
	Give(bytes int64)
}

var bufferPool [maxClass - minClass + 1]sync.Pool

// Body is a request body in memory. Release gives its buffer back.
type Body struct {
	// B is the whole body. It must not be used after Release.
	B     []byte
	class int // of a pooled buffer; -1 if it is not
	box   *[]byte

	memory Memory
	taken  int64 // bytes of it
}

// OwnBody is a body of bytes that the caller has made. ok is false when the memory is
// used up.
func OwnBody(b []byte, memory Memory) (body *Body, ok bool) {
	if !memory.Take(int64(len(b))) {
		return nil, false
	}
	return &Body{B: b, class: -1, memory: memory, taken: int64(len(b))}, true
}

// Release gives the buffer and its memory back. It may be called more than once.
func (b *Body) Release() {
	b.recycle()
	if b.taken > 0 {
		b.memory.Give(b.taken)
		b.taken = 0
	}
}

// recycle gives the buffer back.
func (b *Body) recycle() {
	if b.class >= 0 && b.B != nil {
		if b.box == nil {
			b.box = new([]byte)
		}
		*b.box = b.B[:0]
		bufferPool[b.class].Put(b.box)
	}
	b.B, b.class, b.box = nil, -1, nil
}

// bufferClass is the class of buffers of at least size bytes, or -1, and how
// long they are.
func bufferClass(size int) (class, length int) {
	class = max(bits.Len(uint(max(size-1, 0))), minClass)
	if class > maxClass {
		return -1, size
	}
	return class - minClass, 1 << class
}

// newBuffer is an empty buffer of a class and length, and the box in which the
// pool keeps it if it came from there.
func newBuffer(class, length int) ([]byte, *[]byte) {
	if class >= 0 {
		if p, ok := bufferPool[class].Get().(*[]byte); ok {
			return (*p)[:0], p
		}
	}
	return make([]byte, 0, length), nil
}

// ReadBody reads a request's body of at most limit bytes (0: DefaultBodyLimit)
// into memory. What it takes follows what has arrived, not the announced length: a
// client that announces a large body and sends nothing holds 64 KiB at most, and
// one that sends slowly four times what it has sent. How slow a writer may be is
// the caller's matter (see [BoundBody]).
//
// A body in gzip, zstd or deflate is decoded, and loses its Content-Encoding; the limit is for
// both forms.
//
// The error is an [*Error]: 413 body_too_large, 415 for another coding, 408
// when the read deadline passed, 400 for a body that ended early or cannot be decoded, 503 when the
// memory is used up.
func ReadBody(r *http.Request, limit int64, memory Memory) (*Body, error) {
	if limit <= 0 {
		limit = DefaultBodyLimit
	}
	encoding, err := encodingOf(r.Header)
	if err != nil {
		return nil, err
	}
	if r.ContentLength > limit {
		return nil, tooLarge(limit)
	}
	want := int(r.ContentLength)
	if want < 0 {
		want = 1 << minClass
	}
	body := &Body{class: -1, memory: memory}
	err = body.fill(r.Body, want, limit)
	if err == nil && encoding != "" {
		r.Header.Del("Content-Encoding")
		err = body.decode(encoding, limit)
	}
	if err != nil {
		body.Release()
		return nil, err
	}
	return body, nil
}

// fill reads to the end of a body of which want bytes are expected.
func (b *Body) fill(in io.Reader, want int, limit int64) error {
	if err := b.resize(min(want, firstRead), limit); err != nil {
		return err
	}
	for {
		if len(b.B) == cap(b.B) {
			if len(b.B) == want { // all of it: only the end is missing
				var one [1]byte
				n, err := in.Read(one[:])
				if n == 0 && errors.Is(err, io.EOF) {
					return nil
				}
				if n == 0 && err != nil {
					return readError(err)
				}
				if err := b.grow(want, limit); err != nil {
					return err
				}
				b.B = append(b.B, one[:n]...)
				continue
			}
			if err := b.grow(want, limit); err != nil {
				return err
			}
		}
		free := b.B[len(b.B):cap(b.B)]
		if room := limit + 1 - int64(len(b.B)); int64(len(free)) > room {
			free = free[:room]
		}
		n, err := in.Read(free)
		b.B = b.B[:len(b.B)+n]
		switch {
		case int64(len(b.B)) > limit:
			return tooLarge(limit)
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return readError(err)
		}
	}
}

// grow makes room for more: four times as much, or just what was announced
// where that is less.
func (b *Body) grow(want int, limit int64) error {
	size := 4 * cap(b.B)
	if want > cap(b.B) {
		size = min(size, want)
	}
	size = min(size, int(min(limit+1, 1<<62)))
	return b.resize(max(size, len(b.B)+1), limit)
}

// resize moves the body to a buffer of at least size bytes. The longest body is
// counted with what it may hold, so that one always fits into a memory as large.
func (b *Body) resize(size int, limit int64) error {
	class, length := bufferClass(size)
	more := min(int64(length), limit) - b.taken
	if !b.memory.Take(more) {
		return noMemory()
	}
	b.taken += more
	next, box := newBuffer(class, length)
	next = append(next, b.B...)
	b.recycle()
	b.B, b.class, b.box = next, class, box
	return nil
}

func noMemory() *Error {
	return &Error{
		Status: http.StatusServiceUnavailable, Code: CodeOverloaded, RetryAfter: time.Second,
		Message: "the memory for request bodies is used up; try again later",
	}
}

func tooLarge(limit int64) *Error {
	return &Error{
		Status: http.StatusRequestEntityTooLarge, Code: CodeBodyTooLarge,
		Message: fmt.Sprintf("the request body is larger than %d bytes", limit),
	}
}

func readError(err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		return &Error{
			Status: http.StatusRequestTimeout, Code: CodeRequestTimeout,
			Message: "the request body did not arrive in time", Err: err,
		}
	}
	if big, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return tooLarge(big.Limit)
	}
	return &Error{
		Status: http.StatusBadRequest, Code: CodeInvalidRequest,
		Message: "the request ended before its body was complete", Err: err,
	}
}
