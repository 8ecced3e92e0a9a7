//go:build linux && !race

package kvindex

import "golang.org/x/sys/unix"

// adviseHuge asks for 2 MiB pages: random access into a large table costs a TLB miss per touch
// without them. A host that has none works all the same.
func adviseHuge(b []byte) {
	if len(b) >= 2<<20 {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	}
}
