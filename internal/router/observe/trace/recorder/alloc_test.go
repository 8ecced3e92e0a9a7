//go:build !race

package recorder

import (
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// TestRecordingAllocatesNothing: neither a decision nor an outcome, once the memory
// is there and the workers are described. With the race detector, pools forget what
// they are given.
func TestRecordingAllocatesNothing(t *testing.T) {
	tap := NewTap(trace.Header{})
	sub := listen(t, tap)
	defer sub.Close()
	list, r, now := fleet(16), finished(), time.Now()
	d := made("a754fe24000000000588", list)
	i := 0
	if n := testing.AllocsPerRun(200, func() {
		d.Revision = uint64(1 + i/100%2) // reloads
		i++
		tap.Decision(now, d)
		tap.Outcome(r)
		sub.take()
	}); n > 0.5 { // a pool may be emptied, and a revision is compared when it changes
		t.Errorf("%v allocations", n)
	}
}
