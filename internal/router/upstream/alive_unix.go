//go:build unix

package upstream

import "syscall"

// alive reports whether an unused connection can take a request: the engine
// has neither closed it nor sent anything that nobody asked for. It looks
// without taking anything or waiting.
func (c *conn) alive() bool {
	if c.raw == nil {
		return true
	}
	open := false
	err := c.raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		open = err == syscall.EAGAIN || err == syscall.EWOULDBLOCK || err == syscall.EINTR
	})
	return err == nil && open
}
