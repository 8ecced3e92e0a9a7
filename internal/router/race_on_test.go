//go:build race

package router

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// TestReleasedMemoryShows: who still reads ids, hashes, the pieces of a leg or the
// head of a stream after they were given back finds nothing that a request could
// have.
func TestReleasedMemoryShows(t *testing.T) {
	r := &Router{}
	x := r.acquire(nil, nil)
	x.d.acquireHashes()
	x.d.ids = append(x.d.ids[:0], 1, 2, 3)
	ids := x.d.ids
	h := x.d.view(16)
	h.locals, h.seq = append(h.locals, 4), append(h.seq, 5)
	locals, seq := h.locals, h.seq
	s := x.scratch("decode")
	s.edits, s.body, s.set = append(s.edits, api.Set("model", []byte(`"m"`))), append(s.body, []byte("body")), append(s.set, upstream.HeaderField{Key: "A", Value: "b"})
	edits, body, set := s.edits, s.body, s.set
	head := acquireHead()
	head.Feed([]byte("data: {}\n\n"), time.Now())
	held := head.Held()
	releaseHead(head)
	x.release()
	if ids[2] != 1<<32-1 || locals[0] != 1<<64-1 || seq[0] != 1<<64-1 {
		t.Errorf("a late reader finds ids %v, hashes %v and %v", ids, locals, seq)
	}
	if string(body[0]) != released || set[0].Value != released || edits[0].Key != released {
		t.Errorf("a late reader finds %+v, %q, %+v", edits, body, set)
	}
	if string(held) != "!!!!!!!!!!" {
		t.Errorf("a late reader finds %q", held)
	}
}
