package router

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// lookInterval is how often requests that wait for a rank look at the fleet while no request
// ends: that an engine's metrics change or grow stale, or a worker comes, wakes none of them.
const lookInterval = 50 * time.Millisecond

// enter takes a place in progress, or waits for one in turn with other tenants.
func (x *exchange) enter() error {
	g := x.r.gate
	err := x.ctx.Err()
	if err != nil || g.TryEnter() {
		return err
	}
	c, err := x.d.Claim(x.key.Claim(), x.req.Header, &x.view, x.view.EstimateTokens())
	if err != nil {
		return x.refuse("request", err)
	}
	waited, err := g.Enter(x.ctx, c)
	x.waited(waited, "limits.inflight requests were in progress")
	if err == nil || x.ctx.Err() != nil { // the request was not refused
		return err
	}
	return x.refuseAtGate(err)
}

// waited notes how a request came to its place.
func (x *exchange) waited(w admission.Waited, why string) {
	if x.d.Waited(w, why) {
		x.r.metrics.Stage("queue", w.For)
	}
}

// place decides. Where limits bound what ranks take, it also takes the place on the chosen
// decode rank; where all are at their limits it waits in line and decides again whenever
// something may have changed.
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
	c, err := d.Claim(x.key.Claim(), x.req.Header, &x.view, d.Prompt.ISL)
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

var errNoLeg = errors.New("limits.legs is reached")

// noLeg refuses a request because limits.legs is reached.
func (x *exchange) noLeg() error {
	return x.refuse("legs", &api.Error{
		Status: http.StatusServiceUnavailable, Code: api.CodeOverloaded, RetryAfter: time.Second, Err: errNoLeg,
		Message: "too many requests to workers are in progress (limits.legs); try again later",
	})
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
