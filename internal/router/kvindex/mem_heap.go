//go:build race || !(linux || darwin)

package kvindex

// mapWords returns n zeroed words of the ordinary heap. The race detector watches only that memory,
// so race builds use it too.
func mapWords(n int) []uint64 { return make([]uint64, n) }

func unmapWords([]uint64) error { return nil }
