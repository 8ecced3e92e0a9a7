//go:build !race

package routing

// Without the race detector memory that is given back stays as it is.

func (*hashed) poison() {}
