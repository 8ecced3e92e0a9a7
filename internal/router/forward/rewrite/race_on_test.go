//go:build race

package rewrite

import (
	"testing"

	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// TestReleasedMemoryShows: who still reads the pieces of a leg after they were given back
// finds nothing that a request could have.
func TestReleasedMemoryShows(t *testing.T) {
	m := Scratch{edits: []api.Edit{api.Set("model", []byte(`"m"`))}, body: [][]byte{[]byte("body")}, set: []upstream.HeaderField{{Key: "A", Value: "b"}}}
	edits, body, set := m.edits, m.body, m.set
	m.Reset()
	if string(body[0]) != released || set[0].Value != released || edits[0].Key != released {
		t.Errorf("a late reader finds %+v, %q, %+v", edits, body, set)
	}
}
