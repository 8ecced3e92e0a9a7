package adminserver

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/observe/trace/recorder"
	"github.com/dynctl/dynctl/internal/wait"
)

// boundStand serves the API over sockets that hold little.
func boundStand(t *testing.T, h http.Handler) *httptest.Server {
	t.Helper()
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if err := c.(*net.TCPConn).SetWriteBuffer(64 << 10); err != nil {
			t.Error(err)
		}
		return ctx
	}
	srv.Start()
	t.Cleanup(srv.Close)
	return srv
}

// idleReader sends a request and reads nothing.
func idleReader(t *testing.T, srv *httptest.Server, path string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

// slowReader takes little at a time, with pauses.
type slowReader struct {
	net.Conn
	tick *time.Ticker
}

func (r slowReader) Read(p []byte) (int, error) {
	<-r.tick.C
	return r.Conn.Read(p[:min(len(p), 8<<10)])
}

// TestListenersThatNeverRead: listeners to the stream that read nothing are
// dropped, with an event each, and their places are free; one that reads, but
// for longer than a piece may wait, has the whole recording.
func TestListenersThatNeverRead(t *testing.T) {
	const batches, size = 200, 6000
	tap := recorder.NewTap(trace.Header{Source: "test"})
	s := newStand(64)
	wait := 3 * time.Second // the slow one must take something within it, on a busy machine, too
	srv := boundStand(t, New(anybody(wait), s, nil, map[string]http.Handler{"GET /admin/v1/stream": Stream(tap, s.events)}))

	slow := slowReader{idleReader(t, srv, "/admin/v1/stream"), time.NewTicker(25 * time.Millisecond)}
	defer slow.tick.Stop()
	resp, err := http.ReadResponse(bufio.NewReaderSize(slow, 32<<10), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	defer slow.Close() // first: the body has no end
	const others = 15
	for range others {
		c := idleReader(t, srv, "/admin/v1/stream")
		head := make([]byte, len("HTTP/1.1 200"))
		if _, err := io.ReadFull(c, head); err != nil || string(head) != "HTTP/1.1 200" {
			t.Fatalf("%q, %v", head, err)
		}
		if err := c.SetReadBuffer(4096); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := tap.Subscribe(0); !errors.Is(err, recorder.ErrListeners) {
		t.Fatalf("one listener more: %v", err)
	}
	for i := range batches {
		tap.Batch("w/dp0", uint64(i), time.Now(), false, bytes.Repeat([]byte{byte(i)}, size))
	}
	began := time.Now()
	lines := bufio.NewReader(resp.Body)
	for n := 0; n < batches; {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatalf("the slow listener was dropped after %d of %d batches: %v", n, batches, err)
		}
		if strings.Contains(line, `"kind":"kv"`) {
			n++
		}
	}
	if took := time.Since(began); took < wait {
		t.Errorf("the slow listener was done in %s: too early to say", took)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); <-tick.C {
		if events := s.events.Last(100); len(events) == others {
			sub, err := tap.Subscribe(0)
			if err != nil {
				t.Fatalf("the places are not free: %v", err)
			}
			sub.Close()
			if e := events[0]; e.Kind != "stream_dropped" || e.Severity != eventlog.Warn || !strings.Contains(e.Text, "127.0.0.1:") {
				t.Errorf("%+v", e)
			}
			return
		}
	}
	t.Errorf("not an event for each of %d listeners that were dropped: %+v", others, s.events.Last(100))
}

// TestNoAnswerWaitsForEver: whatever the API answers, a client that never reads
// it does not hold its handler.
func TestNoAnswerWaitsForEver(t *testing.T) {
	long := make([]byte, 16<<20)
	write := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(long) })
	var mu sync.Mutex
	left := map[string]bool{}
	a := anybody(200 * time.Millisecond)
	a.Open = map[string]http.Handler{"GET /healthz": write}
	h := New(a, newStand(1), nil, map[string]http.Handler{"GET /metrics": write, "/sim/v1/": write})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		h.ServeHTTP(w, q)
		mu.Lock()
		defer mu.Unlock()
		left[q.URL.Path] = true
	}))
	t.Cleanup(srv.Close)
	paths := []string{"/metrics", "/sim/v1/x", "/healthz"}
	for _, path := range paths {
		idleReader(t, srv, path)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if !wait.Until(ctx, 10*time.Millisecond, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(left) == len(paths)
	}) {
		mu.Lock()
		defer mu.Unlock()
		t.Fatalf("of %v only %v came to an end", paths, left)
	}
}

// TestBoundWriterPieces: each piece of a long answer has its own deadline, and
// what is written is what was given.
func TestBoundWriterPieces(t *testing.T) {
	for _, n := range []int{0, 1, boundPiece - 1, boundPiece, boundPiece + 1, 3*boundPiece + 7} {
		p := bytes.Repeat([]byte("abcdefg"), n/7+1)[:n]
		w := &deadlines{ResponseRecorder: httptest.NewRecorder()}
		b := &boundWriter{ResponseWriter: w, time: time.Nanosecond} // every piece moves it
		if got, err := b.Write(p); got != n || err != nil || !bytes.Equal(w.Body.Bytes(), p) {
			t.Errorf("%d bytes: wrote %d, %v", n, got, err)
		}
		if want := max(1, (n+boundPiece-1)/boundPiece); w.moved != want {
			t.Errorf("%d bytes: %d deadlines, want %d", n, w.moved, want)
		}
		w.fails = os.ErrDeadlineExceeded
		if _, err := b.Write([]byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) || !b.late {
			t.Errorf("a late piece: %v, late %v", err, b.late)
		}
	}
}

// deadlines counts the deadlines of a writer.
type deadlines struct {
	*httptest.ResponseRecorder
	moved int
	fails error
}

func (d *deadlines) SetWriteDeadline(time.Time) error { d.moved++; return nil }

func (d *deadlines) Write(p []byte) (int, error) {
	if d.fails != nil {
		return 0, d.fails
	}
	return d.ResponseRecorder.Write(p)
}
