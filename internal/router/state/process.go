package state

import (
	"os"
	"runtime"
	"runtime/metrics"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dynctl/dynctl/internal/router/admin"
)

// runtimeFigures reads the process's own figures.
func runtimeFigures() admin.Runtime {
	samples := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/sched/goroutines:goroutines"}}
	metrics.Read(samples)
	f := admin.Runtime{HeapBytes: samples[0].Value.Uint64(), Goroutines: int(samples[1].Value.Uint64()), CPUSeconds: cpuSeconds()}
	if runtime.GOOS == "linux" {
		if raw, err := os.ReadFile("/proc/self/statm"); err == nil {
			if fields := strings.Fields(string(raw)); len(fields) > 1 {
				pages, _ := strconv.ParseUint(fields[1], 10, 64)
				f.RSSBytes = pages * uint64(os.Getpagesize())
			}
		}
		if list, err := os.ReadDir("/proc/self/fd"); err == nil {
			f.OpenFiles = len(list)
		}
	}
	return f
}

// cpuSeconds is the processor time that the process has used.
func cpuSeconds() float64 {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return float64(u.Utime.Sec+u.Stime.Sec) + float64(u.Utime.Usec+u.Stime.Usec)/1e6
}
