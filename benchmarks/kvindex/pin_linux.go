package main

import (
	"os"
	"runtime"
	"strconv"
	"strings"

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
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for l := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(l, "RssAnon:"); ok {
			n, _ := strconv.ParseInt(strings.Fields(v)[0], 10, 64)
			return n * 1024
		}
	}
	return 0
}

// cpu returns the CPU seconds used by the process and by the whole host.
func cpu() (own, host float64) {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	own = float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
	b, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(b), "\n")
	for i, f := range strings.Fields(line) {
		// user nice system irq softirq steal, in ticks of 10 ms
		if i >= 1 && i <= 3 || i >= 6 && i <= 8 {
			n, _ := strconv.ParseFloat(f, 64)
			host += n / 100
		}
	}
	return own, host
}
