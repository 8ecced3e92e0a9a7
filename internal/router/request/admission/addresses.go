package admission

import (
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// Addresses bounds the connections of one client address. It is safe for concurrent
// use.
type Addresses struct {
	limit func(netip.Addr) int
	full  func(addr netip.Addr, limit int)

	refused atomic.Uint64

	mu     sync.Mutex
	open   map[netip.Addr]int
	over   map[string]struct{} // peers that have one too many, and get a refusal
	answer atomic.Int64        // how many they are
	silent time.Time           // until when full is not called again
}

// NewAddresses is a bound of limit connections for an address, asked for each; 0
// is no bound. full is called with an address that has used up its own, once a minute
// at most.
func NewAddresses(limit func(netip.Addr) int, full func(addr netip.Addr, limit int)) *Addresses {
	return &Addresses{limit: limit, full: full, open: map[netip.Addr]int{}, over: map[string]struct{}{}}
}

// Refused counts the connections beyond the bound.
func (a *Addresses) Refused() uint64 { return a.refused.Load() }

// mostAnswered is how many connections beyond their bound, of all addresses, may wait for their
// refusal at the same time.
const mostAnswered = 1024

// Listen returns a listener that accepts the connections of ln within the bound. With answers it
// also accepts 1,024 beyond, and [Addresses.Refusal] reports an error for these; it closes all
// others immediately.
func (a *Addresses) Listen(ln net.Listener, answers bool) net.Listener {
	return &addressListener{ln, a, answers}
}

// Refusal is the error for a request whose connection is beyond the bound; nil for others.
// peer is the address and port that the connection comes from.
func (a *Addresses) Refusal(peer string) error {
	if a.answer.Load() == 0 {
		return nil
	}
	a.mu.Lock()
	_, over := a.over[peer]
	a.mu.Unlock()
	if !over {
		return nil
	}
	return &api.Error{
		Status: http.StatusServiceUnavailable, Code: api.CodeOverloaded, RetryAfter: time.Second,
		Message: "too many connections come from your address (limits.client_connections); use those that are open, or close some; a proxy belongs into trusted_proxies",
	}
}

type addressListener struct {
	net.Listener
	a       *Addresses
	answers bool
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
		if l.answers && l.a.takeOver(c) {
			return &addressConn{Conn: c, end: func() { l.a.giveOver(c) }}, nil
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
	return &addressConn{Conn: c, end: func() { a.give(addr) }}, true
}

// takeOver notes a connection that gets a refusal; false where too many wait for theirs.
func (a *Addresses) takeOver(c net.Conn) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.over) >= mostAnswered {
		return false
	}
	a.over[c.RemoteAddr().String()] = struct{}{}
	a.answer.Store(int64(len(a.over)))
	return true
}

func (a *Addresses) giveOver(c net.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.over, c.RemoteAddr().String())
	a.answer.Store(int64(len(a.over)))
}

func (a *Addresses) give(addr netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.open[addr]--; a.open[addr] <= 0 {
		delete(a.open, addr)
	}
}

// addressConn is a connection that counts until it is closed.
type addressConn struct {
	net.Conn
	end   func()
	ended atomic.Bool
}

// Close implements net.Conn.
func (c *addressConn) Close() error {
	if c.ended.CompareAndSwap(false, true) {
		c.end()
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
