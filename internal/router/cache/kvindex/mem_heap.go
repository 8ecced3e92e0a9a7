//go:build race || !(linux || darwin)

package kvindex

const regionUnits = hugeUnits

// mapRegion returns n zeroed words of the ordinary heap. The race detector watches only that memory, so
// race builds use it too.
func mapRegion(n int) (raw, words []uint64) {
	raw = make([]uint64, n)
	return raw, raw
}

func unmapRegion([]uint64) error { return nil }
