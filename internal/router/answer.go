package router

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/pair"
	"github.com/dynctl/dynctl/internal/router/forward/resume"
	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/account"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/stored"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// maxWholeAnswer is the largest answer of known length that is read whole
// before it is sent on, to learn usage from it; larger ones are forwarded as
// they arrive.
const maxWholeAnswer = 4 << 20

// maxErrorAnswer bounds an answer that is not 2xx.
const maxErrorAnswer = 1 << 20

// progressEvery is after how many streamed tokens the ledger is updated.
const progressEvery = 16

// decodeLeg runs the leg whose answer the client gets. t is nil for a local
// plan. A stream whose head is sent is left in x.flow.
func (x *exchange) decodeLeg(ctx context.Context, p disagg.Peer, held *ledger.Reservation, body [][]byte, t *disagg.Transfer) (err error) {
	r, s := x.r, x.d.Settings
	id := x.id
	if t != nil {
		id = t.RequestID()
	}
	leg := x.leg(selector.Decode, p, body, s.Timeouts.Response, id)
	if t != nil && t.Leased() {
		// An engine that hangs for longer than the lease and then goes on
		// would fetch what other prompts have put into the blocks.
		leg.Alive, leg.AliveBy = p.Worker.State.AnsweredSince, x.aliveBy
	}
	record := x.book.BeginLeg(selector.Decode, p, leg)
	x.book.Answer.Of(record)
	if x.cont != nil {
		x.cont.pending = nil
		x.cont.Begin()
	}
	resp, err := r.client.Do(ctx, leg)
	if err != nil {
		err = x.legFailed(selector.Decode, p.Worker, err)
		record.End(err, time.Now())
		return err
	}
	defer func() {
		if x.flow.resp == nil {
			resp.Close()
			record.End(err, time.Now())
		}
	}()
	record.Head(resp.Status)
	if resp.Status/100 != 2 {
		answer, err := resp.ReadAll(maxErrorAnswer)
		if err != nil {
			return x.legFailed(selector.Decode, p.Worker, err)
		}
		return x.legRefused(selector.Decode, p.Worker, resp, answer)
	}
	x.book.Answer.Unknown()
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		return x.streamed(p, held, record, resp, t)
	}
	if x.committed {
		return x.fail(selector.Decode, p.Worker, attempt.Protocol, true, errors.New("the engine answered with something else than the rest of a stream"))
	}
	return x.whole(p, held, resp, t)
}

// commit sends the head of the answer.
func (x *exchange) commit(resp *upstream.Response) {
	x.book.Headers(x.w.Header())
	x.status, x.committed = resp.Status, true
	resp.WriteHead(x.w)
}

// flow is a stream whose head the client has.
type flow struct {
	peer   disagg.Peer
	held   *ledger.Reservation
	record *account.Leg
	resp   *upstream.Response // nil while there is no stream
	head   *sse.Head
	// pair has the prefill leg that runs beside the stream, of a transfer; nil without one.
	pair     *pair.Pair
	transfer *disagg.Transfer
}

// streamed begins to answer with an event stream. Its head is held until the
// first token or error: what fails before can be tried again elsewhere. The
// rest waits in x.flow for forward, which is called where little of the stack is in
// use: a router has ten thousand streams that wait for a token.
func (x *exchange) streamed(p disagg.Peer, held *ledger.Reservation, record *account.Leg, resp *upstream.Response, t *disagg.Transfer) error {
	head := sse.AcquireHead()
	err := x.holdHead(p, resp, head)
	if err == nil {
		err = x.sendHead(p, held, record, resp, t, head)
	}
	if err != nil {
		head.Release()
		return err
	}
	x.flow = flow{peer: p, held: held, record: record, resp: resp, head: head}
	if x.cont != nil {
		x.cont.Keep(&x.view)
		x.lost()
	}
	if t == nil || t.Mode() != disagg.Concurrent { // the prefill leg may be sending the body
		x.releaseInput()
	}
	return nil
}

// dropFlow gives up a stream that a panic has kept from forward.
func (x *exchange) dropFlow() {
	f := &x.flow
	if f.resp == nil {
		return
	}
	if f.pair != nil {
		f.pair.End(false)
	}
	f.head.Release()
	f.resp.Close()
	f.held.Release()
	x.r.legs.Give(1)
	*f = flow{}
}

// forward sends the rest of a stream on, and ends its leg.
func (x *exchange) forward() (err error) {
	f := &x.flow
	defer func() {
		x.cut = f.head.Gate.Open()
		f.head.Release()
		f.resp.Close()
		f.record.End(err, time.Now())
		if f.pair != nil {
			if err != nil {
				f.transfer.DecodeFailed()
			}
			f.pair.End(err == nil)
		}
		*f = flow{}
	}()
	opt := upstream.StreamOptions{WriteTimeout: x.d.Settings.Timeouts.Write, Observe: x.observer(), Gate: &f.head.Gate}
	if x.cont != nil {
		return x.endStream(x.follow(opt))
	}
	return x.endStream(upstream.Stream(x.w, f.resp, opt))
}

// holdHead reads the head of a stream. The error is that of an attempt that has
// failed.
func (x *exchange) holdHead(p disagg.Peer, resp *upstream.Response, head *sse.Head) error {
	verdict := sse.Hold
	for verdict == sse.Hold {
		piece, err := resp.Next()
		switch {
		case errors.Is(err, io.EOF):
			if verdict = head.End(); verdict != sse.Failed && len(head.Held()) == 0 {
				return x.legFailed(selector.Decode, p.Worker, &upstream.Failure{Kind: upstream.Reset, Addr: resp.Addr(), Op: "read the answer of", Sent: true, Started: true, Err: errors.New("the stream ended before its first event")})
			}
		case err != nil:
			return x.legFailed(selector.Decode, p.Worker, err)
		case x.cont != nil:
			piece, err = x.readAlong(piece)
			if verdict = head.Feed(piece, time.Now()); err == nil {
				continue
			}
			if errors.Is(err, resume.ErrStopped) {
				verdict = sse.Forward
			}
			if verdict == sse.Hold && errors.Is(err, resume.ErrUnclear) {
				x.report(selector.Decode, health.Canceled)
				return err
			}
			if verdict == sse.Hold {
				return x.fail(selector.Decode, p.Worker, attempt.StreamError, true, err)
			}
			x.cont.pending = err
		default:
			verdict = head.Feed(piece, time.Now())
		}
	}
	if verdict == sse.Failed {
		return x.streamRefused(p.Worker, head.Scanner.Summary().Error)
	}
	return nil
}

// streamRefused is the failure of a stream that begins with an error event.
func (x *exchange) streamRefused(w *workers.Worker, event string) error {
	reason, err := attempt.OfEvent(event), errors.New("the engine's stream began with an error: "+event)
	if reason == attempt.Overloaded {
		err = &api.Error{Status: http.StatusServiceUnavailable, Code: api.CodeOverloaded, Message: err.Error(), RetryAfter: time.Second, Err: err}
	}
	return x.fail(selector.Decode, w, reason, true, err)
}

// sendHead sends on what was held.
func (x *exchange) sendHead(p disagg.Peer, held *ledger.Reservation, record *account.Leg, resp *upstream.Response, t *disagg.Transfer, head *sse.Head) error {
	x.begun.Store(true)
	x.leaveMove()
	x.served()
	x.report(selector.Decode, health.Success)
	first := time.Now()
	token := head.Scanner.Tokens() > 0
	record.Streams(first, token)
	if token {
		x.legTook(selector.Decode, record.Start, first)
	}
	held.FirstToken()
	if !x.committed {
		x.commit(resp)
	}
	if x.view.Kind == api.Responses {
		x.r.stored.Put(stored.StreamID(head.Held()), p.Worker.Name, x.key.Owner())
	}
	out := upstream.NewWriter(x.w, x.d.Settings.Timeouts.Write)
	if t != nil {
		if tok, ok := t.FirstToken(); ok {
			if x.cont != nil {
				x.cont.Stream.Refuse(resume.FirstToken)
			}
			if _, err := out.Write(tok.Event(x.id, x.model, x.start)); err != nil {
				return err
			}
		}
	}
	_, ready := head.Gate.Pass(head.Held())
	_, err := out.Write(ready)
	return err
}

// observer reads along with the rest of a stream.
func (x *exchange) observer() func([]byte) {
	f := &x.flow
	tokens, reported := f.head.Scanner.Tokens(), 0
	x.r.costs.Runs(&x.measured, x.d.Settings.Decisions.Rule.Auto, x.model, f.peer.Worker, f.peer.Rank, tokens, time.Now())
	return func(b []byte) {
		got := f.head.Scanner.Feed(b)
		if got.Events == 0 {
			return
		}
		now := time.Now()
		x.book.Answer.Piece(now, got.Tokens)
		tokens += got.Tokens
		x.measured.Ran(tokens, now)
		if tokens-reported >= progressEvery {
			reported = tokens
			f.held.Progress(tokens)
		}
	}
}

// endStream records what the stream said, and judges how it ended.
func (x *exchange) endStream(err error) error {
	scan := &x.flow.head.Scanner
	scan.Finish()
	sum := scan.Summary()
	x.book.Answer.Learn(sum)
	if hungUp(&sum, err) {
		err = nil
	}
	if err == nil && sum.Failed {
		// The client has the engine's own error event; the receipt shall say so too.
		x.book.Answer.Finish = "error"
		x.book.Note("the engine's stream ended with an error: " + sum.Error)
	}
	return x.streamError(x.flow.peer, err)
}

// hungUp reports whether the client has left after the end of its answer: some close
// the connection when they read [DONE], and do not wait for the end of the body.
// A piece is written before the next one is read, so [DONE] has been sent when the
// next read is canceled.
func hungUp(sum *sse.Summary, err error) bool {
	var f *upstream.Failure
	return sum.Done && errors.As(err, &f) && f.Kind == upstream.Canceled && !errors.Is(err, errMoved)
}

// streamError judges how a stream ended of which the client has a part.
func (x *exchange) streamError(p disagg.Peer, err error) error {
	var f *upstream.Failure
	if errors.Is(err, errMoved) {
		x.cont.cut = attempt.Cut(p.Worker, attempt.Moved)
		return err
	}
	if errors.As(err, &f) && f.Kind != upstream.Canceled {
		reason := attempt.Reason(f.Kind)
		if errors.Is(err, resume.ErrEngine) {
			reason = attempt.StreamError
		}
		x.report(selector.Decode, health.ServerError)
		x.book.Failed(selector.Decode, p.Worker, reason, err)
		if x.cont != nil {
			x.cont.cut = attempt.Cut(p.Worker, reason)
		}
		e := *f.APIError()
		if reason == attempt.StreamError {
			e.Message = f.Err.Error()
		}
		e.Message = fmt.Sprintf("%s broke off in the middle of the answer: %s", p.Worker.Name, e.Message)
		e.Err = f
		return &e
	}
	return err
}

// whole forwards an answer that is not a stream.
func (x *exchange) whole(p disagg.Peer, held *ledger.Reservation, resp *upstream.Response, t *disagg.Transfer) error {
	// An answer to HEAD has the length of a body that does not come.
	if x.req.Method == http.MethodHead || resp.ContentLength > maxWholeAnswer || resp.ContentLength < 0 && !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/json") {
		x.begun.Store(true)
		x.served()
		x.report(selector.Decode, health.Success)
		held.FirstToken()
		x.commit(resp)
		return x.streamError(p, upstream.Stream(x.w, resp, upstream.StreamOptions{WriteTimeout: x.d.Settings.Timeouts.Write}))
	}
	body, err := resp.ReadAll(maxPrefillAnswer)
	if err != nil {
		return x.legFailed(selector.Decode, p.Worker, err)
	}
	x.begun.Store(true)
	x.served()
	x.report(selector.Decode, health.Success)
	held.FirstToken()
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "application/json") {
		x.book.Answer.Learn(sse.Inspect(body))
	}
	if x.view.Kind == api.Responses {
		x.r.stored.Put(stored.ID(body), p.Worker.Name, x.key.Owner())
	}
	if t != nil {
		if tok, ok := t.FirstToken(); ok {
			body = tok.Before(body)
		}
	}
	x.book.Headers(x.w.Header())
	x.status, x.committed = resp.Status, true
	h := x.w.Header()
	resp.Header.CopyTo(h)
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	if len(body) <= 16<<10 {
		// net/http flushes it at the end. It waits here for a client that does
		// not read the answers before it.
		x.writeBy.Extend(x.w, x.d.Settings.Timeouts.Write)
		x.w.WriteHeader(resp.Status)
		_, err = x.w.Write(body)
	} else {
		x.w.WriteHeader(resp.Status)
		_, err = upstream.NewWriter(x.w, x.d.Settings.Timeouts.Write).Write(body)
	}
	if err != nil {
		return &upstream.ClientError{Err: err}
	}
	return nil
}
