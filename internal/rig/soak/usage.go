package soak

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/metrics"
	"strings"
	"time"

	"github.com/prometheus/procfs"

	"github.com/dynctl/dynctl/internal/wait"
)

// Usage is what the process holds.
type Usage struct {
	Heap       uint64 `json:"heap_bytes"` // live after a collection
	Goroutines int    `json:"goroutines"`
	Files      int    `json:"open_files"` // sockets included
	Sockets    int    `json:"open_sockets"`
}

func usageNow() Usage {
	runtime.GC()
	runtime.GC() // what the first one has handed to finalizers
	m := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(m)
	u := Usage{Heap: m[0].Value.Uint64(), Goroutines: runtime.NumGoroutine()}
	if p, err := procfs.Self(); err == nil { // on Linux
		files, _ := p.FileDescriptorTargets()
		u.Files = len(files)
		for _, to := range files {
			if strings.HasPrefix(to, "socket:") {
				u.Sockets++
			}
		}
	}
	return u
}

// waitForBaseline waits until as much is left as there was before, or does not shrink
// any more.
func waitForBaseline(before Usage) (now Usage) {
	for end := time.Now().Add(20 * time.Second); ; {
		now = usageNow()
		if now.Goroutines <= before.Goroutines && now.Sockets <= before.Sockets || time.Now().After(end) {
			return now
		}
		wait.For(context.Background(), 50*time.Millisecond)
	}
}

// heapSlack is how much the heap may grow from the second check to the last, as
// a share of it. At the first one logs of events and the engines' replay buffers
// are still filling, as they are throughout a run below half an hour.
const heapSlack = 0.10

func (s *soak) leaks(sum *Summary) {
	b, a := sum.Before, sum.After
	if a.Goroutines > b.Goroutines {
		buf := make([]byte, 1<<20)
		_ = os.WriteFile(filepath.Join(s.o.Dir, "goroutines.txt"), buf[:runtime.Stack(buf, true)], 0o600)
		s.violation("leak", nil, fmt.Sprintf("%d goroutines before, %d after (goroutines.txt)", b.Goroutines, a.Goroutines))
	}
	if a.Sockets > b.Sockets {
		s.violation("leak", nil, fmt.Sprintf("%d sockets before, %d after", b.Sockets, a.Sockets))
	}
	if a.Files > b.Files+1 { // the runtime's own poller opens one
		s.violation("leak", nil, fmt.Sprintf("%d open files before, %d after", b.Files, a.Files))
	}
	if len(sum.Checks) > 2 {
		second, last := sum.Checks[1], sum.Checks[len(sum.Checks)-1]
		at, now := second.Usage.Sockets, last.Usage.Sockets
		if time.Duration(sum.Duration) >= 5*time.Minute && now > at+at/4 {
			s.violation("leak", nil, fmt.Sprintf("%d sockets %s, %d at the end", at, second.When, now))
		}
		sum.HeapGrowth = float64(last.Usage.Heap)/float64(second.Usage.Heap) - 1
		if time.Duration(sum.Duration) >= 30*time.Minute && sum.HeapGrowth > heapSlack {
			s.violation("heap", nil, fmt.Sprintf("%d bytes %s, %d at the end (%+.1f %%)", second.Usage.Heap, second.When, last.Usage.Heap, 100*sum.HeapGrowth))
		}
	}
}
