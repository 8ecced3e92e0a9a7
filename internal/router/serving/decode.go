package serving

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/pair"
	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/stored"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// maxWholeAnswer is the largest answer of known length that is read whole
// before it is sent on, to learn usage from it; larger ones are forwarded as
// they arrive.
const maxWholeAnswer = 4 << 20

// maxHeldAnswer is how much of an answer of unknown length is held until its end, in bytes. A
// longer one is forwarded as it arrives from then on.
const maxHeldAnswer = 32 << 20

// maxErrorAnswer is how much of an answer that is not 2xx is kept, in bytes. The client gets
// the status with what fits.
const maxErrorAnswer = 1 << 20

// decoding is a leg whose answer the client gets, from when it is sent until its body is
// closed.
type decoding struct {
	g      *Legs
	c      *Call
	peer   workers.Peer
	record *lifecycle.LegRecord
	resp   Response
	// head has what was held of a stream until it has been read; read says that it has.
	head *sse.Head
	read bool
	// beside is the pair whose prefill leg was sent at the same time; nil for none. drop says
	// that the call's input is to be dropped when that leg has ended.
	beside *pair.Pair
	drop   bool
	// start is what was read of an answer that is no stream and turned out too long to be held.
	start []byte
	// after is called when the leg has ended, with the error; nil for nothing.
	after func(err error)

	answer Answer
}

// decode sends the leg now and returns its answer once that is good; t is nil for a local plan.
func (g *Legs) decode(ctx context.Context, c *Call, p workers.Peer, body [][]byte, t *disagg.Transfer, now time.Time) (a *Answer, err error) {
	id := c.ID
	if t != nil {
		id = t.RequestID()
	}
	leg := g.leg(c, route.Decode, p, body, c.Routing.Settings.Timeouts.Response, id)
	if t != nil && t.Leased() {
		// An engine that hangs for longer than the lease and then continues
		// would fetch what other prompts have put into the blocks.
		leg.Alive, leg.AliveBy = p.Worker.State.AnsweredSince, c.aliveBy
	}
	record := c.Record.BeginLeg(route.Decode, p, leg, now)
	c.Record.Answer.Of(record)
	b := &c.decoding
	defer func() {
		if a != nil {
			return
		}
		if b.head != nil {
			b.head.Release()
		}
		if b.resp != nil {
			b.resp.Close()
		}
		*b = decoding{}
		if err == nil {
			err = errPanic
		}
		record.End(err, time.Now())
	}()
	resp, err := g.Transport.Do(ctx, leg)
	if err != nil {
		return nil, g.broke(ctx, c, route.Decode, p.Worker, err)
	}
	*b = decoding{g: g, c: c, peer: p, record: record, resp: resp}
	head := resp.Begins()
	record.Head(head.Status)
	if head.Status/100 != 2 {
		body, _, err := readUpTo(resp, maxErrorAnswer)
		if err != nil {
			return nil, g.broke(ctx, c, route.Decode, p.Worker, err)
		}
		return nil, g.refused(ctx, c, route.Decode, p.Worker, head, body)
	}
	c.Record.Answer.Unknown()
	b.answer = Answer{Head: head, Body: b}
	switch {
	case head.Streams():
		err = b.stream(ctx, t)
	case c.Rest:
		err = g.fail(c, route.Decode, p.Worker, attempt.Protocol, true, errors.New("the engine answered with something else than the rest of a stream"))
	default:
		err = b.whole(ctx, t)
	}
	if err != nil {
		return nil, err
	}
	return &b.answer, nil
}

// good reports that the head of the answer is good. The error is that the prefill leg beside
// it failed a moment before, for which this leg ends.
func (b *decoding) good(ctx context.Context) error {
	if !b.c.begun.CompareAndSwap(mayBegin, hasBegun) {
		<-ctx.Done()
		return b.g.broke(ctx, b.c, route.Decode, b.peer.Worker, &upstream.Failure{Kind: upstream.Canceled, Addr: b.answer.Addr, Op: "read the answer of", Sent: true, Started: true, Err: ctx.Err()})
	}
	if body := b.c.Body; body != nil && b.g.Repeats.Watches(len(body.B), time.Now()) {
		b.g.Repeats.Served(b.c.key())
	}
	b.g.report(b.c, route.Decode, health.Success)
	return nil
}

// stream holds the head of an event stream until its first token or error: what fails before
// can be tried again elsewhere. The error is that of an attempt that has failed.
func (b *decoding) stream(ctx context.Context, t *disagg.Transfer) error {
	b.head = sse.AcquireHead()
	head, w := b.head, b.peer.Worker
	verdict := sse.Hold
	for verdict == sse.Hold {
		piece, err := b.resp.Next()
		switch {
		case upstream.AtEnd(err):
			if verdict = head.End(); verdict != sse.Failed && len(head.Held()) == 0 {
				return b.g.broke(ctx, b.c, route.Decode, w, Ended(b.answer.Addr, "the stream ended before its first event"))
			}
		case err != nil:
			return b.g.broke(ctx, b.c, route.Decode, w, err)
		default:
			verdict = head.Feed(piece, time.Now())
			if comments := head.Comments(); len(comments) > 0 && b.c.Idle != nil {
				b.c.Idle.Comment(comments)
			}
		}
	}
	if verdict == sse.Failed {
		return b.failed(ctx, w, head.Scanner.Summary().Error)
	}
	if err := b.good(ctx); err != nil {
		return err
	}
	first := time.Now()
	tokens := head.Scanner.Tokens()
	b.record.Streams(first, tokens > 0)
	b.c.reserved.FirstToken()
	b.record.Held = b.c.reserved
	b.record.Runs(tokens, first)
	if b.c.View.Kind == api.Responses {
		b.g.Stored.Put(stored.StreamID(head.Held()), w.Name, b.c.Owner)
	}
	if t != nil {
		if tok, ok := t.FirstToken(); ok {
			b.answer.Before = tok.Event(b.c.ID, b.c.Model, b.c.Start)
		}
	}
	return nil
}

// Ended is the failure of an answer that ended too early.
func Ended(addr, what string) *upstream.Failure {
	return &upstream.Failure{Kind: upstream.Reset, Addr: addr, Op: "read the answer of", Sent: true, Started: true, Err: errors.New(what)}
}

// failed is the failure of a stream that begins with an error event.
func (b *decoding) failed(ctx context.Context, w *workers.Worker, event string) error {
	reason, err := attempt.OfEvent(event), errors.New("the engine's stream began with an error: "+event)
	switch reason {
	case attempt.Overloaded:
		err = &api.Error{Status: http.StatusServiceUnavailable, Code: api.CodeOverloaded, Message: err.Error(), RetryAfter: time.Second, Err: err}
	case attempt.UnknownModel:
		b.g.reread(ctx)
		err = &api.Error{Status: http.StatusNotFound, Code: api.CodeModelNotFound, Param: "model", Message: err.Error(), Err: err}
	}
	return b.g.fail(b.c, route.Decode, w, reason, true, err)
}

// whole reads an answer that is not a stream, unless it is too long for that.
func (b *decoding) whole(ctx context.Context, t *disagg.Transfer) error {
	a := &b.answer
	json := strings.HasPrefix(a.Header.Get("Content-Type"), "application/json")
	// An answer to HEAD has the length of a body that does not come.
	if b.c.From.Method == http.MethodHead || a.ContentLength > maxWholeAnswer || a.ContentLength < 0 && !json {
		if err := b.good(ctx); err != nil {
			return err
		}
		b.c.reserved.FirstToken()
		return nil
	}
	body, more, err := readUpTo(b.resp, maxHeldAnswer)
	if err != nil {
		return b.g.broke(ctx, b.c, route.Decode, b.peer.Worker, err)
	}
	if err := b.good(ctx); err != nil {
		return err
	}
	b.c.reserved.FirstToken()
	if more {
		b.start = body
		return nil
	}
	if json {
		b.c.Record.Answer.Learn(sse.Inspect(body))
	}
	if b.c.View.Kind == api.Responses {
		b.g.Stored.Put(stored.ID(body), b.peer.Worker.Name, b.c.Owner)
	}
	if t != nil {
		if tok, ok := t.FirstToken(); ok {
			body = tok.Before(body)
		}
	}
	if a.Whole = body; body == nil {
		a.Whole = []byte{}
	}
	return nil
}

func (b *decoding) Next() (p []byte, head bool, err error) {
	if p, head, err = b.next(); b.drop {
		b.c.DropInput()
	}
	return p, head, err
}

func (b *decoding) next() ([]byte, bool, error) {
	if b.head != nil {
		if !b.read {
			b.read = true
			return b.head.Held(), true, nil
		}
		b.head.Release()
		b.head = nil
	}
	if start := b.start; start != nil {
		b.start = nil
		return start, true, nil
	}
	p, err := b.resp.Next()
	return p, false, err
}

func (b *decoding) Done() bool { return b.start == nil && b.resp.Done() }

// Close judges how an answer ended that the client has a part of. All is given back also
// where that panics.
func (b *decoding) Close(cause error) (err error) {
	if b.resp == nil {
		return cause // it is closed
	}
	err = errPanic // until it is judged
	defer func() { b.end(err) }()
	err = b.judged(cause)
	return err
}

// judged is what an error that ended the answer is to the client.
func (b *decoding) judged(err error) error {
	f, ok := errors.AsType[*upstream.Failure](err)
	if !ok || f.Kind == upstream.Canceled {
		return err
	}
	w, reason, out := b.peer.Worker, attempt.Reason(f.Kind), health.ServerError
	switch {
	case errors.Is(err, ErrEngine):
		reason = attempt.StreamError
	case f.Late: // it drips, and so lives
		reason, out = attempt.TooLong, attempt.TooLong.Means().Outcome
	}
	b.g.report(b.c, route.Decode, out)
	b.c.Record.Failed(route.Decode, w, reason, err)
	e := *f.APIError()
	if reason == attempt.StreamError {
		e.Message = f.Err.Error()
	}
	e.Message = fmt.Sprintf("%s broke off in the middle of the answer: %s", w.Name, e.Message)
	e.Err = f
	return &Cut{Err: &e, Failure: attempt.Cut(w, reason)}
}

// end gives back all that was held for the answer.
func (b *decoding) end(err error) {
	was := *b
	*b = decoding{}
	defer was.c.giveBack() // when the leg beside it has ended
	if was.after != nil {
		defer was.after(err)
	}
	if was.head != nil {
		was.head.Release()
	}
	was.resp.Close()
	was.record.End(err, time.Now())
}

// ErrEngine is in the error that closes a stream in which the engine itself has sent an
// error.
var ErrEngine = errors.New("the engine ended its stream with an error")

// Cut is an answer that broke off when the client had a part of it.
type Cut struct {
	// Err is what the client gets to know.
	Err *api.Error
	*attempt.Failure
}

func (c *Cut) Error() string { return c.Err.Error() }

// Unwrap is what the client gets to know.
func (c *Cut) Unwrap() error { return c.Err }
