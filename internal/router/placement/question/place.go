package question

import (
	"context"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// Reserve takes the place of the newest plan on its decode rank.
func (a *Asker) Reserve(d *Question) *ledger.Reservation {
	claim, _ := d.Run.Claims()
	return a.from.Ledger.Reserve(d.Run.In.DecodePeers[d.Run.Plan.DecodeIndex].Rank, claim)
}

// Wait decides in line with others. With a decision it takes the place on the decode rank,
// nil where the plan has an error. Where all ranks are at their limits it waits, and
// decides anew, from the settings and the fleet of then, whenever something may have
// changed; why says what it waited for. name is the request's own, for when its tries set
// it apart from all others.
func (a *Asker) Wait(ctx context.Context, line *admission.Line, c admission.Claim, d *Question, v *api.View, name string) (place *ledger.Reservation, waited admission.Waited, why string, err error) {
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
