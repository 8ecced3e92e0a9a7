package router

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/rewrite"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/account"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/outcome"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// maxPrefillAnswer bounds the answer of a prefill leg; it is read whole.
const maxPrefillAnswer = 32 << 20

// fail is the failure of a leg. It reports what the reason means for the worker's
// health; the policy decides what it means for the request. The caller names a reason and
// no more.
func (x *exchange) fail(phase selector.Phase, w *workers.Worker, reason attempt.Reason, sent bool, err error) *attempt.Error {
	out := reason.Means().Outcome
	x.report(phase, out)
	if out.Failure() {
		x.book.Failed(phase, w, reason, err)
	}
	return attempt.NewError(phase, w, reason, sent, err)
}

// admission is the permission to send a phase's request.
func (x *exchange) admission(p selector.Phase) *health.Admission {
	if p == selector.Prefill {
		return &x.admitted[1]
	}
	return &x.admitted[0]
}

// admit reports whether a phase's request may go to a worker.
func (x *exchange) admit(p selector.Phase, w *workers.Worker) (ok bool) {
	*x.admission(p), ok = x.r.outliers.Admit(w)
	return ok
}

// report records how a phase's request ended, for the health of its worker.
func (x *exchange) report(p selector.Phase, out health.Outcome) {
	a := x.admission(p)
	*a = x.r.outliers.Report(*a, out)
}

// source is the request as engines get it but for what differs from leg to leg.
func (x *exchange) source() rewrite.Source {
	s := rewrite.Source{Request: x.req, Endpoint: x.ep, View: &x.view, Settings: x.d.Settings, Asked: x.asked, Model: x.model, Salted: x.salted, Hops: x.r.hop.After(x.req.Header)}
	if x.body != nil {
		s.Body, s.Form = x.body.B, x.form
	}
	return s
}

// edit is the body of a leg in pieces.
func (x *exchange) edit(more []api.Edit, p disagg.Peer, phase selector.Phase) [][]byte {
	if x.body == nil {
		return nil
	}
	s, ids := x.source(), phase == selector.Decode && x.cont != nil && x.cont.Asks(p.Worker.WireEngine())
	return x.scratch(phase).Body(&s, p, ids, more)
}

// leg makes the HTTP call of a phase, which carries a request id.
func (x *exchange) leg(phase selector.Phase, p disagg.Peer, body [][]byte, headTimeout time.Duration, id string) *upstream.Leg {
	path := x.req.URL.RequestURI()
	if x.cont != nil {
		path = x.cont.Path(path)
	}
	s := x.source()
	return x.scratch(phase).Leg(&s, p, path, id, body, headTimeout)
}

// legTook passes on what a leg of the newest plan took, where the threshold is auto.
func (x *exchange) legTook(phase selector.Phase, sent, first time.Time) {
	if x.d.Settings.Decisions.Rule.Auto {
		x.r.costs.Took(&x.measured, &x.d.Run.Plan, outcome.Leg{Model: x.model, Decision: x.decision, Phase: phase, Sent: sent, First: first})
	}
}

// prefillLeg runs the prefill and judges its answer. The error is an *attempt.Error,
// or an answer that the client shall get (4xx).
func (x *exchange) prefillLeg(ctx context.Context, t *disagg.Transfer, p disagg.Peer, claim ledger.Claim) (err error) {
	r, s := x.r, x.d.Settings
	if !r.legs.Take(1) {
		x.report(selector.Prefill, health.Canceled)
		return x.noLeg()
	}
	defer r.legs.Give(1)
	held := r.ledger.Reserve(p.Rank, claim)
	defer held.Release()
	leg := x.leg(selector.Prefill, p, x.edit(t.PrefillEdits(), p, selector.Prefill), s.Timeouts.Prefill, t.RequestID())
	x.measured.PrefillBegins()
	record := x.book.BeginLeg(selector.Prefill, p, leg)
	defer func() { x.endPrefill(record, err) }()

	resp, err := r.client.Do(ctx, leg)
	if err != nil {
		return x.legFailed(selector.Prefill, p.Worker, err)
	}
	defer resp.Close()
	record.Head(resp.Status)
	body, err := resp.ReadAll(maxPrefillAnswer)
	if err != nil {
		return x.legFailed(selector.Prefill, p.Worker, err)
	}
	if resp.Status/100 != 2 {
		return x.legRefused(selector.Prefill, p.Worker, resp, body)
	}
	err = t.CheckPrefill(body)
	facts := t.Facts()
	record.Facts(facts)
	x.book.Prefilled(p.Worker, &facts, err)
	reason := attempt.BadParams
	switch {
	case err == nil:
		x.report(selector.Prefill, health.Success)
		return nil
	case errors.Is(err, disagg.ErrEnded):
		reason = attempt.Ended
	case errors.Is(err, disagg.ErrRestarted):
		reason = attempt.Restarted
	case errors.Is(err, disagg.ErrMissingParams):
		reason = attempt.MissingParams
	}
	if reason == attempt.Ended || reason == attempt.Restarted {
		x.endPrefill(record, nil) // a good answer
	}
	return x.fail(selector.Prefill, p.Worker, reason, true, err)
}

// endPrefill ends the account of a prefill leg.
func (x *exchange) endPrefill(record *account.Leg, err error) {
	if now := time.Now(); record.End(err, now) && err == nil {
		x.legTook(selector.Prefill, record.Start, now)
	}
}

// legFailed turns a transport failure into one of the request. The client has got
// nothing so far: of a prefill's answer nothing reaches it, and a decode's is held
// until it is whole or has its first token. So a part of it that has arrived here
// does not rule out another attempt.
func (x *exchange) legFailed(phase selector.Phase, w *workers.Worker, err error) error {
	var u *upstream.Failure
	if !errors.As(err, &u) {
		return x.fail(phase, w, attempt.Invalid, false, err)
	}
	reason := attempt.Reason(u.Kind)
	stale := u.Stale() && x.d.Run.History.MayBeStale(phase)
	if stale {
		reason = attempt.Stale
	}
	f := x.fail(phase, w, reason, u.Sent, err)
	// An engine that has died of the request looks the same.
	f.Alive = stale && x.r.monitor.Answers(x.ctx, w)
	return f
}

// legRefused turns an answer that is not 2xx into a failure, which keeps it for
// the client in case no attempt brings a better one.
func (x *exchange) legRefused(phase selector.Phase, w *workers.Worker, resp *upstream.Response, body []byte) error {
	reason := attempt.OfStatus(phase, resp.Status, resp.Header.Get("Retry-After"), body, w.APIKey != "")
	f := &upstream.Failure{Kind: upstream.Status, Addr: resp.Addr(), Op: "answer of", Status: resp.Status}
	switch {
	case reason == attempt.Unauthorized: // the client would take it for its own key
		return x.fail(phase, w, reason, true, fmt.Errorf("it refuses the router's key (api_key_file): %w", f))
	case phase == selector.Decode || resp.Status/100 == 4 || reason == attempt.Overloaded:
		f.Answer = resp.Keep(body)
	}
	return x.fail(phase, w, reason, true, f)
}

// engineAnswer is the engine's own answer to a request that ended with an error; nil
// where the client gets the router's.
func engineAnswer(err error) *upstream.Answer {
	if f, ok := errors.AsType[*upstream.Failure](err); ok {
		return f.Answer
	}
	return nil
}
