package control

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/wait"
)

// Drain is the drain of one router, which may not have begun. It is safe for concurrent use.
type Drain struct {
	limiter *admission.Limiter
	terms   func() (leave, drain time.Duration)
	event   func(eventlog.Event)
	begun   chan struct{}
	plan    atomic.Pointer[plan]
}

// plan is when a drain began, until when new requests are still served, and when it ends
// at the latest.
type plan struct{ since, closes, until time.Time }

// NewDrain is a drain of the requests of a limiter. The terms are read when it begins: how
// long new requests are still served, and how long running ones have from then on.
func NewDrain(limiter *admission.Limiter, terms func() (leave, drain time.Duration), event func(eventlog.Event)) *Drain {
	return &Drain{limiter: limiter, terms: terms, event: event, begun: make(chan struct{})}
}

// Begin begins the drain with a time for the running requests, or that of the terms if it is
// 0. One that has begun continues unchanged.
func (d *Drain) Begin(timeout time.Duration) { d.begin(timeout) }

func (d *Drain) begin(timeout time.Duration) *plan {
	leave, drain := d.terms()
	if timeout <= 0 {
		timeout = drain
	}
	now := time.Now()
	closes := now.Add(leave)
	if d.plan.CompareAndSwap(nil, &plan{now, closes, closes.Add(timeout)}) {
		newOnes := "new ones are refused"
		if leave > 0 {
			newOnes = fmt.Sprintf("new ones are served for %s before that, each as the last of its connection", leave)
		} else {
			d.limiter.Close()
		}
		d.event(eventlog.Event{Kind: "router_draining", Text: fmt.Sprintf("the router drains: %d request(s) in progress may finish within %s, %s", d.limiter.Present(), timeout, newOnes)})
		close(d.begun)
	}
	return d.plan.Load()
}

// Begun is closed when the drain begins.
func (d *Drain) Begun() <-chan struct{} { return d.begun }

// On reports whether the drain has begun: the router is not ready any more, and each
// answer ends its connection.
func (d *Drain) On() bool { return d.plan.Load() != nil }

// State is the state of the drain, nil before it begins.
func (d *Drain) State() *admin.DrainState {
	p := d.plan.Load()
	if p == nil {
		return nil
	}
	return &admin.DrainState{Since: p.since, Closes: p.closes, Until: p.until, Inflight: d.limiter.Present()}
}

// Leave begins the drain and waits until new requests are to be refused, or ctx ends:
// clients with connections and load balancers learn meanwhile that the router leaves.
func (d *Drain) Leave(ctx context.Context) {
	if rest := time.Until(d.begin(0).closes); rest > 0 {
		wait.For(ctx, rest)
	}
}

// End takes no new requests and waits until the running ones have ended, the time for that
// is up, or ctx ends. It may be called more than once; the first to begin sets the time.
func (d *Drain) End(ctx context.Context) error {
	ctx, cancel := context.WithDeadline(ctx, d.begin(0).until)
	defer cancel()
	d.limiter.Close()
	select {
	case <-d.limiter.Idle():
	case <-ctx.Done():
		if n := d.limiter.Present(); n > 0 {
			return fmt.Errorf("%d request(s) still running when the drain ended: %w", n, ctx.Err())
		}
	}
	return nil
}
