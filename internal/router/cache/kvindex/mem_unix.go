//go:build (linux || darwin) && !race

package kvindex

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const regionUnits = 32 * hugeUnits // 64 MiB

// mapRegion returns n words outside the garbage-collected heap that start at a multiple of 2 MiB, and what
// was mapped for it, nil when the host refuses.
func mapRegion(n int) (raw, words []uint64) {
	const huge = hugeUnits * unitWords * 8
	b, err := unix.Mmap(-1, 0, n*8+huge, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil
	}
	adviseHuge(b)
	p := unsafe.Pointer(unsafe.SliceData(b))
	raw = unsafe.Slice((*uint64)(p), len(b)/8)
	skip := -uintptr(p) % huge / 8
	return raw, raw[skip : skip+uintptr(n)]
}

func unmapRegion(raw []uint64) error {
	return unix.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(raw))), len(raw)*8))
}
