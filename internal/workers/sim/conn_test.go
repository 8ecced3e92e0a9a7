package sim_test

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// dial opens a connection to an engine as its own URL says.
func dial(t *testing.T, r *sim.Running) net.Conn {
	t.Helper()
	u := r.Engine(0).Worker().URL
	raw, err := net.Dial("tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = raw.Close() })
	if err := raw.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if u.Scheme == "http" {
		return raw
	}
	conf := r.ClientTLS().Clone()
	conf.ServerName = u.Hostname()
	return tls.Client(raw, conf)
}

// TestIdleConnectionsAreClosed: unless set otherwise, after the time that
// uvicorn has for it; those in use are not.
func TestIdleConnectionsAreClosed(t *testing.T) {
	for _, engine := range []string{"vllm", "sglang"} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			c := dial(t, start(t, "1a:profile=instant,engine="+engine))
			in := bufio.NewReader(c)
			ask := func() time.Time {
				t.Helper()
				at := time.Now()
				if _, err := io.WriteString(c, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
					t.Fatal(err)
				}
				a, err := http.ReadResponse(in, nil)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := io.Copy(io.Discard, a.Body); err != nil || a.StatusCode != 200 {
					t.Fatal(a.StatusCode, err)
				}
				_ = a.Body.Close()
				return at
			}
			ask()
			last := ask()
			if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
				t.Fatalf("%v, want the end of the connection", err)
			}
			if idle := time.Since(last); idle < 5*time.Second {
				t.Errorf("closed after %s", idle)
			}
		})
	}
}

// TestAnswersToNobody: an idle 408 follows an answer, streamed or whole, and
// what comes is the answer, untouched, and then the 408; connections that are
// not used are closed. Over TLS and over TCP.
func TestAnswersToNobody(t *testing.T) {
	for _, secure := range []string{"on", "off"} {
		for _, stream := range []bool{true, false} {
			t.Run(fmt.Sprintf("tls=%s, stream %v", secure, stream), func(t *testing.T) {
				t.Parallel()
				r := start(t, "1a:profile=instant,late_rate=1,close_idle=50ms,tls="+secure)
				c := dial(t, r)
				body := fmt.Sprintf(`{"model":"sim","prompt":"a b c","max_tokens":4,"ignore_eos":true,"stream":%v}`, stream)
				if _, err := fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
					t.Fatal(err)
				}
				in := bufio.NewReader(c)
				a, err := http.ReadResponse(in, nil)
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(a.Body)
				if err != nil || a.StatusCode != 200 || stream != strings.HasSuffix(string(b), "data: [DONE]\n\n") || !bytes.Contains(b, []byte(`"finish_reason":"length"`)) {
					t.Errorf("%v %s: %v", a.Status, b, err)
				}
				late, err := io.ReadAll(in)
				if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) || !strings.HasPrefix(string(late), "HTTP/1.1 408 ") || strings.Count(string(late), "HTTP") != 1 {
					t.Errorf("after the answer: %q, %v", late, err)
				}
			})
		}
	}
}

// TestKilledEngineAnswersNothing: whatever a killed engine was doing, it gives no
// answer, not even an empty one.
func TestKilledEngineAnswersNothing(t *testing.T) {
	r := start(t, "1a:profile=instant")
	e := r.Engine(0)
	for _, set := range []fault.Set{{HangRate: 1}, {Hang: true}, {Delay: fault.Duration(time.Minute)}} {
		for range 20 {
			if err := e.SetFaults(set); err != nil {
				t.Fatal(err)
			}
			sent := make(chan struct{}, 1)
			ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { sent <- struct{}{} }})
			go func() {
				<-sent
				e.Kill()
			}()
			if status, body, err := tryPost(ctx, e.URL()+"/v1/completions", object{"model": "sim", "prompt": ids(20, 1), "max_tokens": 2}); err == nil {
				t.Fatalf("%+v: %d %q", set, status, body)
			}
			restart(t, e)
		}
	}
}

// TestClientsThatLeaveAreNoticed: an engine that does not answer lets go of a
// request whose client has left, as uvicorn does, and what it had of the request
// is still there for one whose client stays.
func TestClientsThatLeaveAreNoticed(t *testing.T) {
	r := start(t, "1a:profile=instant")
	e := r.Engine(0)
	waiting := func() int {
		buf := make([]byte, 1<<20)
		return strings.Count(string(buf[:runtime.Stack(buf, true)]), "front.(*Server).faulty(")
	}
	const body = `{"model":"sim","prompt":"a b c","max_tokens":2,"ignore_eos":true}`
	ask := func() net.Conn {
		c := dial(t, r)
		if _, err := fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
			t.Fatal(err)
		}
		return c
	}
	for _, set := range []fault.Set{{HangRate: 1}, {Delay: fault.Duration(time.Minute)}, {Hang: true}} {
		if err := e.SetFaults(set); err != nil {
			t.Fatal(err)
		}
		c := ask()
		eventually(t, "the engine has the request", func() bool { return waiting() == 1 })
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the engine lets go of it", func() bool { return waiting() == 0 })
	}
	c := ask()
	eventually(t, "the engine has the request", func() bool { return waiting() == 1 })
	if err := e.SetFaults(fault.Set{}); err != nil {
		t.Fatal(err)
	}
	a, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	if b, err := io.ReadAll(a.Body); err != nil || a.StatusCode != 200 || !bytes.Contains(b, []byte(`"completion_tokens":2`)) {
		t.Errorf("%s %s: %v", a.Status, b, err)
	}
}
