//go:build linux && race

package quicksock

import (
	"runtime"
	"syscall"
	"unsafe"
)

// The race detector does not see a raw call, so these announce what the kernel did with
// the memory. What was written before a write happens before what follows a read, of
// whatever file: that is how the syscall package orders its own calls, over an address
// that only it knows. Its calls with no bytes, which change nothing, give the same
// order, also with the peers in this process that use it.

// raceRead announces that n bytes were read into p without an error.
func raceRead(fd uintptr, p []byte, n int) {
	if n > 0 {
		runtime.RaceWriteRange(unsafe.Pointer(&p[0]), n)
	}
	_, _ = syscall.Read(int(fd), nil) // 0 on a socket, whatever its state
}

// raceWrite announces that a write is about to begin.
func raceWrite() {
	_, _ = syscall.Write(-1, nil) // the order is made before the call fails
}

// raceWritten announces that the first n bytes of p were written.
func raceWritten(p []byte, n int) {
	if n > 0 {
		runtime.RaceReadRange(unsafe.Pointer(&p[0]), n)
	}
}

// raceWrittenVec announces that the first n bytes of vec were written.
func raceWrittenVec(vec []syscall.Iovec, n int) {
	for _, v := range vec {
		raceWritten(unsafe.Slice(v.Base, v.Len), min(n, int(v.Len)))
		n -= min(n, int(v.Len))
	}
}
