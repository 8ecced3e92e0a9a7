//go:build race

package router

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// TestReleasedMemoryShows: who still reads the pieces of a leg or the head of a stream
// after they were given back finds nothing that a request could have.
func TestReleasedMemoryShows(t *testing.T) {
	r := &Router{}
	x := r.acquire(nil, nil)
	s := x.scratch("decode")
	s.edits, s.body, s.set = append(s.edits, api.Set("model", []byte(`"m"`))), append(s.body, []byte("body")), append(s.set, upstream.HeaderField{Key: "A", Value: "b"})
	edits, body, set := s.edits, s.body, s.set
	head := acquireHead()
	head.Feed([]byte("data: {}\n\n"), time.Now())
	held := head.Held()
	releaseHead(head)
	x.release()
	if string(body[0]) != released || set[0].Value != released || edits[0].Key != released {
		t.Errorf("a late reader finds %+v, %q, %+v", edits, body, set)
	}
	if string(held) != "!!!!!!!!!!" {
		t.Errorf("a late reader finds %q", held)
	}
}
