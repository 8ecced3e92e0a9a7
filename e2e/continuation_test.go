package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// cutting is a proxy before an engine that cuts a stream, once it is told to, after so
// many of its events.
type cutting struct {
	after *atomic.Int32
	proxy *httputil.ReverseProxy
}

func (c cutting) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	n := int32(0)
	if strings.HasSuffix(q.URL.Path, "/completions") {
		n = c.after.Swap(0)
	}
	if n == 0 {
		c.proxy.ServeHTTP(w, q)
		return
	}
	c.proxy.ServeHTTP(&cutWriter{w, int(n)}, q)
}

type cutWriter struct {
	http.ResponseWriter
	left int
}

func (c *cutWriter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func (c *cutWriter) Write(b []byte) (int, error) {
	for i := 0; ; {
		n := bytes.Index(b[i:], []byte("\n\n"))
		if n < 0 {
			return c.ResponseWriter.Write(b)
		}
		i += n + 2
		if c.left--; c.left == 0 {
			_, _ = c.ResponseWriter.Write(b[:i])
			_ = http.NewResponseController(c.ResponseWriter).Flush()
			panic(http.ErrAbortHandler)
		}
	}
}

// TestContinuationOnVLLM: a stream that is cut after any event reads as that of an
// engine by itself, a completion's and a chat's; and so does one whose engine is killed.
func TestContinuationOnVLLM(t *testing.T) {
	list := startEngines(t, nil, "2d")
	after := &atomic.Int32{}
	args := []string{"--continue", "exact"}
	for i, e := range list {
		to, err := url.Parse(e.URL)
		if err != nil {
			t.Fatal(err)
		}
		s := httptest.NewServer(cutting{after, &httputil.ReverseProxy{
			Rewrite:       func(q *httputil.ProxyRequest) { q.SetURL(to) },
			FlushInterval: -1,
			ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		}})
		t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
		args = append(args, "--worker", fmt.Sprintf("%s,name=a%d", s.URL, i))
	}
	r := serve(t, args...)
	const n = 30
	model := list[0].Model
	requests := map[string]map[string]any{
		"/v1/completions":      {"model": model, "prompt": "The river was wide, and on its other side they saw", "max_tokens": n},
		"/v1/chat/completions": {"model": model, "messages": []any{map[string]any{"role": "user", "content": "Tell me about the river."}}, "max_completion_tokens": n},
	}
	tell := map[string]int{}
	for path, body := range requests {
		body["temperature"], body["ignore_eos"], body["stream"], body["stream_options"] = 0, true, true, map[string]any{"include_usage": true}
		want := post(t, list[1].URL, path, body).must(t)
		if own := post(t, list[0].URL, path, body).must(t); own.text != want.text {
			t.Fatalf("the engines differ: %q and %q", own.text, want.text)
		}
		for k := int32(1); k < n; k++ {
			after.Store(k)
			got := post(t, r.url, path, body).must(t)
			rec := r.explain(got)
			if why := rec.Outcome.NotContinued; why != "" {
				tell[path+" not continued: "+why]++
				if !strings.Contains(string(got.body), why) || !strings.HasPrefix(want.text, got.text) {
					t.Errorf("%s cut after %d events: %s", path, k, got.body)
				}
				continue
			}
			if n := len(rec.Continued); n > 0 {
				tell[fmt.Sprintf("%s continued %d times", path, n)]++
			} else if tell[path+" tried again before the first text"]++; len(rec.Legs) != 2 || rec.Legs[0].Error == "" {
				t.Errorf("%s cut after %d events: neither continued nor tried again: %+v", path, k, rec.Legs)
			}
			if got.text != want.text || got.prompt != want.prompt || strings.Contains(string(got.body), "token_ids\":[") {
				t.Errorf("%s cut after %d events: %q (%d), want %q (%d)\n%+v\n%s", path, k, got.text, got.prompt, want.text, want.prompt, rec.Continued, got.body)
			}
		}
	}
	t.Logf("%v", tell)

	body := requests["/v1/completions"]
	body["max_tokens"] = 400
	want := post(t, list[1].URL, "/v1/completions", body).must(t)
	raw, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Post(r.url+"/v1/completions", "application/json", bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	head := make([]byte, 400) // it has begun
	if _, err := io.ReadFull(resp.Body, head); err != nil {
		t.Fatal(err)
	}
	busy := resp.Header.Get("X-Dynctl-Worker")
	if out, err := exec.Command(filepath.Join(enginesDir, "down"), list[busy[1]-'0'].Name).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	rest, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	got := answer{header: resp.Header, body: append(head, rest...)}
	for line := range strings.SplitSeq(string(got.body), "\n") {
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			got.add([]byte(data))
		}
	}
	rec := r.explain(got)
	t.Logf("%s was killed: %+v", busy, rec.Continued)
	if got.text != want.text || rec.Outcome.NotContinued != "" {
		t.Errorf("%q, want %q; %s", got.text, want.text, rec.Outcome.NotContinued)
	}
}
