package upstream

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// StreamOptions say how an answer is forwarded.
type StreamOptions struct {
	// Observe, when not nil, sees every piece of the body before it is
	// written, and when it came. It must not change or keep it.
	Observe func(p []byte, came time.Time)
	// Gate, when not nil, says what of the body may be sent.
	Gate Gate
	// WriteTimeout bounds every write to the client, so that one that does
	// not read cannot hold a connection for ever; 0 for none. It may last up
	// to a quarter longer.
	WriteTimeout time.Duration
}

// Gate holds pieces of a body back until they are worth sending.
type Gate interface {
	// Pass takes the next piece and returns what may go on, in this order;
	// both are used before the next call.
	Pass(p []byte) (held, ready []byte)
	// Rest is what was still held back when the body came to its end. It is
	// sent then, and not when the body broke off.
	Rest() []byte
}

// Flushes reports whether each piece of an answer must go out immediately: it is an event
// stream, or of unknown length.
func (h *Head) Flushes() bool {
	return h.ContentLength < 0 || h.Streams()
}

// Streams reports whether the answer is an event stream.
func (h *Head) Streams() bool {
	return strings.HasPrefix(h.Header.Get("Content-Type"), "text/event-stream")
}

// WriteHead sends status and headers of the answer to the client, in addition
// to the headers already set on w. An event stream goes out without the engine's
// Content-Length: the router takes token ids out of it, puts a first token before it, and
// ends it with an error event of its own.
func (h *Head) WriteHead(w http.ResponseWriter) {
	to := w.Header()
	h.Header.CopyTo(to)
	if h.ContentLength >= 0 && !h.Streams() {
		to["Content-Length"] = []string{h.Header.Get("Content-Length")}
	}
	w.WriteHeader(h.Status)
}

// Answer is the whole of an answer, which is kept.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Keep is the answer with its body, which has been read.
func (h *Head) Keep(body []byte) *Answer {
	a := &Answer{Status: h.Status, Header: http.Header{}, Body: body}
	h.Header.CopyTo(a.Header)
	return a
}

// Send gives the answer to a client, with the headers already set on w.
func (a *Answer) Send(w http.ResponseWriter) {
	h := w.Header()
	maps.Copy(h, a.Header)
	h.Set("Content-Length", strconv.Itoa(len(a.Body)))
	w.WriteHeader(a.Status)
	_, _ = w.Write(a.Body) // a client that is gone is no news here
}

// Body is read piece by piece; each is valid until the next is read, and the error at the end
// is io.EOF. Done says that no further piece comes.
type Body interface {
	Next() ([]byte, error)
	Done() bool
}

// AtEnd reports whether an error of [Body.Next] is the end of a body. A failure may wrap the
// io.EOF of a connection that another engine closed, and is no end.
func AtEnd(err error) bool { return err == io.EOF } //nolint:errorlint // see above

// Stream forwards a body to the client, whose head must have been written, piece by piece as
// it arrives, in the calling goroutine; flush says that each must go out immediately. The
// error is a [*ClientError] when the client broke off, the body's when that did.
func Stream(w http.ResponseWriter, r Body, flush bool, opt StreamOptions) error {
	out := newWriter(w, opt.WriteTimeout)
	for {
		p, err := r.Next()
		now := time.Now() // once for each piece
		if err != nil {
			if !AtEnd(err) {
				return err
			}
			// The end goes out after this, perhaps long after the last piece.
			err = out.allow(now)
			if opt.Gate != nil && err == nil {
				err = out.write(opt.Gate.Rest(), false, now)
			}
			if err != nil {
				return &ClientError{Err: err}
			}
			return nil
		}
		if opt.Observe != nil {
			opt.Observe(p, now)
		}
		if opt.Gate != nil {
			var held []byte
			if held, p = opt.Gate.Pass(p); len(held) > 0 {
				if err := out.write(held, flush && len(p) == 0, now); err != nil {
					return &ClientError{Err: err}
				}
				now = time.Now()
			}
		}
		// What is written last goes out with the end of the answer, when the
		// handler returns.
		if err := out.write(p, flush && !r.Done(), now); err != nil {
			return &ClientError{Err: err}
		}
	}
}

// Writer writes pieces of an answer to a client and sends each on its way,
// with a deadline for each. The deadline that it leaves behind ends with the
// request: net/http's server takes it back before the next one.
type Writer struct {
	w       http.ResponseWriter
	flusher interface{ FlushError() error }
	rc      *http.ResponseController
	timeout time.Duration
	by      time.Time
}

// NewWriter makes a writer; timeout is that of StreamOptions.WriteTimeout.
func NewWriter(w http.ResponseWriter, timeout time.Duration) *Writer {
	out := newWriter(w, timeout)
	return &out
}

func newWriter(w http.ResponseWriter, timeout time.Duration) Writer {
	out := Writer{w: w, timeout: timeout, rc: http.NewResponseController(w)}
	out.flusher = out.rcFlusher()
	return out
}

type controllerFlusher struct{ rc *http.ResponseController }

func (c controllerFlusher) FlushError() error { return c.rc.Flush() }

// rcFlusher finds the flush method once instead of with each piece.
func (o *Writer) rcFlusher() interface{ FlushError() error } {
	if f, ok := o.w.(interface{ FlushError() error }); ok {
		return f
	}
	return controllerFlusher{o.rc}
}

// Write writes p and flushes it to the client.
func (o *Writer) Write(p []byte) (int, error) {
	if err := o.write(p, true, time.Now()); err != nil {
		return 0, &ClientError{Err: err}
	}
	return len(p), nil
}

func (o *Writer) write(p []byte, flush bool, now time.Time) error {
	if len(p) == 0 {
		return nil
	}
	if err := o.allow(now); err != nil {
		return err
	}
	if _, err := o.w.Write(p); err != nil {
		return err
	}
	if flush {
		if err := o.flusher.FlushError(); err != nil && !errors.Is(err, http.ErrNotSupported) {
			return err
		}
	}
	return nil
}

// allow gives what is written next its time, from now on.
func (o *Writer) allow(now time.Time) error {
	if o.timeout <= 0 {
		return nil
	}
	by, move := due(o.by, now, o.timeout)
	if !move {
		return nil
	}
	o.by = by
	err := o.rc.SetWriteDeadline(by)
	if errors.Is(err, http.ErrNotSupported) { // a writer of a test, say
		o.timeout, err = 0, nil
	}
	return err
}
