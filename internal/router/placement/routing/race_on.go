//go:build race

package routing

import "math"

// With the race detector memory that is given back is overwritten: who still reads
// it finds what no request has, and the detector sees the write beside the read.

// poison overwrites ids and hashes.
func (m *hashed) poison() {
	overwrite(m.ids, math.MaxUint32)
	for _, h := range m.views[:cap(m.views)] {
		overwrite(h.locals, math.MaxUint64)
		overwrite(h.seq, math.MaxUint64)
	}
}

// overwrite writes v into all of a slice's memory.
func overwrite[T any](s []T, v T) {
	s = s[:cap(s)]
	for i := range s {
		s[i] = v
	}
}
