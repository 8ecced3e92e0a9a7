//go:build !linux

package loadgen

import "time"

// nap waits as precisely as the runtime's timers can.
func nap(d time.Duration) { <-time.After(d) }
