package router_test

import (
	"bytes"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/settings"
)

// doorOf is a router in front of one engine that answers every request, and allows pages of
// every origin itself.
func doorOf(t *testing.T, set func(*settings.Config)) *router.Piped {
	c := settings.Default()
	c.Worker = []string{"http://aggregated-0,engine=vllm,model=m,block_size=16"}
	set(&c)
	return router.NewPiped(t, c, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		body, err := io.ReadAll(q.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Access-Control-Allow-Origin", "*")
		w.Header().Set("X-Asked", q.RequestURI)
		if bytes.Contains(body, []byte(`"stream":true`)) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n")
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}`)
	}))
}

// at sends a request through the router's pipes and returns the answer with its body.
func at(t *testing.T, p *router.Piped, method, path, body string, header ...string) (*http.Response, string) {
	t.Helper()
	q, err := http.NewRequestWithContext(t.Context(), method, "http://router"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		q.Header.Set(header[i], header[i+1])
	}
	resp, err := p.Client.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(text)
}

// TestPagesOfOtherOrigins: a page of an allowed origin reads answers, streams and errors; the
// origin stands there once, whatever the engine says. A preflight needs no key.
func TestPagesOfOtherOrigins(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const page = "https://chat.example"
		keys := keysFile(t)
		p := doorOf(t, func(c *settings.Config) { c.CORSOrigins, c.Keys.File = []string{page}, keys })
		if resp, text := at(t, p, http.MethodOptions, "/v1/messages", "", "Origin", page, "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "authorization"); resp.StatusCode != http.StatusNoContent ||
			resp.Header.Get("Access-Control-Allow-Origin") != page || resp.Header.Get("Access-Control-Allow-Headers") != "authorization" {
			t.Errorf("a preflight: %s %v %s", resp.Status, resp.Header, text)
		}
		for _, c := range []struct {
			what, key, body string
			status          int
		}{
			{"an answer", userSecret, `{"model":"m","prompt":"x"}`, 200},
			{"a stream", userSecret, `{"model":"m","prompt":"x","stream":true}`, 200},
			{"an error", userSecret, `{"model":"m"`, 400},
			{"no key", "", `{"model":"m","prompt":"x"}`, 401},
		} {
			for origin, want := range map[string][]string{page: {page}, "https://evil.example": nil} {
				header := []string{"Origin", origin}
				if c.key != "" {
					header = append(header, bearer(c.key)...)
				}
				resp, text := at(t, p, http.MethodPost, "/v1/completions", c.body, header...)
				if got := resp.Header["Access-Control-Allow-Origin"]; resp.StatusCode != c.status || !slices.Equal(got, want) {
					t.Errorf("%s to %s: %s, allowed %q: %s", c.what, origin, resp.Status, got, text)
				}
			}
		}
	})
}

// TestPathsOfTheDoor: the API is under its root path too, and engines do not see that. A path
// that only means an endpoint when its escapes are resolved is refused.
func TestPathsOfTheDoor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := doorOf(t, func(c *settings.Config) { c.RootPath = "/llm" })
		for path, want := range map[string]string{
			"/v1/completions":           "/v1/completions",
			"/llm/v1/completions":       "/v1/completions",
			"/llm/v1/completions?a=%2f": "/v1/completions?a=%2f",
			"/%6clm/v1/completions":     "/v1/completions",
			"/llm/llm/v1/completions":   "",
			"/llmv1/completions":        "",
			"/v1%2fcompletions":         "",
			"/llm/v1%2Fcompletions":     "",
			"/v1/completion%73":         "",
		} {
			resp, text := at(t, p, http.MethodPost, path, `{"model":"m","prompt":"x"}`)
			if got := resp.Header.Get("X-Asked"); got != want || (resp.StatusCode == 200) != (want != "") {
				t.Errorf("%s: the engine was asked for %q: %s %s", path, got, resp.Status, text)
			}
		}
		for _, path := range []string{"/healthz", "/llm/healthz"} {
			if resp, text := at(t, p, http.MethodGet, path, ""); resp.StatusCode != 200 {
				t.Errorf("%s: %s %s", path, resp.Status, text)
			}
		}
	})
}

// TestBodiesAboveTheLimit: the error names the setting.
func TestBodiesAboveTheLimit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := doorOf(t, func(c *settings.Config) { c.Limits.BodyBytes = 1024 })
		if resp, text := at(t, p, http.MethodPost, "/v1/completions", `{"model":"m","prompt":"`+strings.Repeat("x", 1024)+`"}`); resp.StatusCode != 413 || !strings.Contains(text, "limits.body_bytes") {
			t.Errorf("%s %s", resp.Status, text)
		}
	})
}

// TestIdleClients: a client's connection is kept for the time that the operator sets.
func TestIdleClients(t *testing.T) {
	c := settings.Default()
	if c.Timeouts.ClientIdle <= 10*time.Minute {
		t.Errorf("%v by default; load balancers keep theirs for 600 s", c.Timeouts.ClientIdle)
	}
	c.Timeouts.ClientIdle = 7 * time.Second
	r, err := router.New(t.Context(), router.Options{Config: c})
	if err != nil {
		t.Fatal(err)
	}
	if got := r.DataServer(log.New(io.Discard, "", 0)).IdleTimeout; got != 7*time.Second {
		t.Error(got)
	}
	if err := r.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// fromAfar accepts connections from one address that is not this machine's.
type fromAfar struct {
	net.Listener
	ports int
}

// Accept implements net.Listener.
func (l *fromAfar) Accept() (net.Conn, error) {
	l.ports++
	ours, _ := net.Pipe()
	return farConn{ours, &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: l.ports}}, nil
}

type farConn struct {
	net.Conn
	from net.Addr
}

func (c farConn) RemoteAddr() net.Addr { return c.from }

// TestConnectionsWithoutPlace: a request on a connection beyond its address's bound is refused
// with a reason, and the connection ends.
func TestConnectionsWithoutPlace(t *testing.T) {
	c := settings.Default()
	c.Limits.ClientConnections = 1
	r, err := router.New(t.Context(), router.Options{Config: c})
	if err != nil {
		t.Fatal(err)
	}
	ln := &fromAfar{}
	door := r.Secure().DataListener(ln)
	for i := range 2 {
		conn, err := door.Accept()
		if err != nil {
			t.Fatal(err)
		}
		q := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", strings.NewReader(`{"model":"m","prompt":"x"}`))
		q.RemoteAddr = conn.RemoteAddr().String()
		w := httptest.NewRecorder()
		r.ServeHTTP(w, q)
		if refused := strings.Contains(w.Body.String(), "limits.client_connections"); refused != (i == 1) || refused && (w.Code != 503 || w.Header().Get("Connection") != "close") {
			t.Errorf("connection %d: %d %s %v", i+1, w.Code, w.Body, w.Header())
		}
		defer conn.Close()
	}
	if err := r.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
