//go:build unix && !linux

package quicksock

import "syscall"

func (p *Probe) look(fd uintptr) {
	var b [1]byte
	_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	p.quiet = err == syscall.EAGAIN || err == syscall.EWOULDBLOCK || err == syscall.EINTR
}
