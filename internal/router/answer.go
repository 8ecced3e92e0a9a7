package router

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/serving"
)

// copy sends the answer to the client.
func (x *exchange) copy() error {
	a := x.answer
	if x.opened() {
		if !a.Streams() {
			return &api.Error{Status: http.StatusBadGateway, Code: api.CodeUpstreamError, Message: "the engine answered a request for a stream with something else; the stream had begun with comments (timeouts.sse_keepalive)"}
		}
	} else {
		x.record.Headers(x.w.Header())
		x.status, x.committed = a.Status, true
	}
	if a.Whole != nil {
		return x.copyWhole(a)
	}
	opt := upstream.StreamOptions{WriteTimeout: x.call.Routing.Settings.Timeouts.Write}
	pieces := &x.pieces
	*pieces = piecesOf{x: x, Body: a.Body}
	if a.Streams() {
		x.along = sse.AcquireHead()
		opt.Observe, opt.Gate = pieces.observe, &x.along.Gate
		if x.record.Answer.UsageAdded {
			x.along.Usage = sse.UsageGate{Gate: &x.along.Gate, Scanner: &x.along.Scanner}
			opt.Gate = &x.along.Usage
		}
	}
	if !x.opened() {
		a.WriteHead(x.w)
	}
	if len(a.Before) > 0 {
		if _, err := upstream.NewWriter(x.w, opt.WriteTimeout).Write(a.Before); err != nil {
			return err
		}
	}
	err := upstream.Stream(x.w, pieces, a.Flushes(), opt)
	if a.Streams() {
		err = x.learn(err)
	}
	return err
}

// copyWhole sends an answer that was read at once.
func (x *exchange) copyWhole(a *serving.Answer) (err error) {
	h := x.w.Header()
	a.Header.CopyTo(h)
	h["Content-Length"] = []string{strconv.Itoa(len(a.Whole))}
	limit := x.call.Routing.Settings.Timeouts.Write
	if len(a.Whole) <= 16<<10 {
		// net/http flushes it at the end. It waits here for a client that does
		// not read the answers before it.
		x.writeBy.Extend(x.w, limit)
		x.w.WriteHeader(a.Status)
		_, err = x.w.Write(a.Whole)
	} else {
		x.w.WriteHeader(a.Status)
		_, err = upstream.NewWriter(x.w, limit).Write(a.Whole)
	}
	if err != nil {
		return &upstream.ClientError{Err: err}
	}
	return nil
}

// piecesOf is the body of an answer as it is copied.
type piecesOf struct {
	serving.Body
	x    *exchange
	head bool // the newest piece is no piece of a leg in progress
}

func (p *piecesOf) Next() (b []byte, err error) {
	b, p.head, err = p.Body.Next()
	return b, err
}

// Done is [serving.Body.Done] of the body. The head of a leg goes out immediately even where
// nothing follows it: the leg's end may take long.
func (p *piecesOf) Done() bool { return !p.head && p.Body.Done() }

// observe reads along with a stream.
func (p *piecesOf) observe(b []byte) {
	got := p.x.along.Scanner.Feed(b)
	if p.head || got.Events == 0 {
		return
	}
	p.x.record.Answer.Piece(time.Now(), got.Tokens)
}

// learn records what the stream said, and judges how it ended.
func (x *exchange) learn(err error) error {
	scan := &x.along.Scanner
	scan.Finish()
	sum := scan.Summary()
	x.record.Answer.Learn(sum)
	// Some clients close the connection when they read [DONE], and do not wait for the end
	// of the body. A piece is written before the next one is read, so [DONE] has been sent
	// when the next read is canceled.
	var f *upstream.Failure
	if sum.Done && errors.As(err, &f) && f.Kind == upstream.Canceled {
		err = nil
	}
	if err == nil && sum.Failed {
		// The client has the engine's own error event; the receipt shall say so too.
		x.record.EngineError(sum.Error)
	}
	return err
}

// Idle sends a client whose stream waits a comment.
func (x *exchange) Idle(words string) error {
	_, err := upstream.NewWriter(x.w, x.call.Routing.Settings.Timeouts.Write).Write([]byte(": " + words + "\n\n"))
	return err
}

// close ends the answer that is open.
func (x *exchange) close(err error) error {
	if x.answer != nil {
		a := x.answer
		x.answer = nil
		err = a.Close(err)
	}
	if x.along != nil {
		x.cut = x.along.Gate.Open()
		x.along.Release()
		x.along = nil
	}
	return err
}

// engineAnswer is the engine's own answer to a request that ended with an error; nil
// where the client gets the router's.
func engineAnswer(err error) *upstream.Answer {
	if f, ok := errors.AsType[*upstream.Failure](err); ok {
		return f.Answer
	}
	return nil
}
