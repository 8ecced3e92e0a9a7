package benchcmd

import "golang.org/x/sys/unix"

// The calls that read and set a terminal.
const (
	termiosGet = unix.TCGETS
	termiosSet = unix.TCSETS
)
