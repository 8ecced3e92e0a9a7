//go:build !race

package sse

// Without the race detector memory that is given back stays as it is.

func (*Head) poison() {}
