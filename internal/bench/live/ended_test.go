package live

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/bench/loadgen"
)

// TestEnded: answers of a target that keeps up end as fast as requests are due, however long
// they take; those of a target at half the rate end half as fast.
func TestEnded(t *testing.T) {
	requests := func(n int, last func(i int) time.Duration) (out []loadgen.Result) {
		for i := range n {
			out = append(out, loadgen.Result{Intended: time.Duration(i) * time.Second, Last: last(i)})
		}
		return out
	}
	for _, c := range []struct {
		name string
		of   []loadgen.Result
		want float64
	}{
		{"long answers", requests(40, func(i int) time.Duration { return time.Duration(i+60) * time.Second }), 1},
		{"half the rate", requests(40, func(i int) time.Duration { return time.Duration(2*i) * time.Second }), 0.5},
		{"too few", requests(7, func(i int) time.Duration { return time.Duration(2*i) * time.Second }), 0},
	} {
		if got := ended(c.of); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	failed := requests(40, func(i int) time.Duration { return time.Duration(i) * time.Second })
	for i := range failed {
		failed[i].Err = "x"
	}
	if got := ended(failed); got != 0 {
		t.Errorf("nothing ended, and it is %v", got)
	}
}
