package control

import (
	"runtime/metrics"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// runtimeFigures reads the process's own figures.
func runtimeFigures() admin.Runtime {
	samples := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/sched/goroutines:goroutines"}}
	metrics.Read(samples)
	f := admin.Runtime{HeapBytes: samples[0].Value.Uint64(), Goroutines: int(samples[1].Value.Uint64()), CPUSeconds: cpuSeconds()}
	if p, err := procfs.Self(); err == nil { // on Linux
		if stat, err := p.Stat(); err == nil {
			f.RSSBytes = uint64(stat.ResidentMemory())
		}
		f.OpenFiles, _ = p.FileDescriptorsLen()
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
