//go:build !race

package decide

// poison does nothing without the race detector.
func (*memory) poison() {}
