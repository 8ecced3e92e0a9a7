// Package sockets has the sockets of simulated engines beside their HTTP: the publisher of KV
// events, the side channel over which KV moves, and ports that stay an engine's own over
// restarts.
package sockets

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/procfs"

	"github.com/dynctl/dynctl/internal/wait"
)

// A simulated engine keeps its addresses over restarts, as a real one does. A port that the
// system has chosen is one of those that it gives to outgoing connections, too. While its
// listener is away any client of the machine may have it, and the listener cannot come back.
// The ports below that range are given to nobody who does not ask for them.
const (
	// lowest is the first port that is tried: below it are those of well-known
	// services.
	lowest = 10240
	// tries is how many free ports are looked for before the system chooses.
	tries = 64
	// patience is how long a port in use is waited for, pause the time between two
	// looks at it.
	patience, pause = 5 * time.Second, 20 * time.Millisecond
)

// slice is how many ports a process takes at a time.
const slice = 1024

// area is a row of ports, end not among them.
type area struct{ port, end int }

// ours are the ports that this process gives out, in slices that no other process has: a
// port that one gave out would be gone when its listener comes back.
var ours struct {
	sync.Mutex
	all   area // end is 0 before the first use
	slice area // what is left of the one in use
	taken []int
	turn  int // the slice to use again when there are no more
}

// outgoing is the first port that the system gives to outgoing connections; 0 where that is
// not known.
func outgoing() int {
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return 0
	}
	ports, err := fs.SysctlInts("net.ipv4.ip_local_port_range")
	if err != nil || len(ports) != 2 {
		return 0
	}
	return ports[0]
}

// PortsBelow returns the first of n ports in a row that the system gives to no outgoing
// connection, others with each call; 0 if it knows no such ports.
func PortsBelow(n int) int {
	ours.Lock()
	defer ours.Unlock()
	all := &ours.all
	if all.end == 0 {
		all.port, all.end = lowest, max(outgoing(), lowest)
	}
	switch {
	case n > all.end-lowest:
		return 0
	case n >= slice:
		return lowest + rand.IntN(all.end-lowest-n+1)
	}
	if ours.slice.port+n > ours.slice.end {
		ours.slice = another()
	}
	ours.slice.port += n
	return ours.slice.port - n
}

// another is a slice that no process has, or one to use again where there is none.
func another() area {
	of := func(k int) area {
		return area{lowest + k*slice, min(lowest+(k+1)*slice, ours.all.end)}
	}
	all := rand.Perm((ours.all.end - lowest) / slice)
	for _, k := range all {
		if take(filepath.Join(os.TempDir(), fmt.Sprintf("dynctl-ports-%d", lowest+k*slice))) {
			ours.taken = append(ours.taken, k)
			return of(k)
		}
	}
	if n := len(ours.taken); n > 0 {
		ours.turn++
		return of(ours.taken[ours.turn%n])
	}
	if len(all) > 0 {
		return of(all[0])
	}
	return area{lowest, ours.all.end}
}

// take writes this process into a file, unless it names another one that runs. The lock
// lasts for that look alone: a file that is held open would look like a leak.
func take(path string) bool {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return false // another user's
	}
	defer f.Close()
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX) != nil {
		return false
	}
	text, err := io.ReadAll(io.LimitReader(f, 32))
	if err != nil {
		return false
	}
	pid, err := strconv.Atoi(string(text))
	if err == nil && (pid == os.Getpid() || syscall.Kill(pid, 0) != syscall.ESRCH) {
		return false
	}
	if f.Truncate(0) != nil {
		return false
	}
	_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())), 0)
	return err == nil
}

// FreePorts calls bind with n ports in a row that may be free, until it takes them, and at last
// with 0, so that the system chooses. bind must have given everything back when it fails.
func FreePorts(n int, bind func(port int) error) error {
	for range tries {
		p := PortsBelow(n)
		if p == 0 {
			break
		}
		if err := bind(p); !PortInUse(err) {
			return err
		}
	}
	var err error
	for range tries { // of several in a row, the system knows but the first
		if err = bind(0); !PortInUse(err) {
			return err
		}
	}
	return err
}

// BindAgain calls bind, which wants certain ports, until no other process has them, for a
// moment: one that has taken a port that was free for a while may be gone soon. Then the last
// error is returned.
func BindAgain(ctx context.Context, bind func() error) error {
	end := time.Now().Add(patience)
	for {
		err := bind()
		if !PortInUse(err) || time.Now().After(end) || !wait.For(ctx, pause) {
			return err
		}
	}
}

// PortInUse reports whether an error says that someone else has the port.
func PortInUse(err error) bool { return errors.Is(err, syscall.EADDRINUSE) }

// Listen listens on a TCP address, whose port 0 stands for one that can be come
// back to.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("address %s: %w", addr, err)
	}
	var lc net.ListenConfig
	var ln net.Listener
	at := func(addr string) (err error) {
		ln, err = lc.Listen(ctx, "tcp", addr)
		return err
	}
	if port == "0" {
		err = FreePorts(1, func(p int) error { return at(net.JoinHostPort(host, strconv.Itoa(p))) })
	} else {
		err = BindAgain(ctx, func() error { return at(addr) })
	}
	return ln, err
}
