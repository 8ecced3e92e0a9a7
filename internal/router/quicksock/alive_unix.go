//go:build unix && !linux

package quicksock

import "syscall"

// Quiet reports whether the peer of an idle connection has neither closed it
// nor sent anything. It takes nothing and does not wait.
func Quiet(raw syscall.RawConn) bool {
	quiet := false
	err := raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		quiet = err == syscall.EAGAIN || err == syscall.EWOULDBLOCK || err == syscall.EINTR
	})
	return err == nil && quiet
}
