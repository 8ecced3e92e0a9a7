package admission

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Addresses bounds the connections of one client address. It is safe for concurrent
// use.
type Addresses struct {
	limit func(netip.Addr) int
	full  func(addr netip.Addr, limit int)

	refused atomic.Uint64

	mu     sync.Mutex
	open   map[netip.Addr]int
	silent time.Time // until when full is not called again
}

// NewAddresses is a bound of limit connections for an address, asked for each; 0
// is no bound. full is called with an address that has used up its own, once a minute
// at most.
func NewAddresses(limit func(netip.Addr) int, full func(addr netip.Addr, limit int)) *Addresses {
	return &Addresses{limit: limit, full: full, open: map[netip.Addr]int{}}
}

// Refused counts the connections that were closed at once.
func (a *Addresses) Refused() uint64 { return a.refused.Load() }

// Listen gives the connections of a listener that are within the bound; others are
// closed.
func (a *Addresses) Listen(ln net.Listener) net.Listener { return &addressListener{ln, a} }

type addressListener struct {
	net.Listener
	a *Addresses
}

// Accept implements net.Listener.
func (l *addressListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if bounded, ok := l.a.take(c); ok {
			return bounded, nil
		}
		_ = c.Close()
	}
}

// group is what counts as one address: of IPv6 a network of 64 bits, of which one
// client has all.
func group(of net.Addr) (netip.Addr, bool) {
	tcp, ok := of.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}, false
	}
	addr := tcp.AddrPort().Addr().WithZone("").Unmap()
	if addr.Is6() {
		p, _ := addr.Prefix(64) // every address of IPv6 has one
		addr = p.Addr()
	}
	return addr, addr.IsValid()
}

// take counts a connection; false for one too many.
func (a *Addresses) take(c net.Conn) (net.Conn, bool) {
	addr, ok := group(c.RemoteAddr())
	if !ok {
		return c, true
	}
	limit := a.limit(addr)
	if limit <= 0 {
		return c, true
	}
	a.mu.Lock()
	if a.open[addr] >= limit {
		a.refused.Add(1)
		now := time.Now()
		report := now.After(a.silent)
		if report {
			a.silent = now.Add(time.Minute) // refused connections cannot fill the event log
		}
		a.mu.Unlock()
		if report {
			a.full(addr, limit)
		}
		return nil, false
	}
	a.open[addr]++
	a.mu.Unlock()
	return &addressConn{Conn: c, a: a, addr: addr}, true
}

func (a *Addresses) give(addr netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.open[addr]--; a.open[addr] <= 0 {
		delete(a.open, addr)
	}
}

// addressConn is a connection that counts.
type addressConn struct {
	net.Conn
	a     *Addresses
	addr  netip.Addr
	ended atomic.Bool
}

// Close implements net.Conn.
func (c *addressConn) Close() error {
	if c.ended.CompareAndSwap(false, true) {
		c.a.give(c.addr)
	}
	return c.Conn.Close()
}

// CloseWrite lets a server end an answer before it has read all of a request.
func (c *addressConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}
