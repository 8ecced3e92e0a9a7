//go:build linux

package quicksock

import (
	"syscall"
	"unsafe"
)

// Quiet reports whether the peer of an idle connection has neither closed it
// nor sent anything. It takes nothing and does not wait.
func Quiet(raw syscall.RawConn) bool {
	quiet := false
	err := raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b[0])), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
		quiet = errno == syscall.EAGAIN || errno == syscall.EINTR
	})
	return err == nil && quiet
}
