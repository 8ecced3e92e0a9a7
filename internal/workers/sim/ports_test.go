package sim_test

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
)

// TestPortsCountUp: the port of a part is that of its first engine, whatever
// roles follow, and parts without one go on counting.
func TestPortsCountUp(t *testing.T) {
	t.Parallel()
	base := sockets.PortsBelow(4)
	if base == 0 {
		t.Skip("the ports that the system keeps free are not known here")
	}
	f, err := sim.ParseFleet(fmt.Sprintf("1p2d:port=%d,profile=instant+1a:profile=instant", base))
	if err != nil {
		t.Fatal(err)
	}
	r, err := sim.Start(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}()
	for i, w := range r.Workers() {
		if want := fmt.Sprintf("127.0.0.1:%d", base+i); w.URL.Host != want {
			t.Errorf("%s listens on %s, want %s", w.Name, w.URL.Host, want)
		}
	}
}

// TestAPortThatIsTaken: an engine waits for its port, for a while, and says so
// when it stays away.
func TestAPortThatIsTaken(t *testing.T) {
	t.Parallel()
	r := start(t, "1a:dp=2,profile=instant")
	e := r.Engine(0)
	u := e.Worker().URL.Host
	take := func() net.Listener {
		t.Helper()
		ln, err := net.Listen("tcp", u)
		if err != nil {
			t.Fatal(err)
		}
		return ln
	}
	e.Kill()
	other := take()
	back := make(chan error, 1)
	go func() { back <- e.Restart() }()
	_ = other.Close()
	if err := <-back; err != nil {
		t.Fatal(err)
	}
	if status, _, _ := complete(t, e, ids(40, 1), nil); status != 200 {
		t.Errorf("%d", status)
	}
	// The one of an event socket.
	e.Kill()
	at := strings.TrimPrefix(e.Worker().Events[1].Replay, "tcp://")
	other, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	go func() { back <- e.Restart() }()
	_ = other.Close()
	if err := <-back; err != nil || e.Worker().Events[1].Replay != "tcp://"+at {
		t.Fatalf("%v, replays at %s, were at %s", err, e.Worker().Events[1].Replay, at)
	}
	// Taken for good while connections are refused.
	if err := e.SetFaults(fault.Set{Refuse: true}); err != nil {
		t.Fatal(err)
	}
	other = take()
	err = e.SetFaults(fault.Set{})
	if up, why := e.Running(); err == nil || !up || !strings.Contains(why, "refusing") {
		t.Errorf("%v; running %v, %q", err, up, why)
	}
	_ = other.Close()
	if err := e.SetFaults(fault.Set{}); err != nil {
		t.Error(err)
	}
	if _, why := e.Running(); why != "" {
		t.Errorf("well again, and says %q", why)
	}
	if status, _, _ := complete(t, e, ids(40, 2), nil); status != 200 {
		t.Errorf("%d", status)
	}
}
