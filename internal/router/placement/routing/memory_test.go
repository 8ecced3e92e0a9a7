package routing

import "testing"

// TestLargeMemoryIsNotKept: what one large prompt has needed is not kept for the
// requests that follow, and a routing request that has given back its memory has none.
func TestLargeMemoryIsNotKept(t *testing.T) {
	var q Request
	q.Reset()
	for _, c := range []struct {
		tokens int
		kept   bool
	}{{maxKeep, true}, {maxKeep + 1, false}} {
		q.AcquireHashes()
		q.IDs = make([]uint32, 0, c.tokens)
		h := q.view(16, naming{parts: 1})
		h.locals, h.seq = make([]uint64, 0, c.tokens/4+c.tokens%4), make([]uint64, 0, 1)
		m := q.hashed
		q.ReleaseHashes()
		if got := cap(m.ids) > 0 && cap(m.views[0].locals) > 0 && cap(m.views[0].seq) > 0; got != c.kept {
			t.Errorf("%d tokens: kept %v, want %v", c.tokens, got, c.kept)
		}
		if q.hashed != nil || q.IDs != nil || q.views != nil || q.used != 0 {
			t.Errorf("%d tokens: the request has memory still", c.tokens)
		}
		q.ReleaseHashes() // again, for nothing
	}
}
