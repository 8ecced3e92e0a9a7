package serving

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/question"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// Decider is the planner of a fleet. Where limits bound what ranks take, requests wait in
// its line for a rank; waiting for the first worker of a model belongs there, too.
type Decider struct {
	Asker *question.Asker
	Fleet func() *workers.Snapshot
	// Line is where requests wait for a rank, Gate the line of those before it.
	Line Line
	Gate *admission.Line
	Legs *Legs
}

// Line is where requests wait for a rank in turn: an [admission.Line], or one under a
// clock of its own.
type Line interface {
	question.Line
	// Try is [admission.Line.Try], Wait is [admission.Line.Wait].
	Try(try func() bool) bool
	Wait(queue string) (time.Duration, bool)
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
	decode := d.Run.In.DecodePeers[d.Run.Plan.DecodeIndex]
	m := &c.made
	m.placed = placed{p, decode, &m.local}
	if d.Run.Plan.Path == route.Local {
		m.local = local{p, decode}
	} else {
		// What was refused is for the attempt right after it only, and so for the same prompt.
		m.paired = paired{p, d.Run.In.PrefillPeers[d.Run.Plan.PrefillIndex], decode, c.refused}
		m.placed.by = &m.paired
	}
	c.refused = refused{}
	return &m.placed, nil
}

// made is what a call's newest plan consists of.
type made struct {
	placed placed
	local  local
	paired paired
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
		c.Book.Refused("request")
		return err
	}
	place, waited, why, err := p.Asker.Wait(ctx, p.Line, claim, d, &c.View, c.Book.Live.ID())
	c.reserved = place
	if d.Waited(waited, why) {
		c.Book.Waited("queue", waited.For)
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
	c.Book.Refused(reason)
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
func (c *Call) noLeg() error {
	c.Book.Refused("legs")
	return &api.Error{
		Status: http.StatusServiceUnavailable, Code: api.CodeOverloaded, RetryAfter: time.Second, Err: errNoLeg,
		Message: "too many requests to workers are in progress (limits.legs); try again later",
	}
}

// placed serves a call by an engine that has a place on the decode rank of the plan: the
// permission to send, the reservation, and one of the legs in progress. They are given back
// with the answer, or where there is none.
type placed struct {
	p    *Decider
	peer workers.Peer
	by   Engine
}

// Do is [Engine.Do].
func (l *placed) Do(ctx context.Context, c *Call) (a *Answer, err error) {
	p, d := l.p, &c.Question
	g := p.Legs
	if c.Turns != nil {
		if err := c.Turns.Enter(ctx, &d.Run); err != nil {
			return nil, err
		}
		defer c.Turns.Leave()
	}
	c.begun.Store(mayBegin)
	if !g.Open.Take(1) {
		c.giveUpPlace()
		return nil, c.noLeg()
	}
	defer func() {
		if a == nil {
			g.Open.Give(1)
		}
	}()
	if !g.admit(c, route.Decode, l.peer.Worker) {
		c.giveUpPlace()
		return nil, g.fail(c, route.Decode, l.peer.Worker, attempt.Ejected, false, errEjected)
	}
	defer func() {
		if a == nil && err == nil { // a panic
			g.report(c, route.Decode, health.Canceled)
		}
	}()
	c.held = c.reserved
	if c.reserved = nil; c.held == nil {
		c.held = p.Asker.Reserve(d)
	}
	c.Book.Chosen()
	defer func() {
		if a == nil {
			c.held.Release()
		}
	}()
	return l.by.Do(ctx, c)
}

// local is a decode leg that computes the prompt, too.
type local struct {
	p    *Decider
	peer workers.Peer
}

// Do is [Engine.Do].
func (l *local) Do(ctx context.Context, c *Call) (*Answer, error) {
	c.sends()
	now := time.Now()
	l.p.Asker.Sent(&c.Question, l.peer.Worker, l.peer.Rank, now)
	a, err := l.p.Legs.decode(ctx, c, l.peer, c.edit(nil, l.peer, route.Decode), nil)
	l.p.unsent(c, err, l.peer, now)
	return a, err
}

// unsent takes back that a rank is predicted to have the prompt, if it has refused it.
func (p *Decider) unsent(c *Call, err error, to workers.Peer, sent time.Time) {
	if f, ok := errors.AsType[*attempt.Error](err); ok && f.Reason == attempt.Overloaded && f.Worker == to.Worker.State {
		p.Asker.Refused(&c.Question, to.Worker, to.Rank, sent)
	}
}
