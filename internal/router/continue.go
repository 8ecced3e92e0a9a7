package router

import (
	"bytes"
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

// Another engine goes on with a stream whose engine dies in the middle
// (continue.mode): the rest of the answer is the answer to the prompt and what the
// client has of it, as ids. It is a request of its own to the stages, from the prompt
// on, and to the client nothing but the next events.

// completionTokens is how many tokens vLLM answers a completion with that names no
// limit, nativeTokens how many SGLang's /generate does.
const (
	completionTokens = 16
	nativeTokens     = 128
)

// settleTime bounds asking an engine where a text ends in its tokens.
const settleTime = 2 * time.Second

// errMoved ends a leg whose worker is drained.
var errMoved = errors.New("the worker is drained, and the rest comes from elsewhere")

// continuation is what a request has for the case that its engine dies in the middle
// of the stream.
type continuation struct {
	// refused says why the request cannot be gone on with, and member what of it.
	refused resume.Refusal
	member  string
	stream  resume.Stream
	// rest is the request without the value of its prompt, which stood at a place.
	rest []byte
	at   int
	// to is where the rest is asked for; empty while nothing has broken off.
	to string
	// pending is an error that the engine told right after the first token.
	pending error
	// cut is how the stream's newest leg broke off.
	cut *attempt.Failure
	// from is the rank of the stream's newest leg.
	from *workers.Rank
	// places are the ranks on which the rest has a place.
	places []uint32
	// move is the request for the rest with its decision, where a stream that is well is
	// about to be taken from its worker; askAt is when it may ask for a place again.
	move  *exchange
	askAt time.Time
	// taken is what is kept of the stream, in bytes out of limits.body_memory.
	taken int64
	// first is the error of the newest leg that the client had a part of.
	first error
}

// mayContinue begins to read along with what could be gone on with.
func (x *exchange) mayContinue() {
	if !x.view.Stream || x.ep.Body != api.JSONBody {
		return // no stream, nothing to go on with
	}
	c := &continuation{}
	c.stream, c.refused, c.member = resume.Open(&x.view, x.r.tokens.Decoder())
	x.cont = c
}

// tells reports whether a worker tells the ids of the answer, if it is asked.
func (c *continuation) tells(w *workers.Worker) bool {
	if c.stream.Native {
		return w.WireEngine() == workers.SGLang
	}
	return w.WireEngine() == workers.VLLM
}

// asks reports whether a worker is to be asked for token ids.
func (c *continuation) asks(w *workers.Worker) bool {
	return c != nil && c.refused == "" && !c.stream.Native && c.tells(w)
}

// path is where a leg goes for a request that came to a path. It reads nothing of the
// stream: the legs of both phases may ask at once.
func (c *continuation) path(asked string) string {
	if c == nil || c.to == "" {
		return asked
	}
	return c.to
}

// begin makes ready for the answer to another leg.
func (c *continuation) begin() {
	c.pending = nil
	c.stream.Begin()
	c.stream.Refuse(c.refused)
}

// readAlong is what the client gets of a piece of the engine's stream. The error is the
// engine's own, which the client is told with why the rest does not come, or not at all.
func (x *exchange) readAlong(p []byte) ([]byte, error) {
	c := x.cont
	if c.refused == resume.Endpoint { // whose events are of another kind
		return p, nil
	}
	out, err := c.stream.Pass(p)
	x.account()
	switch {
	case errors.Is(err, resume.ErrUnclear):
		err = &api.Error{Status: http.StatusBadGateway, Code: api.CodeUpstreamError, Message: err.Error(), Err: err}
	case err != nil && !errors.Is(err, resume.ErrStopped):
		text := strings.TrimSpace(strings.TrimPrefix(string(c.stream.Held()), "data:"))
		err = &upstream.Failure{Kind: upstream.Reset, Op: "read the answer", Sent: true, Started: true, Err: fmt.Errorf("%w: %.512s", err, text)}
	}
	return out, err
}

// account takes what is kept for another leg out of limits.body_memory. Where that is
// used up, the stream is not continuable from then on, and receipt and metrics say so.
func (x *exchange) account() {
	c := x.cont
	n := int64(0)
	if c.stream.Refused() != "" {
		c.rest = nil
	} else {
		n = int64(c.stream.Kept() + cap(c.rest))
	}
	switch more := n - c.taken; {
	case more == 0:
	case more < 0:
		x.r.bodies.Give(-more)
		c.taken = n
	case x.r.bodies.Take(more):
		c.taken = n
	default:
		c.stream.Refuse(resume.Memory)
		c.rest = nil
		x.r.bodies.Give(c.taken)
		c.taken = 0
		x.r.metrics.StreamWithoutMemory()
		x.book.Note("from here on it could not be continued elsewhere: " + resume.Memory.String())
	}
}

// keep keeps what another leg would be made of, but for the ids, which the stream has.
func (x *exchange) keep() {
	c := x.cont
	if c.rest != nil || c.stream.Refused() != "" {
		return
	}
	defer x.account()
	v := &x.view
	if c.stream.Chat {
		c.rest = restOfChat(v)
		c.at = len(c.rest) - 1
		return
	}
	if c.stream.Native {
		c.stream.Given(v.PromptValue.Of(v.Body))
	}
	c.at = v.PromptValue.Start
	c.rest = append(append(make([]byte, 0, len(v.Body)-v.PromptValue.Len()), v.Body[:c.at]...), v.Body[v.PromptValue.End:]...)
}

// restOfChat is a completion with the members of a chat, whose prompt's value is to
// stand before its last byte.
func restOfChat(v *api.View) []byte {
	b := []byte{'{'}
	for i := range v.Fields {
		if name, raw := v.Member(i); resume.Kept(name) {
			b = append(append(append(api.AppendString(b, name), ':'), raw...), ',')
		}
	}
	b = append(b, `"max_tokens":`...)
	if v.MaxTokens >= 0 {
		b = append(b, api.RawInt(v.MaxTokens)...)
	} else {
		b = append(b, api.RawNull...) // as far as the model goes, as with a chat
	}
	return append(b, `,"prompt":}`...)
}

// follow sends the rest of a stream on as [exchange.forward] does, and reads along.
func (x *exchange) follow(opt upstream.StreamOptions) error {
	c := x.cont
	if c.refused == resume.Endpoint {
		return upstream.Stream(x.w, x.flow.resp, opt)
	}
	opt.Change = x.readAlong
	c.from = x.flow.peer.Rank
	if w := x.flow.peer.Worker; w.Role.CanDecode() {
		opt.Change = func(p []byte) ([]byte, error) {
			out, err := x.readAlong(p)
			if err == nil && w.State.Moving() && c.stream.Settled() && x.mayMove(w) {
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
	if err == nil && !c.stream.Done() && c.refused == "" {
		err = &upstream.Failure{Kind: upstream.Reset, Addr: x.flow.resp.Addr(), Op: "read the answer of", Sent: true, Started: true, Err: errors.New("the stream ended before its end was announced")}
	}
	return err
}

// goesOn asks whether the rest of a stream comes from elsewhere after its leg has
// ended with an error, and prepares that. If it does not, the error says why.
func (x *exchange) goesOn(err *error) bool {
	c := x.cont
	cut := c.cut
	c.cut = nil
	switch {
	case *err == nil || x.ctx.Err() != nil:
		return false
	case cut == nil:
		if why := c.stream.Refused(); why != "" && errors.Is(*err, resume.ErrUnclear) {
			c.first = *err
			x.notContinued(err, string(why), why.String())
		} else if c.first != nil { // of the leg that was to go on, the client has got nothing
			x.notContinued(err, "failed", fmt.Sprintf("nobody else could go on: %v", api.FromError(*err).Message))
		}
		return false
	}
	c.first = *err
	if (c.stream.Ended() || c.stream.Done()) && c.refused == "" {
		if x.closing(cut) {
			*err = nil
		}
		return false
	}
	why, words := c.refused, ""
	if why == "" {
		why, words = x.goOn(cut)
	}
	if why == "" && words == "" {
		return true
	}
	label := string(why)
	if why != "" {
		if words = why.String(); c.member != "" {
			words += fmt.Sprintf(" (%s)", c.member)
		}
	} else {
		label = "policy"
	}
	x.notContinued(err, label, words)
	return false
}

// closing ends a stream whose engine died after the answer's last token.
func (x *exchange) closing(cut *attempt.Failure) bool {
	c := x.cont
	if c.stream.Done() {
		return true
	}
	end := c.stream.Closing(x.view.IncludeUsage)
	if c.stream.Refused() != "" && x.view.IncludeUsage {
		return false // who knows how many there were
	}
	x.book.Note(fmt.Sprintf("%s broke off after the last token; the end of the stream is the router's", cut.Name))
	_, werr := upstream.NewWriter(x.w, x.d.Settings.Timeouts.Write).Write(end)
	return werr == nil
}

// notContinued says in receipt, metrics, events and the client's error why a stream
// that has broken off does not go on elsewhere.
func (x *exchange) notContinued(err *error, label, words string) {
	c := x.cont
	x.book.NotContinued(label, words)
	e := *api.FromError(c.first)
	e.Message += "; not continued elsewhere: " + words
	e.Err = *err
	*err = &e
}

// goOn makes the request for the rest of a stream. It says why there is none: in a
// word of the closed set, or else in plain words.
func (x *exchange) goOn(cut *attempt.Failure) (resume.Refusal, string) {
	r, c := x.r, x.cont
	c.stream.Broke()
	told := c.stream.Told()
	x.settle()
	ids, why := c.stream.Next()
	if why != "" {
		return why, ""
	}
	sent := c.stream.Sent()
	if c.move != nil {
		x.takeMove()
	} else {
		body, why := x.restOf(ids, sent)
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
		x.slim()
		x.body = own
		if err := x.readRest(); err != nil {
			return "", err.Error() // what the router has made: cannot be
		}
	}
	c.to = x.req.URL.RequestURI()
	if c.stream.Chat { // whose rest is a completion
		c.to = strings.Replace(c.to, "/chat/completions", "/completions", 1)
	}
	x.begun.Store(false)
	x.book.Continued(cut, c.from, sent, told-sent)
	return "", ""
}

// readRest reads the body as the request for the rest of a stream, while begun says that
// it is one.
func (x *exchange) readRest() error {
	if err := x.view.Parse(x.body.B, x.restKind(), api.Limits{}); err != nil {
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

// restKind is the kind of a request for the rest of a stream: a completion, of a chat,
// too, or one of SGLang's own.
func (x *exchange) restKind() api.Kind {
	if x.ep.Kind == api.SGLangGenerate {
		return x.ep.Kind
	}
	return api.Completion
}

// restOf is the body of the request for what comes after the ids, of which the last
// are so many of the answer's.
func (x *exchange) restOf(ids []uint32, sent int) ([]byte, resume.Refusal) {
	c := x.cont
	body := make([]byte, 0, len(c.rest)+7*len(ids)+2)
	body = append(body, c.rest[:c.at]...)
	body = append(body, '[')
	for i, id := range ids {
		if i > 0 {
			body = append(body, ',')
		}
		body = append(body, api.RawInt(int64(id))...)
	}
	body = append(append(body, ']'), c.rest[c.at:]...)
	var v api.View
	if err := v.Parse(body, x.restKind(), api.Limits{}); err != nil {
		return nil, resume.Prompt
	}
	var edits []api.Edit
	most, least, limit := "max_tokens", "min_tokens", v.MaxTokens
	_, null := v.Get(most) // as many as fit
	if c.stream.Native {
		most, least, null = "sampling_params.max_new_tokens", "sampling_params.min_new_tokens", false
	}
	switch {
	case limit >= 0:
	case c.stream.Native:
		limit = nativeTokens
	case !null:
		limit = completionTokens
	}
	if limit >= 0 {
		if limit <= int64(sent) {
			return nil, resume.Seam // the engine has not told that it was the last
		}
		edits = append(edits, api.Set(most, api.RawInt(limit-int64(sent))))
	}
	if v.MinTokens > 0 {
		edits = append(edits, api.Set(least, api.RawInt(max(0, v.MinTokens-int64(sent)))))
	}
	return bytes.Join(v.Segments(nil, edits), nil), ""
}

// settle asks an engine which of the tokens stand for the text that was sent, where
// that is not known because several came in one event.
func (x *exchange) settle() {
	c := x.cont
	if _, text := c.stream.Unsettled(); text == "" {
		return
	}
	ctx, cancel := context.WithTimeout(x.ctx, settleTime)
	defer cancel()
	fleet := x.r.registry.Snapshot()
	c.stream.SettleBy(func(ids []uint32) (string, error) { return x.r.tokens.Text(ctx, x.model, fleet.Model(x.model), ids) })
}
