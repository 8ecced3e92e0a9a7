package admission

import "testing"

// TestLegLimit: without a setting there are two open files for each leg, and some for all else.
func TestLegLimit(t *testing.T) {
	if LegLimit(7) != 7 || LegLimit(0) < leastLegs {
		t.Errorf("%d, %d", LegLimit(7), LegLimit(0))
	}
	for files, want := range map[uint64]int64{0: leastLegs, 256: leastLegs, 2000: 872, 1 << 20: 1<<19 - 128, 1<<64 - 1: 1<<31 - 128} {
		if got := legLimit(files); got != want {
			t.Errorf("%d open files: %d legs, want %d", files, got, want)
		}
	}
}
