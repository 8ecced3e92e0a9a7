package upstream

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

func TestRequestGoesOutAsAsked(t *testing.T) {
	t.Parallel()
	seen := make(chan request, 1)
	s := serve(t, func(c net.Conn, r request) bool {
		seen <- r
		say(t, c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		return true
	})
	leg := s.leg()
	leg.Base.Path = "/base/"
	leg.Path = "/v1/x?a=%20b"
	leg.Header = http.Header{
		"Authorization": {"Bearer client"}, "Traceparent": {"00-1-2-3"}, "X-Tenant": {"a", "b"}, "X-Request-Id": {"old"},
		"Connection": {"x-drop, close"}, "X-Drop": {"1"}, "X-Data-Parallel-Rank": {"7"}, "X-Dynctl-Path": {"local"},
		"Host": {"evil"}, "Content-Length": {"999"}, "Transfer-Encoding": {"chunked"}, "Accept-Encoding": {"gzip"},
	}
	leg.Set = []HeaderField{{"X-Request-Id", "new"}, {"X-Data-Parallel-Rank", "1"}}
	get(t, newClient(t, Options{}), leg)
	r := <-seen
	want := http.Header{
		"Authorization": {"Bearer client"}, "Traceparent": {"00-1-2-3"}, "X-Tenant": {"a", "b"},
		"X-Request-Id": {"new"}, "X-Data-Parallel-Rank": {"1"}, "Content-Length": {"7"},
	}
	if diff := cmp.Diff(want, r.req.Header); diff != "" {
		t.Errorf("headers (-want +got):\n%s", diff)
	}
	if r.body != `{"a":1}` || r.req.RequestURI != "/base/v1/x?a=%20b" || r.req.Host != leg.Base.Host {
		t.Errorf("body %q target %q host %q", r.body, r.req.RequestURI, r.req.Host)
	}
}

func TestAPIKeyReplacesTheClients(t *testing.T) {
	t.Parallel()
	seen := make(chan []string, 1)
	s := serve(t, func(c net.Conn, r request) bool {
		seen <- r.req.Header["Authorization"]
		say(t, c, "HTTP/1.1 204 No Content\r\n\r\n")
		return true
	})
	leg := s.leg()
	leg.Header = http.Header{"Authorization": {"Bearer client"}}
	leg.APIKey = "worker"
	get(t, newClient(t, Options{}), leg)
	if diff := cmp.Diff([]string{"Bearer worker"}, <-seen); diff != "" {
		t.Error(diff)
	}
}

func TestNothingCanBeInjected(t *testing.T) {
	t.Parallel()
	c := newClient(t, Options{})
	for _, change := range []func(*Leg){
		func(l *Leg) { l.Set = []HeaderField{{"X-A", "b\r\nX-Evil: 1"}} },
		func(l *Leg) { l.Set = []HeaderField{{"X-A: 1\r\nX-B", "b"}} },
		func(l *Leg) { l.APIKey = "k\n" },
		func(l *Leg) { l.Path = "/a HTTP/1.1\r\nX: 1" },
		func(l *Leg) { l.Path = "nope" },
		func(l *Leg) { l.Method = "GE T" },
		func(l *Leg) { l.Header = http.Header{"X-A": {"b\x00"}} },
		func(l *Leg) { l.Base.Host = "" },
	} {
		leg := legTo(t, "http://127.0.0.1:1")
		change(leg)
		_, err := c.Do(patience(t), leg)
		var f *Failure
		if !errors.As(err, &f) || f.Kind != Invalid {
			t.Errorf("%+v: %v", leg, err)
		}
		if err != nil && leg.APIKey != "" && strings.Contains(err.Error(), leg.APIKey) {
			t.Errorf("the key shows in %q", err)
		}
	}
}

func TestBodies(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("0123456789abcdef", 20_000)
	for _, c := range []struct {
		name, answer, want string
		reuse              bool
		method             string
	}{
		{"length", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello", true, ""},
		{"empty", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "", true, ""},
		{"204", "HTTP/1.1 204 No Content\r\n\r\n", "", true, ""},
		{"304 with a length", "HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n", "", true, ""},
		{"HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", "", true, http.MethodHead},
		{"large", fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(big), big), big, true, ""},
		{"chunked", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n", "hello world", true, ""},
		{"chunked, trailers", "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nTrailer: X-A\r\n\r\n1\r\na\r\n0\r\nX-A: 1\r\nX-B: 2\r\n\r\n", "a", true, ""},
		{"chunked, large", fmt.Sprintf("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%X\r\n%s\r\n0\r\n\r\n", len(big), big), big, true, ""},
		{"chunked and length", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", "a", false, ""},
		{"to the end", "HTTP/1.1 200 OK\r\n\r\nhello", "hello", false, ""},
		{"1.0", "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello", false, ""},
		{"1.0 keep-alive", "HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 5\r\n\r\nhello", "hello", true, ""},
		{"close", "HTTP/1.1 200 OK\r\nConnection: foo, Close\r\nContent-Length: 5\r\n\r\nhello", "hello", false, ""},
		{"bare line feeds", "HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", "hello", true, ""},
		{"no reason", "HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", "hello", true, ""},
		{"interim answers", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello", true, ""},
		{"more than the answer", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloHTTP/1.1 200 OK", "hello", false, ""},
		{"large head", "HTTP/1.1 200 OK\r\nX-Big: " + strings.Repeat("x", 40_000) + "\r\nContent-Length: 5\r\n\r\nhello", "hello", true, ""},
	} {
		for _, cut := range []int{0, 1, 7} {
			t.Run(fmt.Sprintf("%s/%d", c.name, cut), func(t *testing.T) {
				t.Parallel()
				if cut > 0 && len(c.answer) > 10_000 {
					cut *= 1000
				}
				s := serve(t, func(conn net.Conn, r request) bool {
					if cut == 0 {
						say(t, conn, c.answer)
					} else {
						for rest := c.answer; rest != ""; {
							n := min(cut, len(rest))
							say(t, conn, rest[:n])
							rest = rest[n:]
						}
					}
					return !strings.HasPrefix(c.name, "to the end")
				})
				client := newClient(t, Options{})
				leg := s.leg()
				if c.method != "" {
					leg.Method, leg.Body = c.method, nil
				}
				r, got := get(t, client, leg)
				if got != c.want {
					t.Errorf("body %.80q, want %.80q", got, c.want)
				}
				if !r.Done() {
					t.Error("the whole body was read, and Done is false")
				}
				// A conn with bytes after the answer is dropped, either at once
				// or, when they arrive late, before its next use.
				if c.name == "more than the answer" {
					return
				}
				if idle := client.Idle(); (idle == 1) != c.reuse {
					t.Errorf("idle connections %d, want reuse %v", idle, c.reuse)
				}
			})
		}
	}
}

func TestBrokenAnswers(t *testing.T) {
	t.Parallel()
	head := "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
	for _, c := range []struct {
		name, answer string
		kind         Kind
		started      bool
		inBody       bool
	}{
		{"closed before the answer", "", Reset, false, false},
		{"closed within the status line", "HTTP/1.1 2", Reset, true, false},
		{"closed within the headers", "HTTP/1.1 200 OK\r\nX-A: 1\r\n", Reset, true, false},
		{"garbage", "\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", Protocol, true, false},
		{"SSH", "SSH-2.0-OpenSSH_9\r\n\r\n", Protocol, true, false},
		{"bad status", "HTTP/1.1 2x0 OK\r\n\r\n", Protocol, true, false},
		{"HTTP/2", "HTTP/2.0 200 OK\r\n\r\n", Protocol, true, false},
		{"header without colon", "HTTP/1.1 200 OK\r\nnope\r\n\r\n", Protocol, true, false},
		{"folded header", "HTTP/1.1 200 OK\r\nX-A: 1\r\n b\r\n\r\n", Protocol, true, false},
		{"space before the colon", "HTTP/1.1 200 OK\r\nX-A : 1\r\n\r\n", Protocol, true, false},
		{"control character", "HTTP/1.1 200 OK\r\nX-A: a\x00b\r\n\r\n", Protocol, true, false},
		{"two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", Protocol, true, false},
		{"negative length", "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", Protocol, true, false},
		{"other coding", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", Protocol, true, false},
		{"101", "HTTP/1.1 101 Switching Protocols\r\n\r\n", Protocol, true, false},
		{"endless interim answers", strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 20), Protocol, true, false},
		{"huge head", "HTTP/1.1 200 OK\r\n" + strings.Repeat("X-A: 1\r\n", 20_000), Protocol, true, false},
		{"one endless header", "HTTP/1.1 200 OK\r\nX-A: " + strings.Repeat("1", 100_000), Protocol, true, false},
		{"short body", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhell", Reset, true, true},
		{"cut chunk", head + "5\r\nhel", Reset, true, true},
		{"no last chunk", head + "5\r\nhello\r\n", Reset, true, true},
		{"bad chunk size", head + "5\r\nhello\r\nzz\r\n", Protocol, true, true},
		{"huge chunk size", head + "FFFFFFFFFFFFFFFF\r\n", Protocol, true, true},
		{"empty chunk size", head + "\r\n", Protocol, true, true},
		{"long chunk line", head + "5;" + strings.Repeat("x", 1000) + "\r\nhello\r\n", Protocol, true, true},
		{"chunk too long", head + "5\r\nhello!\r\n0\r\n\r\n", Protocol, true, true},
		{"endless trailers", head + "0\r\n" + strings.Repeat("X-A: 1\r\n", 20_000), Protocol, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, func(conn net.Conn, _ request) bool {
				say(t, conn, c.answer)
				return false
			})
			client := newClient(t, Options{})
			leg := s.leg()
			r, err := client.Do(patience(t), leg)
			if err == nil {
				if !c.inBody {
					t.Fatalf("Do succeeded: status %d", r.Status)
				}
				_, err = r.ReadAll(1 << 30)
				r.Close()
			}
			var f *Failure
			if !errors.As(err, &f) {
				t.Fatalf("error %v (%T), want a *Failure", err, err)
			}
			if f.Kind != c.kind || f.Started != c.started || !f.Sent || f.Reused {
				t.Errorf("failure %+v: kind %s started %v", f, f.Kind, f.Started)
			}
			if e := api.FromError(err); e.Status != http.StatusBadGateway || e.Code != api.CodeUpstreamError {
				t.Errorf("the client gets %d %s", e.Status, e.Code)
			}
			if client.Idle() != 0 {
				t.Error("a broken connection was kept")
			}
			if s.count() != 1 {
				t.Errorf("%d connections were made, want 1", s.count())
			}
		})
	}
}

func TestConnectFailures(t *testing.T) {
	t.Parallel()
	const refused = "http://127.0.0.1:1"
	never := func(ctx context.Context, _, _ string) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	for _, c := range []struct {
		name string
		opt  Options
		kind Kind
		want int
	}{
		{"refused", Options{}, Connect, http.StatusBadGateway},
		{"timeout", Options{Dial: never, DialTimeout: 20 * time.Millisecond}, Timeout, http.StatusGatewayTimeout},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, err := newClient(t, c.opt).Do(patience(t), legTo(t, refused))
			var f *Failure
			if !errors.As(err, &f) {
				t.Fatalf("%v is no failure", err)
			}
			if f.Kind != c.kind || f.Sent || f.Started {
				t.Errorf("kind %v, want %v; sent %v, started %v: %v", f.Kind, c.kind, f.Sent, f.Started, f)
			}
			if e := api.FromError(err); e.Status != c.want {
				t.Errorf("status %d, want %d", e.Status, c.want)
			}
		})
	}
}

func TestTimeouts(t *testing.T) {
	t.Parallel()
	const limit = 50 * time.Millisecond
	for _, c := range []struct {
		name, answer string
		inBody       bool
	}{
		{"no head", "", false},
		{"half a head", "HTTP/1.1 200 OK\r\n", false},
		{"stalled body", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				client := newClient(t, inMemory(func(conn net.Conn, _ request) bool {
					if c.answer != "" { // a pipe would deliver it
						say(t, conn, c.answer)
					}
					_, _ = conn.Read(make([]byte, 1)) // until the client gives up
					return false
				}))
				leg := legTo(t, "http://engine")
				leg.HeadTimeout, leg.IdleTimeout = limit, limit
				if c.inBody {
					leg.HeadTimeout = 10 * time.Second
				}
				began := time.Now()
				r, err := client.Do(patience(t), leg)
				if c.inBody {
					if err != nil {
						t.Fatal(err)
					}
					defer r.Close()
					if p, err := r.Next(); string(p) != "hello" || err != nil {
						t.Fatalf("Next: %q, %v", p, err)
					}
					_, err = r.Next()
					if f := new(Failure); !errors.As(err, &f) || f.Kind != Timeout {
						t.Fatalf("failure %+v", err)
					}
				} else if f := new(Failure); !errors.As(err, &f) || f.Kind != Timeout || !f.Sent {
					t.Fatalf("failure %+v", err)
				}
				if took := time.Since(began); took < limit || took > limit*5/4 {
					t.Errorf("took %v", took)
				}
			})
		})
	}
}

// A stream with pauses shorter than the idle timeout lives as long as it likes.
func TestNoTotalTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client := newClient(t, inMemory(func(conn net.Conn, _ request) bool {
			say(t, conn, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
			tick := time.NewTicker(990 * time.Millisecond)
			defer tick.Stop()
			for range 20 {
				<-tick.C
				say(t, conn, "1\r\nx\r\n")
			}
			say(t, conn, "0\r\n\r\n")
			return true
		}))
		leg := legTo(t, "http://engine")
		leg.HeadTimeout, leg.IdleTimeout = time.Second, time.Second
		if _, got := get(t, client, leg); got != strings.Repeat("x", 20) {
			t.Errorf("body %q", got)
		}
	})
}

// TestDrips: what is no event stream has the time of the head once more for all its pauses,
// however its length is shown. The time between two calls of Next is none of them.
func TestDrips(t *testing.T) {
	t.Parallel()
	for _, framing := range []string{"Transfer-Encoding: chunked", "Content-Length: 20", "Connection: close"} {
		for _, pause := range []time.Duration{0, time.Hour} { // of the caller
			if pause > 0 && framing == "Connection: close" {
				continue // a pipe that the other end has closed takes no deadline
			}
			t.Run(fmt.Sprintf("%s, %v", framing, pause), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					const each = 990 * time.Millisecond
					client := newClient(t, inMemory(func(conn net.Conn, _ request) bool {
						say(t, conn, "HTTP/1.1 200 OK\r\n"+framing+"\r\n\r\n")
						for range 20 {
							if pause == 0 {
								<-time.After(each)
							}
							piece := "x"
							if strings.HasSuffix(framing, "chunked") {
								piece = "1\r\nx\r\n"
							}
							if _, err := io.WriteString(conn, piece); err != nil {
								return false // given up
							}
						}
						if strings.HasSuffix(framing, "chunked") {
							say(t, conn, "0\r\n\r\n")
						}
						return strings.HasPrefix(framing, "Content")
					}))
					leg := legTo(t, "http://engine")
					leg.HeadTimeout, leg.IdleTimeout = 5*time.Second, time.Second
					resp, err := client.Do(t.Context(), leg)
					if err != nil {
						t.Fatal(err)
					}
					defer func() {
						resp.Close()
						<-time.After(each) // until the engine sees that
					}()
					began, got := time.Now(), 0
					for err == nil {
						<-time.After(pause)
						var p []byte
						p, err = resp.Next()
						got += len(p)
					}
					var f *Failure
					switch {
					case pause > 0 && (!errors.Is(err, io.EOF) || got != 20):
						t.Errorf("%d bytes, then %v", got, err)
					case pause == 0 && (!errors.As(err, &f) || f.Kind != Timeout || !f.Late || got < 5 || time.Since(began) > 7*time.Second):
						t.Errorf("%d bytes in %v, then %+v", got, time.Since(began), err)
					}
				})
			})
		}
	}
}

func TestConnectionsAreReusedAndChecked(t *testing.T) {
	t.Parallel()
	closeAfter := make(chan struct{})
	s := serve(t, func(c net.Conn, r request) bool {
		say(t, c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		if r.req.Header.Get("X-Close") != "" {
			_ = c.Close()
			closeAfter <- struct{}{}
			return false
		}
		return true
	})
	c := newClient(t, Options{IdleConn: time.Minute})
	leg := s.leg()
	var lost []bool
	leg.Connects = func(l bool) { lost = append(lost, l) }
	for range 5 {
		get(t, c, leg)
	}
	if s.count() != 1 {
		t.Fatalf("%d connections for 5 requests", s.count())
	}
	leg.Set = []HeaderField{{"X-Close", "1"}}
	get(t, c, leg)
	<-closeAfter
	awaitUnread(t, c, leg)
	leg.Set = nil
	// The engine has closed it: the request must go out once, on a new one.
	if _, got := get(t, c, leg); got != "ok" || s.count() != 2 {
		t.Errorf("got %q over %d connections", got, s.count())
	}
	if !slices.Equal(lost, []bool{false, true}) {
		t.Errorf("for new connections the engine had closed others: %v", lost)
	}
}

// A reused connection that breaks after the request was sent: only a request
// that may be sent twice is.
func TestResendOnlyWhereAllowed(t *testing.T) {
	t.Parallel()
	for _, resend := range []bool{false, true} {
		t.Run(fmt.Sprint(resend), func(t *testing.T) {
			t.Parallel()
			s := serve(t, func(c net.Conn, r request) bool {
				if r.n == 1 {
					return false // dies on the second request of a connection
				}
				say(t, c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
				return true
			})
			c := newClient(t, Options{IdleConn: time.Minute})
			leg := s.leg()
			if resend {
				leg.Method, leg.Body = http.MethodGet, nil
			}
			get(t, c, leg)
			r, err := c.Do(patience(t), leg)
			if resend {
				if err != nil {
					t.Fatal(err)
				}
				r.Close()
				return
			}
			var f *Failure
			if !errors.As(err, &f) {
				t.Fatalf("%v is no failure", err)
			}
			if f.Kind != Reset || !f.Reused || !f.Sent {
				t.Errorf("kind %v, want %v; reused %v, sent %v: %v", f.Kind, Reset, f.Reused, f.Sent, f)
			}
			if s.count() != 1 {
				t.Error("the request was sent again")
			}
		})
	}
}

func TestIdleConnectionsAreClosed(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
	srv.Config.ConnState = func(_ net.Conn, st http.ConnState) {
		if st == http.StateClosed {
			close(gone)
		}
	}
	srv.Start()
	defer srv.Close()
	c := newClient(t, Options{IdleConn: 30 * time.Millisecond})
	get(t, c, legTo(t, srv.URL))
	select {
	case <-gone:
	case <-patience(t).Done():
		t.Fatal("the unused connection stays open")
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	if len(c.pools) != 0 {
		t.Error("the pool of an engine that is not asked stays")
	}
}

func TestMaxIdle(t *testing.T) {
	t.Parallel()
	s := serve(t, func(c net.Conn, _ request) bool {
		say(t, c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		return true
	})
	c := newClient(t, Options{MaxIdle: 2, IdleConn: time.Minute})
	var open []*Response
	for range 5 {
		r, err := c.Do(patience(t), s.leg())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.ReadAll(10); err != nil {
			t.Fatal(err)
		}
		open = append(open, r)
	}
	for _, r := range open {
		r.Close()
	}
	if c.Idle() != 2 {
		t.Errorf("%d idle connections, want 2", c.Idle())
	}
	c.Close()
	if c.Idle() != 0 {
		t.Error("Close keeps connections")
	}
}

// Cancel reaches the engine: it sees its connection end.
func TestCancelClosesTheConnection(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, answer string }{
		{"waiting for the head", ""},
		{"within the body", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			arrived, ended := make(chan struct{}), make(chan struct{})
			s := serve(t, func(conn net.Conn, _ request) bool {
				say(t, conn, c.answer)
				close(arrived)
				var b [1]byte
				_, _ = conn.Read(b[:])
				close(ended)
				return false
			})
			ctx, cancel := context.WithCancel(patience(t))
			failed := make(chan error, 1)
			go func() {
				r, err := newClient(t, Options{}).Do(ctx, s.leg())
				if err == nil {
					_, err = r.ReadAll(1 << 30)
					r.Close()
				}
				failed <- err
			}()
			<-arrived
			cancel()
			err := <-failed
			var f *Failure
			if !errors.As(err, &f) || f.Kind != Canceled || !errors.Is(err, context.Canceled) {
				t.Errorf("failure %+v", err)
			}
			select {
			case <-ended:
			case <-patience(t).Done():
				t.Error("the engine does not notice")
			}
		})
	}
	t.Run("before it begins", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := newClient(t, Options{}).Do(ctx, legTo(t, "http://127.0.0.1:1"))
		if f := new(Failure); !errors.As(err, &f) || f.Kind != Canceled {
			t.Errorf("failure %+v", err)
		}
	})
}

// An engine that refuses a body without reading it still gets its answer out.
func TestEarlyAnswer(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := ln.Accept()
		if err != nil {
			return
		}
		_, _ = c.Read(make([]byte, 1000))
		say(t, c, "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
		_ = c.(*net.TCPConn).CloseWrite()
		_, _ = io.CopyN(io.Discard, c, 1<<20)
		_ = c.Close()
	}()
	leg := legTo(t, "http://"+ln.Addr().String())
	leg.Body = [][]byte{make([]byte, 16<<20)}
	client := newClient(t, Options{})
	r, err := client.Do(patience(t), leg)
	<-done
	var f *Failure
	switch {
	case err == nil && r.Status == 413:
		r.Close()
	case errors.As(err, &f) && f.Kind == Reset && f.Sent:
		// The reset may overtake the answer; then it is reported as a reset.
	default:
		t.Errorf("answer %+v, error %v", r, err)
	}
	if client.Idle() != 0 {
		t.Error("the connection was kept")
	}
}

func TestSlowEngineTakesALargeBody(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, iotest.HalfReader(r.Body))
		_, _ = fmt.Fprint(w, n)
	}))
	defer srv.Close()
	leg := legTo(t, srv.URL)
	leg.Body = [][]byte{make([]byte, 3<<20), []byte("x"), make([]byte, 5<<20)}
	if _, got := get(t, newClient(t, Options{}), leg); got != fmt.Sprint(8<<20+1) {
		t.Errorf("engine got %s bytes", got)
	}
}

func TestTLSAndIPv6(t *testing.T) {
	t.Parallel()
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Proto)
	}))
	if ln, err := net.Listen("tcp", "[::1]:0"); err == nil {
		_ = srv.Listener.Close()
		srv.Listener = ln
	}
	srv.StartTLS()
	defer srv.Close()
	roots := x509.NewCertPool()
	roots.AddCert(srv.Certificate())
	c := newClient(t, Options{TLS: func() *tls.Config { return &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12} }})
	for range 2 {
		if _, got := get(t, c, legTo(t, srv.URL)); got != "HTTP/1.1" {
			t.Errorf("got %q", got)
		}
	}
	if c.Idle() != 1 {
		t.Errorf("%d idle connections", c.Idle())
	}
	_, err := newClient(t, Options{}).Do(patience(t), legTo(t, srv.URL))
	if f := new(Failure); !errors.As(err, &f) || f.Kind != Connect {
		t.Errorf("an unknown certificate is accepted: %v", err)
	}
}

// An engine that answers before it has read the body, and then neither reads on
// nor closes, has answered all the same. One that reads slowly and then refuses
// leaves a connection that serves the next request, or none.
func TestEarlyAnswerOnAnOpenConnection(t *testing.T) {
	t.Parallel()
	certFile, keyFile, roots := certificate(t)
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	for _, scheme := range []string{"http", "https"} {
		for _, size := range []int{40 << 10, 700 << 10, 4 << 20, 32 << 20} {
			for _, interim := range []string{"", "HTTP/1.1 100 Continue\r\n\r\n"} {
				for _, reads := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s/%d/%d/%v", scheme, size, len(interim), reads), func(t *testing.T) {
						t.Parallel()
						ln, err := net.Listen("tcp", "127.0.0.1:0")
						if err != nil {
							t.Fatal(err)
						}
						var wg sync.WaitGroup
						defer wg.Wait()
						gone := make(chan struct{})
						defer close(gone)
						defer func() { _ = ln.Close() }()
						serve := func(raw net.Conn) {
							defer func() { _ = raw.Close() }()
							if !reads {
								_ = raw.(*net.TCPConn).SetReadBuffer(4096)
							}
							c := raw
							if scheme == "https" {
								c = tls.Server(raw, &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12})
							}
							in := bufio.NewReader(c)
							for {
								q, err := http.ReadRequest(in)
								if err != nil {
									return
								}
								if q.ContentLength <= earlySize {
									_, _ = io.Copy(io.Discard, q.Body)
									say(t, c, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes")
									continue
								}
								say(t, c, interim)
								if reads {
									listens := time.NewTimer(2 * earlyAfter)
									<-listens.C
									_, _ = io.Copy(io.Discard, q.Body)
								}
								say(t, c, "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
								if !reads {
									<-gone
									return
								}
							}
						}
						wg.Go(func() {
							for {
								raw, err := ln.Accept()
								if err != nil {
									return
								}
								wg.Go(func() { serve(raw) })
							}
						})
						leg := legTo(t, scheme+"://"+ln.Addr().String())
						leg.Body = [][]byte{make([]byte, size/2), make([]byte, size/2)}
						client := newClient(t, Options{TLS: func() *tls.Config { return &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12} }})
						defer client.Close() // ends the engine's reading
						r, got := get(t, client, leg)
						if r.Status != http.StatusRequestEntityTooLarge || got != "no" {
							t.Errorf("%d %q", r.Status, got)
						}
						if !reads && size > 4<<20 && client.Idle() != 0 {
							t.Error("a connection on which half of a body was sent is kept")
						}
						if !reads && client.Idle() != 0 {
							return // all of it was sent, and nobody reads another
						}
						leg.Body = [][]byte{[]byte("small")}
						if r, got = get(t, client, leg); r.Status != http.StatusOK || got != "yes" {
							t.Errorf("the next request got %d %q", r.Status, got)
						}
					})
				}
			}
		}
	}
}
