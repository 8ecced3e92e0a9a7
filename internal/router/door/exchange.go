package door

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/rewrite"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/serving"
)

// exchange is one client request from its first byte to its last. It admits,
// authenticates, reads and tokenizes the request, has the call answered, and copies the
// answer to the client.
type exchange struct {
	d      *Door
	req    *http.Request
	ctx    context.Context
	call   *serving.Call
	key    *access.Key // nil for a request that shows none
	spent  int         // tokens that the key has paid for this request
	record lifecycle.Record
	out    reply
	closed bool // the outcome is recorded
}

var exchanges = sync.Pool{New: func() any { return new(exchange) }}

// newExchange makes the exchange of a request that has come now.
func (d *Door) newExchange(w http.ResponseWriter, req *http.Request, now time.Time) *exchange {
	x := exchanges.Get().(*exchange)
	c := serving.New()
	c.Start, c.Record, c.Idle = now, &x.record, &x.out
	x.d, x.req, x.call = d, req, c // the rest is zero
	x.out.w, x.out.call = w, c
	x.record.To, x.record.Start, x.record.Routing = d.Stream, now, &c.Routing
	return x
}

// release gives the exchange back, with all that it holds. It must not be used then.
func (x *exchange) release() {
	x.call.Release()
	x.record.Release()
	*x = exchange{}
	exchanges.Put(x)
}

// serve answers the request. After an error the client has got nothing yet,
// unless committed is set.
func (x *exchange) serve() error {
	d := x.d
	x.record.Arrived()
	if err := d.Secure.Addresses().Refusal(x.req.RemoteAddr); err != nil {
		x.out.w.Header()["Connection"] = []string{"close"}
		return x.refuse("connections", err)
	}
	ep, err := api.LookupURL(x.req.Method, x.req.URL)
	if err != nil {
		return x.refuse("path", err)
	}
	c := x.call
	x.record.Endpoint = ep
	c.Endpoint, c.From, c.Path, c.Hops = ep, rewrite.ClientOf(x.req), x.req.URL.RequestURI(), d.Hop.After(x.req.Header)
	if d.Hop.Passed(x.req.Header) {
		if e, ok := d.Failures.Looped(x.req.RemoteAddr, x.record.Start); ok {
			d.Event(e)
		}
		return x.refuse("loop", api.Looped())
	}
	s := d.Settings.Load()
	c.Routing.Settings = s
	if keys := d.Secure.Keys(); keys != nil {
		c.KeyHidden = true
		var reason string
		if x.key, reason, err = keys.Admit(x.req.Header, s.Keys.Required, x.record.Start); err != nil {
			return x.refuse(reason, err)
		}
		if x.key != nil {
			x.record.Key, x.record.Tenant, c.Routing.Tenant = x.key.Name, x.key.Tenant, x.key.Tenant
		}
	}
	if ep.ByRouter {
		return x.answerModels()
	}
	if !s.Routing.AllowTransferFields {
		if err := api.CheckQuery(x.req.URL.RawQuery); err != nil {
			return x.refuse("request", err)
		}
	}
	if err := d.Limiter.Arrive(); err != nil {
		return x.refuseUnadmitted(err)
	}
	defer d.Limiter.Depart()
	// The body first: until it is read it is not known whether the client is
	// still there, and the time for that does not count as waiting.
	if err := x.read(); err != nil {
		return err
	}
	defer x.out.settle()
	x.out.keepAlive()
	if err := x.enter(); err != nil {
		return err
	}
	defer d.Limiter.Leave()
	if err := x.resolve(); err != nil {
		return err
	}
	x.tokenize()
	return x.respond()
}

// respond has the call answered, and copies the answer.
func (x *exchange) respond() error {
	a, err := x.d.Answers.Do(x.ctx, x.call)
	x.out.settle()
	if err != nil {
		return err
	}
	x.out.answer = a
	return x.out.close(x.out.copy())
}

// refuse answers with an error before anything was routed.
func (x *exchange) refuse(reason string, err error) error {
	x.record.Refused(reason)
	return err
}

// read takes the body in and parses it.
func (x *exchange) read() error {
	if x.call.Endpoint.Body == api.NoBody && x.req.ContentLength == 0 {
		return nil
	}
	body, err := api.ReadBody(x.req, x.call.Routing.Settings.Limits.BodyBytes, x.d.Bodies)
	if err != nil {
		reason := "body"
		switch e := api.FromError(err); e.Status {
		case http.StatusServiceUnavailable:
			reason = "body_memory"
		case http.StatusRequestEntityTooLarge:
			e.Message += " (limits.body_bytes, --max-body-bytes)"
		}
		return x.refuse(reason, err)
	}
	x.call.Body = body // what parses it may panic
	api.UnboundBody(x.out.w, x.req)
	now := time.Now()
	x.call.Routing.Took.Read = now.Sub(x.record.Start)
	switch x.call.Endpoint.Body {
	case api.NoBody: // one was sent all the same; it is ignored
		body.Release()
		x.call.Body = nil
		return nil
	case api.MultipartBody:
		x.call.View.Body = body.B
		x.call.View.Kind = x.call.Endpoint.Kind
		if x.call.Form, err = api.ReadForm(x.req.Header, body.B, x.call.Routing.Settings.Routing.AllowTransferFields); err == nil {
			x.call.Name = x.call.Form.Model
		}
	default:
		err = x.call.View.Parse(body.B, x.call.Endpoint.Kind, api.Limits{})
		x.call.Name = x.call.View.Model
	}
	x.call.Routing.Took.Parse = time.Since(now)
	x.call.WantUsage = wantsUsage(&x.call.View)
	x.record.RequestedModel, x.record.Stream = x.call.Name, x.call.View.Stream
	if err != nil {
		return x.refuse("request", err)
	}
	return nil
}

// wantsUsage reports whether the router requests the usage of a stream whose client did not.
// The client's other options of streams stay as they are: they cannot be joined with that. So
// does a body whose stream is no plain true: engines read "true" or 1 each in its own way.
func wantsUsage(v *api.View) bool {
	if !v.Stream || v.IncludeUsage || v.OtherStreamOptions || v.Kind != api.Chat && v.Kind != api.Completion {
		return false
	}
	raw, _ := v.Get("stream")
	return string(raw) == "true"
}

// enter takes a slot of the requests in progress, or waits for one in the queue.
func (x *exchange) enter() error {
	l, c := x.d.Limiter, x.call
	c.Owner, c.Claim = x.key.Owner(), x.key.Claim()
	// Also where nothing waits: a header must not be wrong only under load.
	err := c.Claim.ReadHeaders(x.req.Header, c.Routing.Settings.Routing.AllowHeaders)
	if err != nil {
		return x.refuse("request", err)
	}
	if err = x.ctx.Err(); err != nil || l.TryEnter() {
		return err
	}
	claim, err := c.Routing.Claim(c.Claim, x.req.Header, &c.View, prompt.Estimate(&c.View, x.d.Media, c.View.Model, "").ISL)
	if err != nil {
		return x.refuse("request", err)
	}
	waited, err := l.Enter(x.ctx, claim)
	if c.Routing.Waited(waited, "limits.inflight requests were in progress") {
		x.record.Waited("queue", waited.For)
	}
	if err == nil || x.ctx.Err() != nil { // the request was not refused
		return err
	}
	return x.refuseUnadmitted(err)
}

// refuseUnadmitted answers a request that the limiter does not admit.
func (x *exchange) refuseUnadmitted(err error) error {
	return x.refuse(admission.Refusal(err, admission.NamedQueue{Queue: x.d.Limiter.Queue()}, admission.NamedQueue{Queue: x.d.RankQueue, Name: x.call.Model}))
}

// resolve finds the workers that may serve the request, and what the client
// asks of the router.
func (x *exchange) resolve() error {
	s := x.call.Routing.Settings
	if err := x.d.findModel(x.ctx, x.call, x.key); err != nil {
		return x.refuse("model", err)
	}
	x.record.Model = x.call.Model
	if x.call.Form != nil && x.call.Model != x.call.Name {
		x.call.Form.SetModel(x.call.Model)
	}
	if err := x.key.AdapterRefusal(&x.call.View); err != nil {
		return x.refuse(access.ReasonKey, err)
	}
	if x.d.Secure.Keys() != nil {
		x.call.View.Withheld = access.Withheld(x.call.Endpoint.Kind, s.Routing.AllowHeaders)
	}
	if s.Keys.Salt {
		c, err := x.call, error(nil)
		if c.Salted, err = access.SaltPrompt(&c.View, c.Endpoint.Kind, x.req.URL.Path, c.Owner, c.Routing.List); err != nil {
			return x.refuse(access.ReasonKey, err)
		}
	}
	if s.Routing.AllowHeaders {
		if err := x.call.Routing.Steer(x.req.Header); err != nil {
			return x.refuse("request", err)
		}
	}
	x.call.Routing.FindSession(first(x.req.Header[s.SessionHeader]), x.req.Header, &x.call.View)
	if err := x.d.pinToResponse(x.ctx, x.call, x.key, x.req.URL.Path); err != nil {
		return x.refuse("request", err)
	}
	return nil
}

// first is the first value of a header; empty without one.
func first(values []string) string {
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

// tokenize finds ids and block names, and begins the receipt.
func (x *exchange) tokenize() {
	c := x.call
	x.d.Decider.Read(x.ctx, &c.Routing, c.Endpoint, c.Endpoint.Kind, &c.View)
	if !c.Routing.Unread {
		x.record.Tokenized(c.Routing.Prompt.Source)
	}
	x.record.Live = x.d.Receipts.Begin(x.record.Start)
	if c.Endpoint.Streamable {
		x.spend(c.Routing.Prompt.ISL) // and not at the end: many may begin before that
	}
	x.d.Budget.Request(x.record.Start)
}

// finish records the outcome of the request, once, and then sends the client the
// error if it has got nothing yet.
func (x *exchange) finish(err error) (e *api.Error) {
	var own *upstream.Answer // the engine's, which the client gets
	if err != nil {
		if e = api.FromError(err); x.ctx.Err() != nil {
			e = api.Ended(err, x.req.Context().Err() != nil, x.d.Requests.Err() != nil, x.out.committed)
		}
		if !x.out.committed {
			x.out.status = e.Status
			if e.Status != api.StatusClientClosed {
				own = engineAnswer(err)
			}
			if own != nil {
				x.out.status = own.Status
			}
		}
	}
	if !x.closed {
		x.closed = true
		x.ended(e, err)
	}
	if e == nil || x.out.committed {
		return e
	}
	if x.record.Live.ID() != "" {
		x.record.Headers(x.out.w.Header())
	}
	x.out.committed = true
	if own != nil {
		own.Send(x.out.w)
	} else {
		api.WriteError(x.out.w, x.req, e)
	}
	return e
}

// spend has the key pay for that many tokens of the request, and no more.
func (x *exchange) spend(tokens int) {
	if x.key != nil {
		x.key.Spend(tokens-x.spent, time.Now())
		x.spent = tokens
	}
}

// ended reports the outcome of the request.
func (x *exchange) ended(e *api.Error, err error) {
	d := x.d
	status := x.out.status
	if e != nil && e.Status == api.StatusClientClosed {
		status = e.Status
	}
	x.record.Ended(lifecycle.Outcome{
		Status: status, Err: e, Cause: err, Cut: e != nil && x.out.committed && status != api.StatusClientClosed, Took: time.Since(x.record.Start),
	})
	if x.key != nil {
		t := x.record.Tokens()
		x.spend(max(0, t.Prompt) + max(0, t.Completion))
	}
	if err != nil && d.Log.Enabled(x.ctx, slog.LevelDebug) {
		d.Log.Debug("request failed", "request", x.call.ID, "decision", x.record.Live.ID(), "status", status, "err", err)
	}
}

// abort ends an answer that has begun and cannot be completed: a stream gets a
// last error event, anything else is cut so that the client notices. So is the
// connection of a client that is gone: net/http would send an empty 200.
func (x *exchange) abort(e *api.Error) {
	if e.Status == api.StatusClientClosed || !x.record.Answer.Streamed && !x.out.opened() || !e.EndStream(x.out.w, x.call.Endpoint.Kind, x.out.cut) {
		panic(http.ErrAbortHandler)
	}
}
