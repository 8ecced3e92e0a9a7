package loadgen

import (
	"time"

	"golang.org/x/sys/unix"
)

// What the pacing thread asks of the scheduler.
const (
	paceSlice = 100 * time.Microsecond // the shortest that Linux grants
	paceNice  = -15
)

// punctual makes the calling thread, which its goroutine must have locked,
// wake as precisely as it may. It runs for some µs at a time, and a send that
// waits behind the work of others is a wrong figure. What is not allowed or
// not known here (a short slice needs Linux 6.12, a negative nice value the
// right to it) is left out: the figures of dispatch show it.
func punctual() {
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // ns; 50 µs otherwise
	attr, err := unix.SchedGetAttr(0, 0)
	if err != nil || attr.Policy != unix.SCHED_NORMAL {
		return
	}
	attr.Flags |= unix.SCHED_FLAG_RESET_ON_FORK
	attr.Runtime = uint64(paceSlice)
	nice := attr.Nice
	for _, attr.Nice = range []int32{min(nice, paceNice), nice} {
		if unix.SchedSetAttr(0, attr, 0) == nil {
			return
		}
	}
}

// nap blocks the thread: timers of the runtime wake up to a millisecond late
// on an idle machine.
func nap(d time.Duration) {
	ts := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &ts, nil) // ended early by a signal: the caller looks at the clock
}
