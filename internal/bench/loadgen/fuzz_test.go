package loadgen

import (
	"io"
	"net"
	"testing"
	"time"
)

// script is a connection that gives what it was made of, in pieces.
type script struct {
	net.Conn
	rest []byte
	step int
}

func (s *script) Read(p []byte) (int, error) {
	if len(s.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p, s.rest[:min(len(s.rest), s.step)])
	s.rest = s.rest[n:]
	return n, nil
}

// Whatever a server answers, reading ends, and what counts as good has all its
// times and tokens.
func FuzzAnswer(f *testing.F) {
	whole := answer(4)[0] + answer(4)[1]
	f.Add([]byte(whole), 7)
	f.Add([]byte(whole+whole), 1000)
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"+token("a")+tail(1)), 3)
	f.Add([]byte("HTTP/1.1 503 No\r\nContent-Length: 5\r\n\r\nwrong"), 2)
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n"), 9)
	f.Fuzz(func(t *testing.T, data []byte, step int) {
		c := &conn{Conn: &script{rest: data, step: min(max(step, 1), 1<<16)}, buf: make([]byte, 512)}
		var clock time.Duration
		now := func() time.Duration { clock++; return clock }
		for range 3 {
			q := &call{}
			q.begin(now())
			q.res.Sent = now()
			_, err := c.answer(q, now)
			if len(c.buf) > 2*maxHead || len(c.kept) > maxKept {
				t.Fatalf("%d bytes of memory for an answer", len(c.buf))
			}
			if err != nil {
				return
			}
			r := &q.res
			if r.First <= r.Sent || r.Last < r.First || r.FirstByte > r.First {
				t.Fatalf("sent at %v, first byte %v, first token %v, last %v", r.Sent, r.FirstByte, r.First, r.Last)
			}
			if r.Pieces < 1 || r.Status/100 != 2 {
				t.Fatalf("good, but status %d with %d pieces", r.Status, r.Pieces)
			}
		}
	})
}
