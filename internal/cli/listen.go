package cli

import (
	"errors"
	"fmt"
	"net"
	"syscall"
)

// Listen listens at the address of a flag, which an error names.
func Listen(flag, addr string) (net.Listener, error) {
	ln, err := net.Listen("tcp", addr)
	if err == nil {
		return ln, nil
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("%s %s is in use by another program; choose another address", flag, addr)
	}
	return nil, fmt.Errorf("%s: %w", flag, err)
}
