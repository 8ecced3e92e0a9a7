package question

import "testing"

// TestLargeMemoryIsNotKept: what one large prompt has needed is not kept for the
// requests that follow, and a question that has given back its memory has none.
func TestLargeMemoryIsNotKept(t *testing.T) {
	var d Question
	d.Reset()
	for _, c := range []struct {
		tokens int
		kept   bool
	}{{maxKeep, true}, {maxKeep + 1, false}} {
		d.AcquireHashes()
		d.IDs = make([]uint32, 0, c.tokens)
		h := d.view(16)
		h.locals, h.seq = make([]uint64, 0, c.tokens/4+c.tokens%4), make([]uint64, 0, 1)
		m := d.hashed
		d.ReleaseHashes()
		if got := cap(m.ids) > 0 && cap(m.views[0].locals) > 0 && cap(m.views[0].seq) > 0; got != c.kept {
			t.Errorf("%d tokens: kept %v, want %v", c.tokens, got, c.kept)
		}
		if d.hashed != nil || d.IDs != nil || d.views != nil || d.used != 0 {
			t.Errorf("%d tokens: the question has memory still", c.tokens)
		}
		d.ReleaseHashes() // again, for nothing
	}
}
