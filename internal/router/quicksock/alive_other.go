//go:build !unix

package quicksock

import "syscall"

// Quiet reports true: there is no portable way to look.
func Quiet(syscall.RawConn) bool { return true }
