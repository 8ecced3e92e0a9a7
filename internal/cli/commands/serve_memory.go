package commands

import (
	"context"
	"math"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"github.com/dynctl/dynctl/internal/wait"
)

// How much garbage may gather before the collector runs. Little of what a
// request allocates outlives it, so that a small heap may grow to three times
// its size: collecting half as often saves a tenth of the CPU for some ten MiB.
// A large heap is that of thousands of streams, which allocate next to nothing
// while they wait for tokens: a share of it as large would be memory for
// nothing.
const (
	garbageBytes   = 64 << 20 // wanted, whatever lives
	garbageMost    = 200      // percent of what lives, as GOGC
	garbageLeast   = 25
	garbageStep    = 10 // a change below it is not worth stopping the world for
	garbageLook    = time.Second
	liveHeapMetric = "/gc/heap/live:bytes"
)

// garbagePercent is GOGC for a heap of which live bytes are in use.
func garbagePercent(live uint64) int {
	p := math.MaxInt
	if live > 0 {
		p = int(min(100*garbageBytes/live, garbageMost))
	}
	return min(max(p, garbageLeast), garbageMost)
}

// tuneCollector keeps GOGC fitting until ctx ends, and sets it back; with GOGC
// in the environment it does nothing. GOMEMLIMIT works beside it as ever.
func tuneCollector(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	now := garbageMost
	before := debug.SetGCPercent(now)
	defer debug.SetGCPercent(before)
	live := []metrics.Sample{{Name: liveHeapMetric}}
	for range wait.Every(ctx, garbageLook) {
		metrics.Read(live)
		p := garbagePercent(live[0].Value.Uint64())
		if p >= now-garbageStep && p <= now+garbageStep && p != garbageLeast && p != garbageMost || p == now {
			continue
		}
		now = p
		debug.SetGCPercent(now)
	}
}
