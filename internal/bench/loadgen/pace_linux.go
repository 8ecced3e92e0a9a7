package loadgen

import (
	"time"

	"golang.org/x/sys/unix"
)

// nap blocks the thread: timers of the runtime wake up to a millisecond late
// on an idle machine, this about 60 µs.
func nap(d time.Duration) {
	ts := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &ts, nil) // ended early by a signal: the caller looks at the clock
}
