package api

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"mime"
	"mime/multipart"
	"net"
	"net/http"
	"strings"
	"sync"
)

// DefaultBodyLimit is the largest request body in bytes unless configured.
const DefaultBodyLimit = 32 << 20

// Buffers are kept by size class, from 4 KiB to 1 MiB. Larger ones are left to
// the garbage collector: a pool would hold on to the largest body ever seen.
const (
	minClass = 12
	maxClass = 20
)

var bufferPool [maxClass - minClass + 1]sync.Pool

// Body is a request body in memory. Release gives its buffer back.
type Body struct {
	// B is the whole body. It must not be used after Release.
	B     []byte
	class int // of a pooled buffer; -1 if it is not
	box   *[]byte
}

// Release gives the buffer back. It may be called more than once.
func (b *Body) Release() {
	if b.class >= 0 && b.B != nil {
		if b.box == nil {
			b.box = new([]byte)
		}
		*b.box = b.B[:0]
		bufferPool[b.class].Put(b.box)
	}
	b.B, b.class, b.box = nil, -1, nil
}

// newBuffer is an empty buffer, its class, and the box in which the pool keeps
// it if it came from there.
func newBuffer(size int) ([]byte, int, *[]byte) {
	class := max(bits.Len(uint(max(size-1, 0))), minClass)
	if class > maxClass {
		return make([]byte, 0, size), -1, nil
	}
	if p, ok := bufferPool[class-minClass].Get().(*[]byte); ok {
		return (*p)[:0], class - minClass, p
	}
	return make([]byte, 0, 1<<class), class - minClass, nil
}

// ReadBody reads a request's body of at most limit bytes (0: DefaultBodyLimit).
// Memory follows what has arrived, not what was promised: a client that
// announces a large body and sends nothing holds one MiB at most. How slow a
// writer may be is the caller's matter (a read deadline on the connection).
//
// The error is an [*Error]: 413 body_too_large, 415 for a compressed body, 408
// when the read deadline passed, 400 for a body that ended early.
func ReadBody(r *http.Request, limit int64) (*Body, error) {
	if limit <= 0 {
		limit = DefaultBodyLimit
	}
	if enc := r.Header.Get("Content-Encoding"); enc != "" && !strings.EqualFold(enc, "identity") {
		return nil, &Error{
			Status: http.StatusUnsupportedMediaType, Code: CodeUnsupportedMedia,
			Message: "Content-Encoding " + clip(enc, 32) + " is not supported; send the body uncompressed",
		}
	}
	if r.ContentLength > limit {
		return nil, tooLarge(limit)
	}
	want := int(r.ContentLength)
	if want < 0 {
		want = 1 << minClass
	}
	body := new(Body)
	body.B, body.class, body.box = newBuffer(min(want, 1<<maxClass))
	for {
		if len(body.B) == cap(body.B) {
			if len(body.B) == want { // all of it: only the end is missing
				var one [1]byte
				n, err := r.Body.Read(one[:])
				if n == 0 && errors.Is(err, io.EOF) {
					return body, nil
				}
				if n == 0 && err != nil {
					body.Release()
					return nil, readError(err)
				}
				body.grow(want, limit)
				body.B = append(body.B, one[:n]...)
				continue
			}
			body.grow(want, limit)
		}
		free := body.B[len(body.B):cap(body.B)]
		if room := limit + 1 - int64(len(body.B)); int64(len(free)) > room {
			free = free[:room]
		}
		n, err := r.Body.Read(free)
		body.B = body.B[:len(body.B)+n]
		switch {
		case int64(len(body.B)) > limit:
			body.Release()
			return nil, tooLarge(limit)
		case errors.Is(err, io.EOF):
			return body, nil
		case err != nil:
			body.Release()
			return nil, readError(err)
		}
	}
}

// grow makes room for more: four times as much, or just what was announced
// where that is less.
func (b *Body) grow(want int, limit int64) {
	size := 4 * cap(b.B)
	if want > cap(b.B) {
		size = min(size, want)
	}
	size = min(size, int(min(limit+1, 1<<62)))
	next, class, box := newBuffer(max(size, len(b.B)+1))
	next = append(next, b.B...)
	b.Release()
	b.B, b.class, b.box = next, class, box
}

func tooLarge(limit int64) *Error {
	return &Error{
		Status: http.StatusRequestEntityTooLarge, Code: CodeBodyTooLarge,
		Message: fmt.Sprintf("the request body is larger than %d bytes", limit),
	}
}

func readError(err error) *Error {
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		return &Error{
			Status: http.StatusRequestTimeout, Code: CodeRequestTimeout,
			Message: "the request body did not arrive in time", Err: err,
		}
	}
	var big *http.MaxBytesError
	if errors.As(err, &big) {
		return tooLarge(big.Limit)
	}
	return &Error{
		Status: http.StatusBadRequest, Code: CodeInvalidRequest,
		Message: "the request ended before its body was complete", Err: err,
	}
}

// MultipartModel is the field "model" of a multipart/form-data body, "" when
// there is none. The error is an [*Error].
func MultipartModel(contentType string, body []byte) (string, error) {
	media, params, err := mime.ParseMediaType(contentType)
	if err != nil || media != "multipart/form-data" || params["boundary"] == "" {
		return "", &Error{
			Status: http.StatusUnsupportedMediaType, Code: CodeUnsupportedMedia,
			Message: "this path takes multipart/form-data with a boundary", Err: err,
		}
	}
	mr := multipart.NewReader(bytes.NewReader(body), params["boundary"])
	for n := 0; ; n++ {
		part, err := mr.NextRawPart()
		switch {
		case err == io.EOF: //nolint:errorlint // a body that is cut off is told as an error that wraps io.EOF
			return "", nil
		case err != nil:
			return "", &Error{
				Status: http.StatusBadRequest, Code: CodeInvalidRequest,
				Message: "the multipart body is malformed: " + clip(err.Error(), 200), Err: err,
			}
		case n >= 256:
			return "", badRequest("", "the multipart body has more than 256 parts")
		case part.FormName() != "model" || part.FileName() != "":
			continue
		}
		value, err := io.ReadAll(io.LimitReader(part, maxNameBytes+1))
		if err != nil {
			return "", badRequest("model", "the multipart body ends within the field \"model\"")
		}
		if len(value) > maxNameBytes {
			return "", badRequest("model", fmt.Sprintf("\"model\" is longer than %d bytes", maxNameBytes))
		}
		return string(value), nil
	}
}
