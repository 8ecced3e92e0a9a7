package serving

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/question"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// Decider is the planner of a fleet. Where limits bound what ranks take, requests wait in
// its line for a rank; waiting for the first worker of a model belongs there, too.
type Decider struct {
	Asker *question.Asker
	Fleet func() *workers.Snapshot
	// Line is where requests wait for a rank, Gate the line of those before it.
	Line, Gate *admission.Line
	Legs       *Legs
	// Queued counts a request that waited.
	Queued func(time.Duration)
	// Sends is called before the first leg of a plan is sent.
	Sends func(*Call)
}

// Plan is [Planner.Plan].
func (p *Decider) Plan(ctx context.Context, c *Call) (Engine, error) {
	d := &c.Question
	if d.Run.Attempt > 0 && !c.decided {
		p.Asker.Renew(d, p.Fleet(), &c.View)
	}
	if err := p.place(ctx, c); err != nil {
		return nil, err
	}
	c.Book.Decided()
	if d.Run.Plan.Err != nil {
		if d.Run.NoChoice().Step == attempt.Recall {
			return nil, ErrAgain
		}
		return nil, d.Run.Refusal()
	}
	d.Run.Compact()
	// For the attempt right after it only, and so for the same prompt.
	c.plan = plan{p: p, before: c.refused}
	c.refused = refused{}
	return &c.plan, nil
}

// place decides. Where limits bound what ranks take, it also takes the place on the chosen
// decode rank; where all are at their limits it waits in line and decides again whenever
// something may have changed.
func (p *Decider) place(ctx context.Context, c *Call) error {
	d := &c.Question
	if c.decided {
		c.decided = false
		return nil
	}
	if !d.Settings.Bounded {
		p.Asker.Decide(d)
		return nil
	}
	claim, err := d.Claim(c.Claim, c.From.Header, &c.View, d.Prompt.ISL)
	if err != nil {
		p.Legs.Rejected("request")
		return err
	}
	place, waited, why, err := p.Asker.Wait(ctx, p.Line, claim, d, &c.View, c.Book.Live.ID())
	c.reserved = place
	if d.Waited(waited, why) {
		p.Queued(waited.For)
	}
	if err == nil || ctx.Err() != nil {
		return err
	}
	if why != "" {
		err = fmt.Errorf("%w; %s", err, why)
	}
	switch {
	case why != "":
		c.Book.Decided()
	case d.Run.Attempt == 0: // it was turned away before it could try
		c.Book.Undecided()
	}
	reason, err := admission.Refusal(err, admission.Queue{Line: p.Gate}, admission.Queue{Line: p.Line, Name: c.Model})
	p.Legs.Rejected(reason)
	return err
}

// Hold decides on a call without waiting for anything, and takes its place on the decode
// rank: [Retried.Do] begins with that decision. It reports false, and holds nothing, where
// there is no place at once, or take does not agree.
func (p *Decider) Hold(c *Call, take func(*decide.Run) bool) bool {
	d := &c.Question
	return p.Line.Try(func() bool {
		e := p.Asker.Choose(d)
		if d.Run.Plan.Err != nil || len(e.Readmit) > 0 { // an ejected worker is no better place
			return false
		}
		if !take(&d.Run) {
			return false
		}
		c.reserved, c.decided = p.Asker.Reserve(d), true
		p.Asker.Apply(d, e)
		return true
	})
}

// Drop gives up what Hold has taken.
func (p *Decider) Drop(c *Call) { c.giveUpPlace() }

var (
	errNoLeg   = errors.New("limits.legs is reached")
	errEjected = errors.New("the worker is ejected")
	// errPanic is the error of a leg that a panic has ended.
	errPanic = errors.New("internal error of the router")
)

// noLeg refuses a request because limits.legs is reached.
func (g *Legs) noLeg() error {
	g.Rejected("legs")
	return &api.Error{
		Status: http.StatusServiceUnavailable, Code: api.CodeOverloaded, RetryAfter: time.Second, Err: errNoLeg,
		Message: "too many requests to workers are in progress (limits.legs); try again later",
	}
}

// plan serves a call as was decided.
type plan struct {
	p *Decider
	// before is the transfer of the attempt before, if its decode rank had no room.
	before refused
}

// Do is [Engine.Do].
func (l *plan) Do(ctx context.Context, c *Call) (a *Answer, err error) {
	p, d := l.p, &c.Question
	g, run := p.Legs, &d.Run.Plan
	decode := d.Run.In.DecodePeers[run.DecodeIndex]
	if c.Turns != nil {
		if err := c.Turns.Enter(ctx, &d.Run); err != nil {
			return nil, err
		}
		defer c.Turns.Leave()
	}
	c.begun.Store(mayBegin)
	if !g.Open.Take(1) {
		c.giveUpPlace()
		return nil, g.noLeg()
	}
	defer func() {
		if a == nil { // else it is given back with the answer
			g.Open.Give(1)
		}
	}()
	if !g.admit(c, selector.Decode, decode.Worker) {
		c.giveUpPlace()
		return nil, g.fail(c, selector.Decode, decode.Worker, attempt.Ejected, false, errEjected)
	}
	defer func() {
		if a == nil && err == nil { // a panic
			g.report(c, selector.Decode, health.Canceled)
		}
	}()
	held := c.reserved
	if c.reserved = nil; held == nil {
		held = p.Asker.Reserve(d)
	}
	if d.Settings.Decisions.Rule.Auto {
		g.Costs.Chose(c.Model, run, time.Now())
	}
	defer func() {
		if a == nil {
			held.Release()
		}
	}()
	if run.Path == decide.Local {
		p.Sends(c)
		now := time.Now()
		p.Asker.Sent(d, decode.Worker, decode.Rank, now)
		a, err = g.decode(ctx, c, decode, held, c.edit(nil, decode, selector.Decode), nil)
		p.unsent(c, err, decode, now)
		return a, err
	}
	return l.paired(ctx, c, decode, held)
}

// unsent takes back that a rank is predicted to have the prompt, if it has refused it.
func (p *Decider) unsent(c *Call, err error, to disagg.Peer, sent time.Time) {
	if f, ok := errors.AsType[*attempt.Error](err); ok && f.Reason == attempt.Overloaded && f.Worker == to.Worker.State {
		p.Asker.Refused(&c.Question, to.Worker, to.Rank, sent)
	}
}
