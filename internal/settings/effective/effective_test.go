package effective

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

func made(t *testing.T, change func(*settings.Config)) *Settings {
	t.Helper()
	c := settings.Default()
	change(&c)
	s, err := New(c, map[string]string{"routing.policy": "flag"}, 7)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestDerived: settings in force have every connector, what decisions read, and say
// whether anything bounds what ranks take.
func TestDerived(t *testing.T) {
	s := made(t, func(c *settings.Config) { c.Continue.Mode, c.Continue.Moves = settings.ContinueExact, 3 })
	if s.Revision != 7 || s.Origin["routing.policy"] != "flag" || s.Decisions.Continuations != 3 || s.Bounded {
		t.Errorf("%+v", s)
	}
	for _, k := range workers.Connectors() {
		if s.Connectors[k] == nil {
			t.Errorf("%s is missing", k)
		}
	}
	if s := made(t, func(c *settings.Config) { c.Routing.Busy = selector.Busy{Requests: 2} }); !s.Bounded {
		t.Error("busy_requests bounds nothing")
	}
	c := settings.Default()
	c.Routing.DecoderRegistry = "no JSON"
	if _, err := New(c, nil, 1); err == nil || !strings.Contains(err.Error(), "routing.decoder_registry") {
		t.Errorf("%v", err)
	}
	c = settings.Default()
	c.TrustedProxies = []string{"proxy.example"}
	if _, err := New(c, nil, 1); err == nil || !strings.Contains(err.Error(), "trusted_proxies") {
		t.Errorf("%v", err)
	}
}

// TestBlockOf: the configured size counts where it divides the engine's own, else the
// engine's, and the default one while neither is known.
func TestBlockOf(t *testing.T) {
	for _, c := range []struct{ set, engine, want int }{
		{0, 0, DefaultBlock}, {0, 64, 64}, {32, 0, 32}, {32, 64, 32}, {32, 48, 48},
	} {
		s := made(t, func(k *settings.Config) { k.Tokens.BlockSize = c.set })
		w := &workers.Worker{Facts: workers.Facts{BlockSize: c.engine}}
		if got := s.BlockOf(w); got != c.want {
			t.Errorf("set %d, engine %d: %d, want %d", c.set, c.engine, got, c.want)
		}
	}
}

// TestTrusts: a proxy is trusted by its network or address, however its address is
// written, and no peer is where no proxy is named.
func TestTrusts(t *testing.T) {
	s := made(t, func(c *settings.Config) { c.TrustedProxies = []string{"10.0.0.0/8", "192.0.2.7", "fe80::/10"} })
	for peer, want := range map[string]bool{
		"10.1.2.3": true, "::ffff:10.1.2.3": true, "192.0.2.7": true, "192.0.2.8": false, "fe80::1%eth0": true, "2001:db8::1": false, "proxy": false, "": false,
	} {
		if got := s.Trusts(peer); got != want {
			t.Errorf("%q: %v, want %v", peer, got, want)
		}
	}
	if !s.TrustsAddr(netip.MustParseAddr("10.9.9.9")) || s.TrustsAddr(netip.MustParseAddr("11.9.9.9")) {
		t.Error("TrustsAddr")
	}
	if made(t, func(*settings.Config) {}).Trusts("127.0.0.1") {
		t.Error("trusted without being named")
	}
}

// TestConnectionsOf: this machine and trusted proxies have as many as they want.
func TestConnectionsOf(t *testing.T) {
	s := made(t, func(c *settings.Config) {
		c.TrustedProxies, c.Limits.ClientConnections = []string{"10.0.0.0/8"}, 7
	})
	for addr, want := range map[string]int{"127.0.0.1": 0, "::1": 0, "10.1.2.3": 0, "192.0.2.7": 7} {
		if got := s.ConnectionsOf(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: %d, want %d", addr, got, want)
		}
	}
}
