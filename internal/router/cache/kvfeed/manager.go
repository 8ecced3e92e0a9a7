// Package kvfeed is the feed of KV cache events: it keeps the index's entries of
// every rank equal to what the rank's engine published, and says of each rank
// whether they are.
//
// What a rank's batches do to the index is package kvstream. Around its Stream, one
// rank's feed connects, reconnects, notices what is missing and fetches it from the
// publisher's replay socket; Manager owns the feeds and the listeners that ranks
// share whose publishers dial in.
//
// The index may miss blocks, but never has one that the engine gave up in a
// batch that arrived or was lost:
//
//   - Entries are used in state Live only. Whatever shows that a batch is
//     missing ends that state before the next batch is applied.
//   - After a connection was lost, entries are kept only if the publisher proves
//     that it is in the same life: its replay must hold the very batch that was
//     applied last. Without a replay socket they are kept if the engine's process
//     is older than that batch, which only a process of the same life can be, and
//     the next batch follows; else they are dropped.
//   - A gap that no replay closes, a number that goes back, a batch or an event
//     that cannot be read, an engine block that does not fit: the rank's entries
//     are dropped, counted and reported, and rebuilt from what follows.
//   - A rank whose engine is known to compute and publishes nothing is not
//     trusted, see Manager.Mute.
//   - The child of a block that the rank does not hold is not stored. If the
//     feed had seen every batch until then, it starts over from the replay once
//     per connection.
//
// What a feed waits for, and how it gets from one state to the next, is drawn at want.
//
// Wire: the live and replay frames of vLLM 0.8.5 to 0.33 and SGLang up to 0.5.23
// (see kvevent).
package kvfeed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/zmtp"
)

// Options configure a Manager. Index and BlockSize are required; a zero value
// elsewhere means the default in parentheses, or none.
type Options struct {
	Index *kvindex.Index
	// BlockSize of the router in tokens, for ranks whose Key does not say another.
	BlockSize int
	// Sources returns where a worker's ranks publish now. It is called before
	// every reconnect, because ports may change with a restart, and for ranks
	// added without an endpoint. It must honour its context.
	Sources func(ctx context.Context, worker string) ([]workers.EventSource, error)
	// Process returns when the process that answers for a rank's worker was
	// started, in Unix seconds by the engine's clock (NaN when it does not say),
	// and when it was queried. Without it no rank keeps its entries over a lost
	// connection, unless a replay shows that nothing was missed.
	Process func(worker string, dp int) (started float64, asked time.Time)
	// Life, where it is not nil, returns where a worker's signs of life are noted: each live
	// batch is one. It may return nil.
	Life func(worker string) *workers.Life
	// Observer sees every change of a rank's entries, for a recorder. It is
	// called with the rank locked: it must not block, call the Manager or keep
	// the slices.
	Observer func(Observation)
	// Events takes what an operator should know; see eventlog.Sink.
	Events eventlog.Sink
	Logger *slog.Logger

	// BackoffMin and BackoffMax bound the pause before a reconnect (100 ms, 5 s);
	// it doubles until a connection has held for a while (stableAfter).
	BackoffMin, BackoffMax time.Duration
	// StaleAfter is how long a rank may be without connection before it is
	// called stale (30 s). It is not trusted from the first moment.
	StaleAfter time.Duration
	// Heartbeat is the silence after which a publisher is pinged, and pinged it
	// has as long again to answer (5 s).
	Heartbeat time.Duration
	// ReplayIdle is the longest wait for the next answer of a replay, ReplayTotal
	// that for all (2 s, 2 min).
	ReplayIdle, ReplayTotal time.Duration
	// ReplayBatches bounds the answers to one request (1 Mi), as replayBytes does.
	ReplayBatches int
	// ReplayBurst and ReplayEvery bound the replays of one rank: ReplayBurst in a row, then one
	// more in each interval (8, 1 s). Beyond that a gap empties the rank.
	ReplayBurst int
	ReplayEvery time.Duration
	// VerifyAfter and VerifyEvery are the silences after which the replay socket
	// is queried whether a batch was missed, first and later on (1 s, 30 s).
	VerifyAfter, VerifyEvery time.Duration
	// HoldBytes bounds the live batches of one rank that wait for a replay to
	// end, HoldTotal those of all (32 MiB, 256 MiB).
	HoldBytes, HoldTotal int64
	// Socket configures the sockets; topics and heartbeat are set by the feed.
	Socket zmtp.Options
}

const (
	// maxRanks bounds the ranks of a Manager; it is that of the index.
	maxRanks = 1 << 16
	// stableAfter is how long a connection holds until the next pause is the shortest again.
	stableAfter = 10 * time.Second
	// replayBytes bounds the answers to one replay request, in bytes.
	replayBytes = 4 << 30
)

func (o Options) withDefaults() (Options, error) {
	if o.Index == nil {
		return o, errors.New("kvfeed: no index")
	}
	if o.BlockSize < 1 {
		return o, fmt.Errorf("kvfeed: block size %d is below 1", o.BlockSize)
	}
	o.BackoffMin = cmp.Or(max(o.BackoffMin, 0), 100*time.Millisecond)
	o.BackoffMax = max(cmp.Or(max(o.BackoffMax, 0), 5*time.Second), o.BackoffMin)
	o.StaleAfter = cmp.Or(max(o.StaleAfter, 0), 30*time.Second)
	o.Heartbeat = cmp.Or(max(o.Heartbeat, 0), 5*time.Second)
	o.ReplayIdle = cmp.Or(max(o.ReplayIdle, 0), 2*time.Second)
	o.ReplayTotal = cmp.Or(max(o.ReplayTotal, 0), 2*time.Minute)
	o.ReplayBatches = cmp.Or(max(o.ReplayBatches, 0), 1<<20)
	o.ReplayBurst = cmp.Or(max(o.ReplayBurst, 0), 8)
	o.ReplayEvery = cmp.Or(max(o.ReplayEvery, 0), time.Second)
	o.VerifyAfter = cmp.Or(max(o.VerifyAfter, 0), time.Second)
	o.VerifyEvery = cmp.Or(max(o.VerifyEvery, 0), 30*time.Second)
	o.HoldBytes = cmp.Or(max(o.HoldBytes, 0), 32<<20)
	o.HoldTotal = cmp.Or(max(o.HoldTotal, 0), 256<<20)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.Socket.Heartbeat, o.Socket.HeartbeatTimeout = o.Heartbeat, 0
	return o, nil
}

// Key names a rank to people and to its source of events.
type Key struct {
	Worker string
	DP     int
	// Host is where the worker runs, to distinguish publishers that dial into
	// one listener with the same topic; empty if unknown.
	Host string
	// Start is the place of the worker's first rank in the deployment by which its
	// engines count; 0 when unknown. It is no part of the rank's name.
	Start int
	// BlockSize in tokens in which the rank's blocks are named; 0 for that of
	// the Options. It is no part of the rank's name.
	BlockSize int
	// Traits are known of the engine, and no part of the rank's name either.
	Traits kvgroup.Traits
	// CopiesImplausible says that Traits.IgnoreCopies was found out and not stated; it
	// is for Status.
	CopiesImplausible bool
}

func (k Key) String() string { return route.RankLabel(k.Worker, k.DP) }

// Manager owns the feeds of all ranks. Its methods are safe for concurrent use.
// Run makes it work; ranks may be added before and during it.
type Manager struct {
	o            Options
	conns        atomic.Uint64 // numbers of connections
	held         atomic.Int64  // bytes of live batches that wait
	readerStates atomic.Pointer[[]*readerState]

	mu    sync.Mutex // guards the fields below; before rank.mu and hub.mu
	ctx   context.Context
	ranks map[kvindex.Rank]*rank
	hubs  map[string]*hub
}

// New makes a Manager.
func New(o Options) (*Manager, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	m := &Manager{o: o, ranks: map[kvindex.Rank]*rank{}, hubs: map[string]*hub{}}
	m.readerStates.Store(new([]*readerState))
	return m, nil
}

func (m *Manager) now() time.Time { return time.Now() }

// Run feeds the ranks until ctx ends, joins everything it started and returns
// nil. A second Run is an error.
func (m *Manager) Run(ctx context.Context) error {
	m.mu.Lock()
	if m.ctx != nil {
		m.mu.Unlock()
		return errors.New("kvfeed: the manager runs already")
	}
	m.ctx = ctx
	for _, r := range m.ranks {
		m.start(r)
	}
	m.mu.Unlock()
	<-ctx.Done()
	m.mu.Lock()
	ranks := slices.Collect(maps.Values(m.ranks))
	m.mu.Unlock()
	for _, r := range ranks {
		m.stop(r)
	}
	return nil
}

// Add starts to feed rank id, which has a slot in the index already, from src.
// With a resume position the index already holds the rank's entries as of that
// batch; they are used once the publisher has proven to know it. Without one the
// rank begins empty.
func (m *Manager) Add(id kvindex.Rank, key Key, src workers.EventSource, resume *kvstream.Position) error {
	if id >= maxRanks {
		return fmt.Errorf("kvfeed: add %s: rank %d is not below %d", key, id, maxRanks)
	}
	if key.BlockSize < 0 {
		return fmt.Errorf("kvfeed: add %s: block size %d is below 1", key, key.BlockSize)
	}
	if src.Endpoint == "" && m.o.Sources == nil {
		return fmt.Errorf("kvfeed: add %s: no event endpoint", key)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ranks[id] != nil {
		return fmt.Errorf("kvfeed: add %s: rank %d is fed already", key, id)
	}
	if m.ctx != nil && m.ctx.Err() != nil {
		return fmt.Errorf("kvfeed: add %s: the manager has stopped", key)
	}
	states := *m.readerStates.Load()
	if int(id) >= len(states) {
		grown := make([]*readerState, max(int(id)+1, 2*len(states)))
		copy(grown, states)
		for i := len(states); i < len(grown); i++ {
			grown[i] = new(readerState)
		}
		m.readerStates.Store(&grown)
		states = grown
	}
	r := newRank(m, id, key, src, states[id])
	if resume != nil {
		r.stream.Resume(*resume)
		r.implausible = edge(r.stream.CopiesImplausible())
	} else {
		m.o.Index.ClearRank(id) // whatever it holds, no feed vouches for it
	}
	r.observeFeed(Observation{Began: true, Kept: resume != nil, Traits: key.Traits, BlockSize: cmp.Or(key.BlockSize, m.o.BlockSize)})
	m.ranks[id] = r
	if m.ctx != nil {
		m.start(r)
	}
	return nil
}

// Remove ends the feed of rank id and waits for it. The rank's entries stay in
// the index for the caller to remove. It reports whether the rank was fed.
func (m *Manager) Remove(id kvindex.Rank) bool {
	m.mu.Lock()
	r := m.ranks[id]
	delete(m.ranks, id)
	m.mu.Unlock()
	if r == nil {
		return false
	}
	m.stop(r)
	r.mu.Lock()
	r.set(Unknown, wantEnd, "removed")
	r.reader.word.Store(0)
	r.reader.groups.Store(nil)
	r.reader.tiers.Store(nil)
	r.reader.placeholder.Store(0)
	r.observeFeed(Observation{})
	r.mu.Unlock()
	return true
}

// start starts the goroutines of r. The caller holds m.mu.
func (m *Manager) start(r *rank) {
	ctx, cancel := context.WithCancel(m.ctx)
	r.cancel = cancel
	r.wg.Go(func() { r.maintain(ctx) })
	if r.src.Bind {
		r.hub = m.join(r)
	} else {
		r.wg.Go(func() { r.dial(ctx) })
	}
}

// stop ends the goroutines of r and waits for them.
func (m *Manager) stop(r *rank) {
	m.mu.Lock()
	cancel, h := r.cancel, r.hub
	r.cancel, r.hub = nil, nil
	m.mu.Unlock()
	if h != nil {
		m.leave(h, r)
	}
	if cancel != nil {
		cancel()
	}
	r.wg.Wait()
	// A listener's connection may still hold r: nothing of it gets through now.
	r.mu.Lock()
	r.conn, r.rival = 0, 0
	r.await(wantEnd)
	r.release()
	r.mu.Unlock()
}

// join adds r to the listener of its endpoint, which it opens if r is the first.
// The caller holds m.mu.
func (m *Manager) join(r *rank) *hub {
	h := m.hubs[r.src.Endpoint]
	if h == nil {
		ctx, cancel := context.WithCancel(m.ctx)
		h = &hub{m: m, endpoint: r.src.Endpoint, cancel: cancel, conns: map[*publisherConn]struct{}{}}
		m.hubs[h.endpoint] = h
		h.wg.Go(func() { h.run(ctx) })
	}
	h.add(r)
	return h
}

// leave takes r off the listener and closes it after the last rank.
func (m *Manager) leave(h *hub, r *rank) {
	m.mu.Lock()
	empty := h.remove(r, m.ctx.Err() != nil)
	if empty {
		delete(m.hubs, h.endpoint)
	}
	m.mu.Unlock()
	if empty {
		h.cancel()
		h.wg.Wait()
	}
}

// Trusted reports whether the entries of rank id may be used: whether they are
// what its engine held as of the newest batch. It costs nanoseconds.
func (m *Manager) Trusted(id kvindex.Rank) bool {
	at := m.readerState(id)
	return at != nil && at.word.Load()&wordTrusted != 0
}

// Usable returns how many of overlap leading router blocks of a prompt, as the index
// counts them, rank id's engine will reuse: none when the rank is not trusted, whole
// engine blocks only (see [kvstream.Shape.Usable]), and no more than all its cache
// groups can continue from (see [kvgroup.Groups.Usable]). Where its other tiers hold blocks
// behind these, beyond gets them (see [kvtier.Tiers.Extend]).
func (m *Manager) Usable(id kvindex.Rank, overlap int, p *kvgroup.Prompt, beyond *route.Tiers) int {
	at := m.readerState(id)
	if at == nil {
		return 0
	}
	w := at.word.Load()
	if w&wordTrusted == 0 {
		return 0
	}
	s := kvstream.Shape{Parts: int(w >> wordParts), Bigram: w&wordBigram != 0, Drops: w&wordDrops != 0}
	if w&wordMore == 0 {
		return s.Usable(overlap, p)
	}
	g, t := at.groups.Load(), at.tiers.Load()
	if g == nil && t == nil {
		return 0 // the publisher starts over at this moment
	}
	return kvstream.Usable(s, g, t, overlap, p, beyond)
}

// Naming returns how rank id's engine names blocks (see [kvstream.Shape]): how many tokens after
// a block its name covers, and of how many router blocks one of its blocks is; 0 where that is
// not known.
func (m *Manager) Naming(id kvindex.Rank) (ahead, parts int) {
	at := m.readerState(id)
	if at == nil {
		return 0, 0
	}
	w := at.word.Load()
	if at.groups.Load() == nil { // else each group has blocks of its own size
		parts = int(w >> wordParts)
	}
	return int(uint8(w >> wordAhead)), parts
}

// Placeholder returns the token that stands for media in the prompts of rank id's engine, as its
// events have shown; ok is false where that is not known.
func (m *Manager) Placeholder(id kvindex.Rank) (token uint32, ok bool) {
	at := m.readerState(id)
	if at == nil {
		return 0, false
	}
	v := at.placeholder.Load()
	return uint32(v), v != 0
}

// Untrusted reports whether rank id is fed and its entries may not be used now, so
// that 0 from Usable says nothing about it.
func (m *Manager) Untrusted(id kvindex.Rank) bool {
	at := m.readerState(id)
	return at != nil && at.word.Load()&(wordFed|wordTrusted) == wordFed
}

func (m *Manager) readerState(id kvindex.Rank) *readerState {
	states := *m.readerStates.Load()
	if int(id) >= len(states) {
		return nil
	}
	return states[id]
}

// Status returns the account of every rank, by rank number.
func (m *Manager) Status() []Status {
	m.mu.Lock()
	ranks := slices.Collect(maps.Values(m.ranks))
	m.mu.Unlock()
	all := make([]Status, 0, len(ranks))
	for _, r := range ranks {
		all = append(all, r.status())
	}
	slices.SortFunc(all, func(a, b Status) int { return int(a.Rank) - int(b.Rank) })
	return all
}

// Freeze calls f with where rank id stands, while its entries stand still: what
// f reads of them in the index is the rank as of that very batch, so that a feed
// can continue from both after a restart of the router. ok is false when there is
// nothing to continue from. f must be quick and must not call the Manager.
//
// The connection does not matter. Entries that are not trusted for lack of one are
// still those of the last batch, and the publisher has to prove that it knows that
// batch before they are used again. Those of a rank that is mute may be wrong, and
// no publisher could prove that they are not.
func (m *Manager) Freeze(id kvindex.Rank, f func(p kvstream.Position, ok bool)) {
	m.mu.Lock()
	r := m.ranks[id]
	m.mu.Unlock()
	if r == nil {
		f(kvstream.Position{}, false)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mute.why != "" {
		f(kvstream.Position{}, false)
		return
	}
	f(r.stream.Position())
}
