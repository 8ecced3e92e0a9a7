package admission

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
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

// TestDeadlinesOfReads: a deadline is set when a read needs it, once, and also ends a read that
// is in progress.
func TestDeadlinesOfReads(t *testing.T) {
	ours, theirs := net.Pipe()
	below := &countedDeadlines{Conn: ours, reads: make(chan struct{}, 2)}
	f := &Framing{Conn: below}
	for range 3 {
		if err := f.SetReadDeadline(time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	if below.set != 0 {
		t.Errorf("%d deadlines are set, and nothing is read", below.set)
	}
	ended := make(chan error)
	go func() {
		_, err := f.Read(make([]byte, 1))
		ended <- err
	}()
	<-below.reads
	if err := f.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) || below.set != 2 {
		t.Errorf("the read ended with %v after %d deadlines, want 2", err, below.set)
	}
	if _, err := f.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) || below.set != 2 {
		t.Errorf("another read ended with %v after %d deadlines", err, below.set)
	}
	if err := f.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = theirs.Write([]byte("x")) }()
	if n, err := f.Read(make([]byte, 1)); n != 1 || err != nil {
		t.Errorf("without a deadline: %d bytes, %v", n, err)
	}
	_, _ = f.Close(), theirs.Close()
}

// countedDeadlines counts the deadlines of reads, and shows when a read is about to begin.
type countedDeadlines struct {
	net.Conn
	set   int
	reads chan struct{}
}

func (c *countedDeadlines) SetReadDeadline(at time.Time) error {
	c.set++
	return c.Conn.SetReadDeadline(at)
}

func (c *countedDeadlines) Read(p []byte) (int, error) {
	select {
	case c.reads <- struct{}{}:
	default:
	}
	return c.Conn.Read(p)
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
