package router

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/eventlog"
	"github.com/dynctl/dynctl/internal/router/kvfeed"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/workers"
)

// fleet follows the registry: it gives every rank its place in the index, the
// guesses, the ledger and the feeds, and takes it away when the rank leaves.
type fleet struct {
	r *Router
	// Only the goroutine of run touches these.
	once     map[*workers.Rank]bool // ranks whose engine does not tell of single copies
	last     *workers.Snapshot
	restored map[uint32]snapshotRank // by slot: what a snapshot brought back

	// feeding maps slots to the rank whose KV events are fed; read on the
	// request path.
	feeding atomic.Pointer[map[uint32]*workers.Rank]

	mu    sync.Mutex // guards the fields below
	open  map[*workers.Rank]feedOf
	count map[*workers.Rank]*rankCount
}

// feedOf is what a feed was started with.
type feedOf struct {
	source workers.EventSource
	block  int
	worker *workers.Worker
}

func (f *fleet) init(r *Router) {
	f.once = map[*workers.Rank]bool{}
	f.r, f.open, f.count = r, map[*workers.Rank]feedOf{}, map[*workers.Rank]*rankCount{}
	f.feeding.Store(&map[uint32]*workers.Rank{})
}

// fed reports whether the rank's engine tells KV events, so that the index is
// what counts for it.
func (f *fleet) fed(k *workers.Rank) bool { return (*f.feeding.Load())[k.Slot] == k }

// run follows the registry until ctx ends.
func (f *fleet) run(ctx context.Context) error {
	changed, cancel := f.r.registry.Subscribe()
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
			f.follow(f.r.registry.Snapshot())
		}
	}
}

// follow brings everything keyed by rank to the state of a snapshot.
func (f *fleet) follow(now *workers.Snapshot) {
	for _, c := range workers.Diff(f.last, now) {
		for _, k := range c.Retired {
			f.unfeed(k)
			f.mu.Lock()
			delete(f.count, k)
			f.mu.Unlock()
			delete(f.once, k)
			slot := kvindex.Rank(k.Slot)
			f.r.index.RemoveRank(slot)
			f.r.guesses.RemoveRank(slot)
			f.r.ledger.Forget(k)
			f.r.registry.ReleaseRanks(k)
		}
		if c.Kind == workers.Removed {
			f.r.metrics.ForgetWorker(c.Old.Name)
		}
		for _, k := range c.Started {
			slot := kvindex.Rank(k.Slot)
			if err := errors.Join(f.claim(k), f.r.guesses.AddRank(slot, k.Label)); err != nil {
				f.r.event(eventlog.Event{
					Kind: "rank_refused", Severity: eventlog.Error, Worker: k.WorkerName, Rank: k.Label,
					Text: fmt.Sprintf("rank %s has no place in the index and is routed without cache knowledge: %v", k.Label, err),
				})
			}
		}
	}
	f.last = now
	for _, w := range now.Workers {
		for _, k := range w.Ranks {
			f.feed(w, k)
		}
	}
	f.publish()
}

// feed starts, restarts or stops the feed of a rank as its worker says.
func (f *fleet) feed(w *workers.Worker, k *workers.Rank) {
	var want workers.EventSource
	has := false
	for _, s := range w.Events {
		if s.DP == k.DP {
			want, has = s, true
		}
	}
	block := f.r.settings.Load().blockOf(w)
	f.mu.Lock()
	old, fed := f.open[k]
	f.mu.Unlock()
	if fed && has && old.block == block && reflect.DeepEqual(old.source, want) {
		return
	}
	if fed {
		f.unfeed(k)
		f.r.index.ClearRank(kvindex.Rank(k.Slot))
	}
	if !has {
		return
	}
	key := kvfeed.Key{Worker: w.Name, DP: k.DP, Host: w.URL.Hostname(), BlockSize: block, Once: f.once[k]}
	if err := f.r.feeds.Add(kvindex.Rank(k.Slot), key, want, f.resume(k, want, block)); err != nil {
		f.r.event(eventlog.Event{
			Kind: "feed_refused", Severity: eventlog.Error, Worker: w.Name, Rank: k.Label,
			Text: fmt.Sprintf("the KV events of %s are not followed: %v", k.Label, err),
		})
		return
	}
	f.mu.Lock()
	f.open[k] = feedOf{want, block, w}
	f.mu.Unlock()
}

// auditEvery is how often the index is held against the engines' capacity.
const auditEvery = 5 * time.Second

// audit looks for ranks of which the index knows more blocks than fit into the
// engine's memory. The count of copies (kvindex.Batch.StoreCopies) is then
// wrong: the engine tells the removal of the last copy only. Such a rank begins
// anew without that count.
func (f *fleet) audit() {
	if f.last == nil {
		return
	}
	for _, w := range f.last.Workers {
		if w.KVBlocks <= 0 {
			continue
		}
		for _, k := range w.Ranks {
			s, ok := f.r.index.RankStats(kvindex.Rank(k.Slot))
			if !ok || f.once[k] || s.Copies == 0 || f.r.settings.Load().blockOf(w) != w.BlockSize || s.Blocks+s.Copies <= int64(w.KVBlocks) {
				continue
			}
			f.once[k] = true
			f.unfeed(k)
			f.r.index.ClearRank(kvindex.Rank(k.Slot))
			f.feed(w, k)
			f.publish()
			f.r.event(eventlog.Event{Kind: "copies_disbelieved", Severity: eventlog.Warn, Worker: w.Name, Rank: k.Label,
				Text: fmt.Sprintf("the events of %s add up to %d blocks and %d further copies, but it has room for %d: it does not tell the removal of single copies; its entries are built anew without counting them", k.Label, s.Blocks, s.Copies, w.KVBlocks)})
		}
	}
}

func (f *fleet) unfeed(k *workers.Rank) {
	f.mu.Lock()
	_, fed := f.open[k]
	delete(f.open, k)
	f.mu.Unlock()
	if fed {
		f.r.feeds.Remove(kvindex.Rank(k.Slot))
	}
}

func (f *fleet) publish() {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := make(map[uint32]*workers.Rank, len(f.open))
	for k := range f.open {
		m[k.Slot] = k
	}
	f.feeding.Store(&m)
}

// sources asks a worker again where its ranks publish; the ports may have
// changed with a restart.
func (f *fleet) sources(ctx context.Context, worker string) ([]workers.EventSource, error) {
	w, ok := f.r.registry.Snapshot().Worker(worker)
	if !ok {
		return nil, fmt.Errorf("worker %s is not in the fleet", worker)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := f.r.learn(ctx, w); err != nil {
		return nil, err
	}
	w, ok = f.r.registry.Snapshot().Worker(worker)
	if !ok {
		return nil, fmt.Errorf("worker %s left the fleet", worker)
	}
	return w.Events, nil
}
