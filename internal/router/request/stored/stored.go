// Package stored remembers which worker has the state of a response that an engine
// keeps (of the Responses API), and whose response it is.
package stored

import "sync"

// maxID is the longest id in bytes that is remembered.
const maxID = 256

// Response is a response that a worker keeps for a tenant.
type Response struct{ Worker, Tenant string }

// Responses are those of the fleet, by id. An id that another tenant's response
// has, too (clients may choose it), stays with the first. When it is full, the entry that
// was stored first goes.
type Responses struct {
	mu    sync.Mutex
	max   int
	byID  map[string]Response
	order []string
	head  int
	tap   func(id, worker, tenant string)
}

// New remembers as many responses as limit, which is at least 1.
func New(limit int) *Responses {
	return &Responses{max: limit, byID: map[string]Response{}}
}

// Tap has f called with each response that Put remembers. Its caller calls it before others use
// the responses.
func (s *Responses) Tap(f func(id, worker, tenant string)) { s.tap = f }

// Put notes that a worker has a response. An id that is empty or longer than 256 bytes
// is not remembered.
func (s *Responses) Put(id, worker, tenant string) {
	if s.learn(id, worker, tenant) && s.tap != nil {
		s.tap(id, worker, tenant)
	}
}

// Learn is Put for a response that another router stored.
func (s *Responses) Learn(id, worker, tenant string) { s.learn(id, worker, tenant) }

// learn reports whether the response is remembered: an id stays its first tenant's.
func (s *Responses) learn(id, worker, tenant string) bool {
	if id == "" || len(id) > maxID {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, known := s.byID[id]; known && old.Tenant != tenant {
		return false
	} else if !known {
		if len(s.byID) >= s.max {
			delete(s.byID, s.order[s.head])
			s.order[s.head] = id
			s.head = (s.head + 1) % s.max
		} else {
			s.order = append(s.order, id)
		}
	}
	s.byID[id] = Response{worker, tenant}
	return true
}

// Get is where the response of an id is and whose it is, if it is known.
func (s *Responses) Get(id string) (r Response, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok = s.byID[id]
	return r, ok
}
