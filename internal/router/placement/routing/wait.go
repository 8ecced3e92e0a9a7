package routing

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Claim is what a request is worth where requests wait: its prompt's tokens and those that
// it may be answered with, in the name of the tenant that its header or body names. of is what it
// begins with; its headers may ask for more or less of it.
func (q *Request) Claim(of admission.Claim, h http.Header, v *api.View, prompt int) (admission.Claim, error) {
	l := &q.Settings.Limits
	name := h.Get(l.TenantHeader)
	if name == "" && l.TenantField != "" && v.Body != nil {
		name, _ = v.String(l.TenantField)
	}
	if name != "" {
		of.Tenant = api.Clip(name)
	}
	of.Tokens = prompt + int(max(0, v.MaxTokens))
	err := of.ReadHeaders(h, q.Settings.Routing.AllowHeaders)
	return of, err
}

// Waited notes how long the request waited in a queue, and reports whether it did.
func (q *Request) Waited(w admission.Waited, why string) bool {
	if w.For <= 0 {
		return false
	}
	t := &q.Took
	t.Queue += w.For
	t.Ahead, t.Why = w.Ahead, why
	return true
}

// Reserve reserves what the newest plan takes of its decode rank.
func (d *Decider) Reserve(q *Request) *ledger.Reservation {
	claim, _ := q.Run.Claims()
	return d.from.Ledger.Reserve(q.Run.In.DecodePeers[q.Run.Plan.DecodeIndex].Rank, claim)
}

// Queue is where requests wait for a rank: an [admission.Queue], or one under a
// clock of its own.
type Queue interface {
	// Enter is [admission.Queue.Enter].
	Enter(ctx context.Context, c admission.Claim, try func() (needs string, ok bool)) (admission.Waited, error)
}

// Waits reports whether the newest plan failed for what a request waits for: all ranks of a
// phase are at their limits, or, with limits.wait_for_worker, the model has no usable worker
// for it. why says so.
func (q *Request) Waits() (phase route.Phase, why string, waits bool) {
	if phase, busy := q.Run.Busy(); busy {
		return phase, q.Run.BusyWhy(phase), true
	}
	if phase, none := q.Run.Unserved(); none && q.Settings.Limits.WaitForWorker {
		return phase, fmt.Sprintf("%s had no usable %s worker", cmp.Or(q.Model, "the fleet"), phase), true
	}
	return "", "", false
}

// DecideUnlessUnserved decides a request that no limit holds back, unless it has to wait for a
// worker of its model: it reports false then, and DecideInQueue is for it.
func (d *Decider) DecideUnlessUnserved(q *Request) (decided bool) {
	e := d.Propose(q)
	if _, _, waits := q.Waits(); waits || q.Unread {
		q.Run.Retract()
		return false
	}
	d.Apply(q, e)
	return true
}

// DecideInQueue decides a request among others in the queue. With a decision it reserves
// the decode rank, nil where the plan has an error. Where the request has to wait
// ([Request.Waits]) it decides again, from the settings and the fleet of then, whenever
// something may have changed; why says what it waited for. It returns without a decision once
// the model of an unread request has a usable worker: the caller reads the request, and calls
// it again. name is the request's own, for when it has bans of its own.
func (d *Decider) DecideInQueue(ctx context.Context, queue Queue, c admission.Claim, q *Request, v *api.View, name string) (reservation *ledger.Reservation, waited admission.Waited, why string, err error) {
	c.Queue = q.Model
	if c.Patience > 0 {
		c.Patience = max(time.Millisecond, c.Patience-q.Took.Queue)
	}
	var found struct {
		reservation *ledger.Reservation
		why         string
		again       bool
	}
	waited, err = queue.Enter(ctx, c, func() (needs string, ok bool) {
		if found.again {
			q.Run.Retract()
			settings, fleet := d.from.Now()
			q.Settings = settings
			d.Renew(q, fleet, v)
		}
		e := d.Propose(q)
		phase, why, waits := q.Waits()
		// Tokenizing queries engines, and others could not try meanwhile.
		if q.Unread && (!waits || slices.ContainsFunc(q.List, decide.Serves)) {
			q.Run.Retract()
			return "", true
		}
		if !waits {
			d.Apply(q, e)
			if q.Run.Plan.Err == nil {
				found.reservation = d.Reserve(q)
			}
			return "", true
		}
		if found.again = true; found.why == "" {
			found.why = why
		}
		return q.Run.Needs(phase, name), false
	})
	return found.reservation, waited, found.why, err
}
