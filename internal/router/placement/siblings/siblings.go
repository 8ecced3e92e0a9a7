// Package siblings is the work that other routers of the fleet give this router's ranks. It
// publishes the router's own work, and keeps for decisions what the others publish (package
// replicas has the exchange itself).
//
// A decision gets what is known as a value, [Seen]. No request waits for another router: one
// that is silent for [replicas.Lifetime] counts as without work.
package siblings

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// Options make Siblings. All are needed.
type Options struct {
	Self   replicas.Identity
	Fleet  func() *workers.Snapshot
	Ledger *ledger.Ledger
	Event  func(eventlog.Event)
	// Clock is time.Now, or a virtual clock.
	Clock func() time.Time
}

// Siblings are the other routers of the fleet. Nil stands for none. It is safe for
// concurrent use.
type Siblings struct {
	o        Options
	router   uint64 // names this router in decisions
	exchange atomic.Pointer[replicas.Exchange]
	loads    atomic.Pointer[loads]

	mu sync.Mutex // guards the fields below, and the making of loads
	// snap is the fleet whose ranks the view has: ranks, keys and judged are parallel.
	snap   *workers.Snapshot
	ranks  []*workers.Rank
	keys   []replicas.Rank
	judged []judgement
	sums   []replicas.Sum // scratch
	given  []sample       // oldest first, of the last rateOver
	states map[string]state
	counts replicas.Counts
}

// sample is what the ledger had given at a time.
type sample struct {
	at                   time.Time
	reservations, tokens uint64
}

// rateOver is over how long the rate of the router's own decisions is taken.
const rateOver = time.Second

// loads is what was known of the siblings at one time. It is not changed.
type loads struct {
	revision uint64 // of the view
	snap     *workers.Snapshot
	until    time.Time // when the next router's work no longer counts
	bySlot   []load
	router   uint64
	live     int
	heard    time.Time // of the live router that has been silent longest
	// rate is this router's own decisions a second, tokens their uncached tokens on average.
	rate, tokens float64
}

type load struct {
	rank *workers.Rank
	replicas.Sum
}

// New makes the siblings of a router, which knows none until Run.
func New(o Options) *Siblings {
	return &Siblings{o: o, router: selector.HashSession(o.Self.Origin), states: map[string]state{}}
}

// Run exchanges work over a transport until ctx ends. The caller closes the transport.
func (s *Siblings) Run(ctx context.Context, t replicas.Transport) error {
	x, err := s.Join(t)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { x.Run(ctx); return nil })
	g.Go(func() error {
		for range wait.Every(ctx, replicas.Heartbeat) {
			s.Watch()
		}
		return nil
	})
	return g.Wait()
}

// Join subscribes to a transport. Its caller steps the exchange, and calls Watch.
func (s *Siblings) Join(t replicas.Transport) (*replicas.Exchange, error) {
	x, err := replicas.NewExchange(s.o.Self, t, s.o.Clock, s.own)
	if err != nil {
		return nil, err
	}
	s.exchange.Store(x)
	return x, nil
}

// own appends this router's work by rank.
func (s *Siblings) own(into []replicas.Row) []replicas.Row {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.follow()
	s.sample()
	for i, k := range s.ranks {
		if l := s.o.Ledger.Load(k); l != (ledger.Load{LastTurn: l.LastTurn}) {
			into = append(into, replicas.Row{Rank: s.keys[i], Load: replicas.Load{
				Requests: l.Requests, Answering: l.Answering, PrefillTokens: l.PrefillTokens, DecodeBlocks: l.DecodeBlocks,
				FreshTokens: l.Fresh - l.FreshLong, // what only some ranks can take is no reason to avoid them
			}})
		}
	}
	return into
}

// follow takes the ranks of the fleet as it is now. The caller holds mu.
func (s *Siblings) follow() {
	snap := s.o.Fleet()
	x := s.exchange.Load()
	if snap == s.snap || x == nil {
		return
	}
	was := make(map[*workers.Rank]judgement, len(s.ranks))
	for i, k := range s.ranks {
		was[k] = s.judged[i]
	}
	s.snap, s.ranks, s.keys, s.judged = snap, s.ranks[:0], s.keys[:0], s.judged[:0]
	for _, w := range snap.Workers {
		url := w.URL.String()
		for _, k := range w.Ranks {
			s.ranks, s.keys, s.judged = append(s.ranks, k), append(s.keys, replicas.RankOf(url, k.DP)), append(s.judged, was[k])
		}
	}
	x.View().SetRanks(s.keys)
}

// sample notes what the ledger has given. The caller holds mu.
func (s *Siblings) sample() {
	now := s.o.Clock()
	n, tokens := s.o.Ledger.Given()
	s.given = append(s.given, sample{now, n, tokens})
	for len(s.given) > 2 && now.Sub(s.given[1].at) >= rateOver {
		s.given = slices.Delete(s.given, 0, 1)
	}
}

// rate is the router's own decisions a second, and their mean uncached tokens. The caller
// holds mu.
func (s *Siblings) rate() (perSecond, tokens float64) {
	if len(s.given) < 2 {
		return 0, 0
	}
	a, b := &s.given[0], &s.given[len(s.given)-1]
	n := float64(b.reservations - a.reservations)
	if d := b.at.Sub(a.at).Seconds(); n > 0 && d > 0 {
		return n / d, float64(b.tokens-a.tokens) / n
	}
	return 0, 0
}

// Seen is what a decision knows of other routers. The zero value knows none.
type Seen struct {
	loads *loads
	now   time.Time
}

// Look returns what is known now. It waits for no other router.
func (s *Siblings) Look(now time.Time) Seen {
	if s == nil {
		return Seen{}
	}
	x := s.exchange.Load()
	if x == nil {
		return Seen{}
	}
	l := s.loads.Load()
	if l == nil || l.revision != x.View().Revision() || l.live > 0 && !now.Before(l.until) {
		l = s.refresh(x.View(), now)
	}
	if l.live == 0 {
		return Seen{}
	}
	return Seen{l, now}
}

func (s *Siblings) refresh(v *replicas.View, now time.Time) *loads {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := &loads{revision: v.Revision(), snap: s.snap, router: s.router} // before the sums, which may be newer
	s.sums = slices.Grow(s.sums[:0], len(s.keys))[:len(s.keys)]
	l.live, l.heard, l.until = v.Sums(now, s.keys, s.sums)
	l.rate, l.tokens = s.rate()
	slots := 0
	for _, k := range s.ranks {
		slots = max(slots, int(k.Slot)+1)
	}
	l.bySlot = make([]load, slots)
	for i, k := range s.ranks {
		if !s.judged[i].disbelieved {
			l.bySlot[k.Slot] = load{k, s.sums[i]}
		}
	}
	s.loads.Store(l)
	return l
}

// Add adds the siblings' work on a rank to a candidate, and says so in it.
func (s Seen) Add(c *decision.Candidate, k *workers.Rank) {
	if s.loads == nil || int(k.Slot) >= len(s.loads.bySlot) {
		return
	}
	l := &s.loads.bySlot[k.Slot]
	if l.rank != k || l.Since.IsZero() {
		return
	}
	c.ActiveRequests += l.Requests
	c.PrefillTokens += l.PrefillTokens
	c.DecodeBlocks += l.DecodeBlocks
	c.FreshTokens += l.FreshTokens
	c.Siblings = decision.Siblings{
		SiblingRequests: int32(l.Requests), SiblingPrefillTokens: int32(l.PrefillTokens), SiblingDecodeBlocks: int32(l.DecodeBlocks), SiblingFreshTokens: int32(l.FreshTokens),
		SiblingAgeMS: int32(max(1, math.Ceil(float64(s.now.Sub(l.Since))/float64(time.Millisecond)))),
	}
}

// Choice is what a choice among ranks depends on.
func (s Seen) Choice() selector.Siblings {
	l := s.loads
	if l == nil {
		return selector.Siblings{}
	}
	// A router that is silent for less than a heartbeat had nothing to publish until then.
	blind := max(0, s.now.Sub(l.heard))
	if blind <= replicas.Heartbeat {
		blind = min(blind, replicas.Pace)
	}
	// The others are taken to decide as often as this router: behind a balancer they do.
	return selector.Siblings{Router: l.router, Unseen: l.rate * float64(l.live) * blind.Seconds(), Tokens: l.tokens}
}

// Name is this router's among them.
func (s *Siblings) Name() string { return s.o.Self.Origin }
