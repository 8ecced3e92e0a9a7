package access

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/watchfile"
)

// Options set up a Store.
type Options struct {
	// Path of the file of keys.
	Path string
	// Event gets the results of reading the file; Loaded is called for every reading after
	// the first, with "ok" or "refused". Neither may be nil.
	Event  func(eventlog.Event)
	Loaded func(result string)
	// Watch is how the file is watched; its paths are set.
	Watch watchfile.Options
}

// Store holds the keys in force. It is safe for concurrent use.
type Store struct {
	o       Options
	current atomic.Pointer[Set]
	peers   *peers

	mu  sync.Mutex // one reading at a time; guards what follows
	bad string     // why the newest file is not in force; empty when it is
}

// NewStore reads a file of keys, which must be good.
func NewStore(o Options) (*Store, error) {
	o.Watch.Paths = []string{o.Path}
	set, err := ReadFile(o.Path)
	if err != nil {
		return nil, err
	}
	s := &Store{o: o, peers: &peers{changed: map[uint64]*meter{}}}
	set.join(s.peers)
	s.current.Store(set)
	return s, nil
}

// Find is Set.Find of the keys in force.
func (s *Store) Find(shown string) *Key { return s.current.Load().Find(shown) }

// Count is the number of keys in force.
func (s *Store) Count() int { return len(s.current.Load().keys) }

// Trouble is what is wrong now, in words; empty for nothing.
func (s *Store) Trouble() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bad == "" {
		return ""
	}
	return "the new file of API keys is not in force: " + s.bad
}

// Run reads the file again when it changes, until ctx ends.
func (s *Store) Run(ctx context.Context) error {
	watchfile.Run(ctx, s.o.Watch, s.reload, func(err error) {
		s.o.Event(eventlog.Event{
			Kind: "keys_unwatched", Severity: eventlog.Warn,
			Text: fmt.Sprintf("%s cannot be watched and is looked at every %s instead: %v", s.o.Path, watchfile.DefaultPoll, err),
		})
	})
	return nil
}

// reload puts what the file holds now into force, or says why not.
func (s *Store) reload() {
	s.mu.Lock()
	defer s.mu.Unlock()
	set, err := ReadFile(s.o.Path)
	if err != nil {
		if err.Error() != s.bad {
			s.bad = err.Error()
			s.o.Loaded("refused")
			for _, problem := range eventlog.Problems(err) {
				s.o.Event(eventlog.Event{
					Kind: "keys_refused", Severity: eventlog.Error,
					Text: "the new file of API keys is refused, the previous keys stay in force: " + problem,
				})
			}
		}
		return
	}
	old := s.current.Load()
	added, changed, removed := difference(old, set)
	if s.bad == "" && added+changed+removed == 0 {
		return
	}
	s.bad = ""
	set.join(s.peers)
	s.current.Store(set)
	s.o.Loaded("ok")
	s.o.Event(eventlog.Event{
		Kind: "keys_replaced", Text: fmt.Sprintf("new API keys are in force: %d, with %d new and %d changed; %d are gone", len(set.keys), added, changed, removed),
		Fields: map[string]any{"keys": len(set.keys), "added": added, "changed": changed, "removed": removed},
	})
}

// difference compares two sets; keys that stay keep what their rate and their tokens have let through.
func difference(old, set *Set) (added, changed, removed int) {
	was := make(map[string]*Key, len(old.keys))
	for i := range old.keys {
		was[old.keys[i].Name] = &old.keys[i]
	}
	for i := range set.keys {
		k := &set.keys[i]
		o := was[k.Name]
		if o == nil {
			added++
			continue
		}
		delete(was, k.Name)
		k.tokens, k.meter = o.tokens, o.meter
		if k.limit = o.limit; k.Rate != o.Rate {
			refill, size := k.bucket()
			k.limit.SetLimit(refill)
			k.limit.SetBurst(size)
		}
		if o.sum != k.sum || o.Tenant != k.Tenant || o.Rate != k.Rate || o.Tokens != k.Tokens || o.Weight != k.Weight || fmt.Sprint(o.Models, o.Roles) != fmt.Sprint(k.Models, k.Roles) {
			changed++
		}
	}
	return added, changed, len(was)
}

// noBearer stands for credentials of another kind, which are refused as a wrong key is.
const noBearer = "credentials that are no bearer token"

// Shown is the key that a request shows, as OpenAI's clients do or as Anthropic's;
// empty for none.
func Shown(h http.Header) string {
	if v := h["Authorization"]; len(v) > 0 {
		const scheme = "Bearer "
		if len(v) == 1 && len(v[0]) > len(scheme) && strings.EqualFold(v[0][:len(scheme)], scheme) {
			return strings.TrimSpace(v[0][len(scheme):])
		}
		return noBearer
	}
	if v := h["X-Api-Key"]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// Hide takes the key out of a request's headers, so that no engine or log sees it.
func Hide(h http.Header) {
	delete(h, "Authorization")
	delete(h, "X-Api-Key")
}
