//go:build !linux

package quicksock

import "net"

// New gives nc back: direct calls are for Linux.
func New(nc net.Conn) net.Conn { return nc }
