package simulate

import (
	"cmp"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
)

// line is where requests wait where a limit keeps them: one for those in progress and
// for ranks, as their waits follow each other and no other work is between.
type line struct {
	limited bool
	order   admission.FairOrder
	waiting map[*admission.Waiter]*flight
	due     bool // a turn is
	wait    *hdrhistogram.Histogram
}

func (r *run) openLine() {
	l := &r.s.Limits
	r.line = line{
		limited: l.Inflight > 0 || r.s.Busy != selector.Busy{},
		order:   admission.FairOrder{Limit: l.Queue},
		waiting: map[*admission.Waiter]*flight{},
		wait:    hdrhistogram.New(1, 1e10, 3),
	}
	l.Timeout = cmp.Or(max(l.Timeout, 0), time.Hour)
	r.ledger.OnEase(r.eased)
}

// eased lets those that wait try again once whatever happens now has happened.
func (r *run) eased() {
	if r.line.order.Changed(); r.line.due || len(r.line.waiting) == 0 {
		return
	}
	r.line.due = true
	r.world.At(r.world.Now(), func() { r.line.due = false; r.turn() })
}

// clock is the world's time for whoever wants a date.
func (r *run) clock() time.Time { return time.Unix(0, 0).Add(r.world.Now()) }

// wait lets a request take its turn; it goes at once if there is room.
func (f *flight) wait() {
	r := f.r
	c := admission.Claim{Tokens: f.q.ISL + max(f.q.OSL, 1)}
	if r.s.Tenant != nil {
		c.Tenant, c.Weight = r.s.Tenant(f.q)
	}
	w := &admission.Waiter{Claim: c}
	if len(r.line.waiting) == 0 && f.try(w) {
		return
	}
	evicted, ok := r.line.order.Push(w, r.clock())
	if evicted != nil {
		r.line.waiting[evicted].refuse()
	}
	if !ok {
		f.refuse()
		return
	}
	f.waiter = w
	r.line.waiting[w] = f
	r.world.At(r.world.Now()+r.s.Limits.Timeout, func() {
		if f.waiter == w {
			r.line.order.Remove(w)
			f.refuse()
		}
	})
	r.turn()
}

// refuse ends a request that gets no place.
func (f *flight) refuse() {
	if f.waiter != nil {
		delete(f.r.line.waiting, f.waiter)
		f.waiter = nil
	}
	if !f.early {
		f.r.res.Refused++
	}
	f.fail()
}

// try sends a request off if there is room for it.
func (f *flight) try(w *admission.Waiter) bool {
	r := f.r
	change := r.line.order.Change()
	others := r.open - len(r.line.waiting)
	if f.waiter == nil {
		others--
	}
	if n := r.s.Limits.Inflight; n > 0 && others >= n {
		r.line.order.Failed(w, "a place", change)
		return false
	}
	e := f.choose()
	if phase, busy := r.decide.Busy(); busy {
		r.line.order.Failed(w, string(phase), change)
		return false
	}
	if f.waiter != nil {
		r.line.order.Admit(w, r.clock())
		delete(r.line.waiting, w)
		f.waiter = nil
		f.record(r.line.wait, r.world.Now()-f.start)
		if !f.early {
			r.res.Waited++
		}
	}
	f.carryOut(e)
	return true
}

// turn lets those whose turn it is try.
func (r *run) turn() {
	for w := r.line.order.Next(); w != nil; w = r.line.order.Next() {
		r.line.waiting[w].try(w)
	}
}

// ended counts a request that has ended, and has the next turn of its session arrive.
func (f *flight) ended() {
	r := f.r
	r.open--
	r.quiet = r.world.Now()
	r.eased()
	r.follow(f.q)
}
