package question

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
func (d *Question) Claim(of admission.Claim, h http.Header, v *api.View, prompt int) (admission.Claim, error) {
	l := &d.Settings.Limits
	name := h.Get(l.TenantHeader)
	if name == "" && l.TenantField != "" && v.Body != nil {
		name, _ = v.String(l.TenantField)
	}
	if name != "" {
		of.Tenant = api.Clip(name)
	}
	of.Tokens = prompt + int(max(0, v.MaxTokens))
	err := of.Ask(h, d.Settings.Routing.AllowHeaders)
	return of, err
}

// Waited notes how the request came to a place, and reports whether it waited for it.
func (d *Question) Waited(w admission.Waited, why string) bool {
	if w.For <= 0 {
		return false
	}
	t := &d.Took
	t.Queue += w.For
	t.Ahead, t.Why = w.Ahead, why
	return true
}

// Reserve takes the place of the newest plan on its decode rank.
func (a *Asker) Reserve(d *Question) *ledger.Reservation {
	claim, _ := d.Run.Claims()
	return a.from.Ledger.Reserve(d.Run.In.DecodePeers[d.Run.Plan.DecodeIndex].Rank, claim)
}

// Line is where requests wait for a rank in turn: an [admission.Line], or one under a
// clock of its own.
type Line interface {
	// Enter is [admission.Line.Enter].
	Enter(ctx context.Context, c admission.Claim, try func() (needs string, ok bool)) (admission.Waited, error)
}

// Wait decides in line with others. With a decision it takes the place on the decode rank,
// nil where the plan has an error. Where all ranks are at their limits it waits, and
// decides again, from the settings and the fleet of then, whenever something may have
// changed; why says what it waited for. name is the request's own, for when its tries set
// it apart from all others.
func (a *Asker) Wait(ctx context.Context, line Line, c admission.Claim, d *Question, v *api.View, name string) (place *ledger.Reservation, waited admission.Waited, why string, err error) {
	c.Queue = d.Model
	if c.Patience > 0 {
		c.Patience = max(time.Millisecond, c.Patience-d.Took.Queue)
	}
	var found struct {
		place *ledger.Reservation
		why   string
		again bool
	}
	waited, err = line.Enter(ctx, c, func() (needs string, ok bool) {
		if found.again {
			d.Run.Again()
			settings, fleet := a.from.Now()
			d.Settings = settings
			a.Renew(d, fleet, v)
		}
		e := a.Choose(d)
		phase, busy := d.Run.Busy()
		if !busy {
			a.Apply(d, e)
			if d.Run.Plan.Err == nil {
				found.place = a.Reserve(d)
			}
			return "", true
		}
		if found.again = true; found.why == "" {
			found.why = d.Run.BusyWhy(phase)
		}
		return d.Run.Needs(phase, name), false
	})
	return found.place, waited, found.why, err
}
