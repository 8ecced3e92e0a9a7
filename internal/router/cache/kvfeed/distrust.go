package kvfeed

import "github.com/dynctl/dynctl/internal/router/cache/kvindex"

// Distrust drops what is known of rank id, because its engine does not hold it any more, as why
// says: an engine publishes that it has emptied its cache only with its next step. The batches
// that follow rebuild the rank. What a replay has from before is not fetched again.
func (m *Manager) Distrust(id kvindex.Rank, why string) {
	m.mu.Lock()
	r := m.ranks[id]
	m.mu.Unlock()
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, had := r.stream.Last(); !had {
		return
	}
	r.stream.Drop()
	r.dropped(why, false)
	if r.state == Live {
		r.explain("rebuilding: " + why)
	}
	r.publish()
}
