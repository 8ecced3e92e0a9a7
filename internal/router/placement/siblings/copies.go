package siblings

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

const (
	// findWithin is how long a router that starts waits until it hears another one: eight
	// heartbeats.
	findWithin = 8 * replicas.Heartbeat
	// busyPause is the time until a router that gives a copy to another one is asked again.
	busyPause = 20 * time.Millisecond
	// fetchWithin is how long one router may take to give the copy of a rank: two more can
	// be asked before the feeds begin without.
	fetchWithin = 10 * time.Second
)

// copies is how routers that start get copies of ranks.
type copies struct {
	first     chan struct{} // closed when another router was heard
	firstOnce sync.Once
	direct    atomic.Pointer[replicas.Direct]
	giver     atomic.Pointer[replicas.Giver]
	offer     func(k *workers.Rank, limit int) ([]byte, error)

	// find is until when another router is waited for, all says that all of them were heard,
	// failed are those that do not answer as they should. They are for the goroutine of Copy.
	find   time.Time
	all    bool
	failed map[string]error
}

// Offer sets what makes the copy of a rank for other routers, in at most limit bytes. It is
// called before Run.
func (s *Siblings) Offer(copyOf func(k *workers.Rank, limit int) ([]byte, error)) { s.offer = copyOf }

// exchangeCopies begins to give copies to other routers, and to get them.
func (s *Siblings) exchangeCopies(d replicas.Direct) error {
	s.mu.Lock()
	self := s.o.Self
	s.mu.Unlock()
	g := replicas.NewGiver(self, s.o.Clock, s.copyOf)
	if err := d.Answer(self.Address(), g.Answer); err != nil {
		return err
	}
	s.giver.Store(g)
	s.direct.Store(&d)
	return nil
}

// copyOf is the copy of a rank for another router.
func (s *Siblings) copyOf(rank replicas.Rank) ([]byte, error) {
	s.mu.Lock()
	s.follow()
	i := slices.Index(s.keys, rank)
	if i < 0 || s.offer == nil {
		s.mu.Unlock()
		return nil, errors.New("it does not know the rank")
	}
	k := s.ranks[i]
	s.mu.Unlock()
	return s.offer(k, replicas.MaxCopy)
}

// errAlone is the error of a router that has heard no other one.
var errAlone = fmt.Errorf("no other router was heard within %v", findWithin)

// found waits until another router was heard, and for a heartbeat and a half more, in which all
// of them are: the first one may have started a moment ago, too. It reports whether one was heard.
func (s *Siblings) found(ctx context.Context) bool {
	if s.all {
		return true
	}
	within, cancel := context.WithDeadline(ctx, s.find)
	defer cancel()
	select {
	case <-s.first:
	case <-within.Done():
		select {
		case <-s.first: // long ago
		default:
			return false
		}
	}
	s.all = wait.For(ctx, replicas.Heartbeat*3/2)
	return s.all
}

// Copy returns another router's copy of a worker's rank, and that router's name. Of several it
// is the one that has been running longest. It is for one goroutine.
func (s *Siblings) Copy(ctx context.Context, w *workers.Worker, k *workers.Rank) (copied []byte, router string, err error) {
	if s.find.IsZero() {
		s.find, s.failed = time.Now().Add(findWithin), map[string]error{}
	}
	if !s.found(ctx) {
		return nil, "", errAlone
	}
	d, x := s.direct.Load(), s.exchange.Load()
	if d == nil {
		return nil, "", errors.New("routers exchange no copies on this transport")
	}
	s.mu.Lock()
	self := s.o.Self
	s.mu.Unlock()
	origins := x.View().Snapshot(s.o.Clock()).Origins
	slices.SortStableFunc(origins, func(a, b replicas.Origin) int { return a.Epoch.Compare(b.Epoch) })
	rank := replicas.RankOf(w.URL.String(), k.DP)
	err = errAlone
	for i := range origins {
		o := &origins[i]
		if failed := s.failed[o.Origin]; failed != nil {
			err = failed
		}
		if !o.Live || s.failed[o.Origin] != nil {
			continue
		}
		copied, err = s.fetch(ctx, *d, &self, o.Origin, rank)
		switch {
		case err == nil:
			return copied, o.Origin, nil
		case ctx.Err() != nil:
			return nil, "", err
		case !errors.Is(err, replicas.ErrNoCopy):
			s.failed[o.Origin] = err
		}
	}
	return nil, "", err
}

// fetch gets a rank's copy from one router. It waits while that router gives a copy to another
// one, and gives up in time to get the copy elsewhere.
func (s *Siblings) fetch(ctx context.Context, d replicas.Direct, self *replicas.Identity, origin string, rank replicas.Rank) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchWithin)
	defer cancel()
	for {
		copied, err := replicas.Fetch(ctx, d, self, origin, rank)
		if !errors.Is(err, replicas.ErrBusy) || !wait.For(ctx, busyPause) {
			return copied, err
		}
	}
}
