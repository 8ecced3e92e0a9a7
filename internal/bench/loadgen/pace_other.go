//go:build !linux

package loadgen

import "time"

// punctual does nothing: there is no way to ask for it here.
func punctual() {}

// nap waits as precisely as the runtime's timers can.
func nap(d time.Duration) { <-time.After(d) }
