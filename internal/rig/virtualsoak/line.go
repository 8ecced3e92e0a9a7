package virtualsoak

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/route"
)

const (
	// lookInterval is how long the line goes without a look at the fleet when nothing ends on
	// a rank, as the router's.
	lookInterval = 50 * time.Millisecond
	// patience is the longest wait for a rank.
	patience = 2 * time.Second
)

// rankQueue is where requests wait for a rank that is under its limit, in seeds that have
// one: [admission.Queue] without its goroutines and timers.
type rankQueue struct {
	s       *stage
	order   admission.FairOrder
	waiting map[*admission.Waiter]*task
	trying  *admission.Waiter
	polled  bool
}

// limit draws whether ranks have a limit, with numbers of its own: a seed without one
// has the history that it had before there were any.
func (s *stage) limit() {
	rng := rand.New(rand.NewPCG(s.out.Seed, 0x6c696e65))
	s.queue = rankQueue{s: s, order: admission.FairOrder{Limit: 1000}, waiting: map[*admission.Waiter]*task{}}
	if s.settings.Bounded = rng.IntN(3) == 0; s.settings.Bounded {
		s.settings.Decisions.Busy.Requests = 1 + rng.IntN(2)
	}
}

// unlimited takes the limit back.
func (s *stage) unlimited() { s.settings.Bounded, s.settings.Decisions.Busy = false, selector.Busy{} }

// ease notifies the line that work has left a rank, as the ledger does.
func (s *stage) ease() {
	if s.plant != forgetEase {
		s.queue.order.Changed()
	}
}

// Enter is for serving.Queue.
func (l *rankQueue) Enter(ctx context.Context, c admission.Claim, try func() (needs string, ok bool)) (admission.Waited, error) {
	s, t := l.s, l.s.running
	w := &admission.Waiter{Claim: c}
	since := s.w.Now()
	if _, ok := l.order.Push(w, s.now()); !ok {
		s.violate("%s finds no room in a line of %d", t.q.id, l.order.Waiting())
		return admission.Waited{}, admission.ErrFull
	}
	l.waiting[w], t.q.inLine = t, true
	defer func() {
		l.order.Remove(w)
		delete(l.waiting, w)
		if l.trying == w {
			l.trying = nil
		}
		t.q.inLine = false
	}()
	s.w.At(since+patience, func() { s.wake(t) })
	if !l.polled {
		l.polled = true
		s.w.At(since+lookInterval, l.poll)
	}
	tried := false
	for {
		switch {
		case ctx.Err() != nil:
			return admission.Waited{}, ctx.Err()
		case l.trying == w:
			change := l.order.Change()
			needs, ok := try()
			if l.trying = nil; ok {
				l.order.Admit(w, s.now())
				l.within(t.q)
				if tried {
					s.out.Waited++
				}
				return admission.Waited{For: s.w.Now() - since, Ahead: w.Ahead}, nil
			}
			tried = true
			l.order.Failed(w, needs, change)
		case s.w.Now() >= since+patience:
			return admission.Waited{}, admission.ErrTimeout
		default:
			s.block(ctx)
		}
	}
}

// within wants the place that a request was just given to be one.
func (l *rankQueue) within(q *request) {
	s, run := l.s, &q.call.Routing.Run
	if run.Plan.Err != nil {
		return
	}
	k := run.In.DecodePeers[run.Plan.DecodeIndex].Rank
	if n := s.ledger.Load(k).Requests; n > s.settings.Decisions.Busy.Requests {
		s.violate("%s has %d requests, its limit is %d", k.Label, n, s.settings.Decisions.Busy.Requests)
	}
}

// Try is for serving.Queue.
func (l *rankQueue) Try(try func() bool) bool { return len(l.waiting) == 0 && try() }

// EstimateWait is for serving.Queue.
func (l *rankQueue) EstimateWait(queue string) (time.Duration, bool) {
	return l.order.EstimateWait(queue, admission.Low, l.s.now())
}

// poll lets all try again.
func (l *rankQueue) poll() {
	if l.polled = len(l.waiting) > 0; l.polled {
		l.order.Changed()
		l.s.w.At(l.s.w.Now()+lookInterval, l.poll)
	}
}

// turn gives the turn to the next who waits.
func (s *stage) turn() {
	if l := &s.queue; l.trying == nil && len(l.waiting) > 0 {
		if w := l.order.Next(); w != nil {
			l.trying = w
			s.wake(l.waiting[w])
		}
	}
}

// idle is the invariant: nobody waits while a rank that could serve it is under its
// limit. A rank whose health has changed since the last look is none yet.
func (s *stage) idle() {
	for _, n := range s.nodes {
		ok, _ := n.worker.State.Usable()
		if !n.member || !ok || !n.worker.Role.CanDecode() {
			n.readySince = -1
			continue
		}
		if n.readySince < 0 {
			n.readySince = s.w.Now()
		}
		if s.w.Now()-n.readySince <= lookInterval || s.ledger.Load(n.rank).Requests >= s.settings.Decisions.Busy.Requests {
			continue
		}
		for _, q := range s.inOrder() {
			if !q.inLine {
				continue
			}
			h := &q.call.Routing.Run.History
			if _, banned := h.Banned(n.worker.State, route.Decode); !banned && h.Elsewhere(n.worker.State, route.Decode) == "" {
				s.violate("%s waits although %s has %d requests of %d", q.id, n.name, s.ledger.Load(n.rank).Requests, s.settings.Decisions.Busy.Requests)
				return
			}
		}
	}
}
