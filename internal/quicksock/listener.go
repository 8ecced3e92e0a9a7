package quicksock

import "net"

// Listen makes the connections of a listener direct.
func Listen(ln net.Listener) net.Listener { return listener{ln} }

type listener struct{ net.Listener }

// Accept implements [net.Listener].
func (l listener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return New(nc), nil
}
