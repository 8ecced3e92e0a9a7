package router

import (
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// settle is how long requests that wait for a rank go without a look at the fleet when
// nothing ends on one: engines' metrics change, grow stale, and workers come, without a
// word.
const settle = 50 * time.Millisecond

// enter takes a place in progress, or waits for one in turn with other tenants.
func (x *exchange) enter() error {
	g := x.r.gate
	err := x.ctx.Err()
	if err != nil || g.TryEnter() {
		return err
	}
	c, err := x.claim(x.view.EstimateTokens())
	if err != nil {
		return x.refuse("request", err)
	}
	waited, err := g.Enter(x.ctx, c)
	x.waited(waited, "limits.inflight requests were in progress")
	if err == nil || x.ctx.Err() != nil { // nobody was refused
		return err
	}
	return x.refuseAtGate(err)
}

// waited notes how a request came to its place.
func (x *exchange) waited(w admission.Waited, why string) {
	if w.For <= 0 {
		return
	}
	t := &x.d.Took
	t.Queue += w.For
	t.Ahead, t.Why = w.Ahead, why
	x.r.metrics.Stage("queue", w.For)
}

// claim is what the request is worth where requests wait: its prompt's tokens, and
// those that it may be answered with.
func (x *exchange) claim(prompt int) (admission.Claim, error) {
	c := admission.Claim{Tokens: prompt + int(max(0, x.view.MaxTokens)), Tenant: x.tenant()}
	if x.key != nil {
		c.Weight, c.Band = x.key.Weight, x.key.Priority
	}
	return c, c.Ask(x.req.Header, x.d.Settings.Routing.AllowHeaders)
}

// tenant is in whose name the request takes turns.
func (x *exchange) tenant() string {
	l, name := &x.d.Settings.Limits, ""
	if l.TenantHeader != "" {
		name = x.req.Header.Get(l.TenantHeader)
	}
	if name == "" && l.TenantField != "" && x.body != nil {
		name, _ = x.view.String(l.TenantField)
	}
	if name == "" {
		return x.owner()
	}
	return api.Clip(name)
}

// place decides. Where limits bound what ranks take, it takes the place on the chosen
// decode rank with that, and where all are at their limits it waits in line and decides
// anew whenever something may have changed.
func (x *exchange) place() error {
	r, d := x.r, &x.d
	if x.decided {
		x.decided = false
		return nil
	}
	if !d.Settings.Bounded {
		r.asker.Decide(d)
		return nil
	}
	c, err := x.claim(d.Prompt.ISL)
	if err != nil {
		return x.refuse("request", err)
	}
	place, waited, why, err := r.asker.Wait(x.ctx, r.ranks, c, d, &x.view, x.decision)
	x.reserved = place
	x.waited(waited, why)
	if err == nil || x.ctx.Err() != nil {
		return err
	}
	if why != "" {
		err = fmt.Errorf("%w; %s", err, why)
	}
	switch {
	case why != "":
		x.book.Decided()
	case d.Run.Attempt == 0: // it was turned away before it could try
		x.book.Undecided()
	}
	return x.refuseAtGate(err)
}

// giveUpPlace gives back the place that no leg has taken over.
func (x *exchange) giveUpPlace() {
	if x.reserved != nil {
		x.reserved.Release()
		x.reserved = nil
	}
}

// refuseAtGate answers a request that the gate, or the line for a rank, does not let in.
func (x *exchange) refuseAtGate(err error) error {
	return x.refuse(admission.Refusal(err, admission.Queue{Line: x.r.gate.Line()}, admission.Queue{Line: x.r.ranks, Name: x.model}))
}
