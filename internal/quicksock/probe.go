package quicksock

import "syscall"

// Probe looks at an idle connection. It must not be used by two goroutines at
// a time.
type Probe struct {
	raw   syscall.RawConn
	quiet bool
	see   func(fd uintptr)
}

// NewProbe makes a probe; nil for a connection without file descriptor.
func NewProbe(c any) *Probe {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	p := &Probe{raw: raw}
	p.see = p.look
	return p
}

// Quiet reports whether the peer has neither closed the connection nor sent
// anything that was not read. It takes nothing and does not wait.
func (p *Probe) Quiet() bool {
	p.quiet = false
	return p.raw.Control(p.see) == nil && p.quiet
}
