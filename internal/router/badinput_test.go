package router_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestBadConnections: what clients send that is not in order, or not in time.
func TestBadConnections(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1a:profile=instant", func(c *settings.Config) { c.Timeouts.Body = 300 * time.Millisecond })
	for _, c := range []struct {
		name string
		test func(*testing.T, *rig, *tap)
	}{{"bodies", badBodies}, {"headers", headerInjection}, {"slow and half closed", slowAndHalfClosedClients}, {"smuggling", smuggling}, {"chunks", chunkedBodies}, {"HTTP/2", otherVersions}} {
		t.Run(c.name, func(t *testing.T) {
			p.set(nil)
			r.set(func(*settings.Config) {})
			c.test(t, r.in(t), p)
		})
	}
}

// badBodies: whatever a client sends is answered with a clear 4xx that
// names the fault, and touches no worker.
func badBodies(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) { c.Limits.BodyBytes = 1 << 20 })
	deep := strings.Repeat(`{"a":`, 5000) + "1" + strings.Repeat("}", 5000)
	for _, c := range []struct {
		name, path, body string
		status           int
		code             string
		says             string
	}{
		{"empty", "/v1/completions", ``, 400, "invalid_json", ""},
		{"cut", "/v1/completions", `{"model":"sim","prompt":`, 400, "invalid_json", ""},
		{"two values", "/v1/completions", `{"model":"sim","prompt":"x"} {}`, 400, "invalid_json", ""},
		{"not an object", "/v1/completions", `[1,2]`, 400, "", ""},
		{"control character", "/v1/completions", "{\"model\":\"sim\",\"prompt\":\"a\x01b\"}", 400, "invalid_json", ""},
		{"NaN", "/v1/completions", `{"model":"sim","prompt":"x","temperature":NaN}`, 400, "invalid_json", ""},
		{"single quotes", "/v1/completions", `{'model':'sim'}`, 400, "invalid_json", ""},
		{"trailing comma", "/v1/completions", `{"model":"sim","prompt":"x",}`, 400, "invalid_json", ""},
		{"deep", "/v1/completions", `{"model":"sim","prompt":"x","x":` + deep + `}`, 400, "", ""},
		{"many members", "/v1/completions", `{"model":"sim","prompt":"x"` + members(5000) + `}`, 400, "", ""},
		{"duplicate model", "/v1/completions", `{"model":"sim","model":"other","prompt":"x"}`, 400, "duplicate_key", "model"},
		{"duplicate prompt", "/v1/completions", `{"model":"sim","prompt":"x","prompt":"y"}`, 400, "duplicate_key", "prompt"},
		{"escaped duplicate", "/v1/completions", `{"model":"sim","prompt":"x","\u006dodel":"y"}`, 400, "duplicate_key", "model"},
		{"model is a number", "/v1/completions", `{"model":7,"prompt":"x"}`, 400, "invalid_request", "model"},
		{"stream is a word", "/v1/completions", `{"model":"sim","prompt":"x","stream":"maybe"}`, 400, "invalid_request", "stream"},
		{"max_tokens is a word", "/v1/completions", `{"model":"sim","prompt":"x","max_tokens":"nine"}`, 400, "invalid_request", "max_tokens"},
		{"max_tokens absurd", "/v1/completions", `{"model":"sim","prompt":"x","max_tokens":99999999999999999999}`, 400, "invalid_request", "max_tokens"},
		{"max_tokens negative", "/v1/completions", `{"model":"sim","prompt":"x","max_tokens":-4}`, 400, "invalid_request", "max_tokens"},
		{"max_tokens a fraction", "/v1/completions", `{"model":"sim","prompt":"x","max_tokens":1.5}`, 400, "invalid_request", "max_tokens"},
		{"n absurd", "/v1/completions", `{"model":"sim","prompt":"x","n":1e18}`, 400, "invalid_request", "n"},
		{"prompt is an object", "/v1/completions", `{"model":"sim","prompt":{"a":1}}`, 400, "invalid_request", "prompt"},
		{"prompt mixes", "/v1/completions", `{"model":"sim","prompt":[1,"a"]}`, 400, "invalid_request", "prompt"},
		{"token id too large", "/v1/completions", `{"model":"sim","prompt":[4294967296]}`, 400, "invalid_request", "prompt"},
		{"token id negative", "/v1/completions", `{"model":"sim","prompt":[-1]}`, 400, "invalid_request", "prompt"},
		{"messages is a string", "/v1/chat/completions", `{"model":"sim","messages":"hello"}`, 400, "invalid_request", "messages"},
		{"message is null", "/v1/chat/completions", `{"model":"sim","messages":[null]}`, 400, "", ""},
		{"unknown model", "/v1/completions", `{"model":"simm","prompt":"x"}`, 404, "model_not_found", `did you mean "sim"`},
		{"unknown path", "/v2/chat", `{}`, 404, "unknown_path", ""},
		{"too large", "/v1/completions", `{"model":"sim","prompt":"` + strings.Repeat("x", 1<<20) + `"}`, 413, "body_too_large", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			p.reset()
			a := r.send(http.MethodPost, c.path, []byte(c.body))
			code := c.code
			if code == "" {
				e := decode[apiError](t, a.body)
				code = e.Error.Code
			}
			e := a.refused(t, c.status, code)
			if !strings.Contains(e.Error.Message+e.Error.Param, c.says) {
				t.Errorf("the error does not name %q: %s", c.says, a)
			}
			if n := len(p.legs()); n != 0 {
				t.Errorf("%d legs for a bad request", n)
			}
		})
	}
	// Methods, forms and encodings.
	r.send(http.MethodGet, "/v1/completions", nil).refused(t, http.StatusMethodNotAllowed, "method_not_allowed")
	r.send(http.MethodPost, "/v1/completions", []byte(`{"model":"sim","prompt":"x"}`), "Content-Encoding", "br").refused(t, http.StatusUnsupportedMediaType, "unsupported_media_type")
	// Still well.
	r.complete(ids(40, 1))
}

func members(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `,"m%d":%d`, i, i)
	}
	return b.String()
}

// TestLargeBodies: 100 MB are refused at the limit without being read, and
// below the limit memory grows by little more than the body. Not parallel: it
// counts what the process allocates.
func TestLargeBodies(t *testing.T) {
	r := start(t, "1a:profile=instant", func(c *settings.Config) { c.Limits.BodyBytes = 16 << 20; c.Tokens.Tokenizer = "estimate" })
	t.Run("announced", func(t *testing.T) {
		c := r.dial()
		fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", 100<<20)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || resp.StatusCode != http.StatusRequestEntityTooLarge {
			t.Fatalf("%v %v", resp, err)
		}
	})
	t.Run("chunked", func(t *testing.T) {
		q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.URL+"/v1/completions", io.LimitReader(zeros{}, 100<<20))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := r.Client.Do(q)
		// The router hangs up before all was sent. A client that still writes then may
		// notice that before the answer; anything else is no refusal.
		if broken := errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET); err != nil && !broken {
			t.Fatal(err)
		} else if err == nil {
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusRequestEntityTooLarge {
				t.Errorf("%d", resp.StatusCode)
			}
		}
		r.eventually("a refusal that is counted", func() error {
			if n := r.metric(`dynctl_rejections_total{reason="body"}`); n != 2 { // with the one above
				return fmt.Errorf("%v", n)
			}
			return nil
		})
	})
	t.Run("below the limit", func(t *testing.T) {
		big := fmt.Appendf(nil, `{"model":"sim","max_tokens":1,"prompt":"%s"}`, strings.Repeat("word ", 12<<20/5))
		// Not the heap, whose size is up to the moment of its collection, but all
		// that is asked of it. Engine, client and router share this process: the
		// engine decodes the body several times over. The router's own share is
		// measured in its benchmarks; here the bound is for the sum.
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		a := r.send(http.MethodPost, "/v1/completions", big)
		if a.status != http.StatusBadRequest && a.status != 200 { // the engine's limit on the context
			t.Fatalf("%d", a.status)
		}
		runtime.ReadMemStats(&after)
		if taken := after.TotalAlloc - before.TotalAlloc; taken > 40*12<<20 {
			t.Errorf("%d MiB were taken for a body of 12", taken>>20)
		}
	})
}

// zeros is an endless body.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = ' '
	}
	return len(b), nil
}

// dial opens a bare connection to the data plane.
func (r *rig) dial() net.Conn {
	r.t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(r.URL, "http://"))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		r.t.Fatal(err)
	}
	return c
}

// headerInjection: no header of a client breaks out of its line, towards
// engines, towards the client or in the event log.
func headerInjection(t *testing.T, r *rig, p *tap) {
	body := `{"model":"sim","prompt":"x","max_tokens":1}`
	raw := func(head string) *http.Response {
		t.Helper()
		c := r.dial()
		fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nConnection: close\r\n%s\r\n\r\n%s", len(body), head, body)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatalf("%q: %v", head, err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		return resp
	}
	for _, id := range []string{strings.Repeat("a", 5000), "with space", "tab\there", "q\"uote\\", "é", "<script>"} {
		p.reset()
		resp := raw("X-Request-Id: " + id)
		got := resp.Header.Get("X-Request-Id")
		if resp.StatusCode != 200 || got == "" || len(got) > 128 || strings.ContainsAny(got, " \t\r\n") {
			t.Errorf("id %.20q: %d %q", id, resp.StatusCode, got)
		}
		for _, l := range p.legs() {
			if l.header.Get("X-Request-Id") != got {
				t.Errorf("the engine got id %q, the client %q", l.header.Get("X-Request-Id"), got)
			}
		}
	}
	for name, head := range map[string]string{
		"folded line":     "X-A: b\r\n X-Evil: 1",
		"bare CR":         "X-A: b\rX-Evil: 1",
		"NUL":             "X-A: b\x00c",
		"space in name":   "X A: b",
		"two lengths":     "Content-Length: 5",
		"chunked as well": "Transfer-Encoding: chunked",
		"odd encoding":    "Transfer-Encoding: xchunked",
	} {
		p.reset()
		c := r.dial()
		fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n\r\n%s", len(body), head, body)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil {
			resp.Body.Close()
		}
		for _, l := range p.legs() {
			if l.header.Get("X-Evil") != "" || !bytes.Equal(l.body, []byte(body)) && err == nil && resp.StatusCode == 200 {
				t.Errorf("%s: the engine got %v %q", name, l.header, l.body)
			}
		}
		c.Close()
	}
	// Hop-by-hop headers, and those that Connection names, end here.
	p.reset()
	raw("Connection: X-Secret\r\nX-Secret: 1\r\nKeep-Alive: 5\r\nProxy-Authorization: a\r\nTE: trailers\r\nUpgrade: h2c\r\nX-Kept: 1\r\nAuthorization: Bearer client")
	for _, l := range p.legs() {
		for _, k := range []string{"X-Secret", "Keep-Alive", "Proxy-Authorization", "Te", "Upgrade"} {
			if l.header.Get(k) != "" {
				t.Errorf("the engine got %s: %q", k, l.header.Get(k))
			}
		}
		if l.header.Get("X-Kept") != "1" || l.header.Get("Authorization") != "Bearer client" {
			t.Errorf("the engine lost a header: %v", l.header)
		}
	}
	// Huge headers are refused by the listener.
	c := r.dial()
	fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Big: ")
	go func() { _, _ = io.Copy(c, io.LimitReader(zeros{}, 1<<20)) }() // ends when the server hangs up
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err == nil && resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("huge headers: %d", resp.StatusCode)
	}
}

// slowAndHalfClosedClients: a client that writes slowly, reads slowly or
// closes one direction costs a bounded time, and nothing afterwards.
func slowAndHalfClosedClients(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) { c.Timeouts.Write = 300 * time.Millisecond })
	head := func(n int) string {
		return fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", n)
	}
	t.Run("slow writer", func(t *testing.T) {
		c := r.dial()
		fmt.Fprint(c, head(1000)+`{"model":"si`)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil) // the connection has a deadline
		if err != nil || resp.StatusCode != http.StatusRequestTimeout {
			t.Errorf("%v %v", resp, err)
		}
	})
	t.Run("body ends early", func(t *testing.T) {
		c := r.dial()
		fmt.Fprint(c, head(1000)+`{"model":"sim","prompt":"x"}`)
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil && resp.StatusCode/100 != 4 {
			t.Errorf("%v", resp)
		}
	})
	t.Run("half closed after the request", func(t *testing.T) {
		// net/http takes the end of a client's sending for its leaving; either
		// an answer or a clean end is right, but nothing may be left behind.
		c := r.dial()
		body := `{"model":"sim","prompt":"x","max_tokens":2}`
		fmt.Fprint(c, head(len(body))+body)
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); err != nil {
			t.Errorf("no clean end: %v", err)
		}
	})
	t.Run("slow reader", func(t *testing.T) {
		chunk := []byte("data: {\"choices\":[{\"text\":\"" + strings.Repeat("x", 32<<10) + "\"}]}\n\n")
		ended := make(chan struct{})
		p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
			if q.URL.Path != "/v1/completions" {
				return false
			}
			w.Header().Set("Content-Type", "text/event-stream")
			for q.Context().Err() == nil {
				if _, err := w.Write(chunk); err != nil {
					break
				}
				_ = http.NewResponseController(w).Flush()
			}
			close(ended)
			return true
		})
		defer p.set(nil)
		c := r.dial()
		if err := c.(*net.TCPConn).SetReadBuffer(4096); err != nil {
			t.Fatal(err)
		}
		body := `{"model":"sim","prompt":"x","stream":true}`
		fmt.Fprint(c, head(len(body))+body)
		// The client reads nothing. The router gives it up after the write
		// timeout, and the engine's work ends with it.
		select {
		case <-ended:
		case <-time.After(patience):
			t.Fatal("the engine still writes to a client that does not read")
		}
		r.eventually("an empty ledger", r.Router.Balanced)
	})
	r.complete(ids(40, 1))
}

// garbage is an engine that answers generation requests with bytes of its own.
type garbage struct {
	ln   net.Listener
	wg   sync.WaitGroup
	mu   sync.Mutex
	raw  string
	wait bool
	open map[net.Conn]bool
}

// TestGarbageEngines: whatever bytes an engine answers with, the client gets an
// honest 5xx or the answer of another engine, and the router is none the worse.
func TestGarbageEngines(t *testing.T) {
	t.Parallel()
	g := newGarbage(t)
	other := engineAlone(t, "sim")
	r := startCold(t, loopback.Options{Specs: func([]workers.Spec) []workers.Spec {
		u, _ := url.Parse("http://" + g.ln.Addr().String())
		return []workers.Spec{
			{Name: "garbage", URL: u, Facts: workers.Facts{Engine: workers.VLLM, Role: workers.Aggregated}, EventsOff: true, Origin: "test"},
			{Name: "good", URL: other.Worker().URL, Facts: workers.Facts{Engine: workers.VLLM, Role: workers.Aggregated}, EventsOff: true, Origin: "test"},
		}
	}}, func(c *settings.Config) {
		c.Routing.AllowHeaders = true
		c.Timeouts.Response, c.Timeouts.Idle = time.Minute, time.Minute // longer than anybody waits here
		c.Tokens.Tokenizer = "estimate"
		c.Retry.Budget = 1
	})
	r.eventually("both workers", func() error {
		for _, w := range []string{"garbage", "good"} {
			if x := r.worker(w); !x.Usable {
				return fmt.Errorf("%s: %s", w, x.Reason)
			}
		}
		return nil
	})
	sse := "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
	for _, c := range []struct {
		name, raw string
		wait      bool // hold the connection open
		begun     bool // the client has got a part before
	}{
		{name: "nothing", raw: ""},
		{name: "silence", raw: "", wait: true},
		{name: "not HTTP", raw: "SSH-2.0-OpenSSH_9\r\n"},
		{name: "binary", raw: "\x00\x01\x02\xff\xfe\r\n\r\n"},
		{name: "cut status line", raw: "HTTP/1.1 20"},
		{name: "status of letters", raw: "HTTP/1.1 abc OK\r\n\r\n"},
		{name: "status 99", raw: "HTTP/1.1 99 Low\r\nContent-Length: 0\r\n\r\n"},
		{name: "endless head", raw: "HTTP/1.1 200 OK\r\n" + strings.Repeat("X-A: "+strings.Repeat("b", 1000)+"\r\n", 2000)},
		{name: "header without colon", raw: "HTTP/1.1 200 OK\r\nnonsense\r\nContent-Length: 2\r\n\r\n{}"},
		{name: "response splitting", raw: "HTTP/1.1 200 OK\r\nX-A: b\rX-Evil: 1\r\nContent-Length: 2\r\n\r\n{}"},
		{name: "two lengths", raw: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 5\r\n\r\n{}"},
		{name: "negative length", raw: "HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"},
		{name: "huge length", raw: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99999999999999999999\r\n\r\n{}"},
		{name: "short body", raw: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{}"},
		{name: "stalled body", raw: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{}", wait: true},
		{name: "bad chunk", raw: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"},
		{name: "huge chunk", raw: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}"},
		{name: "chunks without end", raw: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"},
		{name: "500", raw: "HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"},
		{name: "100 for ever", raw: strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 50_000)},
		{name: "101", raw: "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"},
		{name: "stream without events", raw: sse},
		{name: "stream that begins with an error", raw: sse + "data: {\"error\":{\"message\":\"no KV\",\"code\":500}}\n\ndata: [DONE]\n\n"},
		{name: "stream of silence", raw: sse, wait: true},
		{name: "stream cut in an event", raw: sse + "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"cho", begun: true},
		{name: "stream that stalls", raw: sse + "data: {\"choices\":[{\"text\":\"a\"}]}\n\n", wait: true, begun: true},
		{name: "one endless line", raw: sse + "data: " + strings.Repeat("x", 4<<20), begun: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			g.set(c.raw, c.wait)
			// Only an engine that sends nothing more runs into a timeout.
			within := func(d time.Duration) {
				if cfg := r.Config; c.wait {
					cfg.Timeouts.Response, cfg.Timeouts.Idle = d, d
					if err := r.Router.Settings().Reload(cfg, nil); err != nil {
						t.Fatal(err)
					}
				}
			}
			within(200 * time.Millisecond)
			r.Router.Heal("garbage")
			a, err := r.try(r.wait(), http.MethodPost, "/v1/completions", []byte(`{"model":"sim","prompt":"hello there","max_tokens":3,"stream":true}`), "X-Dynctl-Worker", "garbage")
			switch {
			case err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF):
				t.Errorf("no answer at all: %v", err)
			case err != nil:
			case c.begun:
				if a.status != 200 {
					t.Errorf("%s", a)
				}
			case a.status < 500 || a.header.Get("X-Evil") != "":
				t.Errorf("%.300s", a)
			}
			if err == nil && !c.begun && c.name != "500" {
				e := decode[apiError](t, a.body)
				if e.Error.Code == "" || e.Error.Code == "internal_error" || !strings.Contains(e.Error.Message, "garbage") {
					t.Errorf("the error does not say what happened and where: %s", a)
				}
			}
			// With another engine at hand the client sees nothing of it.
			within(2 * time.Second) // in which that one must answer
			if !c.begun {
				for i := range 2 {
					r.Router.Heal("garbage")
					a := r.send(http.MethodPost, "/v1/completions", fmt.Appendf(nil, `{"model":"sim","prompt":"hello %s %d","max_tokens":3}`, c.name, i))
					if c.name == "silence" && a.status == http.StatusGatewayTimeout {
						continue // it answers probes: it may be computing
					}
					if a.status != 200 || !strings.HasPrefix(a.header.Get("X-Dynctl-Worker"), "good") {
						t.Errorf("%s", a)
					}
				}
			}
			within(time.Minute)
		})
	}
	g.set("", false)
}

// newGarbage starts an engine that is healthy and answers nonsense.
func newGarbage(t *testing.T) *garbage {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &garbage{ln: ln, open: map[net.Conn]bool{}}
	g.wg.Add(1)
	go func() {
		defer g.wg.Done()
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			g.mu.Lock()
			g.open[c] = true
			g.mu.Unlock()
			g.wg.Add(1)
			go func() {
				defer g.wg.Done()
				defer func() {
					g.mu.Lock()
					delete(g.open, c)
					g.mu.Unlock()
					c.Close()
				}()
				g.serve(c)
			}()
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		g.mu.Lock()
		for c := range g.open {
			c.Close()
		}
		g.mu.Unlock()
		g.wg.Wait()
	})
	return g
}

func (g *garbage) set(raw string, wait bool) {
	g.mu.Lock()
	g.raw, g.wait = raw, wait
	g.mu.Unlock()
}

func (g *garbage) serve(c net.Conn) {
	in := bufio.NewReader(c)
	for {
		q, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		body, err := io.ReadAll(q.Body)
		if err != nil {
			return
		}
		_ = body
		page := ""
		switch q.URL.Path {
		case "/health":
		case "/v1/models":
			page = `{"object":"list","data":[{"id":"sim","object":"model","max_model_len":4096}]}`
		case "/v1/completions":
			g.mu.Lock()
			raw, wait := g.raw, g.wait
			g.mu.Unlock()
			_, _ = io.WriteString(c, raw)
			if wait {
				_, _ = in.ReadByte() // until the router gives up
			}
			return
		default:
			_, _ = io.WriteString(c, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
			continue
		}
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(page), page)
	}
}
