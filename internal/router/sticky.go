package router

import "sync"

// stickyResponses remembers which worker holds the state of a response of the
// Responses API. When it is full, the entry that was stored first goes.
type stickyResponses struct {
	mu    sync.Mutex
	max   int
	byID  map[string]string
	order []string
	head  int
}

func newStickyResponses(limit int) *stickyResponses {
	return &stickyResponses{max: limit, byID: map[string]string{}}
}

func (s *stickyResponses) put(id, worker string) {
	if id == "" || len(id) > 256 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.byID[id]; !known {
		if len(s.byID) >= s.max {
			delete(s.byID, s.order[s.head])
			s.order[s.head] = id
			s.head = (s.head + 1) % s.max
		} else {
			s.order = append(s.order, id)
		}
	}
	s.byID[id] = worker
}

func (s *stickyResponses) get(id string) (worker string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	worker, ok = s.byID[id]
	return worker, ok
}
