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
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// cutter stands in the proxies before the engines and cuts the next stream after so many
// of its events. An engine that was held up sends the tokens of several steps in one
// event, so that a stream may end before: cut says whether it was.
type cutter struct {
	after atomic.Int32 // events of the next stream; 0 when none is to be cut
	cut   atomic.Bool  // whether the last one was
}

// next has the next stream cut after so many events.
func (c *cutter) next(events int32) {
	c.cut.Store(false)
	c.after.Store(events)
}

// workers puts a proxy before each engine, and names them as workers.
func (c *cutter) workers(t *testing.T, list []engine) (args []string) {
	t.Helper()
	for i, e := range list {
		to, err := url.Parse(e.URL)
		if err != nil {
			t.Fatal(err)
		}
		proxy := &httputil.ReverseProxy{
			Rewrite:       func(q *httputil.ProxyRequest) { q.SetURL(to) },
			FlushInterval: -1,
			ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
			Transport:     &http.Transport{DisableKeepAlives: true}, // what one request breaks is no other's
		}
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if strings.HasSuffix(q.URL.Path, "/completions") {
				if n := c.after.Swap(0); n > 0 {
					w = &cutWriter{w, int(n), &c.cut}
				}
			}
			// Whole before it is sent: Go's transport looks for the end of a body that it
			// has sent, and takes it for broken once the answer to it has begun.
			body, err := io.ReadAll(q.Body)
			if err != nil {
				panic(http.ErrAbortHandler)
			}
			q.Body = io.NopCloser(bytes.NewReader(body))
			proxy.ServeHTTP(w, q)
		}))
		t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
		args = append(args, "--worker", fmt.Sprintf("%s,name=a%d", s.URL, i))
	}
	return args
}

// cutWriter breaks the connection after so many events.
type cutWriter struct {
	http.ResponseWriter
	left int
	cut  *atomic.Bool
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
			c.cut.Store(true)
			_, _ = c.ResponseWriter.Write(b[:i])
			_ = http.NewResponseController(c.ResponseWriter).Flush()
			panic(http.ErrAbortHandler)
		}
	}
}

// modelFolder is where an engine says that its model is, if there is a tokenizer.json.
func modelFolder(t *testing.T, e engine) string {
	t.Helper()
	resp, err := http.Get(e.URL + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var list struct {
		Data []struct {
			Root string `json:"root"`
		} `json:"data"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil || len(list.Data) == 0 {
		t.Fatalf("%v %+v", err, list)
	}
	if _, err := os.Stat(filepath.Join(list.Data[0].Root, "tokenizer.json")); err != nil {
		t.Fatal(err)
	}
	return list.Data[0].Root
}

// TestStopStringsOnVLLM: a stream with stop strings that is cut after any event reads as
// that of an engine by itself: text, finish and stop reason, and the count of tokens.
func TestStopStringsOnVLLM(t *testing.T) {
	list := startEngines(t, "2d")
	streams := &cutter{}
	r := serve(t, append(streams.workers(t, list), "--continue", "exact", "--tokenizer-path", modelFolder(t, list[0]))...)
	counts := map[string]int{}
	for path, body := range map[string]map[string]any{
		"/v1/completions":      {"prompt": "The river was wide, and on its other side they saw", "max_tokens": 40},
		"/v1/chat/completions": {"messages": []any{map[string]any{"role": "user", "content": "Tell me about the river."}}, "max_completion_tokens": 40},
	} {
		body["model"], body["temperature"], body["ignore_eos"], body["stream"], body["stream_options"] = list[0].Model, 0, true, true, map[string]any{"include_usage": true}
		whole := []rune(post(t, list[1].URL, path, body).must(t).text)
		if len(whole) < 24 {
			t.Fatalf("%q", string(whole))
		}
		for _, stop := range []string{string(whole[len(whole)/2:][:5]), string(whole[len(whole)*2/3:][:8]), "never in it"} {
			body["stop"] = []string{stop, "nor this"}
			want := post(t, list[1].URL, path, body).must(t)
			ended := 0 // streams in a row that ended before they were cut
			for k := int32(1); k < 60; k++ {
				streams.next(k)
				got := post(t, r.url, path, body).must(t)
				if streams.after.Load() != 0 {
					t.Fatal("nothing was asked")
				}
				rec := r.explain(got)
				if !streams.cut.Load() {
					if a, b := ends(got.body), ends(want.body); len(rec.Legs) != 1 || got.text != want.text || a != b {
						t.Errorf("%s, stop %q, not cut: %d legs, %q %s, want %q %s", path, stop, len(rec.Legs), got.text, a, want.text, b)
					}
					if ended++; ended == 3 { // not only an event of several tokens
						break
					}
					continue
				}
				ended = 0
				if why := rec.Outcome.NotContinued; why != "" {
					counts[path+" not continued: "+why]++
					continue
				}
				counts[fmt.Sprintf("%s continued %d times", path, len(rec.Continued))]++
				if a, b := ends(got.body), ends(want.body); got.text != want.text || a != b {
					t.Errorf("%s, stop %q, cut after %d events: %q %s\nwant %q %s\n%+v\n%s", path, stop, k, got.text, a, want.text, b, rec.Continued, got.body)
				}
			}
		}
	}
	t.Logf("%v", counts)
	for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
		if counts[path+" continued 1 times"] < 10 {
			t.Errorf("%s: %v", path, counts)
		}
	}
}

// ends are the reasons and the count of tokens with which a stream ended.
func ends(body []byte) (out string) {
	for line := range strings.SplitSeq(string(body), "\n") {
		data, ok := strings.CutPrefix(line, "data: ")
		v := rawjson.Value(data)
		if c := v.Get("choices.0"); ok && c.Get("finish_reason").String() != "" {
			out += string(c.Get("finish_reason")) + string(c.Get("stop_reason"))
		}
		if u := v.Get("usage"); ok && rawjson.IsObject(u) {
			out += fmt.Sprint(" ", u.Get("prompt_tokens"), u.Get("completion_tokens"), u.Get("total_tokens"))
		}
	}
	return out
}

// TestContinuationOnVLLM: a stream that is cut after any event reads as that of an
// engine by itself, a completion's and a chat's; and so does one whose engine is killed.
func TestContinuationOnVLLM(t *testing.T) {
	list := startEngines(t, "2d")
	streams := &cutter{}
	r := serve(t, append(streams.workers(t, list), "--continue", "exact")...)
	const n = 30
	model := list[0].Model
	requests := map[string]map[string]any{
		"/v1/completions":      {"model": model, "prompt": "The river was wide, and on its other side they saw", "max_tokens": n},
		"/v1/chat/completions": {"model": model, "messages": []any{map[string]any{"role": "user", "content": "Tell me about the river."}}, "max_completion_tokens": n},
	}
	counts := map[string]int{}
	for path, body := range requests {
		body["temperature"], body["ignore_eos"], body["stream"], body["stream_options"] = 0, true, true, map[string]any{"include_usage": true}
		want := post(t, list[1].URL, path, body).must(t)
		if own := post(t, list[0].URL, path, body).must(t); own.text != want.text {
			t.Fatalf("the engines differ: %q and %q", own.text, want.text)
		}
		for k := int32(1); k < n; k++ {
			streams.next(k)
			got := post(t, r.url, path, body).must(t)
			rec := r.explain(got)
			if !streams.cut.Load() {
				counts[path+" ended before"]++
				if len(rec.Legs) != 1 || got.text != want.text || got.prompt != want.prompt {
					t.Errorf("%s not cut after %d events: %q (%d), want %q (%d): %+v", path, k, got.text, got.prompt, want.text, want.prompt, rec.Legs)
				}
				continue
			}
			if why := rec.Outcome.NotContinued; why != "" {
				counts[path+" not continued: "+why]++
				if !strings.Contains(string(got.body), why) || !strings.HasPrefix(want.text, got.text) {
					t.Errorf("%s cut after %d events: %s", path, k, got.body)
				}
				continue
			}
			switch n := len(rec.Continued); {
			case n > 0:
				counts[fmt.Sprintf("%s continued %d times", path, n)]++
			case len(rec.Legs) == 2 && rec.Legs[0].Error != "":
				counts[path+" tried again before the first text"]++
			case len(rec.Legs) == 1 && ends(got.body) == ends(want.body):
				counts[path+" cut after its end"]++
			default:
				t.Errorf("%s cut after %d events: neither continued nor tried again: %+v\n%s", path, k, rec.Legs, got.body)
			}
			if got.text != want.text || got.prompt != want.prompt || strings.Contains(string(got.body), "token_ids\":[") {
				t.Errorf("%s cut after %d events: %q (%d), want %q (%d)\n%+v\n%s", path, k, got.text, got.prompt, want.text, want.prompt, rec.Continued, got.body)
			}
		}
	}
	t.Logf("%v", counts)
	for path := range requests {
		if counts[path+" continued 1 times"] < n/2 {
			t.Errorf("%s: %v", path, counts)
		}
	}

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
	if out, err := exec.Command(enginesScript, "down", list[busy[1]-'0'].Name).CombinedOutput(); err != nil {
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
