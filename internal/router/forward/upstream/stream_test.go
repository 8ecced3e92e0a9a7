package upstream

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// proxy is a server that forwards every request to engine over a client, the
// way the router does, and reports how each ended.
func proxy(t *testing.T, engine func() *Leg, opt StreamOptions, ended chan<- error) *httptest.Server {
	t.Helper()
	client := newClient(t, Options{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			ended <- err
			return
		}
		leg := engine()
		leg.Body = [][]byte{body}
		resp, err := client.Do(r.Context(), leg)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			ended <- err
			return
		}
		defer resp.Close()
		resp.WriteHead(w)
		ended <- Stream(w, resp, resp.Flushes(), opt)
	}))
	t.Cleanup(srv.Close)
	return srv
}

func TestStreamForwardsEachPieceAtOnce(t *testing.T) {
	t.Parallel()
	more := make(chan struct{}, 1)
	s := serve(t, func(c net.Conn, _ request) bool {
		say(t, c, lines("HTTP/1.1 200 OK", "Content-Type: text/event-stream; charset=utf-8", "Transfer-Encoding: chunked", "X-Engine: a", "X-Request-Id: engine",
			"Endpoint-Load-Metrics: JSON {}", "Connection: keep-alive", "Date: Sat, 21 Nov 2026 11:45:14 GMT", "", ""))
		for i := range 3 {
			<-more
			say(t, c, fmt.Sprintf("9\r\ndata: %d\n\n\r\n", i))
		}
		<-more
		say(t, c, "0\r\n\r\n")
		return true
	})
	var observed strings.Builder
	ended := make(chan error, 1)
	srv := proxy(t, s.leg, StreamOptions{WriteTimeout: 10 * time.Second, Observe: func(p []byte, _ time.Time) { observed.Write(p) }}, ended)
	req, err := http.NewRequestWithContext(patience(t), http.MethodPost, srv.URL, strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	more <- struct{}{} // the head goes out with the first piece
	resp, err := srv.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	br := bufio.NewReader(resp.Body)
	for i := range 3 {
		line, err := br.ReadString('\n')
		if err != nil || line != fmt.Sprintf("data: %d\n", i) {
			t.Fatalf("line %q, %v", line, err)
		}
		if _, err := br.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		more <- struct{}{} // the engine goes on only after the client has it
	}
	if rest, err := io.ReadAll(br); err != nil || len(rest) != 0 {
		t.Fatalf("rest %q, %v", rest, err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if observed.String() != "data: 0\n\ndata: 1\n\ndata: 2\n\n" {
		t.Errorf("observed %q", observed.String())
	}
	for name, want := range map[string]string{
		"X-Engine": "a", "X-Request-Id": "", "Endpoint-Load-Metrics": "",
		"Content-Type": "text/event-stream; charset=utf-8", "Date": "Sat, 21 Nov 2026 11:45:14 GMT",
	} {
		if got := resp.Header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

func TestStreamKeepsLengthAndStatus(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("x", 300_000)
	s := serve(t, func(c net.Conn, _ request) bool {
		say(t, c, fmt.Sprintf("HTTP/1.1 418 Teapot\r\nContent-Length: %d\r\nContent-Encoding: foo\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n\r\n%s", len(big), big))
		return true
	})
	ended := make(chan error, 2)
	srv := proxy(t, s.leg, StreamOptions{WriteTimeout: 10 * time.Second}, ended)
	for range 2 {
		resp, err := srv.Client().Post(srv.URL, "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || string(b) != big {
			t.Errorf("another body, of %d bytes: %v", len(b), err)
		}
		if resp.StatusCode != 418 || resp.ContentLength != int64(len(big)) || len(resp.Header["Set-Cookie"]) != 2 {
			t.Errorf("status %d, length %d, %v", resp.StatusCode, resp.ContentLength, resp.Header)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if s.count() != 1 {
		t.Errorf("%d connections to the engine", s.count())
	}
}

func TestStreamSaysWhoBrokeOff(t *testing.T) {
	t.Parallel()
	s := serve(t, func(c net.Conn, _ request) bool {
		say(t, c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n5\r\nhe")
		return false
	})
	ended := make(chan error, 1)
	srv := proxy(t, s.leg, StreamOptions{}, ended)
	resp, err := srv.Client().Post(srv.URL, "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	if f := new(Failure); !errors.As(<-ended, &f) || f.Kind != Reset || !f.Started {
		t.Errorf("failure %+v", f)
	}
}

// A client that leaves ends the engine's work.
func TestDisconnectCancelsTheEngine(t *testing.T) {
	t.Parallel()
	for _, answer := range []string{"", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"} {
		engineSaw := make(chan struct{})
		arrived := make(chan struct{})
		s := serve(t, func(c net.Conn, _ request) bool {
			say(t, c, answer)
			close(arrived)
			_, _ = c.Read(make([]byte, 1))
			close(engineSaw)
			return false
		})
		ended := make(chan error, 1)
		srv := proxy(t, s.leg, StreamOptions{}, ended)
		ctx, cancel := context.WithCancel(patience(t))
		go func() {
			<-arrived
			cancel()
		}()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, srv.URL, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		if resp, err := srv.Client().Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
		for _, ch := range []<-chan struct{}{engineSaw} {
			select {
			case <-ch:
			case <-patience(t).Done():
				t.Fatal("the engine goes on working")
			}
		}
		err = <-ended
		f, ce := new(Failure), new(ClientError)
		if (!errors.As(err, &f) || f.Kind != Canceled) && !errors.As(err, &ce) {
			t.Errorf("ended with %v", err)
		}
	}
}

// A client that does not read is dropped after the write timeout, and its
// engine with it.
func TestSlowReaderIsDropped(t *testing.T) {
	t.Parallel()
	engineSaw := make(chan struct{})
	s := serve(t, func(c net.Conn, _ request) bool {
		defer close(engineSaw)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		block := fmt.Sprintf("%x\r\n%s\r\n", 64<<10, strings.Repeat("x", 64<<10))
		for {
			if _, err := io.WriteString(c, block); err != nil {
				return false
			}
		}
	})
	ended := make(chan error, 1)
	srv := proxy(t, s.leg, StreamOptions{WriteTimeout: 100 * time.Millisecond}, ended)
	c, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	say(t, c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
	select {
	case err := <-ended:
		if ce := new(ClientError); !errors.As(err, &ce) || !ce.Slow() {
			t.Errorf("ended with %v", err)
		}
	case <-patience(t).Done():
		t.Fatal("the stream hangs on its reader")
	}
	<-engineSaw
}

// The deadline of one answer does not hit the next on the same connection.
func TestWriteDeadlineIsTakenBack(t *testing.T) {
	t.Parallel()
	wait := make(chan struct{})
	n := 0
	s := serve(t, func(c net.Conn, _ request) bool {
		if n++; n == 2 {
			<-wait
			say(t, c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nxy") // short: written without a deadline
			return true
		}
		say(t, c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n1\r\ny\r\n0\r\n\r\n")
		return true
	})
	ended := make(chan error, 2)
	opt := StreamOptions{WriteTimeout: 250 * time.Millisecond}
	srv := proxy(t, s.leg, opt, ended)
	for i := range 2 {
		if i == 1 {
			time.AfterFunc(750*time.Millisecond, func() { close(wait) })
		}
		resp, err := srv.Client().Post(srv.URL, "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || string(b) != "xy" {
			t.Errorf("request %d: %q, %v", i, b, err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// The end of an answer may come long after its last piece.
func TestLateEndReachesTheClient(t *testing.T) {
	t.Parallel()
	const timeout = 250 * time.Millisecond
	s := serve(t, func(c net.Conn, _ request) bool {
		say(t, c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
		<-time.After(4 * timeout) // the pace of the engine
		say(t, c, "0\r\n\r\n")
		return true
	})
	ended := make(chan error, 1)
	srv := proxy(t, s.leg, StreamOptions{WriteTimeout: timeout}, ended)
	resp, err := srv.Client().Post(srv.URL, "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "data: 1\n\n" {
		t.Errorf("%q, %v", b, err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestReadAllIsBounded(t *testing.T) {
	t.Parallel()
	s := serve(t, func(c net.Conn, r request) bool {
		if r.req.Header.Get("X-Chunked") != "" {
			say(t, c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n5\r\nhello\r\n0\r\n\r\n")
		} else {
			say(t, c, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhellohello")
		}
		return true
	})
	c := newClient(t, Options{})
	for _, set := range [][]HeaderField{nil, {{"X-Chunked", "1"}}} {
		for _, limit := range []int64{9, 10} {
			leg := s.leg()
			leg.Set = set
			r, err := c.Do(patience(t), leg)
			if err != nil {
				t.Fatal(err)
			}
			b, err := r.ReadAll(limit)
			r.Close()
			if limit == 10 && (err != nil || string(b) != "hellohello") {
				t.Errorf("ReadAll: %q, %v", b, err)
			}
			if f := new(Failure); limit == 9 && (!errors.As(err, &f) || f.Kind != Protocol) {
				t.Errorf("ReadAll over the limit: %q, %v", b, err)
			}
		}
	}
}

// FuzzAnswer feeds bytes as an engine's answer: whatever they are, nothing
// panics, hangs or grows, and what was accepted was HTTP.
func FuzzAnswer(f *testing.F) {
	for _, s := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: 1\r\n\r\n",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 404 Nope\r\n\r\nbody", "HTTP/1.1 204\n\n", "\r\n\r\n",
	} {
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, answer []byte, step uint8) {
		r := &Response{
			conn: newConn(&scripted{data: answer, step: int(step)%7 + 1}), ctx: t.Context(),
			client: New(Options{}), pool: &pool{addr: "x"}, stop: func() bool { return true },
		}
		defer r.client.Close()
		err := r.readHead(&Leg{Method: http.MethodPost})
		if err != nil {
			r.abort()
			return
		}
		if r.Status < 200 || r.Status > 999 {
			t.Errorf("status %d", r.Status)
		}
		total := 0
		for {
			p, err := r.Next()
			if err != nil {
				if errors.Is(err, io.EOF) != r.Done() {
					t.Errorf("error %v, Done %v", err, r.Done())
				}
				break
			}
			if len(p) == 0 {
				t.Fatal("an empty piece")
			}
			total += len(p)
		}
		if total > len(answer) || len(r.buf) > 32<<10 {
			t.Errorf("%d bytes out of %d, buffer %d", total, len(answer), len(r.buf))
		}
		r.Close()
	})
}

// scripted is a connection that says what a test gives it.
type scripted struct {
	net.Conn
	data []byte
	step int
}

func (s *scripted) Read(p []byte) (int, error) {
	n := copy(p, s.data[:min(s.step, len(s.data))])
	s.data = s.data[n:]
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (s *scripted) Close() error { return nil }

// TestKeptAnswer: an answer that is kept is sent with its own headers beside those that are
// set, and with the length that it has.
func TestKeptAnswer(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	w.Header().Set("X-Request-Id", "id")
	a := &Answer{Status: http.StatusTooManyRequests, Header: http.Header{"Retry-After": {"1"}}, Body: []byte("busy")}
	a.Send(w)
	want := http.Header{"Retry-After": {"1"}, "X-Request-Id": {"id"}, "Content-Length": {"4"}}
	if d := cmp.Diff(want, w.Header()); d != "" {
		t.Errorf("headers (-want +got):\n%s", d)
	}
	if w.Code != http.StatusTooManyRequests || w.Body.String() != "busy" {
		t.Errorf("%d %q", w.Code, w.Body)
	}
}
