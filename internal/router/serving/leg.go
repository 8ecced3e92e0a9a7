package serving

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/pair"
	"github.com/dynctl/dynctl/internal/router/forward/rewrite"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/stored"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// Transport sends a request to an engine: over HTTP, or in a test's own world.
type Transport interface {
	Do(ctx context.Context, leg *upstream.Leg) (Response, error)
}

// Response is what an engine answers, as [upstream.Response] does.
type Response interface {
	Begins() *upstream.Head
	Next() ([]byte, error)
	ReadAll(limit int64) ([]byte, error)
	Done() bool
	Close()
}

// HTTP is the transport of a client.
func HTTP(c *upstream.Client) Transport { return overHTTP{c} }

type overHTTP struct{ c *upstream.Client }

func (t overHTTP) Do(ctx context.Context, leg *upstream.Leg) (Response, error) {
	resp, err := t.c.Do(ctx, leg)
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// Health judges workers by how their requests end: as [health.Outliers] does, or a test.
type Health interface {
	Admit(w *workers.Worker) (a health.Admission, ok bool)
	Report(a health.Admission, out health.Outcome) health.Admission
}

// Legs are how requests are sent to workers.
type Legs struct {
	Transport Transport
	// Beside runs a prefill leg beside its decode leg; nil is on a goroutine.
	Beside pair.Runner
	// Open bounds how many are in progress.
	Open     *admission.Memory
	Ledger   *ledger.Ledger
	Outliers Health
	// Silence is how long a worker may show no sign of life until one leg of a request that
	// waits for it is given up; 0 is for ever. Budget is that of the retries for it.
	Silence time.Duration
	Budget  *attempt.Budget
	// Answers asks whether a worker gives a sign of life.
	Answers func(ctx context.Context, w *workers.Worker) bool
	// Reread reads again which models the workers serve, because one does not serve what it
	// was taken to; nil for never.
	Reread  func(ctx context.Context)
	Repeats *attempt.Repeats
	Stored  *stored.Responses
	// Panicked reports a panic of a leg that runs beside another one.
	Panicked func(c *Call, p any)
}

// maxPrefillAnswer bounds the answer of a prefill leg; it is read whole.
const maxPrefillAnswer = 32 << 20

// readUpTo reads a body until its end, or until it holds limit bytes: more says that the rest
// is still to come. The slice is the caller's.
func readUpTo(r Response, limit int) (body []byte, more bool, err error) {
	body = make([]byte, 0, max(512, min(r.Begins().ContentLength, int64(limit))))
	for len(body) < limit {
		p, err := r.Next()
		if upstream.AtEnd(err) {
			return body, false, nil
		}
		if err != nil {
			return nil, false, err
		}
		body = append(body, p...)
	}
	return body, !r.Done(), nil
}

// fail is the failure of a leg. It reports what the reason means for the worker's
// health; the policy decides what it means for the request. The caller names a reason and
// no more.
func (g *Legs) fail(c *Call, phase route.Phase, w *workers.Worker, reason attempt.Reason, sent bool, err error) *attempt.Error {
	out := reason.Means().Outcome
	g.report(c, phase, out)
	if out.Failure() || reason == attempt.Silent || reason == attempt.TooLong {
		c.Record.Failed(phase, w, reason, err)
	}
	return attempt.NewError(phase, w, reason, sent, err)
}

// permit is the permission to send a phase's request: its worker's health admits it, and it is
// one of the legs that limits.legs bounds.
type permit struct {
	admission health.Admission
	// unreported says that the admission lacks its report.
	unreported bool
	// legs has the leg that is taken; nil while none is.
	legs *Legs
}

// permit is that of a phase.
func (c *Call) permit(p route.Phase) *permit {
	if p == route.Prefill {
		return &c.permits[1]
	}
	return &c.permits[0]
}

// permit takes the permission to send a phase's request to a worker, unless the call has it
// from [FleetPlanner.Hold]. take takes a leg out of g.Open. The error is errNoLeg or errEjected.
func (g *Legs) permit(c *Call, p route.Phase, w *workers.Worker, take func(n int64) bool) error {
	m := c.permit(p)
	if m.legs != nil {
		return nil
	}
	if !take(1) {
		return errNoLeg
	}
	m.legs = g
	if w.State.Silent() {
		c.Record.Note(w.Name + " is tried although it answers no probe: no other worker is left")
	}
	if m.admission, m.unreported = g.Outliers.Admit(w); !m.unreported {
		m.giveBack()
		return errEjected
	}
	return nil
}

// mustPermit is permit for a request that fails without it. The error is what the client gets
// where limits.legs is reached, or an *attempt.Error.
func (g *Legs) mustPermit(c *Call, p route.Phase, w *workers.Worker) error {
	switch err := g.permit(c, p, w, g.Open.Take); {
	case errors.Is(err, errNoLeg):
		return c.noLeg()
	case err != nil:
		return g.fail(c, p, w, attempt.Ejected, false, err)
	}
	return nil
}

// giveBack gives back what the permission still holds.
func (m *permit) giveBack() {
	g := m.legs
	if g == nil {
		return
	}
	m.legs = nil
	defer g.Open.Give(1)
	if m.unreported {
		m.report(g, health.Canceled)
	}
}

func (m *permit) report(g *Legs, out health.Outcome) {
	m.unreported = false
	m.admission = g.Outliers.Report(m.admission, out)
}

// report records how a phase's request ended, for the health of its worker.
func (g *Legs) report(c *Call, p route.Phase, out health.Outcome) { c.permit(p).report(g, out) }

// source is the request as engines get it but for what differs from leg to leg.
func (c *Call) source() rewrite.Source {
	set := c.Routing.Settings
	s := rewrite.Source{
		Client: &c.From, Endpoint: c.Endpoint, View: &c.View, RequestedModel: c.Name, Model: c.Model, Salted: c.Salted, Hops: c.Hops,
		KeepTransferFields: set.Routing.AllowTransferFields, Proxies: set, IdleTimeout: set.Timeouts.Idle,
	}
	if c.Body != nil {
		s.Body, s.Form = c.Body.B, c.Form
	}
	return s
}

// memory is that of a phase's request; the legs of one phase follow each other.
func (c *Call) memory(p route.Phase) *rewrite.Scratch {
	if p == route.Prefill {
		return &c.scratch[1]
	}
	return &c.scratch[0]
}

// edit is the body of a leg in pieces.
func (c *Call) edit(more []api.Edit, p workers.Peer, phase route.Phase) [][]byte {
	if c.Body == nil {
		return nil
	}
	s, ids := c.source(), phase == route.Decode && c.WantIDs && p.Worker.WireEngine() == workers.VLLM
	if phase == route.Decode {
		e := p.Worker.WireEngine()
		s.Usage = c.WantUsage && (e == workers.VLLM || e == workers.SGLang)
		c.Record.Answer.UsageAdded = s.Usage
	}
	return c.memory(phase).Body(&s, p, ids, more)
}

// leg makes the HTTP call of a phase, which carries a request id.
func (g *Legs) leg(c *Call, phase route.Phase, p workers.Peer, body [][]byte, headTimeout time.Duration, id string) *upstream.Leg {
	s := c.source()
	leg := c.memory(phase).Leg(&s, p, c.Path, id, body, headTimeout)
	leg.Life = p.Worker.State.Life()
	if g.Silence > 0 {
		v := &c.vigils[0]
		if phase == route.Prefill {
			v = &c.vigils[1]
		}
		*v = vigil{g: g, c: c, phase: phase, worker: p.Worker}
		leg.Watch = v
	}
	return leg
}

// broke turns a transport failure into one of the request. The client has got
// nothing so far: of a prefill's answer nothing reaches it, and a decode's is held
// until it is whole or has its first token. So a part of it that has arrived here
// does not rule out another attempt.
func (g *Legs) broke(ctx context.Context, c *Call, phase route.Phase, w *workers.Worker, err error) error {
	var u *upstream.Failure
	if !errors.As(err, &u) {
		return g.fail(c, phase, w, attempt.Invalid, false, err)
	}
	reason := attempt.Reason(u.Kind)
	// The first byte of an answer that is not streamed comes after its last token, and the
	// others may drip.
	if u.Late && phase == route.Decode && !c.View.Stream && g.Answers(ctx, w) {
		err = fmt.Errorf("no whole answer within %s (timeouts.response), and the engine is alive: raise timeouts.response for longer answers, or have them streamed: %w", c.Routing.Settings.Timeouts.Response, err)
		return g.fail(c, phase, w, attempt.TooLong, true, err)
	}
	stale := u.Stale() && c.Routing.Run.History.MayBeStale(phase)
	if stale {
		reason = attempt.Stale
	}
	f := g.fail(c, phase, w, reason, u.Sent, err)
	// An engine that has died of the request looks the same.
	f.Alive = stale && g.Answers(ctx, w)
	return f
}

// reread has the models of the fleet read again.
func (g *Legs) reread(ctx context.Context) {
	if g.Reread != nil {
		g.Reread(ctx)
	}
}

// refused turns an answer that is not 2xx into a failure, which keeps it for
// the client in case no attempt brings a better one.
func (g *Legs) refused(ctx context.Context, c *Call, phase route.Phase, w *workers.Worker, head *upstream.Head, body []byte) error {
	reason := attempt.OfStatus(phase, head.Status, head.Header.Get("Retry-After"), body, w.APIKey != "" || c.KeyHidden)
	if head.Status/100 == 3 { // whatever the phase: the client would leave the router
		reason = attempt.Status3xx
	}
	if reason == attempt.UnknownModel {
		g.reread(ctx)
	}
	f := &upstream.Failure{Kind: upstream.Status, Addr: head.Addr, Op: "answer of", Status: head.Status}
	switch {
	case reason == attempt.Unauthorized: // the client would take it for its own key
		why := "it refuses the router's key (api_key_file)"
		if w.APIKey == "" {
			why = "it requires a key, and the router has none for it (api_key_file)"
		}
		return g.fail(c, phase, w, reason, true, fmt.Errorf("%s: %w", why, f))
	case reason == attempt.Status3xx:
		return g.fail(c, phase, w, reason, true, fmt.Errorf("it redirects, to %q: its URL must be the engine's own: %w", api.Clip(head.Header.Get("Location")), f))
	case phase == route.Decode || head.Status/100 == 4 || reason == attempt.Overloaded:
		f.Answer = head.Keep(body)
	}
	return g.fail(c, phase, w, reason, true, f)
}
