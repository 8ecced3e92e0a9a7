package sockets

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// TestListenersComeBack: no outgoing connection is given the port of a listener
// that is away, and its address is free for it when it comes back.
func TestListenersComeBack(t *testing.T) {
	seen := map[string]bool{}
	for range 50 {
		ln, err := Listen(t.Context(), "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr := ln.Addr().String()
		if p, first := ln.Addr().(*net.TCPAddr).Port, outgoing(); first > lowest && p >= first {
			t.Errorf("port %d is one of outgoing connections, which begin at %d", p, first)
		}
		if seen[addr] && PortsBelow(1) != 0 { // what the system does is up to it
			t.Errorf("%s was given twice", addr)
		}
		seen[addr] = true
		if err := ln.Close(); err != nil {
			t.Fatal(err)
		}
		if ln, err = Listen(t.Context(), addr); err != nil {
			t.Fatal(err)
		}
		if err := ln.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAgain: a port that somebody else has is waited for, and not for ever.
func TestAgain(t *testing.T) {
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	looks := 0
	var ln net.Listener
	err = BindAgain(t.Context(), func() (err error) {
		if looks++; looks == 3 {
			if err := other.Close(); err != nil {
				t.Error(err)
			}
		}
		ln, err = net.Listen("tcp", other.Addr().String())
		return err
	})
	if err != nil || looks != 3 {
		t.Fatalf("%v after %d looks", err, looks)
	}
	defer ln.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Listen(ctx, ln.Addr().String()); err == nil {
		t.Error("two listeners have one port")
	}
	looks = 0
	if err := BindAgain(t.Context(), func() error { looks++; return errors.New("no such device") }); err == nil || looks != 1 {
		t.Errorf("%v after %d looks: what is not about the port is returned at once", err, looks)
	}
}

// TestFree: several ports in a row, others when one of them is in use, and the
// system's choice when none is free.
func TestFree(t *testing.T) {
	var got []int
	err := FreePorts(3, func(p int) error {
		if got = append(got, p); len(got) < 3 {
			return fmt.Errorf("rank 1: %w", syscall.EADDRINUSE)
		}
		return nil
	})
	if err != nil || len(got) != 3 {
		t.Fatalf("%v, ports %v", err, got)
	}
	overlap := func(a, b int) bool { return max(a, b)-min(a, b) < 3 }
	if got[0] != 0 && (overlap(got[0], got[1]) || overlap(got[1], got[2])) {
		t.Errorf("the ports from %v on overlap", got)
	}
	calls := 0
	if err := FreePorts(1, func(p int) error {
		if calls++; p != 0 {
			return syscall.EADDRINUSE
		}
		return nil
	}); err != nil || calls > tries+1 {
		t.Errorf("%v after %d calls", err, calls)
	}
	if err := FreePorts(1, func(int) error { return syscall.EADDRINUSE }); !PortInUse(err) {
		t.Errorf("%v", err)
	}
}

// TestProcessesShareNoPorts: what one process gives out no other one does meanwhile, so
// that listeners of both can go away and come back.
func TestProcessesShareNoPorts(t *testing.T) {
	const name, n = "DYNCTL_TEST_PORTS", 3 * slice / 2
	if os.Getenv(name) != "" {
		for range n {
			_, _ = fmt.Fprintln(os.Stdout, "port", PortsBelow(1))
		}
		_, _ = io.Copy(io.Discard, os.Stdin) // until the others have theirs
		return
	}
	if PortsBelow(1) == 0 {
		t.Skip("the ports of outgoing connections are not known here")
	}
	of := map[int]int{}
	for who := range 3 {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), name+"=1")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
				t.Error(err)
			}
		}()
		lines := bufio.NewScanner(out)
		for range n {
			var p int
			if !lines.Scan() {
				t.Fatal(lines.Err())
			}
			if _, err := fmt.Sscanf(lines.Text(), "port %d", &p); err != nil {
				t.Fatalf("%q: %v", lines.Text(), err)
			}
			if was, taken := of[p]; taken && was != who {
				t.Fatalf("%d is given out by processes %d and %d", p, was, who)
			}
			of[p] = who
		}
	}
}
