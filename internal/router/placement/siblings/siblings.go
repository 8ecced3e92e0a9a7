// Package siblings is the work that other routers of the fleet give this router's ranks. It
// publishes the router's own work, and keeps for decisions what the others publish (package
// replicas has the exchange itself).
//
// A decision gets what is known as a value, [Seen]. No request waits for another router: one
// that is silent for [replicas.Lifetime] counts as without work.
package siblings

import (
	"context"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// Options make Siblings. All but Learned and Rates are needed.
type Options struct {
	Self   replicas.Identity
	Fleet  func() *workers.Snapshot
	Ledger *ledger.Ledger
	Event  func(eventlog.Event)
	// Learned is called with responses that workers keep for other routers' clients.
	Learned func(id, worker, tenant string)
	// Rates are those of API keys; nil for none.
	Rates *access.Store
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
	// past is this router's own requests by rank at two times, blind apart.
	past   [2][]int
	pastAt time.Time
	given  []sample // oldest first, of the last rateOver
	states map[string]state
	counts replicas.Counts
	facts
	copies
}

// sample is what the ledger had given at a time.
type sample struct {
	at                   time.Time
	reservations, tokens uint64
}

// blind is how long a router may not see what another one decides, or a little longer: the
// longest time between two messages about changes, and the way of one.
const blind = 2 * replicas.Pace

// rateOver is over how long the rate of the router's own decisions is taken.
const rateOver = time.Second

// maxOthers bounds how many times as many prompts the siblings are taken to give as this router,
// which may have given next to none.
const maxOthers = 16

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
	// others is how many times as many uncached tokens the siblings gave the fleet of late as this
	// router.
	others float32
}

type load struct {
	rank *workers.Rank
	// past is this router's own requests, a blind time ago or longer.
	past int
	replicas.Sum
}

// New makes the siblings of a router, which knows none until Run.
func New(o Options) *Siblings {
	return &Siblings{o: o, router: selector.HashSession(o.Self.Origin), states: map[string]state{}, facts: newFacts(), copies: copies{first: make(chan struct{})}}
}

// Run exchanges work over a transport until ctx ends, and copies of ranks if it is a
// [replicas.Direct], too. The caller closes the transport.
func (s *Siblings) Run(ctx context.Context, t replicas.Transport) error {
	if d, ok := t.(replicas.Direct); ok {
		if err := s.exchangeCopies(d); err != nil {
			return err
		}
	}
	x, err := s.Join(t)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { x.Run(ctx); x.Leave(); return nil })
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
	s.mu.Lock()
	self := s.o.Self
	s.mu.Unlock()
	x, err := replicas.NewExchange(self, t, s.o.Clock, s.own, replicas.More{Fill: s.fill, Heard: s.heard})
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
	if now := s.o.Clock(); now.Sub(s.pastAt) >= blind {
		s.past[0], s.past[1] = s.past[1], s.past[0][:0]
		for _, k := range s.ranks {
			s.past[1] = append(s.past[1], s.o.Ledger.Load(k).Requests)
		}
		s.pastAt = now
		s.loads.Store(nil)
	}
	for i, k := range s.ranks {
		if l := s.o.Ledger.Load(k); l != (ledger.Load{LastTurn: l.LastTurn}) {
			into = append(into, replicas.Row{Rank: s.keys[i], Load: replicas.Load{
				Requests: l.Requests, Answering: l.Answering, PrefillTokens: l.PrefillTokens, DecodeBlocks: l.DecodeBlocks, CachedBlocks: l.CachedBlocks,
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
	clear(s.byName)
	clear(s.byKey)
	for _, w := range snap.Workers {
		url := w.URL.String()
		key := replicas.WorkerOf(url)
		s.byName[w.Name], s.byKey[key] = key, w
		for _, k := range w.Ranks {
			s.ranks, s.keys, s.judged = append(s.ranks, k), append(s.keys, replicas.RankOf(url, k.DP)), append(s.judged, was[k])
		}
	}
	// A worker that comes back is another one.
	maps.DeleteFunc(s.orders, func(key replicas.Rank, _ replicas.Order) bool { return s.byKey[key] == nil })
	x.View().SetRanks(s.keys)
	s.past, s.pastAt = [2][]int{}, time.Time{}
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

// Seen is what a decision knows of other routers. It is not changed.
type Seen struct {
	loads *loads
	now   time.Time
}

// Look returns what is known now, nil for nothing. It waits for no other router.
func (s *Siblings) Look(now time.Time) *Seen {
	if s == nil {
		return nil
	}
	x := s.exchange.Load()
	if x == nil {
		return nil
	}
	l := s.loads.Load()
	if l == nil || l.revision != x.View().Revision() || l.live > 0 && !now.Before(l.until) {
		l = s.refresh(x.View(), now)
	}
	if l.live == 0 {
		return nil
	}
	return &Seen{l, now}
}

func (s *Siblings) refresh(v *replicas.View, now time.Time) *loads {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := &loads{revision: v.Revision(), snap: s.snap, router: s.router} // before the sums, which may be newer
	s.sums = slices.Grow(s.sums[:0], len(s.keys))[:len(s.keys)]
	l.live, l.heard, l.until = v.Sums(now, s.keys, s.sums)
	l.rate, l.tokens = s.rate()
	slots, own, others := 0, 0, 0
	for i, k := range s.ranks {
		slots = max(slots, int(k.Slot)+1)
		mine := s.o.Ledger.Load(k)
		own += mine.Fresh - mine.FreshLong
		others += s.sums[i].FreshTokens
	}
	if own > 0 {
		l.others = float32(min(float64(others)/float64(own), maxOthers))
	}
	l.bySlot = make([]load, slots)
	for i, k := range s.ranks {
		if !s.judged[i].ignored {
			l.bySlot[k.Slot] = load{k, 0, s.sums[i]}
			if i < len(s.past[0]) {
				l.bySlot[k.Slot].past = s.past[0][i]
			}
		}
	}
	s.loads.Store(l)
	return l
}

// Add adds the siblings' work on a rank to a candidate, and says so in it. limit is how many
// requests the rank may have; 0 for any number.
//
// In a blind time each router takes at most its share of the places that were free, so that
// all of them together exceed the limit by one each at most.
func (s *Seen) Add(c *decision.Candidate, k *workers.Rank, limit int) {
	if int(k.Slot) >= len(s.loads.bySlot) {
		return
	}
	l := &s.loads.bySlot[k.Slot]
	if l.rank != k || l.Since.IsZero() {
		return
	}
	held := 0
	if limit > 0 {
		routers := s.loads.live + 1
		free := max(0, limit-l.Requests-l.past)
		held = max(0, free-(free+routers-1)/routers)
	}
	c.ActiveRequests += l.Requests
	c.Answering += l.Answering
	c.PrefillTokens += l.PrefillTokens
	c.DecodeBlocks += l.DecodeBlocks
	c.CachedBlocks += l.CachedBlocks
	c.FreshTokens += l.FreshTokens
	c.Siblings = decision.Siblings{
		SiblingRequests: int32(l.Requests), SiblingPrefillTokens: int32(l.PrefillTokens), SiblingDecodeBlocks: int32(l.DecodeBlocks), SiblingFreshTokens: int32(l.FreshTokens),
		SiblingAgeMS: int32(max(1, math.Ceil(float64(s.now.Sub(l.Since))/float64(time.Millisecond)))), SiblingHeld: int32(held),
	}
}

// Decoding adds what the siblings' answers do on a rank, with blocks of blockSize tokens, as Add
// adds it to a candidate.
func (s *Siblings) Decoding(on *cost.Decoding, k *workers.Rank, blockSize int, now time.Time) {
	seen := s.Look(now)
	if seen == nil {
		return
	}
	on.Others = seen.loads.others
	if int(k.Slot) >= len(seen.loads.bySlot) {
		return
	}
	if l := &seen.loads.bySlot[k.Slot]; l.rank == k && !l.Since.IsZero() {
		share := float64(blockSize) * float64(min(l.Answering, l.Requests)) / float64(max(l.Requests, 1))
		add := func(to *int32, more float64) { *to = int32(min(float64(*to)+more, math.MaxInt32)) }
		add(&on.Running, float64(l.Answering))
		add(&on.Held, float64(l.DecodeBlocks-l.CachedBlocks)*share)
		add(&on.HeldCached, float64(l.CachedBlocks)*share)
	}
}

// Choice is what a choice among ranks depends on.
func (s *Seen) Choice() *selector.Siblings {
	l := s.loads
	// A router that is silent for less than a heartbeat had nothing to publish until then.
	silent := max(0, s.now.Sub(l.heard))
	if silent <= replicas.Heartbeat {
		silent = min(silent, replicas.Pace)
	}
	// The others are taken to decide as often as this router: behind a balancer they do.
	return &selector.Siblings{Router: l.router, Unseen: l.rate * float64(l.live) * silent.Seconds(), Tokens: l.tokens}
}

// SetSettings changes the digest of the settings that other routers see.
func (s *Siblings) SetSettings(digest string) {
	s.mu.Lock()
	s.o.Self.Settings = digest
	s.mu.Unlock()
	if x := s.exchange.Load(); x != nil {
		x.SetSettings(digest)
	}
}

// Name is this router's among them.
func (s *Siblings) Name() string { return s.o.Self.Origin }
