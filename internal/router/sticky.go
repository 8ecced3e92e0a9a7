package router

import "sync"

// stickyResponses remembers which worker holds the state of a response of the
// Responses API, and whose response it is: an id that engines say of another tenant's,
// too, as clients may choose it, stays with the first. When it is full, the entry that was stored first goes.
type stickyResponses struct {
	mu    sync.Mutex
	max   int
	byID  map[string]stored
	order []string
	head  int
}

// stored is a response that a worker keeps for a tenant.
type stored struct{ worker, tenant string }

func newStickyResponses(limit int) *stickyResponses {
	return &stickyResponses{max: limit, byID: map[string]stored{}}
}

func (s *stickyResponses) put(id, worker, tenant string) {
	if id == "" || len(id) > 256 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, known := s.byID[id]; known && old.tenant != tenant {
		return
	} else if !known {
		if len(s.byID) >= s.max {
			delete(s.byID, s.order[s.head])
			s.order[s.head] = id
			s.head = (s.head + 1) % s.max
		} else {
			s.order = append(s.order, id)
		}
	}
	s.byID[id] = stored{worker, tenant}
}

func (s *stickyResponses) get(id string) (r stored, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok = s.byID[id]
	return r, ok
}
