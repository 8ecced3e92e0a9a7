package upstream

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rawServer answers every connection with a function of the test's, which gets
// the connection after each request's head and body were read.
type rawServer struct {
	t     *testing.T
	ln    net.Listener
	wg    sync.WaitGroup
	mu    sync.Mutex // guards conns and dials
	conns []net.Conn
	dials int
}

// request is what the raw server saw of one request.
type request struct {
	n    int // of this connection, from 0
	req  *http.Request
	body string
}

// serve starts a raw server. The answer function returns false to close the
// connection.
func serve(t *testing.T, answer func(c net.Conn, r request) bool) *rawServer {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("listen: %v", err)
	}
	s := &rawServer{t: t, ln: ln}
	s.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, c)
			s.dials++
			s.mu.Unlock()
			s.wg.Go(func() { answerAll(c, answer) })
		}
	})
	t.Cleanup(s.stop)
	return s
}

// answerAll answers the requests of a connection, and closes it.
func answerAll(c net.Conn, answer func(c net.Conn, r request) bool) {
	defer func() { _ = c.Close() }()
	br := bufio.NewReader(c)
	for n := 0; ; n++ {
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		body, err := io.ReadAll(req.Body)
		if err != nil || !answer(c, request{n, req, string(body)}) {
			return
		}
	}
}

// inMemory are the options of a client whose connections have no sockets, so that they
// can be in a bubble of virtual time. The answer function is that of serve.
func inMemory(answer func(c net.Conn, r request) bool) Options {
	return Options{Dial: func(context.Context, string, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go answerAll(theirs, answer)
		return ours, nil
	}}
}

func (s *rawServer) stop() {
	_ = s.ln.Close()
	s.mu.Lock()
	for _, c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

func (s *rawServer) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dials
}

func (s *rawServer) leg() *Leg { return legTo(s.t, "http://"+s.ln.Addr().String()) }

func legTo(t testing.TB, base string) *Leg {
	t.Helper()
	u, err := url.Parse(base)
	if err != nil {
		t.Fatalf("parse %q: %v", base, err)
	}
	return &Leg{
		Base: u, Path: "/v1/completions", Method: http.MethodPost, Body: [][]byte{[]byte(`{"a":`), []byte(`1}`)},
		HeadTimeout: 10 * time.Second, IdleTimeout: 10 * time.Second,
	}
}

func say(t testing.TB, c net.Conn, text string) {
	if _, err := io.WriteString(c, text); err != nil {
		t.Logf("raw server: %v", err)
	}
}

// patience bounds what a test waits for, so that a hang fails.
func patience(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func newClient(t testing.TB, opt Options) *Client {
	t.Helper()
	c := New(opt)
	t.Cleanup(c.Close)
	return c
}

// get does a leg and reads all of its answer.
func get(t testing.TB, c *Client, leg *Leg) (*Response, string) {
	t.Helper()
	r, err := c.Do(patience(t), leg)
	if err != nil {
		t.Fatalf("Do: %v", err)
	}
	defer r.Close()
	b, err := r.ReadAll(1 << 30)
	if err != nil {
		t.Fatalf("read: %v", err)
	}
	return r, string(b)
}

func lines(s ...string) string { return strings.Join(s, "\r\n") }
