//go:build linux

package quicksock

import (
	"syscall"
	"unsafe"
)

func (p *Probe) look(fd uintptr) {
	var b [1]byte
	_, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b[0])), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	p.quiet = errno == syscall.EAGAIN || errno == syscall.EINTR
}
