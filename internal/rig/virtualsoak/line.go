package virtualsoak

import (
	"math/rand/v2"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
)

const (
	// lookInterval is how long the line goes without a look at the fleet when nothing ends on
	// a rank, as the router's.
	lookInterval = 50 * time.Millisecond
	// patience is the longest wait for a rank.
	patience = 2 * time.Second
)

// line is where requests wait for a rank that is under its limit, in seeds that have
// one.
type line struct {
	limited bool
	turns   admission.Turns
	waiting map[*admission.Waiter]*request
	polled  bool
}

// limit draws whether ranks have a limit, with numbers of its own: a seed without one
// has the history that it had before there were any.
func (s *stage) limit() {
	rng := rand.New(rand.NewPCG(s.out.Seed, 0x6c696e65))
	s.line = line{turns: admission.Turns{Limit: 1000}, waiting: map[*admission.Waiter]*request{}}
	if s.line.limited = rng.IntN(3) == 0; s.line.limited {
		s.settings.Busy.Requests = 1 + rng.IntN(2)
	}
}

// ease notifies the line that work has left a rank, as the ledger does.
func (s *stage) ease() {
	if s.plant != forgetEase {
		s.line.turns.Changed()
	}
}

// wait lets a request take its turn for a rank.
func (q *request) wait() {
	s := q.s
	w := &admission.Waiter{Claim: admission.Claim{
		Tenant: []string{"a", "b", "c"}[q.no%3], Band: admission.Band(q.no%5%3) - 1, Tokens: len(q.tokens) + q.limit,
	}}
	if _, ok := s.line.turns.Push(w, s.now()); !ok {
		s.violate("%s finds no room in a line of %d", q.id, s.line.turns.Waiting())
		return
	}
	q.waiter = w
	s.line.waiting[w] = q
	s.w.At(s.w.Now()+patience, func() {
		if q.waiter == w {
			s.out.Hopeless++
			q.end("it waited too long for a rank")
		}
	})
	if !s.line.polled {
		s.line.polled = true
		s.w.At(s.w.Now()+lookInterval, s.poll)
	}
}

// outOfLine takes a request out of the line.
func (q *request) outOfLine() {
	if q.waiter != nil {
		q.s.line.turns.Remove(q.waiter)
		delete(q.s.line.waiting, q.waiter)
		q.waiter = nil
	}
}

// poll lets all try again.
func (s *stage) poll() {
	if s.line.polled = len(s.line.waiting) > 0; s.line.polled {
		s.line.turns.Changed()
		s.w.At(s.w.Now()+lookInterval, s.poll)
	}
}

// turn lets those whose turn it is try, until nobody else can go.
func (s *stage) turn() {
	for w := s.line.turns.Next(); w != nil; w = s.line.turns.Next() {
		q := s.line.waiting[w]
		change := s.line.turns.Change()
		if q.asked {
			q.run.Again()
		}
		e := q.choose()
		if phase, busy := q.run.Busy(); busy {
			q.asked = true
			s.line.turns.Failed(w, q.needs(phase), change)
			continue
		}
		if q.asked {
			s.out.Waited++
		}
		q.asked, q.waiter = false, nil
		s.line.turns.Admit(w, s.now())
		delete(s.line.waiting, w)
		q.apply(e)
		if p := &q.run.Plan; p.Err == nil {
			claim, _ := q.run.Claims()
			d := q.node(q.run.In.DecodePeers[p.DecodeIndex])
			q.placed = q.reserve(d, claim)
			if n := s.ledger.Load(d.rank).Requests; n > s.settings.Busy.Requests {
				s.violate("%s has %d requests, its limit is %d", d.name, n, s.settings.Busy.Requests)
			}
		}
		q.decided()
	}
	s.idle()
}

// needs are those of the router: what a request found nothing of.
func (q *request) needs(p selector.Phase) string {
	if q.run.Apart() {
		return q.id
	}
	return string(p)
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
		if s.w.Now()-n.readySince <= lookInterval || s.ledger.Load(n.rank).Requests >= s.settings.Busy.Requests {
			continue
		}
		for _, q := range s.inOrder() {
			if _, banned := q.run.History.Banned(n.worker.State, selector.Decode); q.waiter != nil && !banned && q.run.History.Elsewhere(n.worker.State, selector.Decode) == "" {
				s.violate("%s waits although %s has %d requests of %d", q.id, n.name, s.ledger.Load(n.rank).Requests, s.settings.Busy.Requests)
				return
			}
		}
	}
}
