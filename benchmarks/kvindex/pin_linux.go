package main

import (
	"runtime"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// pin keeps the calling goroutine on one CPU. Where that is not allowed it runs anywhere.
func pin(cpu int) {
	runtime.LockOSThread()
	var s unix.CPUSet
	s.Set(cpu)
	_ = unix.SchedSetaffinity(0, &s)
}

// rss returns the anonymous memory of the process in bytes.
func rss() int64 {
	p, err := procfs.Self()
	if err != nil {
		return 0
	}
	status, _ := p.NewStatus()
	return int64(status.RssAnon)
}

// cpu returns the CPU seconds used by the process and by the whole host.
func cpu() (own, host float64) {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	own = float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
	if fs, err := procfs.NewDefaultFS(); err == nil {
		stat, _ := fs.Stat()
		c := stat.CPUTotal
		host = c.User + c.Nice + c.System + c.IRQ + c.SoftIRQ + c.Steal
	}
	return own, host
}
