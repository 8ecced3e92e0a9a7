//go:build race

package rewrite

import (
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// With the race detector memory that is given back is overwritten: who still reads it
// finds what no request has, and the detector sees the write beside the read.

// released stands in the place of texts.
const released = "released memory"

// poison overwrites the pieces of a request.
func (m *Scratch) poison() {
	overwrite(m.edits, api.Set(released, []byte(released)))
	overwrite(m.body, []byte(released))
	overwrite(m.set, upstream.HeaderField{Key: "X-Released-Memory", Value: released})
}

// overwrite writes v into all of a slice's memory.
func overwrite[T any](s []T, v T) {
	s = s[:cap(s)]
	for i := range s {
		s[i] = v
	}
}
