package router

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/resume"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// Another engine continues a stream whose engine dies in the middle (continue.mode). It
// is asked with the ids of the prompt and of what the client has of the answer. To the
// stages, from the prompt on, this is a request of its own; the client just gets the next
// events.

// alignTimeout bounds asking an engine where a text ends in its tokens.
const alignTimeout = 2 * time.Second

// errMoved ends a leg whose worker is drained.
var errMoved = errors.New("the worker is drained, and the rest comes from elsewhere")

// continuation is the state of a request whose stream another engine may continue.
type continuation struct {
	resume.Continuation
	// pending is an error that the engine sent right after the first token.
	pending error
	// cut is how the stream's newest leg broke off.
	cut *attempt.Failure
	// from is the rank of that leg.
	from *workers.Rank
	// places are the ranks on which the rest has a place.
	places []uint32
	// move is the request for the rest with its decision, where a healthy stream is about
	// to be taken from its worker; askAt is when it may ask for a place again.
	move  *exchange
	askAt time.Time
	// first is the error of the newest leg of which the client has a part.
	first error
}

// mayContinue prepares for a stream that another engine may have to continue.
func (x *exchange) mayContinue() {
	if !x.view.Stream || x.ep.Body != api.JSONBody {
		return // nothing to continue
	}
	x.cont = &continuation{Continuation: resume.New(&x.view, x.r.tokens.Decoder(), x.r.bodies)}
}

// readAlong is what the client gets of a piece of the engine's stream. The error is the
// engine's own: the client gets it with the reason why the rest does not come, or not at all.
func (x *exchange) readAlong(p []byte) ([]byte, error) {
	c := x.cont
	out, err := c.Pass(p)
	x.lost()
	switch {
	case errors.Is(err, resume.ErrUnclear):
		err = &api.Error{Status: http.StatusBadGateway, Code: api.CodeUpstreamError, Message: err.Error(), Err: err}
	case err != nil && !errors.Is(err, resume.ErrStopped):
		text := strings.TrimSpace(strings.TrimPrefix(string(c.Stream.Held()), "data:"))
		err = &upstream.Failure{Kind: upstream.Reset, Op: "read the answer", Sent: true, Started: true, Err: fmt.Errorf("%w: %.512s", err, text)}
	}
	return out, err
}

// lost says in receipt and metrics that the stream is not continuable from now on, where
// limits.body_memory has just been used up.
func (x *exchange) lost() {
	if x.cont.Lost() {
		x.r.metrics.StreamWithoutMemory()
		x.book.Note("from here on it could not be continued elsewhere: " + resume.Memory.String())
	}
}

// follow sends the rest of a stream on as [exchange.forward] does, and reads along.
func (x *exchange) follow(opt upstream.StreamOptions) error {
	c := x.cont
	if c.Refused == resume.Endpoint {
		return upstream.Stream(x.w, x.flow.resp, opt)
	}
	opt.Change = x.readAlong
	c.from = x.flow.peer.Rank
	if w := x.flow.peer.Worker; w.Role.CanDecode() {
		opt.Change = func(p []byte) ([]byte, error) {
			out, err := x.readAlong(p)
			if err == nil && w.State.Moving() && c.Stream.Resumable() && x.mayMove(w) {
				err = &upstream.Failure{Kind: upstream.Canceled, Op: "read the answer", Sent: true, Started: true, Err: errMoved}
			}
			return out, err
		}
	}
	err := c.pending
	if err == nil {
		err = upstream.Stream(x.w, x.flow.resp, opt)
	}
	if errors.Is(err, resume.ErrStopped) {
		return nil // and the engine's leg is closed
	}
	if err == nil && !c.Stream.Done() && c.Refused == "" {
		err = &upstream.Failure{Kind: upstream.Reset, Addr: x.flow.resp.Addr(), Op: "read the answer of", Sent: true, Started: true, Err: errors.New("the stream ended before its end was announced")}
	}
	return err
}

// goesOn reports whether the rest of a stream comes from elsewhere after its leg has
// ended with an error, and prepares that. If it does not, the error says why.
func (x *exchange) goesOn(err *error) bool {
	c := x.cont
	cut := c.cut
	c.cut = nil
	switch {
	case *err == nil || x.ctx.Err() != nil:
		return false
	case cut == nil:
		if why := c.Stream.Refused(); why != "" && errors.Is(*err, resume.ErrUnclear) {
			c.first = *err
			x.notContinued(err, string(why), why.String())
		} else if c.first != nil { // the client has got nothing of the leg that was to continue
			x.notContinued(err, "failed", fmt.Sprintf("no other engine could continue it: %v", api.FromError(*err).Message))
		}
		return false
	}
	c.first = *err
	if c.Whole() {
		if x.closing(cut) {
			*err = nil
		}
		return false
	}
	why, words := c.Refused, ""
	if why == "" {
		why, words = x.goOn(cut)
	}
	if why == "" && words == "" {
		return true
	}
	label := string(why)
	if why != "" {
		words = c.Words(why)
	} else {
		label = "policy"
	}
	x.notContinued(err, label, words)
	return false
}

// closing ends a stream whose engine died after the answer's last token.
func (x *exchange) closing(cut *attempt.Failure) bool {
	end, ok := x.cont.Ending(x.view.IncludeUsage)
	if len(end) == 0 {
		return ok
	}
	x.book.Note(fmt.Sprintf("%s broke off after the last token; the end of the stream is the router's", cut.Name))
	_, werr := upstream.NewWriter(x.w, x.d.Settings.Timeouts.Write).Write(end)
	return werr == nil
}

// notContinued says in receipt, metrics, events and the client's error why a stream
// that has broken off is not continued elsewhere.
func (x *exchange) notContinued(err *error, label, words string) {
	c := x.cont
	x.book.NotContinued(label, words)
	e := *api.FromError(c.first)
	e.Message += "; not continued elsewhere: " + words
	e.Err = *err
	*err = &e
}

// goOn makes the request for the rest of a stream. Where there is none it returns why: one
// of the known reasons, or else a text.
func (x *exchange) goOn(cut *attempt.Failure) (resume.Refusal, string) {
	r, c := x.r, x.cont
	c.Stream.Broke()
	generated := c.Stream.Generated()
	x.alignTokens()
	ids, why := c.Stream.Next()
	if why != "" {
		return why, ""
	}
	sent := c.Stream.Sent()
	if c.move != nil {
		x.takeMove()
	} else {
		body, why := c.Rest(ids, sent)
		if why != "" {
			return why, ""
		}
		if next := x.d.Run.Failed(*cut); next.Step != attempt.Continue {
			return "", next.Why
		}
		own, ok := api.OwnBody(body, r.bodies)
		if !ok {
			return resume.Memory, ""
		}
		x.releaseInput()
		x.body = own
		if err := x.readRest(); err != nil {
			return "", err.Error() // cannot be: the router wrote it
		}
	}
	c.GoOn(x.req.URL.RequestURI())
	x.begun.Store(false)
	x.book.Continued(cut, c.from, sent, generated-sent)
	return "", ""
}

// readRest reads the body as the request for the rest of a stream, while begun says that
// it is one.
func (x *exchange) readRest() error {
	if err := x.view.Parse(x.body.B, resume.RestKind(x.ep.Kind), api.Limits{}); err != nil {
		return err
	}
	if x.salted {
		if err := x.saltTenant(); err != nil {
			return err
		}
	}
	x.findPrompt()
	return nil
}

// alignTokens asks an engine which of the tokens stand for the text that was sent, where
// that is not known because several came in one event.
func (x *exchange) alignTokens() {
	c := x.cont
	if _, text := c.Stream.Unaligned(); text == "" {
		return
	}
	ctx, cancel := context.WithTimeout(x.ctx, alignTimeout)
	defer cancel()
	fleet := x.r.registry.Snapshot()
	c.Stream.AlignBy(func(ids []uint32) (string, error) { return x.r.tokens.Text(ctx, x.model, fleet.Model(x.model), ids) })
}
