package admission

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// named is a connection from an address.
type named struct {
	net.Conn
	from net.Addr
}

func (n named) RemoteAddr() net.Addr { return n.from }
func (n named) Close() error         { return nil }

// TestAddressesAreBoundedEachByItself: one address has no more than its own, others
// theirs, and what is closed, once or twice, makes room once.
func TestAddressesAreBoundedEachByItself(t *testing.T) {
	calls := 0
	free := netip.MustParseAddr("10.0.0.9")
	a := NewAddresses(func(of netip.Addr) int {
		if of == free {
			return 0
		}
		return 2
	}, func(netip.Addr, int) { calls++ })
	from := func(s string) net.Conn { return named{from: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(s))} }
	one, ok1 := a.take(from("10.0.0.1:1"))
	_, ok2 := a.take(from("[::ffff:10.0.0.1]:2"))
	_, ok3 := a.take(from("10.0.0.1:3"))
	_, ok4 := a.take(from("10.0.0.1:4"))
	_, other := a.take(from("10.0.0.2:1"))
	if got := []bool{ok1, ok2, ok3, ok4, other}; !slices.Equal(got, []bool{true, true, false, false, true}) {
		t.Errorf("taken: %v, want two of the first address, and the other", got)
	}
	if a.Refused() != 2 || calls != 1 {
		t.Errorf("%d refused, want 2; full called %d times, want once", a.Refused(), calls)
	}
	_, _ = one.Close(), one.Close()
	if _, ok := a.take(from("10.0.0.1:5")); !ok {
		t.Error("a place that came free is not given")
	}
	if _, ok := a.take(from("10.0.0.1:6")); ok {
		t.Error("a connection that was closed twice made room twice")
	}
	for range 5 {
		if _, ok := a.take(from("10.0.0.9:1")); !ok {
			t.Error("an address without bound is refused")
		}
	}
	_, _ = a.take(from("[2001:db8::1]:1"))
	_, _ = a.take(from("[2001:db8::2]:1"))
	if _, ok := a.take(from("[2001:db8::3]:1")); ok {
		t.Error("of IPv6 a client has more than one address")
	}
	if _, ok := a.take(from("[2001:db8:0:1::3]:1")); !ok {
		t.Error("another network of IPv6 is refused")
	}
}

// queueOf accepts connections from a list.
type queueOf struct {
	net.Listener
	conns []net.Conn
}

// Accept implements net.Listener.
func (l *queueOf) Accept() (net.Conn, error) {
	if len(l.conns) == 0 {
		return nil, net.ErrClosed
	}
	c := l.conns[0]
	l.conns = l.conns[1:]
	return c, nil
}

// TestConnectionsBeyondTheBound: a listener that answers gives some of them, for a refusal
// with a reason; the others, and those of a listener that does not answer, are closed.
func TestConnectionsBeyondTheBound(t *testing.T) {
	from := func(port int) net.Conn {
		return named{from: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(port)))} //nolint:gosec // below 65536
	}
	a := NewAddresses(func(netip.Addr) int { return 1 }, func(netip.Addr, int) {})
	const more = 5
	q := &queueOf{}
	for i := range 1 + mostAnswered + more {
		q.conns = append(q.conns, from(1000+i))
	}
	var got []net.Conn
	for ln := a.Listen(q, true); ; {
		c, err := ln.Accept()
		if err != nil {
			break
		}
		got = append(got, c)
	}
	if len(got) != 1+mostAnswered || a.Refused() != mostAnswered+more {
		t.Fatalf("%d accepted, %d refused", len(got), a.Refused())
	}
	if err := a.Refusal("10.0.0.1:1000"); err != nil {
		t.Errorf("the one within the bound: %v", err)
	}
	e := api.FromError(a.Refusal("10.0.0.1:1001"))
	if e == nil || e.Status != http.StatusServiceUnavailable || e.RetryAfter <= 0 || !strings.Contains(e.Message, "limits.client_connections") {
		t.Errorf("one beyond it: %+v", e)
	}
	_ = got[1].Close()
	if err := a.Refusal("10.0.0.1:1001"); err != nil {
		t.Errorf("after its end: %v", err)
	}
	if c, err := a.Listen(&queueOf{conns: []net.Conn{from(9000)}}, true).Accept(); err != nil {
		t.Errorf("its place is not free: %v", err)
	} else {
		_ = c.Close()
	}
	if c, err := a.Listen(&queueOf{conns: []net.Conn{from(9001)}}, false).Accept(); err == nil {
		t.Errorf("%v is accepted where nothing answers it", c.RemoteAddr())
	}
	for _, c := range got {
		_ = c.Close()
	}
	if len(a.open)+len(a.over) != 0 || a.answer.Load() != 0 {
		t.Errorf("%d and %d are left", len(a.open), len(a.over))
	}
}
