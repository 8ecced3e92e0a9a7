package admission

import (
	"net"
	"net/netip"
	"slices"
	"testing"
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
