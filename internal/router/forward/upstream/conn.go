package upstream

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/quicksock"
)

// conn is one connection to an engine. Only close may be called by another
// goroutine than the one that uses it.
type conn struct {
	nc        net.Conn
	lends     quicksock.LendingReader // nc, nil where it cannot
	probe     *quicksock.Probe        // of the TCP connection, nil where there is none
	records   *records                // below a TLS connection, nil without TLS
	idleSince time.Time
	closeOnce sync.Once
	closing   func() // close, made once: each use as a value would be an allocation
	// The deadlines that are set on nc; zero for none.
	readBy, writeBy time.Time
	// sending is how the sending of a body stands that an early answer may
	// end: sendQuiet without one.
	sending atomic.Uint32
}

const (
	sendQuiet uint32 = iota
	sendRuns
	sendEnough // ended by stopSending: the connection can send nothing again
)

// errEnough ends the sending of a request that has been answered.
var errEnough = errors.New("the engine has answered already")

// stopSending ends a send that another goroutine is in, and with it the use of
// the connection. A send that has come to its end is left alone: the connection
// may serve the next request.
func (c *conn) stopSending() {
	if !c.sending.CompareAndSwap(sendRuns, sendEnough) {
		return
	}
	_ = c.nc.SetWriteDeadline(time.Unix(1, 0)) // fails on a closed connection only
}

// sent ends a send and reports whether nobody has stopped it.
func (c *conn) sent() bool {
	return c.sending.Swap(sendQuiet) != sendEnough
}

func newConn(nc net.Conn) *conn {
	lends, _ := nc.(quicksock.LendingReader)
	c := &conn{nc: nc, lends: lends, probe: quicksock.NewProbe(nc)}
	c.closing = c.close
	return c
}

// alive reports whether an unused connection can take a request: the engine
// has neither closed it nor sent anything that nobody asked for.
func (c *conn) alive() bool {
	if c.records != nil { // TLS may have something to answer
		return c.writeWithin(sendTimeout, time.Now()) == nil && c.records.quiet(c.nc)
	}
	return c.probe == nil || c.probe.Quiet()
}

func (c *conn) close() {
	c.closeOnce.Do(func() {
		_ = c.nc.Close() // nothing is left to save
	})
}

// due says whether a deadline must be set again to allow a pause of d from now
// on, and to what. Moving a deadline costs as much as a short write, so one
// that allows up to a quarter more than d is left alone.
func due(set, now time.Time, d time.Duration) (time.Time, bool) {
	if d <= 0 {
		return time.Time{}, !set.IsZero()
	}
	left := set.Sub(now)
	if left >= d && left <= d+d/4 {
		return set, false
	}
	return now.Add(d + d/4), true
}

// readWithin allows reads a pause of d from now on, 0 for ever.
func (c *conn) readWithin(d time.Duration, now time.Time) error {
	by, move := due(c.readBy, now, d)
	if !move {
		return nil
	}
	return c.readUntil(by)
}

// readUntil sets the deadline of reads; zero is none.
func (c *conn) readUntil(by time.Time) error {
	if by.Equal(c.readBy) {
		return nil
	}
	c.readBy = by
	return c.nc.SetReadDeadline(by)
}

func (c *conn) writeWithin(d time.Duration, now time.Time) error {
	by, move := due(c.writeBy, now, d)
	if !move {
		return nil
	}
	c.writeBy = by
	err := c.nc.SetWriteDeadline(by)
	if c.sending.Load() == sendEnough { // asked after that, which may have undone what stopSending did
		return errEnough
	}
	return err
}

// joinBelow is the size in bytes up to which head and body are put into one
// buffer; above, they are written from where they are.
const joinBelow = 4 << 10

// send writes a request, from now on, and returns how many bytes the system took.
func (c *conn) send(head []byte, body [][]byte, now time.Time) (int64, error) {
	if err := c.writeWithin(sendTimeout, now); err != nil {
		return 0, err
	}
	size := 0
	for _, b := range body {
		size += len(b)
	}
	if len(head)+size <= joinBelow {
		for _, b := range body {
			head = append(head, b...)
		}
		n, err := c.nc.Write(head)
		return int64(n), err
	}
	// WriteTo consumes the slice, and a large body may take many writes with a
	// pause before each.
	all := make(net.Buffers, 0, len(body)+1)
	all = append(all, head)
	all = append(all, body...)
	if size <= 1<<20 {
		if w, ok := c.nc.(quicksock.VectorWriter); ok {
			return w.WriteAll(all)
		}
		return all.WriteTo(c.nc)
	}
	var sent int64
	for _, b := range all {
		for len(b) > 0 {
			if err := c.writeWithin(sendTimeout, time.Now()); err != nil {
				return sent, err
			}
			n, err := c.nc.Write(b[:min(len(b), 256<<10)])
			sent += int64(n)
			if err != nil {
				return sent, err
			}
			b = b[n:]
		}
	}
	return sent, nil
}
