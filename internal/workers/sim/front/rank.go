package front

import (
	"context"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// Rank drives an engine.Rank by the wall clock. It is safe for concurrent use.
type Rank struct {
	start time.Time
	wake  chan struct{}
	mu    sync.Mutex
	core  *engine.Rank // guarded by mu
}

// NewRank wraps core, which no other may use from now on. Its clock starts now.
func NewRank(core *engine.Rank) *Rank {
	return &Rank{start: time.Now(), wake: make(chan struct{}, 1), core: core}
}

func (r *Rank) now() engine.Time { return time.Since(r.start) }

// Run lets time pass on the rank until ctx ends.
func (r *Rank) Run(ctx context.Context) {
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	for {
		r.mu.Lock()
		r.core.Advance(r.now())
		next, ok := r.core.Next()
		r.mu.Unlock()
		left := time.Hour
		if ok {
			left = max(next-r.now(), 0)
		}
		t.Reset(left)
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		case <-t.C:
		}
	}
}

// Do calls f with the rank and the time, and has the rank look at its timers
// again afterwards. f must not block.
func (r *Rank) Do(f func(core *engine.Rank, now engine.Time)) {
	r.mu.Lock()
	f(r.core, r.now())
	r.mu.Unlock()
	wait.Poke(r.wake)
}

// Submit starts a request. Its outputs come by the Stream.
func (r *Rank) Submit(q engine.Request) (*Stream, error) {
	s := &Stream{rank: r, id: q.ID, ready: make(chan struct{}, 1)}
	q.Sink = s.put
	var err error
	r.Do(func(core *engine.Rank, now engine.Time) { err = core.Submit(now, q) })
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Stats is a copy of the rank's counters.
func (r *Rank) Stats() (s engine.Stats) {
	r.Do(func(core *engine.Rank, now engine.Time) { s = core.Stats(now) })
	return s
}

// Load is the number of running and waiting requests and the share of used blocks.
func (r *Rank) Load() (running, waiting int, usage float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.core.Load()
}

// Seqs are the sequence hashes of the blocks in the rank's cache, in no order.
func (r *Rank) Seqs() (seqs []uint64) {
	r.Do(func(core *engine.Rank, _ engine.Time) { seqs = core.Cache().Seqs(nil) })
	return seqs
}

// PullDone hands the result of a pull to the rank.
func (r *Rank) PullDone(id string, contents []cache.Content, err error) {
	r.Do(func(core *engine.Rank, now engine.Time) { core.PullDone(now, id, contents, err) })
}

// Stream is the answer to one request as it is made.
type Stream struct {
	rank  *Rank
	id    string
	ready chan struct{}

	mu sync.Mutex
	// pending holds what nobody has read yet; a request's own length limits it.
	pending []engine.Output
}

func (s *Stream) put(o engine.Output) {
	s.mu.Lock()
	s.pending = append(s.pending, o)
	s.mu.Unlock()
	wait.Poke(s.ready)
}

// Next waits for outputs and returns all that are there, oldest first, in a
// slice that is appended to buf[:0]. It fails only when ctx ends.
func (s *Stream) Next(ctx context.Context, buf []engine.Output) ([]engine.Output, error) {
	for {
		s.mu.Lock()
		if len(s.pending) > 0 {
			buf = append(buf[:0], s.pending...)
			s.pending = s.pending[:0]
			s.mu.Unlock()
			return buf, nil
		}
		s.mu.Unlock()
		select {
		case <-s.ready:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Abort gives the request up. It may be called at any time.
func (s *Stream) Abort() {
	s.rank.Do(func(core *engine.Rank, now engine.Time) { core.Abort(now, s.id) })
}

// Stop ends the request as complete: no more outputs come.
func (s *Stream) Stop() {
	s.rank.Do(func(core *engine.Rank, now engine.Time) { core.Finish(now, s.id) })
}
