// Package positive gives options their defaults.
package positive

import "cmp"

// Or is v if it is above zero, and otherwise what is said for it: an option
// that was left out, or that cannot be meant.
func Or[T cmp.Ordered](v, otherwise T) T {
	var zero T
	if v <= zero {
		return otherwise
	}
	return v
}
