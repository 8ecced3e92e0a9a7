package tokenize

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

const testdata = "../../../../testdata/tokenizer"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve starts a server and returns an Engine for it.
func serve(t *testing.T, o EngineOptions, h http.HandlerFunc) *Engine {
	t.Helper()
	srv := httptest.NewServer(h)
	tr := &http.Transport{}
	o.Client, o.BaseURL = &http.Client{Transport: tr}, srv.URL+"/"
	if o.CacheBytes == 0 {
		o.CacheBytes = 1 << 20
	}
	e := NewEngine(o)
	t.Cleanup(func() { e.Close(); tr.CloseIdleConnections(); srv.Close() })
	return e
}

func TestEngineRequests(t *testing.T) {
	t.Parallel()
	var last atomic.Pointer[string]
	e := serve(t, EngineOptions{Model: `real"name`}, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		s := fmt.Sprint(r.Method, " ", r.URL.Path, " ", string(b))
		last.Store(&s)
		fmt.Fprint(w, `{"count":3,"max_model_len":16384,"tokens":[1, 2,4294967295],"token_strs":null}`)
	})
	want := Result{IDs: []uint32{1, 2, 4294967295}, Tokens: 3, Engine: true}
	got, err := e.Prompt(t.Context(), "a\"b\n你", true)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if want := `POST /tokenize {"model":"real\"name","prompt":"a\"b\n你","add_special_tokens":true}`; *last.Load() != want {
		t.Errorf("sent %s, want %s", *last.Load(), want)
	}
	got, err = e.Chat(t.Context(), []byte(` { "model":"alias", "temperature":0.5, "messages":[ {"role":"user","content":"x"} ],"tools":null,"add_generation_prompt":false}`))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if want := `POST /tokenize {"messages":[ {"role":"user","content":"x"} ],"add_generation_prompt":false,"model":"real\"name"}`; *last.Load() != want {
		t.Errorf("sent %s, want %s", *last.Load(), want)
	}
	for _, body := range []string{`{}`, `[]`, `{"messages":null}`, `{"messages":[`} {
		if _, err := e.Chat(t.Context(), []byte(body)); !errors.Is(err, ErrBadRequest) {
			t.Errorf("%s: error %v, want ErrBadRequest", body, err)
		}
	}
}

// An engine closes an idle connection in the moment in which the next question is
// sent on it. Nothing was answered, and nothing is wrong with the engine.
func TestEngineClosesTheConnectionAsItIsUsed(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	used := map[string]bool{}
	var cut atomic.Int32
	e := serve(t, EngineOptions{Model: "m"}, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		again := used[r.RemoteAddr]
		used[r.RemoteAddr] = true
		mu.Unlock()
		if again {
			cut.Add(1)
			panic(http.ErrAbortHandler)
		}
		fmt.Fprint(w, `{"count":1,"tokens":[1]}`)
	})
	for i := range 3 {
		if _, err := e.Prompt(t.Context(), fmt.Sprint("question ", i), true); err != nil {
			t.Errorf("question %d: %v", i, err)
		}
	}
	if cut.Load() != 2 {
		t.Errorf("%d connections were closed as they were used again, want 2", cut.Load())
	}
}

func TestEngineErrors(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		status int
		body   string
		want   error
	}{
		{"bad request", 400, `{"error":{"message":"too long"}}`, ErrRefused},
		{"too large", 413, ``, ErrRefused},
		{"not understood", 422, `{"detail":[]}`, ErrRefused},
		{"no such path", 404, `{"detail":"Not Found"}`, ErrUnavailable},
		{"another key", 401, ``, ErrUnavailable},
		{"too many", 429, ``, ErrUnavailable},
		{"broken", 500, strings.Repeat("x", 9000), ErrUnavailable},
		{"unavailable", 503, ``, ErrUnavailable},
		{"no JSON", 200, `<html>`, ErrBadAnswer},
		{"no tokens", 200, `{"count":0}`, ErrBadAnswer},
		{"count differs", 200, `{"count":2,"tokens":[1]}`, ErrBadAnswer},
		{"negative", 200, `{"tokens":[-1]}`, ErrBadAnswer},
		{"fraction", 200, `{"tokens":[1.5]}`, ErrBadAnswer},
		{"too big an id", 200, `{"tokens":[4294967296]}`, ErrBadAnswer},
		{"nested", 200, `{"tokens":[[1]]}`, ErrBadAnswer},
		{"cut off", 200, `{"tokens":[1,2`, ErrBadAnswer},
		{"over the limit", 200, `{"tokens":[` + strings.Repeat("1,", 3000) + `1]}`, ErrTooLarge},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var calls atomic.Int32
			e := serve(t, EngineOptions{MaxResponseBytes: 4096, MaxRequestBytes: 1000}, func(w http.ResponseWriter, _ *http.Request) {
				calls.Add(1)
				w.WriteHeader(c.status)
				fmt.Fprint(w, c.body)
			})
			for range 2 { // failures are not kept
				_, err := e.Prompt(t.Context(), "x", false)
				if !errors.Is(err, c.want) {
					t.Fatalf("error %v, want %v", err, c.want)
				}
				var ee *EngineError
				if c.status != 200 && (!errors.As(err, &ee) || ee.Status != c.status || len(ee.Body) > 512) {
					t.Errorf("error %v, want an EngineError of status %d", err, c.status)
				}
			}
			if calls.Load() != 2 {
				t.Errorf("%d calls, want 2", calls.Load())
			}
			if _, err := e.Prompt(t.Context(), strings.Repeat("x", 1000), false); !errors.Is(err, ErrTooLarge) {
				t.Errorf("error %v, want ErrTooLarge", err)
			}
		})
	}
	dead := NewEngine(EngineOptions{Client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, BaseURL: "http://127.0.0.1:1"})
	if _, err := dead.Prompt(t.Context(), "x", true); !errors.Is(err, ErrUnavailable) {
		t.Errorf("error %v, want ErrUnavailable", err)
	}
}

// TestEngineTimeout: a hanging engine is ErrUnavailable; a caller that leaves
// gets its own error at once, and does not end the call for the others.
func TestEngineTimeout(t *testing.T) {
	t.Parallel()
	started, release := make(chan struct{}, 8), make(chan struct{})
	var calls atomic.Int32
	h := func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
		started <- struct{}{}
		select {
		case <-release:
			fmt.Fprint(w, `{"tokens":[7]}`)
		case <-r.Context().Done():
		}
	}
	// Whether a call that ends so soon reaches the engine is up to the machine.
	slow := serve(t, EngineOptions{Timeout: 20 * time.Millisecond}, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	if _, err := slow.Prompt(t.Context(), "x", true); !errors.Is(err, ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want ErrUnavailable by deadline", err)
	}

	e := serve(t, EngineOptions{Timeout: time.Minute}, h)
	first, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() { _, err := e.Prompt(first, "x", true); gone <- err }()
	<-started
	var wg sync.WaitGroup
	var entered sync.WaitGroup
	for range 5 {
		entered.Add(1)
		wg.Go(func() {
			entered.Done()
			if r, err := e.Prompt(t.Context(), "x", true); err != nil || len(r.IDs) != 1 || r.IDs[0] != 7 {
				t.Errorf("got %v, %v", r, err)
			}
		})
	}
	entered.Wait()
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want Canceled", err)
	}
	close(release)
	wg.Wait()
	if n := calls.Load(); n != 1 {
		t.Errorf("%d calls for one question, want 1", n)
	}
	if r, err := e.Prompt(t.Context(), "x", true); err != nil || !r.Cached {
		t.Errorf("got %v, %v; want a cached answer", r, err)
	}
}

func TestAnswerCacheBound(t *testing.T) {
	t.Parallel()
	c := answerCache{max: 2000}
	for i := range 100 {
		c.put([32]byte{byte(i)}, answer{ids: make([]uint32, 50)})
	}
	if c.size > c.max || len(c.items) != 5 || c.order.Len() != 5 {
		t.Errorf("size %d, %d items", c.size, len(c.items))
	}
	if _, ok := c.get([32]byte{99}); !ok {
		t.Error("the newest is gone")
	}
	if _, ok := c.get([32]byte{1}); ok {
		t.Error("the oldest is there")
	}
	c.put([32]byte{200}, answer{ids: make([]uint32, 5000)})
	if len(c.items) != 5 {
		t.Error("an answer over the bound pushed others out")
	}
}

// chatDir is a model folder with a template.
func chatDir(t *testing.T, template string) string {
	t.Helper()
	dir := t.TempDir()
	data, err := os.ReadFile(filepath.Join(testdata, "qwen2", "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := json.Marshal(map[string]any{"chat_template": template, "bos_token": map[string]any{"content": "<|endoftext|>"}})
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"tokenizer.json": data, "tokenizer_config.json": cfg} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

const chatML = `{% for t in tools or [] %}{{ t | tojson }}
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}`

func TestLocalChat(t *testing.T) {
	t.Parallel()
	l, err := Load(chatDir(t, chatML), Options{MaxTextBytes: 10000})
	if err != nil || l.TemplateError() != nil {
		t.Fatal(err, l.TemplateError())
	}
	for _, c := range []struct{ body, want string }{
		{`{"messages":[{"role":"user","content":"hi"}]}`, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"},
		{`{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],"add_generation_prompt":false}`,
			"<|im_start|>user\na\nb<|im_end|>\n"},
		{`{"messages":[{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":"{\"z\":1,\"a\":[1.0,\"<é>\"]}"}}]}],"add_generation_prompt":false}`,
			"<|im_start|>assistant\n{\"z\": 1, \"a\": [1.0, \"<é>\"]}<|im_end|>\n"},
		{`{"messages":[],"add_generation_prompt":false,"tools":[{"function":{"strict":true,"name":"f"}}]}`,
			"{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": null, \"parameters\": null, \"strict\": true}}\n"},
	} {
		got, _, err := l.render([]byte(c.body))
		if err != nil || string(got) != c.want {
			t.Errorf("%s: %v (-want +got)\n%s", c.body, err, cmp.Diff(c.want, string(got)))
		}
		r, err := l.Chat(t.Context(), []byte(c.body))
		if err != nil || r.Engine || r.Tokens != len(r.IDs) {
			t.Fatal(r, err)
		}
		if want := l.tok.AppendString(nil, c.want); !slices.Equal(r.IDs, want) {
			t.Errorf("ids %v of %q, want %v", r.IDs, c.want, want)
		}
	}
	for body, want := range map[string]error{
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`: ErrUnsupported,
		`{"messages":[{"role":"user","content":"x"}],"chat_template":"{{ 1 }}"}`:                  ErrUnsupported,
		`{"messages":[{"role":"user","content":"x"}],"continue_final_message":true}`:              ErrUnsupported,
		`{"messages":[{"role":"user","content":5}]}`:                                              ErrBadRequest,
		`{"messages":["x"]}`: ErrBadRequest,
		`{"messages":{}}`:    ErrBadRequest,
		`{"tools":[]}`:       ErrBadRequest,
		`{"messages":[{"role":"user","content":"` + strings.Repeat("x", 10000) + `"}]}`: ErrUnsupported,
		`{"messages":[{"role":"user","content":"` + strings.Repeat("x", 20000) + `"}]}`: ErrTooLarge,
	} {
		if _, err := l.Chat(t.Context(), []byte(body)); !errors.Is(err, want) {
			t.Errorf("%.80s: error %v, want %v", body, err, want)
		}
	}
	bare, err := Load(filepath.Join(testdata, "llama3"), Options{})
	if err != nil || bare.TemplateError() == nil {
		t.Fatal(err, "no template must be said")
	}
	if _, err := bare.Chat(t.Context(), []byte(`{"messages":[]}`)); !errors.Is(err, ErrUnsupported) {
		t.Errorf("error %v, want ErrUnsupported", err)
	}
	with, _ := bare.Prompt(t.Context(), "x", true)
	without, _ := bare.Prompt(t.Context(), "x", false)
	if len(with.IDs) != len(without.IDs)+1 {
		t.Errorf("%d and %d ids with and without special tokens", len(with.IDs), len(without.IDs))
	}
	if _, err := l.Prompt(t.Context(), strings.Repeat("x", 10001), false); !errors.Is(err, ErrTooLarge) {
		t.Errorf("error %v, want ErrTooLarge", err)
	}
}

// TestSelfCheck: an engine with the same template agrees, one that renders
// tools otherwise agrees on the rest, and Gated asks it for the tools only.
func TestSelfCheck(t *testing.T) {
	t.Parallel()
	local, err := Load(chatDir(t, chatML), Options{})
	if err != nil {
		t.Fatal(err)
	}
	other, err := Load(chatDir(t, strings.Replace(chatML, "{{ t | tojson }}", "{{ t | tojson(indent=2) }}", 1)), Options{})
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int32
	engine := func(l *Local) *Engine {
		return serve(t, EngineOptions{CacheBytes: -1}, func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			b, _ := io.ReadAll(r.Body)
			var req struct {
				Prompt  *string
				Special bool `json:"add_special_tokens"`
			}
			var res Result
			err := json.Unmarshal(b, &req)
			if err == nil && req.Prompt != nil {
				res, err = l.Prompt(r.Context(), *req.Prompt, req.Special)
			} else if err == nil {
				res, err = l.Chat(r.Context(), b)
			}
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			_ = json.NewEncoder(w).Encode(map[string]any{"tokens": res.IDs, "count": len(res.IDs)})
		})
	}
	same, err := SelfCheck(t.Context(), local, engine(local), DefaultProbes("m"))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]Aspect{AspectPrompt, AspectChat, AspectParts, AspectTools}, same.Agreed); d != "" {
		t.Errorf("agreed (-want +got):\n%s\n%+v", d, same.Probes)
	}
	e := engine(other)
	part, err := SelfCheck(t.Context(), local, e, DefaultProbes("m"))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]Aspect{AspectPrompt, AspectChat, AspectParts}, part.Agreed); d != "" {
		t.Errorf("agreed (-want +got):\n%s\n%+v", d, part.Probes)
	}
	g := NewSelfChecked(local, e, part)
	asked.Store(0)
	r, err := g.Chat(t.Context(), []byte(`{"messages":[{"role":"user","content":"x"}]}`))
	if err != nil || r.Engine || asked.Load() != 0 {
		t.Errorf("plain chat: engine %t, %v, %d calls", r.Engine, err, asked.Load())
	}
	r, err = g.Chat(t.Context(), []byte(`{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f"}}]}`))
	if err != nil || !r.Engine || asked.Load() != 1 {
		t.Errorf("chat with tools: engine %t, %v, %d calls", r.Engine, err, asked.Load())
	}
	asked.Store(0)
	if r, err = NewSelfChecked(local, e, Agreement{}).Prompt(t.Context(), "x", true); err != nil || !r.Engine || asked.Load() != 1 {
		t.Errorf("a prompt that was not checked: engine %t, %v, %d calls", r.Engine, err, asked.Load())
	}
	alone := NewSelfChecked(local, nil, Agreement{})
	if _, err := alone.Prompt(t.Context(), "x", true); !errors.Is(err, ErrUnsupported) {
		t.Errorf("error %v, want ErrUnsupported", err)
	}
	if _, err := SelfCheck(t.Context(), local, serve(t, EngineOptions{}, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }), DefaultProbes("m")); !errors.Is(err, ErrUnavailable) {
		t.Errorf("error %v, want ErrUnavailable", err)
	}
}
