// Package follower keeps everything that is keyed by rank in step with the
// fleet: the KV index and its feeds, the predicted blocks, the ledger. It
// gives a rank its place in each of them when its worker joins, and takes all
// of them away before the rank's slot may be used again. It also keeps the
// index across restarts.
package follower

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/approx"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/workers"
)

// Options are what a Follower works on; none may be missing but Snapshot and Sibling.
type Options struct {
	Registry  *workers.Registry
	Index     *kvindex.Index
	Predicted *approx.Index
	// Ledger forgets the load of ranks that have left, as ledger.Ledger does.
	Ledger interface{ Forget(k *workers.Rank) }
	// Feeds are the options of the feeds; Index and Sources are filled in.
	Feeds kvfeed.Options
	// Snapshot is a file that keeps the index across restarts; empty for none.
	Snapshot string
	// Sibling returns another router's [Follower.Copy] of a rank, and that router's name;
	// nil where there are no other routers. It bounds its time. No request waits for it.
	Sibling func(ctx context.Context, w *workers.Worker, k *workers.Rank) (copied []byte, router string, err error)
	// BlockOf is the block size in tokens in which a worker's blocks are named.
	BlockOf func(*workers.Worker) int
	// Learn asks a worker again what it is.
	Learn func(context.Context, *workers.Worker) error
	// Gone is called for a worker that was removed.
	Gone  func(worker string)
	Event func(eventlog.Event)
}

// Follower follows a registry. Make it with New, run it with Run.
type Follower struct {
	Options
	feeds *kvfeed.Manager

	// ranksMu is held while ranks come and go, and while one is
	// copied into a snapshot, so that what is copied is of the rank that it
	// is labelled with.
	ranksMu      sync.Mutex             // guards the fields below; before mu
	ignoreCopies map[*workers.Rank]bool // ranks whose engine does not publish the removal of single copies
	last         *workers.Snapshot
	restored     map[uint32]restoredRank // by slot: what a snapshot brought back
	began        time.Time               // when Run did
	copying      map[*workers.Rank]bool  // ranks that another router was asked for; true until it has answered

	toCopy chan struct{} // another rank is to be copied

	// feeding holds at each slot the rank whose KV events are fed, if one's are;
	// read on the request path.
	feeding atomic.Pointer[[]*workers.Rank]

	mu     sync.Mutex // guards the fields below
	open   map[*workers.Rank]feedOf
	count  map[*workers.Rank]*rankCount
	copied Copied
}

// feedOf is what a feed was started with.
type feedOf struct {
	source workers.EventSource
	block  int
	worker *workers.Worker
}

// New makes a follower and its feeds.
func New(o Options) (*Follower, error) {
	f := &Follower{
		Options: o, ignoreCopies: map[*workers.Rank]bool{}, copying: map[*workers.Rank]bool{}, toCopy: make(chan struct{}, 1),
		open: map[*workers.Rank]feedOf{}, count: map[*workers.Rank]*rankCount{},
	}
	f.feeding.Store(new([]*workers.Rank))
	o.Feeds.Index, o.Feeds.Sources, o.Feeds.Process = o.Index, f.sources, f.process
	o.Feeds.Life = f.life
	var err error
	f.feeds, err = kvfeed.New(o.Feeds)
	return f, err
}

// Feeds are the feeds of the ranks whose engines publish KV events.
func (f *Follower) Feeds() *kvfeed.Manager { return f.feeds }

// Blocks are the sequence hashes of the blocks that the index holds of the rank with a
// label, in no order: what an audit compares with the engine's own cache. ok is false for
// a rank that has no place in the index.
func (f *Follower) Blocks(label string) (seqs []uint64, ok bool) {
	for _, k := range f.Registry.Snapshot().Ranks {
		if k.Label != label {
			continue
		}
		err := f.Index.RankBlocks(kvindex.Rank(k.Slot), func(seq, _ uint64) bool {
			seqs = append(seqs, seq)
			return true
		})
		return seqs, err == nil
	}
	return nil, false
}

// Fed reports whether the rank's engine publishes KV events, so that the
// index counts for it.
func (f *Follower) Fed(k *workers.Rank) bool { return f.fed(k.Slot) == k }

// fed is the rank whose KV events are fed at a slot, nil for none.
func (f *Follower) fed(slot uint32) *workers.Rank {
	if at := *f.feeding.Load(); int64(slot) < int64(len(at)) {
		return at[slot]
	}
	return nil
}

// Run follows the registry and feeds the index until ctx ends. It begins with
// what the snapshot file holds, and leaves the last state in it. The feeds end
// after that: with them goes what is known of where they stand.
func (f *Follower) Run(ctx context.Context) error {
	f.restore()
	f.ranksMu.Lock()
	f.began = time.Now()
	f.ranksMu.Unlock()
	g, ctx := errgroup.WithContext(ctx)
	feeding, stop := context.WithCancel(context.WithoutCancel(ctx))
	g.Go(func() error { return f.feeds.Run(feeding) })
	g.Go(func() error {
		defer stop()
		return f.keep(ctx)
	})
	return g.Wait()
}

// keep follows the registry until ctx ends, and saves snapshots at intervals and at the
// end.
func (f *Follower) keep(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return f.watch(ctx) })
	if f.Sibling != nil {
		g.Go(func() error { return f.copyRanks(ctx) })
	}
	if f.Snapshot != "" {
		g.Go(func() error { return f.saveEvery(ctx) })
	}
	err := g.Wait()
	if f.Snapshot != "" {
		err = errors.Join(err, f.save())
	}
	return err
}

// watch follows the registry until ctx ends.
func (f *Follower) watch(ctx context.Context) error {
	changed, cancel := f.Registry.Subscribe()
	defer cancel()
	expire := time.NewTimer(restoredKeep)
	defer expire.Stop()
	audit := time.NewTicker(auditEvery)
	defer audit.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-expire.C:
			f.expire()
		case <-audit.C:
			f.audit()
		case <-changed:
			f.applySnapshot(f.Registry.Snapshot())
		}
	}
}

// applySnapshot brings everything keyed by rank to the state of a snapshot.
func (f *Follower) applySnapshot(now *workers.Snapshot) {
	f.ranksMu.Lock()
	defer f.ranksMu.Unlock()
	changes := workers.Diff(f.last, now)
	for _, c := range changes {
		for _, k := range c.Retired {
			f.retire(k)
		}
	}
	// A rank that came and went since the last look is in no change. One that
	// left after this look is still in the snapshot, and has its turn next
	// time.
	for _, k := range f.Registry.Retired() {
		if _, in, ok := now.Slot(k.Slot); !ok || in != k {
			f.retire(k)
		}
	}
	for _, c := range changes {
		if c.Kind == workers.Removed {
			f.Gone(c.Old.Name)
		}
		for _, k := range c.Started {
			slot := kvindex.Rank(k.Slot)
			if err := errors.Join(f.claim(k), f.Predicted.AddRank(slot, k.Number, k.Label)); err != nil {
				f.Event(eventlog.Event{
					Kind: "rank_refused", Severity: eventlog.Error, Worker: k.WorkerName, Rank: k.Label,
					Text: fmt.Sprintf("rank %s does not fit the index and is routed without cache knowledge: %v", k.Label, err),
				})
			}
		}
	}
	f.last = now
	f.forgetCounts()
	for _, w := range now.Workers {
		for _, k := range w.Ranks {
			f.feed(w, k)
		}
	}
	f.publish()
}

// retire takes a rank that has left the fleet out of all that is keyed by rank, and then
// releases its slot. The caller holds ranksMu.
func (f *Follower) retire(k *workers.Rank) {
	f.unfeed(k)
	f.mu.Lock()
	delete(f.count, k)
	f.mu.Unlock()
	delete(f.ignoreCopies, k)
	delete(f.copying, k)
	slot := kvindex.Rank(k.Slot)
	f.Index.RemoveRank(slot)
	delete(f.restored, k.Slot) // its blocks went with the place
	f.Predicted.RemoveRank(slot)
	f.Ledger.Forget(k)
	f.Registry.ReleaseRanks(k)
}

// feed starts, restarts or stops the feed of a rank as its worker says. The
// caller holds ranksMu.
func (f *Follower) feed(w *workers.Worker, k *workers.Rank) {
	var want workers.EventSource
	has := false
	for _, s := range w.Events {
		if s.DP == k.DP {
			want, has = s, true
		}
	}
	block := f.BlockOf(w)
	f.mu.Lock()
	old, fed := f.open[k]
	f.mu.Unlock()
	if fed && has && old.block == block && stated(old.worker) == stated(w) && old.worker.DPStart == w.DPStart && reflect.DeepEqual(old.source, want) {
		return
	}
	if fed {
		f.unfeed(k)
		f.Index.ClearRank(kvindex.Rank(k.Slot))
	}
	if !has || f.waits(k, want, fed) {
		return
	}
	traits := stated(w)
	if traits.IgnoreCopies || fed && stated(old.worker).IgnoreCopies {
		f.ignoreCopies[k] = traits.IgnoreCopies
	}
	from := f.resume(w, k, block)
	implausible := f.ignoreCopies[k] && !traits.IgnoreCopies
	traits.IgnoreCopies = f.ignoreCopies[k]
	key := kvfeed.Key{Worker: w.Name, DP: k.DP, Host: w.URL.Hostname(), Start: w.DPStart, BlockSize: block, Traits: traits, CopiesImplausible: implausible}
	if err := f.feeds.Add(kvindex.Rank(k.Slot), key, want, from); err != nil {
		f.Event(eventlog.Event{
			Kind: "feed_refused", Severity: eventlog.Error, Worker: w.Name, Rank: k.Label,
			Text: fmt.Sprintf("the KV events of %s are not followed: %v", k.Label, err),
		})
		return
	}
	f.mu.Lock()
	f.open[k] = feedOf{want, block, w}
	f.mu.Unlock()
}

// stated is what is known of a worker's engine in addition to its events.
func stated(w *workers.Worker) kvgroup.Traits {
	return kvgroup.Traits{IgnoreCopies: w.KVCopies == workers.CopiesSingle, Drops: w.LastBlock == workers.LastBlockDropped, Chunk: w.AttentionChunk, HashAlgorithm: w.KVHash, HashSeed: w.KVHashSeed}
}

// auditEvery is how often the index is compared with the engines' capacity.
const auditEvery = 5 * time.Second

// Distrust forgets what a rank is known or predicted to hold, because its engine does not hold
// it any more, as why says.
func (f *Follower) Distrust(k *workers.Rank, why string) {
	f.feeds.Distrust(kvindex.Rank(k.Slot), why)
	f.Predicted.Clear(kvindex.Rank(k.Slot))
}

// audit looks for ranks of which the index knows more blocks than fit into the
// engine's memory. The count of copies (kvindex.Batch.StoreCopies) is then
// wrong: the engine publishes the removal of the last copy only. Such a rank
// starts over without that count.
func (f *Follower) audit() {
	f.ranksMu.Lock()
	defer f.ranksMu.Unlock()
	if f.last == nil {
		return
	}
	for _, w := range f.last.Workers {
		room := int64(w.Room())
		if room <= 0 {
			continue
		}
		for _, k := range w.Ranks {
			s, ok := f.Index.RankStats(kvindex.Rank(k.Slot))
			if !ok || f.ignoreCopies[k] || s.Copies == 0 || f.BlockOf(w) != w.BlockSize || s.Blocks+s.Copies <= room {
				continue
			}
			f.ignoreCopies[k] = true
			f.unfeed(k)
			f.Index.ClearRank(kvindex.Rank(k.Slot))
			f.feed(w, k)
			f.publish()
			f.Event(eventlog.Event{Kind: "copies_implausible", Severity: eventlog.Warn, Worker: w.Name, Rank: k.Label,
				Text: fmt.Sprintf("the events of %s add up to %d blocks and %d further copies, but it has room for %d: it does not publish the removal of single copies; its entries are rebuilt without counting them", k.Label, s.Blocks, s.Copies, room)})
		}
	}
}

func (f *Follower) unfeed(k *workers.Rank) {
	f.mu.Lock()
	_, fed := f.open[k]
	delete(f.open, k)
	f.mu.Unlock()
	if fed {
		f.feeds.Remove(kvindex.Rank(k.Slot))
	}
}

func (f *Follower) publish() {
	f.mu.Lock()
	defer f.mu.Unlock()
	slots := 0
	for k := range f.open {
		slots = max(slots, int(k.Slot)+1)
	}
	at := make([]*workers.Rank, slots)
	for k := range f.open {
		at[k.Slot] = k
	}
	f.feeding.Store(&at)
}

// process returns when the engine's process behind a rank was started, NaN when
// it does not say, and when it was queried.
func (f *Follower) process(worker string, dp int) (started float64, queried time.Time) {
	if w, ok := f.Registry.Snapshot().Worker(worker); ok && dp < len(w.Ranks) {
		if l := w.Ranks[dp].Load(); l != nil {
			return l.Process, l.Asked
		}
	}
	return math.NaN(), time.Time{}
}

// life is where a worker's signs of life are noted; nil for a worker that has left.
func (f *Follower) life(worker string) *workers.Life {
	if w, ok := f.Registry.Snapshot().Worker(worker); ok {
		return w.State.Life()
	}
	return nil
}

// sources asks a worker again where its ranks publish; the ports may have
// changed with a restart.
func (f *Follower) sources(ctx context.Context, worker string) ([]workers.EventSource, error) {
	w, ok := f.Registry.Snapshot().Worker(worker)
	if !ok {
		return nil, fmt.Errorf("worker %s is not in the fleet", worker)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := f.Learn(ctx, w); err != nil {
		return nil, err
	}
	w, ok = f.Registry.Snapshot().Worker(worker)
	if !ok {
		return nil, fmt.Errorf("worker %s left the fleet", worker)
	}
	return w.Events, nil
}

// rankCount counts what was sent to a rank, and streams that continued elsewhere.
type rankCount struct{ requests, failures, away, onto uint64 }

// Began counts a request that was sent to a rank.
func (f *Follower) Began(k *workers.Rank) { f.add(k, rankCount{requests: 1}) }

// Failed counts a request that failed there by the engine's doing.
func (f *Follower) Failed(k *workers.Rank) { f.add(k, rankCount{failures: 1}) }

// Left counts a stream of a rank that continues elsewhere.
func (f *Follower) Left(k *workers.Rank) { f.add(k, rankCount{away: 1}) }

// Took counts the rest of a stream that is requested of a rank.
func (f *Follower) Took(k *workers.Rank) { f.add(k, rankCount{onto: 1}) }

func (f *Follower) add(k *workers.Rank, n rankCount) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.count[k]
	if c == nil {
		c = &rankCount{}
		f.count[k] = c
	}
	c.requests += n.requests
	c.failures += n.failures
	c.away += n.away
	c.onto += n.onto
}

// Moved are the streams of a rank that continued elsewhere since it joined, and the rests
// that were requested of it.
func (f *Follower) Moved(k *workers.Rank) (away, onto uint64) {
	c := f.counted(k)
	return c.away, c.onto
}

// Counts are the requests that were sent to a rank since it joined, and those
// that failed there.
func (f *Follower) Counts(k *workers.Rank) (requests, failures uint64) {
	c := f.counted(k)
	return c.requests, c.failures
}

func (f *Follower) counted(k *workers.Rank) (c rankCount) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.count[k]; n != nil {
		c = *n
	}
	return c
}

// forgetCounts drops what late requests have counted of ranks that have left.
func (f *Follower) forgetCounts() {
	newest := f.Registry.Snapshot()
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.count, func(k *workers.Rank, _ *rankCount) bool {
		_, in, ok := newest.Slot(k.Slot)
		return !ok || in != k
	})
}
