package door

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

// reply is what the client of an exchange gets.
type reply struct {
	w    http.ResponseWriter
	call *serving.Call

	answer    *serving.Answer // nil while none is open
	cut       bool            // a stream broke off within an event
	head      bool            // its newest piece is no piece of a leg in progress
	along     *sse.Head       // reads along with a stream
	early     *early          // a head that may go out before the answer; nil for none
	committed bool            // the head of the answer is sent
	status    int
	writeBy   api.AnswerDeadline
}

// copy sends the answer to the client.
func (r *reply) copy() error {
	a := r.answer
	if r.opened() {
		if !a.Streams() {
			return &api.Error{Status: http.StatusBadGateway, Code: api.CodeUpstreamError, Message: "the engine answered a request for a stream with something else; the stream had begun with comments (timeouts.sse_keepalive)"}
		}
	} else {
		r.call.Record.Headers(r.w.Header())
		r.status, r.committed = a.Status, true
	}
	if a.Whole != nil {
		return r.copyWhole(a)
	}
	opt := upstream.StreamOptions{WriteTimeout: r.call.Routing.Settings.Timeouts.Write}
	if a.Streams() {
		r.along = sse.AcquireHead()
		opt.Observe, opt.Gate = r.observe, &r.along.Gate
		if r.call.Record.Answer.UsageAdded {
			r.along.Usage = sse.UsageGate{Gate: &r.along.Gate, Scanner: &r.along.Scanner}
			opt.Gate = &r.along.Usage
		}
	}
	if !r.opened() {
		a.WriteHead(r.w)
	}
	if len(a.Before) > 0 {
		if _, err := upstream.NewWriter(r.w, opt.WriteTimeout).Write(a.Before); err != nil {
			return err
		}
	}
	err := upstream.Stream(r.w, r, a.Flushes(), opt)
	if a.Streams() {
		err = r.learn(err)
	}
	return err
}

// copyWhole sends an answer that was read at once.
func (r *reply) copyWhole(a *serving.Answer) (err error) {
	h := r.w.Header()
	a.Header.CopyTo(h)
	h["Content-Length"] = []string{strconv.Itoa(len(a.Whole))}
	limit := r.call.Routing.Settings.Timeouts.Write
	if len(a.Whole) <= 16<<10 {
		// net/http flushes it at the end. It waits here for a client that does
		// not read the answers before it.
		r.writeBy.Extend(r.w, limit)
		r.w.WriteHeader(a.Status)
		_, err = r.w.Write(a.Whole)
	} else {
		r.w.WriteHeader(a.Status)
		_, err = upstream.NewWriter(r.w, limit).Write(a.Whole)
	}
	if err != nil {
		return &upstream.ClientError{Err: err}
	}
	return nil
}

// Next is the next piece of the answer's body.
func (r *reply) Next() (b []byte, err error) {
	b, r.head, err = r.answer.Body.Next()
	return b, err
}

// Done is [serving.Body.Done] of the body. The head of a leg goes out immediately even where
// nothing follows it: the leg's end may take long.
func (r *reply) Done() bool { return !r.head && r.answer.Body.Done() }

// observe reads along with a stream.
func (r *reply) observe(b []byte, came time.Time) {
	got := r.along.Scanner.Feed(b)
	if r.head || got.Events == 0 {
		return
	}
	r.call.Record.Answer.Piece(came, got.Tokens)
}

// learn records what the stream said, and judges how it ended.
func (r *reply) learn(err error) error {
	scan := &r.along.Scanner
	scan.Finish()
	sum := scan.Summary()
	r.call.Record.Answer.Learn(sum)
	// Some clients close the connection when they read [DONE], and do not wait for the end
	// of the body. A piece is written before the next one is read, so [DONE] has been sent
	// when the next read is canceled.
	var f *upstream.Failure
	if sum.Done && errors.As(err, &f) && f.Kind == upstream.Canceled {
		err = nil
	}
	if err == nil && sum.Failed {
		// The client has the engine's own error event; the receipt shall say so too.
		r.call.Record.EngineError(sum.Error)
	}
	return err
}

// Idle sends a client whose stream waits a comment.
func (r *reply) Idle(words string) error {
	_, err := upstream.NewWriter(r.w, r.call.Routing.Settings.Timeouts.Write).Write([]byte(": " + words + "\n\n"))
	return err
}

// close ends the answer that is open.
func (r *reply) close(err error) error {
	if r.answer != nil {
		a := r.answer
		r.answer = nil
		err = a.Close(err)
	}
	if r.along != nil {
		r.cut = r.along.Gate.Open()
		r.along.Release()
		r.along = nil
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
