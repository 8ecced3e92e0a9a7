package stored

import (
	"context"
	"strings"
	"sync"
	"time"
)

const (
	// rememberedFor is for how long a search that found no worker answers for its id, and
	// maxRemembered the number of such searches.
	rememberedFor = 5 * time.Second
	maxRemembered = 1024
	// searchesAtOnce bounds the searches in progress. Another one waits for its turn for
	// searchWait.
	searchesAtOnce = 16
	searchWait     = 2 * time.Second
)

// RetryAfter is when a client may repeat a request whose search was [Found.Unclear].
const RetryAfter = rememberedFor

// Found is the result of a search.
type Found struct {
	// Worker is the name of the worker that keeps the response; empty for none.
	Worker string
	// Unclear says why a worker may keep it although none was found; empty for no reason.
	Unclear string
}

// Finder searches the fleet for responses that the router does not know, as after its restart.
// Requests for one id share a search, and for a few seconds no worker is queried again for an id
// that no worker knew. It is safe for concurrent use.
type Finder struct {
	slots chan struct{}

	mu    sync.Mutex
	byID  map[string]*search
	ended []*search // those that found no worker, oldest first
}

// search is one search, in progress or ended. The rest is set when done is closed.
type search struct {
	id    string
	done  chan struct{}
	ended time.Time
	found Found
}

// NewFinder makes a finder.
func NewFinder() *Finder {
	return &Finder{slots: make(chan struct{}, searchesAtOnce), byID: map[string]*search{}}
}

// Searchable reports whether an id may become a part of the path of a request to an engine: 1 to
// 256 letters, digits and "-_.:", and not only dots.
func Searchable(id string) bool {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:"
	return len(id) <= maxID && strings.Trim(id, ".") != "" && strings.Trim(id, letters) == ""
}

// Find returns what query found for an id, which query or an earlier call of it answers. The
// error is that of ctx, which does not end query: other requests may wait for the same answer.
func (f *Finder) Find(ctx context.Context, id string, query func() Found) (Found, error) {
	f.mu.Lock()
	f.forget(time.Now())
	s := f.byID[id]
	mine := s == nil
	if mine {
		s = &search{id: id, done: make(chan struct{}), found: Found{Unclear: "the search ended early"}}
		f.byID[id] = s
	}
	f.mu.Unlock()
	if mine {
		f.run(ctx, s, query)
	}
	select {
	case <-s.done:
		return s.found, nil
	case <-ctx.Done():
		return Found{}, ctx.Err()
	}
}

// run searches when it is its turn, and ends the search in any case.
func (f *Finder) run(ctx context.Context, s *search, query func() Found) {
	queried := false
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if s.ended = time.Now(); queried && s.found.Worker == "" {
			f.ended = append(f.ended, s)
			f.forget(s.ended)
		} else {
			delete(f.byID, s.id)
		}
		close(s.done)
	}()
	wait := time.NewTimer(searchWait)
	defer wait.Stop()
	select {
	case f.slots <- struct{}{}:
	case <-wait.C:
		s.found.Unclear = "too many responses are searched for"
		return
	case <-ctx.Done():
		return
	}
	defer func() { <-f.slots }()
	s.found = query()
	queried = true
}

// forget drops searches that are too old or too many.
func (f *Finder) forget(now time.Time) {
	for len(f.ended) > 0 && (len(f.ended) > maxRemembered || now.Sub(f.ended[0].ended) >= rememberedFor) {
		delete(f.byID, f.ended[0].id)
		f.ended[0] = nil
		f.ended = f.ended[1:]
	}
}
