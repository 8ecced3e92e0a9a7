package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/resume"
	"github.com/dynctl/dynctl/internal/router/forward/rewrite"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/account"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/outcome"
	"github.com/dynctl/dynctl/internal/router/placement/question"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/models"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// exchange is one client request from its first byte to its last.
type exchange struct {
	perRequest
	view api.View
	d    question.Question
	// legs is the memory of the requests to engines, decode and prefill.
	legs [2]rewrite.Scratch
}

// perRequest is what is reset before an exchange serves another request.
type perRequest struct {
	r     *Router
	w     http.ResponseWriter
	req   *http.Request
	ctx   context.Context
	start time.Time

	id  string      // X-Request-Id
	key *access.Key // nil for a request that shows none
	// salted says that the view's salt is the router's.
	salted bool
	ep     *api.Endpoint
	body   *api.Body
	form   *api.Form // nil unless the body is one
	// asked is the model in the client's words, model in the engines'.
	asked, model string

	decision string // its id
	span     *telemetry.Span
	// book is the account of the request from its receipt on.
	book account.Request

	// What the client got.
	committed bool // the head of the answer is sent
	closed    bool // the outcome is recorded
	// begun is set with the first byte from the decode leg that counts; it is
	// read by the prefill leg that runs beside it.
	begun atomic.Bool
	// measured is what the request adds to the model of costs, with a threshold that is auto.
	measured outcome.Request
	status   int
	writeBy  api.AnswerDeadline
	path     string // "none" until a decision is made
	// cut says that the stream broke off after the client had got the beginning of an
	// event.
	cut bool
	// retry is the attempt that may follow a failed one, until a leg of it is sent.
	retry retry
	// aliveBy is by when the decode engine must have shown a sign of life: after that the
	// prefill engine may free its KV.
	aliveBy time.Time
	flow    flow
	// refused is the newest attempt's transfer, if its decode rank had no room: another
	// decode rank may take the KV.
	refused refused
	// reserved is the place that the decision was given on its decode rank, until the
	// decode leg takes it over.
	reserved *ledger.Reservation
	// decided says that the next attempt's decision is made, and its place taken.
	decided bool
	// cont is for the case that the engine dies in the middle of the stream; nil unless
	// that is asked for (continue.mode).
	cont *continuation
	// admitted are the permissions to send the legs, decode and prefill.
	admitted [2]health.Admission
}

// ServeHTTP is the data plane. Probes are answered here, too, because load
// balancers ask the port that they send to.
func (r *Router) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	limits := &r.settings.Load().Timeouts
	api.BoundBody(w, req, limits.Body)
	// A proxy that believed a length beside a chunked body would take what follows for
	// a request: nothing may follow. And clients must not keep connections to a router
	// that is leaving.
	if len(req.TransferEncoding) > 0 || r.drain.On() {
		w.Header()["Connection"] = []string{"close"}
	}
	switch req.URL.Path {
	case "/health", "/healthz", "/readyz":
		new(api.AnswerDeadline).Extend(w, limits.Write)
		r.probe(w, req)
		return
	}
	x := r.acquire(w, req)
	// Requests end with their client, or when the router stops waiting.
	end := func() {}
	if x.ctx = req.Context(); x.ctx.Value(routerKey{}) != r {
		ctx, cancel := context.WithCancel(x.ctx)
		stop := context.AfterFunc(r.requests, cancel)
		x.ctx, end = ctx, func() { stop(); cancel() }
	}
	x.id = api.RequestID(req.Header)
	w.Header()["X-Request-Id"] = []string{x.id}
	if r.tracer != nil {
		x.span = r.tracer.Server(x.ctx, req.Header, req.Method+" "+req.URL.Path)
		x.span.String("dynctl.request_id", x.id)
	}
	defer func() {
		p := recover()
		x.dropFlow()
		end()
		if cut, _ := p.(error); p != nil && !errors.Is(cut, http.ErrAbortHandler) {
			r.panicked(x, p)
			answered := x.committed
			_ = x.finish(fmt.Errorf("panic: %v", p))
			if p = nil; answered {
				p = http.ErrAbortHandler
			}
		}
		x.release()
		if p != nil {
			panic(http.ErrAbortHandler)
		}
	}()
	err := x.serve()
	x.writeBy.Extend(w, limits.Write) // what is not written yet
	begun := x.committed
	if e := x.finish(err); e != nil && (begun || e.Status == api.StatusClientClosed) {
		x.abort(e)
	}
}

// serve answers the request. After an error the client has got nothing yet,
// unless committed is set.
func (x *exchange) serve() error {
	r := x.r
	r.traffic.Requests.Add(1)
	ep, err := api.Lookup(x.req.Method, x.req.URL.Path)
	if err != nil {
		return x.refuse("path", err)
	}
	x.ep = ep
	if r.hop.Passed(x.req.Header) {
		if e, ok := r.failures.Looped(x.req.RemoteAddr, x.start); ok {
			r.event(e)
		}
		return x.refuse("loop", api.Looped())
	}
	x.d.Settings = r.settings.Load()
	if keys := r.secure.Keys(); keys != nil {
		var reason string
		if x.key, reason, err = keys.Admit(x.req.Header, x.d.Settings.Keys.Required, x.start); err != nil {
			return x.refuse(reason, err)
		}
	}
	if ep.Local {
		return x.local()
	}
	if !x.d.Settings.Routing.AllowTransferFields {
		if err := api.CheckQuery(x.req.URL.RawQuery); err != nil {
			return x.refuse("request", err)
		}
	}
	if err := r.gate.Arrive(); err != nil {
		return x.refuseAtGate(err)
	}
	defer r.gate.Depart()
	// The body first: until it is read it is not known whether the client is
	// still there, and the time for that does not count as waiting.
	if err := x.read(); err != nil {
		return err
	}
	if err := x.enter(); err != nil {
		return err
	}
	defer r.gate.Leave()
	if err := x.resolve(); err != nil {
		return err
	}
	x.tokenize()
	if x.d.Settings.Decisions.Continuations > 0 {
		x.mayContinue()
	}
	err = x.respond()
	for x.cont != nil && x.goesOn(&err) {
		err = x.respond()
	}
	return err
}

// respond carries the request through the fleet once, to the end of an answer or to
// that of a leg in the middle of a stream.
func (x *exchange) respond() error {
	if err := x.dispatch(); err != nil || x.flow.resp == nil {
		return err
	}
	defer x.r.legs.Give(1)
	defer x.flow.held.Release()
	return x.forward()
}

// panicked reports a panic; it is called where the stack still shows it.
func (r *Router) panicked(x *exchange, p any) {
	if e, ok := r.failures.Panicked(fmt.Sprintf("a request ended with an internal error: %v", p), time.Now()); ok {
		e.Request = x.decision
		r.event(e)
	}
	r.log.Error("panic", "request", x.id, "panic", p, "stack", string(debug.Stack()))
}

// refuse answers with an error before anything was routed.
func (x *exchange) refuse(reason string, err error) error {
	x.r.metrics.Rejected(reason)
	return err
}

// read takes the body in and parses it.
func (x *exchange) read() error {
	if x.ep.Body == api.NoBody && x.req.ContentLength == 0 {
		return nil
	}
	body, err := api.ReadBody(x.req, x.d.Settings.Limits.BodyBytes, x.r.bodies)
	if err != nil {
		reason := "body"
		if api.FromError(err).Status == http.StatusServiceUnavailable {
			reason = "body_memory"
		}
		return x.refuse(reason, err)
	}
	x.body = body // what parses it may panic
	api.UnboundBody(x.w, x.req)
	now := time.Now()
	x.d.Took.Read = now.Sub(x.start)
	switch x.ep.Body {
	case api.NoBody: // one was sent all the same; it is ignored
		body.Release()
		x.body = nil
		return nil
	case api.MultipartBody:
		x.view.Body = body.B
		x.view.Kind = x.ep.Kind
		if x.form, err = api.ReadForm(x.req.Header, body.B, x.d.Settings.Routing.AllowTransferFields); err == nil {
			x.asked = x.form.Model
		}
	default:
		err = x.view.Parse(body.B, x.ep.Kind, api.Limits{})
		x.asked = x.view.Model
	}
	x.d.Took.Parse = time.Since(now)
	if err != nil {
		return x.refuse("request", err)
	}
	return nil
}

// resolve finds the workers that may serve the request, and what the client
// asks of the router.
func (x *exchange) resolve() error {
	s := x.d.Settings
	if err := x.findModel(); err != nil {
		return x.refuse("model", err)
	}
	if x.form != nil && x.model != x.asked {
		x.form.SetModel(x.model)
	}
	if s.Keys.Salt {
		if err := x.saltTenant(); err != nil {
			return err
		}
	}
	if s.Routing.AllowHeaders {
		if err := x.d.Steer(x.req.Header); err != nil {
			return x.refuse("request", err)
		}
	}
	x.d.FindSession(x.req.Header.Get(s.Routing.SessionHeader), &x.view)
	if err := x.follows(); err != nil {
		return x.refuse("request", err)
	}
	return nil
}

// findModel finds the model and its workers, and the adapter that the prompt's
// blocks belong to. Endpoints without a body have no model.
func (x *exchange) findModel() error {
	d := &x.d
	fleet := x.r.registry.Snapshot()
	var of workers.Resolved
	if x.ep.Body != api.NoBody {
		of = fleet.Resolve(x.asked)
		if e := models.Unresolved(x.asked, of, fleet, x.r.starting(), x.mayHave); e != nil {
			return e
		}
	}
	x.model = of.Model
	d.Model, d.Named, d.ModelNote = x.model, x.view.LoRA, models.Note(x.asked, of)
	if err := x.mayAsk(cmp.Or(of.Alias, x.model), x.model); err != nil {
		return err
	}
	if d.Look(fleet); len(d.List) > 0 {
		return nil
	}
	if !of.Default {
		return x.noModel(x.asked)
	}
	e := x.noModel(of.Model)
	e.Message = "routing.default_model: " + e.Message
	return e
}

// introduction is for how long after the start a model that no worker serves may be that
// of a worker which has not answered yet.
const introduction = 10 * time.Second

// starting reports whether workers may not have answered yet because the router has just
// begun.
func (r *Router) starting() bool { return time.Since(r.started) < introduction }

// noModel is the error for a model that no worker serves.
func (x *exchange) noModel(name string) *api.Error {
	return models.NotServed(name, x.d.Fleet, x.r.starting())
}

// follows sends what belongs to a stored response to the worker that has it.
func (x *exchange) follows() error {
	id, param := "", ""
	switch x.ep.Kind {
	case api.ResponseObject:
		id, _, _ = strings.Cut(strings.TrimPrefix(x.req.URL.Path, "/v1/responses/"), "/")
	case api.Responses:
		id, param = x.view.PreviousResponseID, "previous_response_id"
	}
	return x.d.Follow(id, param, x.r.stored, x.key.Owner(), x.r.secure.Keys() == nil)
}

// mayHave reports whether the request's key is for a model.
func (x *exchange) mayHave(model string) bool { return x.key == nil || x.key.May(model) }

// mayAsk refuses a model, by its names, that the request's key is not for.
func (x *exchange) mayAsk(names ...string) error {
	if x.key == nil || x.ep.Kind == api.ResponseObject {
		return nil
	}
	return x.key.Refusal(x.asked, names...)
}

// saltTenant keeps the request's blocks apart from those of other tenants.
func (x *exchange) saltTenant() (err error) {
	if x.salted, err = access.SaltPrompt(&x.view, x.ep.Kind, x.req.URL.Path, x.key.Owner(), x.d.List); err != nil {
		return x.refuse(access.ReasonKey, err)
	}
	return nil
}

// tokenize finds ids and block names, and begins the receipt.
func (x *exchange) tokenize() {
	x.findPrompt()
	x.book = account.Request{
		To: &x.r.sinks, Live: x.r.receipts.Begin(x.start), Span: x.span, Question: &x.d,
		ID: x.id, Endpoint: x.ep, Model: x.model, Stream: x.view.Stream, Start: x.start,
	}
	if x.key != nil {
		x.book.Key, x.book.Tenant = x.key.Name, x.key.Tenant
	}
	x.decision = x.book.Live.ID()
	x.r.budget.Request(x.start)
}

// findPrompt finds what a decision needs to know of the request.
func (x *exchange) findPrompt() {
	kind := x.ep.Kind
	if x.begun.Load() { // what is asked now is the rest of a stream
		kind = resume.RestKind(x.ep.Kind)
	}
	x.r.asker.Read(x.ctx, &x.d, x.ep, kind, &x.view)
	if !x.d.Dry {
		x.r.metrics.Tokenized(string(x.d.Prompt.Source))
	}
}

// finish records the outcome of the request, once, and then sends the client the
// error if it has got nothing yet.
func (x *exchange) finish(err error) (e *api.Error) {
	var own *upstream.Answer // the engine's, which the client gets
	if err != nil {
		if e = api.FromError(err); x.ctx.Err() != nil {
			e = api.Ended(err, x.req.Context().Err() != nil, x.r.requests.Err() != nil, x.committed)
		}
		if !x.committed {
			x.status = e.Status
			if e.Status != api.StatusClientClosed {
				own = engineAnswer(err)
			}
			if own != nil {
				x.status = own.Status
			}
		}
	}
	x.giveUpPlace()
	x.dropMove()
	if !x.closed {
		x.closed = true
		x.close(e, err)
	}
	if e == nil || x.committed {
		return e
	}
	if x.decision != "" {
		x.book.Headers(x.w.Header())
	}
	x.committed = true
	if own != nil {
		own.Send(x.w)
	} else {
		api.WriteError(x.w, x.req, e)
	}
	return e
}

// close writes what came of the request into metrics, spans and the receipt.
func (x *exchange) close(e *api.Error, err error) {
	r := x.r
	took := time.Since(x.start)
	status := x.status
	if e != nil && e.Status == api.StatusClientClosed {
		status = e.Status
	}
	gone, cut := status == api.StatusClientClosed, e != nil && x.committed
	switch {
	case gone:
		r.metrics.Abort("client_gone")
	case cut:
		r.metrics.Abort("upstream_broke")
	}
	r.traffic.Ended(status, cut, gone, took)
	endpoint := "unknown"
	if x.ep != nil {
		endpoint = x.ep.Kind.String()
	}
	model := x.model
	if model != "" && len(x.d.List) == 0 {
		model = "unknown"
	}
	r.metrics.Request(endpoint, model, x.path, strconv.Itoa(status), took)
	if x.span != nil {
		x.span.String("dynctl.decision", x.decision)
		x.span.String("dynctl.path", x.path)
		x.span.Int("http.response.status_code", status)
		x.span.End(err)
	}
	if x.decision != "" {
		x.book.Finish(account.Outcome{Status: status, Err: e, Path: x.path, Took: took})
		if e == nil {
			if a := &x.book.Answer; a.Gaps.Count() > 0 {
				x.measured.Ended(a.FirstToken.Sub(x.start))
			}
		}
	}
	if err != nil && r.log.Enabled(x.ctx, slog.LevelDebug) {
		r.log.Debug("request failed", "request", x.id, "decision", x.decision, "status", status, "err", err)
	}
}

// abort ends an answer that has begun and cannot be completed: a stream gets a
// last error event, anything else is cut so that the client notices. So is the
// connection of a client that is gone: net/http would send an empty 200.
func (x *exchange) abort(e *api.Error) {
	if e.Status == api.StatusClientClosed || !x.book.Answer.Streamed || !e.EndStream(x.w, x.ep.Kind, x.cut) {
		panic(http.ErrAbortHandler)
	}
}
