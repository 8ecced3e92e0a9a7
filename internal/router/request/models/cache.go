package models

import (
	"context"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
)

// keep is how long a list is given out.
const keep = 5 * time.Second

// Lists answers what models a fleet has.
type Lists struct {
	Fleet func() *workers.Snapshot
	// Aliases are the names that clients may use instead, without patterns.
	Aliases func() []Alias
	// Of is a worker's own answer, nil for none; hops are what questions carry that follow
	// from a client's.
	Of func(ctx context.Context, w *workers.Worker, hops string) []byte
	// Failed gets a list that could not be read.
	Failed func(error)

	cache Cache
}

// Get is the merged list.
func (l *Lists) Get(ctx context.Context, hops string) (*List, error) {
	fleet := l.Fleet()
	return l.cache.Get(ctx, fleet.Revision, func() *List {
		list, err := Query(ctx, fleet, l.Aliases(), func(ctx context.Context, w *workers.Worker) []byte { return l.Of(ctx, w, hops) })
		if err != nil {
			l.Failed(err)
		}
		return list
	})
}

// Cache keeps the merged list for a moment, so that polls of clients do not become as many
// requests to each worker. Callers that come while the fleet is queried wait for that answer;
// no lock is held meanwhile. The zero value is ready.
type Cache struct {
	mu     sync.Mutex
	answer *answer // the newest, being fetched or done
}

// answer is the fleet's at one revision. The rest is set when done is closed.
type answer struct {
	revision uint64
	done     chan struct{}
	at       time.Time
	list     *List // nil when fetching it failed
}

// fresh reports whether the answer can be given out at a fleet's revision.
func (a *answer) fresh(revision uint64, now time.Time) bool {
	if a == nil || a.revision != revision {
		return false
	}
	select {
	case <-a.done:
		return a.list != nil && now.Sub(a.at) < keep
	default:
		return true
	}
}

// Get is the list at a fleet's revision, which fetch gets if it is not there yet. The
// error is that of ctx.
func (c *Cache) Get(ctx context.Context, revision uint64, fetch func() *List) (*List, error) {
	for {
		c.mu.Lock()
		a := c.answer
		mine := !a.fresh(revision, time.Now())
		if mine {
			a = &answer{revision: revision, done: make(chan struct{})}
			c.answer = a
		}
		c.mu.Unlock()
		if mine {
			func() {
				defer close(a.done)
				a.list = fetch()
				a.at = time.Now()
			}()
		}
		select {
		case <-a.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if a.list != nil {
			return a.list, nil
		}
		// The call of ask panicked; ask again.
	}
}
