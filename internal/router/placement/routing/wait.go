package routing

import (
	"context"
	"net/http"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// Claim is what a request is worth where requests wait: its prompt's tokens and those that
// it may be answered with, in the name of whom its header or body names. of is what it
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

// DecideInQueue decides a request among others in the queue. With a decision it reserves
// the decode rank, nil where the plan has an error. Where all ranks are at their limits it waits, and
// decides again, from the settings and the fleet of then, whenever something may have
// changed; why says what it waited for. name is the request's own, for when it
// has bans of its own.
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
		phase, busy := q.Run.Busy()
		if !busy {
			d.Apply(q, e)
			if q.Run.Plan.Err == nil {
				found.reservation = d.Reserve(q)
			}
			return "", true
		}
		if found.again = true; found.why == "" {
			found.why = q.Run.BusyWhy(phase)
		}
		return q.Run.Needs(phase, name), false
	})
	return found.reservation, waited, found.why, err
}
