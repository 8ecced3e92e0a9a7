package router_test

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/zmtp"
)

// recordedRequest is a request of testdata/media, and what vLLM's cache manager published
// for it.
type recordedRequest struct {
	Tokens []int
	Media  []struct {
		ID             string
		Offset, Length int
	}
	Salt    string
	Cached  int
	batches [][]byte
}

// recordedEngine answers and publishes as vLLM's own cache manager did, request by request. Its
// pages are those of vLLM 0.32 and 0.33.
type recordedEngine struct {
	requests []recordedRequest
	renders  bool // --enable-scale-out
	pub      *zmtp.Pub

	mu    sync.Mutex
	asked map[string]int // by path
}

func readMedia(t *testing.T, path string) *recordedEngine {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	e := &recordedEngine{asked: map[string]int{}}
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var l struct {
			Type    string
			Payload []byte
			recordedRequest
		}
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			t.Fatal(err)
		}
		switch l.Type {
		case "request":
			e.requests = append(e.requests, l.recordedRequest)
		case "batch":
			last := &e.requests[len(e.requests)-1]
			last.batches = append(last.batches, l.Payload)
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return e
}

var requestNumber = regexp.MustCompile(`request number (\d+)`)

func (e *recordedEngine) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	body, _ := io.ReadAll(q.Body)
	e.mu.Lock()
	e.asked[q.URL.Path]++
	e.mu.Unlock()
	number := func() *recordedRequest {
		n := 0
		if m := requestNumber.FindSubmatch(body); m != nil {
			n, _ = strconv.Atoi(string(m[1])) // digits
		}
		return &e.requests[n]
	}
	write := func(v any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v) // a router that has left is none here
	}
	switch q.URL.Path {
	case "/health":
	case "/version":
		write(object{"version": "0.33.0"})
	case "/v1/models":
		write(object{"object": "list", "data": []object{{"id": "m", "object": "model", "max_model_len": 4096}}})
	case "/tokenize":
		r := number()
		write(object{"count": len(r.Tokens), "max_model_len": 4096, "tokens": r.Tokens})
	case "/v1/chat/completions/render":
		if !e.renders {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		r := number()
		names, places := []string{}, []object{}
		for _, m := range r.Media {
			names, places = append(names, m.ID), append(places, object{"offset": m.Offset, "length": m.Length})
		}
		write(object{"request_id": "chatcmpl-1", "token_ids": r.Tokens, "features": object{"mm_hashes": object{"image": names}, "mm_placeholders": object{"image": places}, "kwargs_data": nil}, "model": "m"})
	case "/v1/chat/completions":
		r := number()
		write(object{
			"id": "chatcmpl-1", "object": "chat.completion", "model": "m",
			"choices": []object{{"index": 0, "message": object{"role": "assistant", "content": "a"}, "finish_reason": "length"}},
			"usage":   object{"prompt_tokens": len(r.Tokens), "completion_tokens": 1, "total_tokens": len(r.Tokens) + 1, "prompt_tokens_details": object{"cached_tokens": r.Cached}},
		})
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

// chat is the chat of request number n: its text is of no matter, since the engine has its tokens.
func (e *recordedEngine) chat(n int, named bool) object {
	r := &e.requests[n]
	parts := []object{{"type": "text", "text": fmt.Sprintf("request number %d", n)}}
	for _, m := range r.Media {
		p := object{"type": "image_url", "image_url": object{"url": "data:image/png;base64," + m.ID}}
		if named {
			p["uuid"] = m.ID
		}
		parts = append(parts, p)
	}
	q := object{"model": "m", "messages": []object{{"role": "user", "content": parts}}, "max_tokens": 1}
	if r.Salt != "" {
		q["cache_salt"] = r.Salt
	}
	return q
}

// TestMediaThroughTheRouter: chats with images through a router, in front of what vLLM's own cache
// managers found and published for them: several images, again, moved, exchanged under equal
// text, mixed with text, with caches of one kind and of several. In every request whose
// names are known, by the engine's render page or by the client's uuids, the router predicts
// what the engine reports, and elsewhere no more.
func TestMediaThroughTheRouter(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.FromSlash("../../testdata/media/*.jsonl.gz"))
	if err != nil || len(files) < 7 {
		t.Fatalf("recordings: %d, %v", len(files), err)
	}
	for _, file := range files {
		// Without the page the places of items of several tokens are not known.
		several := strings.HasSuffix(file, "-rows.jsonl.gz") || strings.HasSuffix(file, "-framed.jsonl.gz")
		for _, renders := range []bool{true, false} {
			if several && !renders {
				continue
			}
			t.Run(fmt.Sprintf("%s/renders=%v", strings.TrimSuffix(filepath.Base(file), ".jsonl.gz"), renders), func(t *testing.T) {
				t.Parallel()
				e := readMedia(t, file)
				e.renders = renders
				e.play(t)
			})
		}
	}
}

// play sends all requests and judges what was predicted.
func (e *recordedEngine) play(t *testing.T) {
	var err error
	if e.pub, err = zmtp.ListenPub(t.Context(), "tcp://127.0.0.1:0", zmtp.Options{}); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(e)
	t.Cleanup(func() {
		srv.Close()
		if err := e.pub.Close(); err != nil {
			t.Error(err)
		}
	})
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	r := startCold(t, loopback.Options{Specs: func([]workers.Spec) []workers.Spec {
		s, err := workers.ParseSpec(workers.Aggregated, u.String()+",name=e,model=m,engine=vllm,block_size=16,events="+e.pub.Endpoint())
		if err != nil {
			t.Fatal(err)
		}
		return []workers.Spec{s}
	}}, func(c *settings.Config) { c.Tokens.BlockSize = 16 })
	r.eventually("the worker", func() error {
		if w := r.worker("e"); !w.Usable || e.pub.Subscribers() == 0 {
			return errors.New(w.Reason)
		}
		return nil
	})
	var seq uint64
	with, known, equal, more, found := 0, 0, 0, 0, 0 // requests with images, tokens
	for n := range e.requests {
		q := &e.requests[n]
		a := r.post("/v1/chat/completions", e.chat(n, !e.renders))
		c := r.receipt(a.header.Get("X-Dynctl-Decision"))
		got := c.Predicted.CachedTokens
		if len(q.Media) > 0 {
			with++
		}
		switch named := c.Inputs.ISLSource == "engine"; {
		case got > q.Cached:
			more++
			t.Errorf("request %d: predicted %d, the engine found %d, %s", n, got, q.Cached, c.Inputs.ISLSource)
		case named && len(q.Media) > 0:
			known++
			if got == q.Cached {
				equal++
			} else {
				t.Errorf("request %d: predicted %d, the engine found %d of %d", n, got, q.Cached, len(q.Tokens))
			}
			found += got
		case len(q.Media) > 0 && e.renders:
			t.Errorf("request %d: its names are not known: %s", n, c.Inputs.ISLSource)
		}
		for _, payload := range q.batches {
			e.pub.Send(nil, kvevent.AppendSeq(nil, seq), payload)
			seq++
		}
		if len(q.batches) > 0 {
			r.eventually("the events", func() error {
				if f := r.worker("e").Ranks[0].Feed; f.LastSeq == nil || *f.LastSeq != seq-1 || !f.Trusted {
					return fmt.Errorf("%s: %s", f.State, f.Reason)
				}
				return nil
			})
		}
	}
	t.Logf("%d requests, %d with images, names known of %d: %d equal, %d tokens found; predicted more: %d", len(e.requests), with, known, equal, found, more)
	e.mu.Lock()
	defer e.mu.Unlock()
	if n := e.asked["/v1/chat/completions/render"]; e.renders != (n > 1) {
		t.Errorf("%d prompts were rendered", n)
	}
	if known < with/2 || found == 0 {
		t.Errorf("names known of %d of %d requests with images, %d tokens found", known, with, found)
	}
}
