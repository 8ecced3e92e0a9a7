//go:build race

package question

import "testing"

// TestReleasedMemoryShows: who still reads ids or hashes after they were given back finds
// nothing that a request could have.
func TestReleasedMemoryShows(t *testing.T) {
	var d Question
	d.Reset()
	d.AcquireHashes()
	d.IDs = append(d.IDs[:0], 1, 2, 3)
	ids := d.IDs
	h := d.view(16)
	h.locals, h.seq = append(h.locals, 4), append(h.seq, 5)
	locals, seq := h.locals, h.seq
	d.Release()
	if ids[2] != 1<<32-1 || locals[0] != 1<<64-1 || seq[0] != 1<<64-1 {
		t.Errorf("a late reader finds ids %v, hashes %v and %v", ids, locals, seq)
	}
}
