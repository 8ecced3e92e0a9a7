package upstream

import (
	"crypto/tls"
	"net"
	"os"
	"time"

	"github.com/dynctl/dynctl/internal/quicksock"
)

// records is what a TLS connection reads from: the TCP connection, which can
// for a moment be read without waiting, and followed to see whether a record
// has come in part.
type records struct {
	net.Conn
	owner *conn // whose deadlines are this connection's
	// noWait makes Read fail instead of waiting.
	noWait bool
	// have counts the bytes of a record's header that have come, left those of
	// its content that have not.
	have, left int
	size       [2]byte // the last two bytes of the header
}

// recordHeader is the size in bytes of a record's header: type, version, length.
const recordHeader = 5

// Read implements [net.Conn]. What it says instead of waiting is temporary, so
// that the TLS connection goes on after it.
func (r *records) Read(p []byte) (int, error) {
	if r.noWait {
		if r.owner.probe == nil || r.owner.probe.Quiet() {
			return 0, os.ErrDeadlineExceeded
		}
		// There is something to read, but not past the last answer's deadline.
		if err := r.owner.readWithin(0, time.Time{}); err != nil {
			return 0, err
		}
	}
	n, err := r.Conn.Read(p)
	r.track(p[:n])
	return n, err
}

// track reads along from record to record.
func (r *records) track(p []byte) {
	for len(p) > 0 {
		if r.left > 0 {
			n := min(r.left, len(p))
			r.left, p = r.left-n, p[n:]
			continue
		}
		if r.have >= recordHeader-2 {
			r.size[r.have-(recordHeader-2)] = p[0]
		}
		if r.have, p = r.have+1, p[1:]; r.have == recordHeader {
			r.have, r.left = 0, int(r.size[0])<<8|int(r.size[1])
		}
	}
}

// quiet is [quicksock.Probe.Quiet] for a TLS connection. Session tickets and
// key updates are records like any other from outside, so it reads what there
// is: of those, nothing comes out of the TLS connection, and they leave nothing
// behind.
func (r *records) quiet(tc net.Conn) bool {
	var b [1]byte
	r.noWait = true
	n, err := tc.Read(b[:])
	r.noWait = false
	return n == 0 && err == os.ErrDeadlineExceeded && r.have == 0 && r.left == 0 //nolint:errorlint // this very value, not a deadline that has passed
}

// overTLS makes a TLS connection, whose handshake is the caller's to do, and
// what a client keeps of it.
func overTLS(nc net.Conn, conf *tls.Config) (*tls.Conn, *conn) {
	r := &records{Conn: nc}
	tc := tls.Client(r, conf)
	r.owner = newConn(tc)
	r.owner.records, r.owner.probe = r, quicksock.NewProbe(nc)
	return tc, r.owner
}
