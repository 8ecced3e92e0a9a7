package commands

import "testing"

func TestGarbagePercent(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		live uint64
		want int
	}{{0, 200}, {10 << 20, 200}, {32 << 20, 200}, {64 << 20, 100}, {128 << 20, 50}, {160 << 20, 40}, {256 << 20, 25}, {4 << 30, 25}} {
		if got := garbagePercent(c.live); got != c.want {
			t.Errorf("%d MiB: %d %%, want %d %%", c.live>>20, got, c.want)
		}
	}
}
