package upstream

import (
	"net"
	"os"
	"syscall"
	"testing"
	"time"
)

// TestStale: only a reset of a reused connection, without a byte of an answer and soon
// after the request, may be an idle close.
func TestStale(t *testing.T) {
	idle := Failure{Kind: Reset, Reused: true, Sent: true, Idle: 3 * time.Second, After: time.Millisecond}
	for name, c := range map[string]struct {
		change func(f *Failure)
		want   bool
	}{
		"at once":                        {func(*Failure) {}, true},
		"nothing was sent":               {func(f *Failure) { f.Sent = false }, true},
		"a new connection":               {func(f *Failure) { f.Reused = false }, false},
		"a part of an answer":            {func(f *Failure) { f.Started = true }, false},
		"another failure":                {func(f *Failure) { f.Kind = Timeout }, false},
		"half a second later":            {func(f *Failure) { f.After = 500 * time.Millisecond }, true},
		"a second later":                 {func(f *Failure) { f.After = time.Second }, false},
		"used shortly before":            {func(f *Failure) { f.Idle = time.Microsecond }, true},
		"later than it had been idle":    {func(f *Failure) { f.Idle, f.After = 200*time.Millisecond, 300*time.Millisecond }, false},
		"earlier than it had been idle":  {func(f *Failure) { f.Idle, f.After = 300*time.Millisecond, 200*time.Millisecond }, true},
		"within the flight of an ending": {func(f *Failure) { f.Idle, f.After = 0, flight-1 }, true},
	} {
		f := idle
		if c.change(&f); f.Stale() != c.want {
			t.Errorf("%s: stale is %v, want %v", name, f.Stale(), c.want)
		}
	}
}

// TestUnreachable: an engine that is down is named once, and with the address that was called
// where that is not the one of its URL.
func TestUnreachable(t *testing.T) {
	refused := &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 8000}, Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	for addr, want := range map[string]string{
		"10.0.0.1:8000": "connect 10.0.0.1:8000: connect: connection refused",
		"engine:8000":   "connect engine:8000: connect: dial tcp 10.0.0.1:8000: connect: connection refused",
	} {
		if got := (&Failure{Kind: Connect, Op: "connect", Addr: addr, Err: refused}).Error(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
