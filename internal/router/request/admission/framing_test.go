package admission

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

// readConn is a connection from which something may be read.
type readConn struct {
	net.Conn
	io.Reader
}

func (c readConn) Read(p []byte) (int, error)    { return c.Reader.Read(p) }
func (readConn) SetReadDeadline(time.Time) error { return nil }

// TestMayHaveLength: the header is found in whatever pieces and letters it comes, and what
// came with the requests before does not count once the server waits for the next one.
func TestMayHaveLength(t *testing.T) {
	if !MayHaveLength(t.Context()) {
		t.Error("nothing is known of a connection, and it may have none")
	}
	const head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
	for _, c := range []struct {
		raw  string
		want bool
	}{
		{head + "\r\n", false},
		{head + "Content-Type: a\r\nX-Content: -length\r\n\r\n", false},
		{head + "Content-Length: 5\r\n\r\n", true},
		{head + "cOnTeNt-lEnGtH: 5\r\n\r\n", true},
		{head + "\r\n5\r\nhello\r\n0\r\n\r\nPOST / HTTP/1.1\r\nContent-Length: 5", true},
	} {
		for name, in := range map[string]io.Reader{"at once": strings.NewReader(c.raw), "byte by byte": iotest.OneByteReader(strings.NewReader(c.raw))} {
			f := &Framing{Conn: readConn{Reader: in}}
			ctx := FramingContext(context.Background(), f)
			if _, err := io.ReadAll(f); err != nil {
				t.Fatal(err)
			}
			if got := MayHaveLength(ctx); got != c.want {
				t.Errorf("%s, %q: %v", name, c.raw, got)
			}
			// As net/http does after an answer: the time for an idle connection, the first
			// bytes of a request, the time for its head, the rest of it.
			FramingState(f, http.StateIdle)
			for i, piece := range []string{"POS", "T / HTTP/1.1\r\n"} {
				if err := f.SetReadDeadline(time.Now()); err != nil {
					t.Fatal(err)
				}
				f.Conn = readConn{Reader: strings.NewReader(piece)}
				if _, err := io.ReadAll(f); err != nil {
					t.Fatal(err)
				}
				if MayHaveLength(ctx) {
					t.Errorf("%s, %q: piece %d of the next request may have it", name, c.raw, i)
				}
			}
		}
	}
}

// FuzzFraming: the name is found wherever it is, in any two pieces.
func FuzzFraming(f *testing.F) {
	f.Add([]byte("a: b\r\nContent-Length: 5\r\n"), 10)
	f.Add([]byte("content-lengtcontent-length"), 14)
	f.Fuzz(func(t *testing.T, b []byte, at int) {
		at = min(max(at, 0), len(b))
		var c Framing
		for _, p := range [][]byte{b[:at], b[at:]} {
			if !c.seen {
				c.look(p)
			}
		}
		if want := bytes.Contains(bytes.ToLower(b), []byte(lengthName)); want && !c.seen {
			t.Errorf("%q, in pieces at %d: not found", b, at)
		}
	})
}
