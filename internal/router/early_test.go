package router_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestKeepAlive: with timeouts.sse_keepalive a stream has its head and a comment in each
// interval until its answer comes, through queue and prefill, and a failure is an error event
// then. Without it the client gets what it got before, but for comments of the engine, which
// pass in any case. In virtual time, in which nothing is late by itself.
func TestKeepAlive(t *testing.T) {
	t.Parallel()
	const every, takes = time.Second, 2400 * time.Millisecond
	comment := ": waiting for the first token\n\n"
	chunks := []string{`{"choices":[{"index":0,"text":"F"}]}`, "[DONE]"}
	model := fakeengine.Model{Text: "F"}
	aggregated := func(c *settings.Config) { c.Worker = []string{"http://aggregated-0,engine=vllm,model=m,block_size=16"} }
	pair := func(c *settings.Config) {
		c.Prefill = []string{"http://prefill-0,engine=vllm,model=m,block_size=16,connector=nixl"}
		c.Decode = []string{"http://decode-0,engine=vllm,model=m,block_size=16,connector=nixl"}
	}
	prompt := `"prompt":[` + strings.Repeat("1000,", 63) + `1000],"max_tokens":1`
	for _, c := range []struct {
		name     string
		set      func(c *settings.Config)
		off      bool
		path     string
		body     string
		decode   fakeengine.Answer
		prefill  time.Duration
		others   int // requests before this one, of which each takes its time
		status   int
		comments int
		then     []string // what the rest of the answer contains
	}{
		{name: "one engine", set: aggregated, decode: fakeengine.Stream(chunks...).After(takes), status: 200, comments: 2, then: []string{`"text":"F"`, "[DONE]"}},
		{name: "off", set: aggregated, off: true, decode: fakeengine.Stream(chunks...).After(takes), status: 200, then: []string{`"text":"F"`, "[DONE]"}},
		{name: "an answer in time", set: aggregated, decode: fakeengine.Stream(chunks...), status: 200, then: []string{`"text":"F"`, "[DONE]"}},
		{name: "a pair", set: pair, decode: fakeengine.Stream(chunks...).After(takes), prefill: takes, status: 200, comments: 4, then: []string{`"text":"F"`, "[DONE]"}},
		{name: "a queue", set: func(c *settings.Config) { aggregated(c); c.Limits.Inflight = 1 }, others: 1, decode: fakeengine.Stream(chunks...).After(takes), status: 200, comments: 4, then: []string{`"text":"F"`, "[DONE]"}},
		{name: "a failure", set: aggregated, decode: fakeengine.JSON(500, `{"error":"x"}`).After(takes), status: 200, comments: 2, then: []string{`data: {"error":`, "[DONE]"}},
		{name: "a failure, off", set: aggregated, off: true, decode: fakeengine.JSON(500, `{"error":"x"}`).After(takes), status: 500, then: []string{`{"error":"x"}`}},
		{name: "a failure in time", set: aggregated, decode: fakeengine.JSON(500, `{"error":"x"}`), status: 500, then: []string{`{"error":"x"}`}},
		{name: "a refusal", set: aggregated, decode: fakeengine.JSON(400, `{"error":"x"}`).After(takes), status: 200, comments: 2, then: []string{`data: {"error":`}},
		{name: "a failure of messages", set: aggregated, path: "/v1/messages", body: `"messages":[{"role":"user","content":"x"}],"max_tokens":1`, decode: fakeengine.JSON(500, `{"error":"x"}`).After(takes), status: 200, comments: 2, then: []string{"event: error\n"}},
		{name: "a failure of responses", set: aggregated, path: "/v1/responses", body: `"input":"x"`, decode: fakeengine.JSON(500, `{"error":"x"}`).After(takes), status: 200, comments: 2, then: []string{"event: error\n"}},
		{name: "a failure of chats behind a prefill", set: pair, path: "/v1/chat/completions", body: `"messages":[{"role":"user","content":"` + strings.Repeat("word ", 200) + `"}],"max_tokens":1`, prefill: takes, decode: fakeengine.JSON(500, `{"error":"x"}`).After(takes), status: 200, comments: 4, then: []string{`data: {"error":`, "[DONE]"}},
		{name: "no stream in the answer", set: aggregated, decode: fakeengine.JSON(200, `{"choices":[]}`).After(takes), status: 200, comments: 2, then: []string{`data: {"error":`, "timeouts.sse_keepalive"}},
		{name: "no stream", set: aggregated, body: prompt + `,"stream":false`, decode: fakeengine.JSON(200, `{"choices":[]}`).After(takes), status: 200, then: []string{`{"choices":[]}`}},
		{name: "sound", set: aggregated, path: "/v1/audio/speech", body: `"input":"x"`, decode: fakeengine.Answer{Status: 200, Header: []string{"Content-Type: audio/pcm"}, Pieces: []fakeengine.Piece{{Text: "sound"}}}.After(takes), status: 200, then: []string{"sound"}},
		{name: "comments of the engine, off", set: aggregated, off: true, decode: fakeengine.Stream(append([]string{comment, comment}, chunks...)...).Every(every), status: 200, comments: 2, then: []string{`"text":"F"`, "[DONE]"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				conf := settings.Default()
				c.set(&conf)
				conf.Retry.Attempts = 1
				if !c.off {
					conf.Timeouts.SSEKeepAlive = every
				}
				p := router.NewPiped(t, conf, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
					body, err := io.ReadAll(q.Body)
					if err != nil {
						panic(http.ErrAbortHandler)
					}
					a := c.decode
					if strings.HasPrefix(q.Host, "prefill") {
						a = model.Answer(&fakeengine.Request{Worker: q.Host, Method: q.Method, Path: q.URL.Path, ID: q.Header.Get("X-Request-Id"), Body: body}).After(c.prefill)
					}
					play(w, q, &a)
				}))
				path, body := c.path, c.body
				if path == "" {
					path = "/v1/completions"
				}
				if body == "" {
					body = prompt
				}
				if !strings.Contains(body, "stream") {
					body += `,"stream":true`
				}
				send := func() (*http.Response, error) {
					return p.Client.Post("http://router"+path, "application/json", strings.NewReader(`{"model":"m",`+body+`}`))
				}
				for range c.others {
					go func() {
						if resp, err := send(); err != nil {
							t.Error(err)
						} else {
							_, _ = io.Copy(io.Discard, resp.Body)
							resp.Body.Close()
						}
					}()
					synctest.Wait()
				}
				began := time.Now()
				resp, err := send()
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				if c.comments > 0 && time.Since(began) > every {
					t.Errorf("the head came after %v", time.Since(began))
				}
				for i := range c.comments {
					got := make([]byte, len(comment))
					if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != comment {
						t.Fatalf("comment %d: %q, %v", i, got, err)
					}
					if at := time.Since(began); at > time.Duration(i+1)*every {
						t.Errorf("comment %d came after %v", i, at)
					}
				}
				rest, err := io.ReadAll(resp.Body)
				if err != nil || resp.StatusCode != c.status || resp.Header.Get("X-Request-Id") == "" || strings.Contains(string(rest), comment) {
					t.Errorf("%d %v, then %q: %v", resp.StatusCode, resp.Header, rest, err)
				}
				for _, want := range c.then {
					if !strings.Contains(string(rest), want) {
						t.Errorf("%q lacks %q", rest, want)
					}
				}
				if c.comments > 0 && !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
					t.Error(fmt.Sprint("headers ", resp.Header))
				}
			})
		})
	}
}
