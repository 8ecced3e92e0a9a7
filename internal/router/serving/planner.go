package serving

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/routing"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// FleetPlanner is the planner of a fleet. Where limits bound what ranks take, requests wait in
// its queue for a rank, and with limits.wait_for_worker for a worker of their model.
type FleetPlanner struct {
	Decider *routing.Decider
	Fleet   func() *workers.Snapshot
	// Queue is where requests wait for a rank, DoorQueue where they waited before.
	Queue     Queue
	DoorQueue *admission.Queue
	Legs      *Legs
}

// Queue is where requests wait for a rank: an [admission.Queue], or one under a
// clock of its own.
type Queue interface {
	routing.Queue
	// Try is [admission.Queue.Try], EstimateWait is [admission.Queue.EstimateWait].
	Try(try func() bool) bool
	EstimateWait(queue string) (time.Duration, bool)
}

// Plan is [Planner.Plan].
func (p *FleetPlanner) Plan(ctx context.Context, c *Call) (Engine, error) {
	q := &c.Routing
	if q.Run.Attempt > 0 && !c.decided {
		p.Decider.Renew(q, p.Fleet(), &c.View)
	}
	if q.Run.Attempt == 0 && !c.Rest {
		if err := q.Fits(); err != nil {
			c.Record.Undecided()
			c.Record.Refused("request")
			return nil, err
		}
	}
	if err := p.decide(ctx, c); err != nil {
		return nil, err
	}
	c.Record.Decided()
	if q.Run.Plan.Err != nil {
		if q.Run.NoChoice().Step == attempt.LiftBans {
			return nil, ErrAgain
		}
		return nil, q.Run.Refusal()
	}
	q.Run.Compact()
	decode := q.Run.In.DecodePeers[q.Run.Plan.DecodeIndex]
	m := &c.made
	m.reserving = reserving{p, decode, &m.local}
	if q.Run.Plan.Path == route.Local {
		m.local = local{p, decode}
	} else {
		// What was refused is for the attempt right after it only, and so for the same prompt.
		m.paired = paired{p, q.Run.In.PrefillPeers[q.Run.Plan.PrefillIndex], decode, c.refused}
		m.reserving.by = &m.paired
	}
	c.refused = refused{}
	return &m.reserving, nil
}

// made is what a call's newest plan consists of.
type made struct {
	reserving reserving
	local     local
	paired    paired
}

// decide decides the call. Where limits bound what ranks take, it also reserves the chosen
// decode rank; where all are at their limits, or the model has no usable worker, it waits in
// the queue and decides again whenever something may have changed.
func (p *FleetPlanner) decide(ctx context.Context, c *Call) error {
	q := &c.Routing
	if c.decided {
		c.decided = false
		return nil
	}
	limits := &q.Settings.Limits
	switch {
	case q.Settings.Bounded:
	case !limits.WaitForWorker:
		p.Decider.Decide(q)
		return nil
	case p.Decider.DecideUnlessUnserved(q):
		return nil
	}
	claim, err := q.Claim(c.Claim, c.From.Header, &c.View, q.Prompt.ISL)
	if err != nil {
		p.refused(c, "")
		c.Record.Refused("request")
		return err
	}
	var why string
	for read := true; read; {
		if limits.WaitForWorker && claim.Patience == 0 && q.Took.Queue > 0 {
			claim.Patience = limits.QueueTimeout // of all its waits together
		}
		var waited admission.Waited
		c.reserved, waited, why, err = p.Decider.DecideInQueue(ctx, p.Queue, claim, q, &c.View, c.Record.Live.ID())
		if q.Waited(waited, why) {
			c.Record.Waited("queue", waited.For)
		}
		if read = err == nil && q.Unread; read {
			p.Decider.Read(ctx, q, c.Endpoint, q.Run.Criteria.Facts.Kind, &c.View)
			c.Record.Tokenized(q.Prompt.Source)
		}
	}
	if err == nil {
		return nil
	}
	p.refused(c, why)
	if ctx.Err() != nil {
		return err
	}
	if why != "" {
		err = fmt.Errorf("%w; %s", err, why)
	}
	reason, err := admission.Refusal(err, admission.NamedQueue{Queue: p.DoorQueue}, admission.NamedQueue{Queue: p.Queue, Name: c.Model})
	c.Record.Refused(reason)
	if _, none := q.Run.Unserved(); none { // which is no overload
		e := *api.FromError(err)
		e.Status, e.Code = http.StatusServiceUnavailable, api.FromError(q.Run.Refusal()).Code
		return &e
	}
	return err
}

// refused brings a call that gets no rank into the receipt. why is what it waited for, by its
// newest decision; empty for a call that was turned away before it could try.
func (*FleetPlanner) refused(c *Call, why string) {
	switch {
	case why != "":
		c.Record.Decided()
	case c.Routing.Run.Attempt == 0:
		c.Record.Undecided()
	}
}

// Hold decides a call without waiting for anything, and takes all that its legs need: the
// reservation of the decode rank, and for each leg one of limits.legs and the permission to
// send. [Retried.Do] begins with that decision. It reports false, and holds nothing, where
// something is not free immediately, or take does not agree.
func (p *FleetPlanner) Hold(c *Call, take func(*decide.Run) bool) (held bool) {
	defer func() {
		if !held {
			c.giveBack()
		}
	}()
	q := &c.Routing
	return p.Queue.Try(func() bool {
		e := p.Decider.Propose(q)
		if q.Run.Plan.Err != nil || len(e.Readmit) > 0 { // an ejected or silent worker is no better
			return false
		}
		if !p.permitted(c) || !take(&q.Run) {
			return false
		}
		c.reserved, c.decided = p.Decider.Reserve(q), true
		p.Decider.Apply(q, e)
		return true
	})
}

// permitted takes the permissions to send the legs of a call's plan, and reports whether it has
// them all.
func (p *FleetPlanner) permitted(c *Call) bool {
	run, g := &c.Routing.Run, p.Legs
	if g.permit(c, route.Decode, run.In.DecodePeers[run.Plan.DecodeIndex].Worker, g.Open.Try) != nil {
		return false
	}
	return run.Plan.Path == route.Local || g.permit(c, route.Prefill, run.In.PrefillPeers[run.Plan.PrefillIndex].Worker, g.Open.Try) == nil
}

// Drop gives up what Hold has taken.
func (p *FleetPlanner) Drop(c *Call) { c.giveBack() }

var (
	errNoLeg   = errors.New("limits.legs is reached")
	errEjected = errors.New("the worker is ejected")
	// errPanic is the error of a leg that a panic has ended.
	errPanic = errors.New("internal error of the router")
)

// noLeg refuses a request because limits.legs is reached.
func (c *Call) noLeg() error {
	c.Record.Refused("legs")
	return &api.Error{
		Status: http.StatusServiceUnavailable, Code: api.CodeOverloaded, RetryAfter: time.Second, Err: errNoLeg,
		Message: "too many requests to workers are in progress (limits.legs); try again later",
	}
}

// reserving serves a call by an engine, and holds what it needs on the plan's decode rank: the
// permission to send, and the reservation. They are given back with the answer, or where there
// is none.
type reserving struct {
	p    *FleetPlanner
	peer workers.Peer
	by   Engine
}

// Do is [Engine.Do].
func (l *reserving) Do(ctx context.Context, c *Call) (a *Answer, err error) {
	p, q := l.p, &c.Routing
	defer func() {
		if a == nil {
			c.giveBack()
		}
	}()
	if c.Pacer != nil {
		if err := c.Pacer.Enter(ctx, &q.Run); err != nil {
			return nil, err
		}
		defer c.Pacer.Leave()
	}
	c.begun.Store(mayBegin)
	if err := p.Legs.mustPermit(c, route.Decode, l.peer.Worker); err != nil {
		return nil, err
	}
	if c.reserved == nil {
		c.reserved = p.Decider.Reserve(q)
	}
	c.Record.Chosen()
	return l.by.Do(ctx, c)
}

// local is a decode leg that computes the prompt, too.
type local struct {
	p    *FleetPlanner
	peer workers.Peer
}

// Do is [Engine.Do].
func (l *local) Do(ctx context.Context, c *Call) (*Answer, error) {
	c.sends()
	now := time.Now()
	l.p.Decider.Sent(&c.Routing, l.peer.Worker, l.peer.Rank, now)
	a, err := l.p.Legs.decode(ctx, c, l.peer, c.edit(nil, l.peer, route.Decode), nil, now)
	l.p.unsent(c, err, l.peer, now)
	return a, err
}

// unsent takes back that a rank is predicted to have the prompt, if it has refused it.
func (p *FleetPlanner) unsent(c *Call, err error, to workers.Peer, sent time.Time) {
	if f, ok := errors.AsType[*attempt.Error](err); ok && f.Reason == attempt.Overloaded && f.Worker == to.Worker.State {
		p.Decider.Refused(&c.Routing, to.Worker, to.Rank, sent)
	}
}
