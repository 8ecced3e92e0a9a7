//go:build race

package routing

import "testing"

// TestReleasedMemoryShows: who still reads ids or hashes after they were given back finds
// nothing that a request could have.
func TestReleasedMemoryShows(t *testing.T) {
	var q Request
	q.Reset()
	q.AcquireHashes()
	q.IDs = append(q.IDs[:0], 1, 2, 3)
	ids := q.IDs
	h := q.view(16, naming{parts: 1})
	h.locals, h.seq = append(h.locals, 4), append(h.seq, 5)
	locals, seq := h.locals, h.seq
	q.Release()
	if ids[2] != 1<<32-1 || locals[0] != 1<<64-1 || seq[0] != 1<<64-1 {
		t.Errorf("a late reader finds ids %v, hashes %v and %v", ids, locals, seq)
	}
}
