//go:build (linux || darwin) && !race

package kvindex

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapWords returns n zeroed words outside the garbage-collected heap, nil when the host refuses.
func mapWords(n int) []uint64 {
	b, err := unix.Mmap(-1, 0, n*8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil
	}
	adviseHuge(b)
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), n)
}

func unmapWords(w []uint64) error {
	return unix.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(w))), len(w)*8))
}
