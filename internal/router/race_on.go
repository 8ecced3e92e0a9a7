//go:build race

package router

import (
	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// With the race detector memory that is given back is overwritten: who still reads
// it finds what no request has, and the detector sees the write beside the read. Of
// an exchange nothing is left in any build: its router, request and writer are nil.

// released stands in the place of texts.
const released = "released memory"

// poison overwrites the pieces of a leg's request.
func (s *legScratch) poison() {
	overwrite(s.edits, api.Set(released, []byte(released)))
	overwrite(s.body, []byte(released))
	overwrite(s.set, upstream.HeaderField{Key: "X-Released-Memory", Value: released})
}

// poisonHead overwrites what was held of a stream.
func poisonHead(h *sse.Head) { overwrite(h.Held(), '!') }

// overwrite writes v into all of a slice's memory.
func overwrite[T any](s []T, v T) {
	s = s[:cap(s)]
	for i := range s {
		s[i] = v
	}
}
