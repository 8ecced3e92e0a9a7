// Package conformance is what a vLLM-speaking engine does on the wire, as
// assertions that run against simulated and real engines alike.
//
// Run takes base URLs only, so that the same suite judges both: where they
// differ, the simulator is wrong. Every assertion was seen to hold on vLLM
// 0.32. A test binary calls it with the engines that it has started.
package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers/samples"
)

// Target is the engines to judge.
type Target struct {
	// URL is the engine for everything that one engine can do.
	URL string
	// Prefill and Decode are a NIXL pair; both empty leaves its part out. They
	// may be the same engine as URL.
	Prefill, Decode string
	// Client sends the requests; nil means http.DefaultClient.
	Client *http.Client
	// Timeout bounds one request; 0 means a minute.
	Timeout time.Duration
}

type object = map[string]any

// suite is a Target with what was learned of it.
type suite struct {
	Target
	model     string
	maxLen    int
	blockSize int
	salt      string // makes the run's prompts new to the engine
}

// Run judges the target.
func Run(t *testing.T, target Target) {
	if target.Client == nil {
		target.Client = http.DefaultClient
	}
	if target.Timeout == 0 {
		target.Timeout = time.Minute
	}
	s := &suite{Target: target, salt: strconv.FormatInt(time.Now().UnixNano(), 36)}
	if !t.Run("Discovery", s.discovery) {
		return // nothing else can be checked
	}
	t.Run("Tokens", s.tokens)
	t.Run("Completion", s.completion)
	t.Run("Chat", s.chat)
	t.Run("Cache", s.cache)
	t.Run("Events", s.events)
	t.Run("Errors", s.errors)
	t.Run("Load", s.load)
	t.Run("Disconnect", s.disconnect)
	if target.Prefill != "" && target.Decode != "" {
		t.Run("Transfer", s.transfer)
	}
}

// answer is a response that was read to its end.
type answer struct {
	status int
	header http.Header
	body   []byte
}

func (s *suite) do(t *testing.T, method, url string, body any, header ...string) answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), s.Timeout)
	defer cancel()
	var r io.Reader
	switch b := body.(type) {
	case nil:
	case string:
		r = strings.NewReader(b)
	default:
		raw, err := json.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		r = bytes.NewReader(raw)
	}
	q, err := http.NewRequestWithContext(ctx, method, url, r)
	if err != nil {
		t.Fatal(err)
	}
	if r != nil {
		q.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		q.Header.Set(header[i], header[i+1])
	}
	resp, err := s.Client.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, b}
}

func (s *suite) get(t *testing.T, path string) answer {
	t.Helper()
	return s.do(t, http.MethodGet, s.URL+path, nil)
}

func (s *suite) post(t *testing.T, path string, body any, header ...string) answer {
	t.Helper()
	return s.do(t, http.MethodPost, s.URL+path, body, header...)
}

// into decodes a 200 answer.
func (a answer) into(t *testing.T, v any) {
	t.Helper()
	if a.status != http.StatusOK {
		t.Fatalf("status %d: %s", a.status, a.body)
	}
	if err := json.Unmarshal(a.body, v); err != nil {
		t.Fatalf("%v in %s", err, a.body)
	}
}

// sse cuts an event stream into the values of its data lines.
func (a answer) sse(t *testing.T) []string {
	t.Helper()
	if a.status != http.StatusOK {
		t.Fatalf("status %d: %s", a.status, a.body)
	}
	if ct := a.header.Get("Content-Type"); !strings.HasPrefix(ct, "text/event-stream") {
		t.Errorf("content type %q", ct)
	}
	var out []string
	for _, e := range strings.Split(strings.TrimSpace(string(a.body)), "\n\n") {
		d, ok := strings.CutPrefix(e, "data: ")
		if !ok {
			t.Fatalf("event %q", e)
		}
		out = append(out, d)
	}
	return out
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
	Details    *struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

type completion struct {
	ID      string
	Object  string
	Model   string
	Choices []struct {
		Index        int
		Text         *string
		Message      *struct{ Role, Content string }
		Delta        *struct{ Role, Content string }
		FinishReason *string `json:"finish_reason"`
		StopReason   any     `json:"stop_reason"`
	}
	Usage *usage
	KV    json.RawMessage `json:"kv_transfer_params"`
}

func (c completion) finish() string {
	if len(c.Choices) == 0 || c.Choices[0].FinishReason == nil {
		return ""
	}
	return *c.Choices[0].FinishReason
}

// prompt is a list of n token ids that no earlier run has sent.
func (s *suite) prompt(n int, tag string) []int {
	h := uint64(14695981039346656037)
	for _, b := range []byte(s.salt + tag) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	out := make([]int, n)
	for i := range out {
		h = h*6364136223846793005 + 1442695040888963407
		out[i] = 300 + int(h>>40)%3000
	}
	return out
}

// complete runs a greedy completion of that many tokens and returns its text.
func (s *suite) complete(t *testing.T, url string, prompt []int, tokens int, extra object) (string, usage) {
	t.Helper()
	body := object{"model": s.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true}
	maps.Copy(body, extra)
	var c completion
	s.do(t, http.MethodPost, url+"/v1/completions", body).into(t, &c)
	if len(c.Choices) != 1 || c.Choices[0].Text == nil || c.Usage == nil {
		t.Fatalf("answer %+v", c)
	}
	return *c.Choices[0].Text, *c.Usage
}

// metric is the sum over the ranks of a series of an engine's metrics page;
// labels must all be there.
func (s *suite) metric(t *testing.T, url, name string, labels ...string) float64 {
	t.Helper()
	v, err := Metric(string(s.do(t, http.MethodGet, url+"/metrics", nil).body), name, labels...)
	if err != nil {
		t.Error(err)
	}
	return v
}

// Metric sums the samples of a Prometheus text page that have a name and all of
// the labels, which are written as on the page (source="local_compute").
func Metric(page, name string, labels ...string) (float64, error) {
	sum, found := 0.0, false
	samples.Scan([]byte(page), func(n []byte) bool { return string(n) == name }, func(_ []byte, l samples.Labels, v float64) {
		if !slices.ContainsFunc(labels, func(want string) bool { return !bytes.Contains(l, []byte(want)) }) {
			sum, found = sum+v, true
		}
	})
	if !found {
		return 0, fmt.Errorf("no metric %s with %v", name, labels)
	}
	return sum, nil
}

// grows runs f and returns by how much a counter grew, once it has reached at
// least want: engines write their counters after their answers.
func (s *suite) grows(t *testing.T, url string, want float64, f func(), name string, labels ...string) float64 {
	t.Helper()
	before := s.metric(t, url, name, labels...)
	f()
	return s.until(t, func() (float64, bool) {
		d := s.metric(t, url, name, labels...) - before
		return d, d >= want
	})
}

// until polls for a moment and returns the last value.
func (s *suite) until(t *testing.T, f func() (float64, bool)) (v float64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	wait.Until(ctx, 20*time.Millisecond, func() (ok bool) {
		v, ok = f()
		return ok || t.Failed()
	})
	return v
}

func (s *suite) discovery(t *testing.T) {
	if a := s.get(t, "/health"); a.status != 200 || len(a.body) != 0 {
		t.Errorf("health: %d %q, want 200 without a body", a.status, a.body)
	}
	if a := s.get(t, "/ping"); a.status != 200 {
		t.Errorf("ping: %d", a.status)
	}
	var v struct{ Version string }
	if s.get(t, "/version").into(t, &v); v.Version == "" {
		t.Error("no version")
	}
	var m struct {
		Object string
		Data   []struct {
			ID          string
			Object      string
			Root        string
			Parent      *string
			MaxModelLen int `json:"max_model_len"`
		}
	}
	s.get(t, "/v1/models").into(t, &m)
	if m.Object != "list" || len(m.Data) == 0 || m.Data[0].ID == "" || m.Data[0].MaxModelLen < 2 || m.Data[0].Parent != nil || m.Data[0].Object != "model" {
		t.Fatalf("models: %+v", m)
	}
	s.model, s.maxLen = m.Data[0].ID, m.Data[0].MaxModelLen
	page := string(s.get(t, "/metrics").body)
	_, rest, ok := strings.Cut(page, "vllm:cache_config_info{")
	_, size, ok2 := strings.Cut(rest, `,block_size="`)
	if !ok2 {
		_, size, ok2 = strings.Cut(rest, `block_size="`)
	}
	size, _, _ = strings.Cut(size, `"`)
	n, err := strconv.Atoi(size)
	if !ok || !ok2 || err != nil || n < 1 {
		t.Fatalf("no block size in vllm:cache_config_info: %q", size)
	}
	s.blockSize = n
	for _, name := range []string{
		"vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total",
		"vllm:generation_tokens_total", "vllm:num_preemptions_total", "vllm:external_prefix_cache_hits_total",
	} {
		s.metric(t, s.URL, name, `engine="0"`, `model_name="`+s.model+`"`)
	}
	// With several ranks the series of a rank's load come with its first request.
	ranks := 0
	for strings.Contains(page, fmt.Sprintf("vllm:prefix_cache_queries_total{engine=\"%d\"", ranks)) {
		ranks++
	}
	started, err := Metric(page, "process_start_time_seconds")
	if (err == nil) != (ranks == 1) {
		t.Errorf("an engine with %d ranks reports the start of its process: %v", ranks, err == nil)
	}
	if now := float64(time.Now().Unix()) + 1; err == nil && (started < 1e9 || started > now) {
		t.Errorf("the process was started at %.2f, it is %.0f now", started, now)
	}
	for i := range ranks {
		rank := fmt.Sprintf("engine=\"%d\"", i)
		served, err := Metric(page, "vllm:prefix_cache_queries_total", rank)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} {
			if _, err := Metric(page, name, rank); (err == nil) != (ranks == 1 || served > 0) {
				t.Errorf("rank %d of %d, whose prompts had %.0f tokens so far, has the series %s: %v", i, ranks, served, name, err == nil)
			}
		}
	}
}

func (s *suite) tokens(t *testing.T) {
	const text = "The quick brown fox, 42 times!\nNaïve café — 日本語"
	var a struct {
		Count       int
		MaxModelLen int `json:"max_model_len"`
		Tokens      []int
		TokenStrs   []string `json:"token_strs"`
	}
	s.post(t, "/tokenize", object{"model": s.model, "prompt": text, "return_token_strs": true}).into(t, &a)
	if a.Count == 0 || a.Count != len(a.Tokens) || a.Count != len(a.TokenStrs) || a.MaxModelLen != s.maxLen {
		t.Errorf("tokenize: %+v", a)
	}
	var d struct{ Prompt string }
	s.post(t, "/detokenize", object{"model": s.model, "tokens": a.Tokens}).into(t, &d)
	if d.Prompt != text {
		t.Errorf("detokenize: %q, want %q", d.Prompt, text)
	}
	messages := []object{{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}}
	s.post(t, "/tokenize", object{"model": s.model, "messages": messages}).into(t, &a)
	var c completion
	s.post(t, "/v1/chat/completions", object{"model": s.model, "messages": messages, "max_tokens": 1}).into(t, &c)
	if c.Usage == nil || c.Usage.Prompt != a.Count {
		t.Errorf("chat usage %+v, tokenize counts %d", c.Usage, a.Count)
	}
}

func (s *suite) load(t *testing.T) {
	var l struct {
		Load *int `json:"server_load"`
	}
	if s.get(t, "/load").into(t, &l); l.Load == nil {
		t.Error("no server_load")
	}
	body := object{"model": s.model, "prompt": s.prompt(10, "orca"), "max_tokens": 1}
	if h := s.post(t, "/v1/completions", body, "endpoint-load-metrics-format", "JSON").header.Get("endpoint-load-metrics"); !strings.HasPrefix(h, `JSON {"named_metrics": {`) || !strings.Contains(h, `"kv_cache_usage_perc": `) {
		t.Errorf("JSON report %q", h)
	}
	if h := s.post(t, "/v1/completions", body, "endpoint-load-metrics-format", "TEXT").header.Get("endpoint-load-metrics"); !strings.HasPrefix(h, "TEXT named_metrics.") {
		t.Errorf("TEXT report %q", h)
	}
	if h := s.post(t, "/v1/completions", body).header.Get("endpoint-load-metrics"); h != "" {
		t.Errorf("report without being asked: %q", h)
	}
}

// disconnect: a client that leaves ends its request.
func (s *suite) disconnect(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), s.Timeout)
	defer cancel()
	raw, err := json.Marshal(object{"model": s.model, "prompt": s.prompt(20, "leave"), "max_tokens": s.maxLen - 100, "ignore_eos": true, "stream": true})
	if err != nil {
		t.Fatal(err)
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+"/v1/completions", bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	q.Header.Set("Content-Type", "application/json")
	resp, err := s.Client.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.ReadFull(resp.Body, make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := io.Copy(io.Discard, resp.Body); err == nil || !errors.Is(err, context.Canceled) {
		t.Errorf("the stream ended by itself: %v", err)
	}
	if v := s.until(t, func() (float64, bool) {
		v := s.metric(t, s.URL, "vllm:num_requests_running")
		return v, v == 0
	}); v != 0 {
		t.Errorf("%v requests still run", v)
	}
}

// SameCaching sends one random series of prompts with shared beginnings, long
// enough to evict, to two engines with caches of the same size, and reports
// where they disagree on the cached tokens. blocks is the size of the caches.
func SameCaching(t *testing.T, client *http.Client, one, two string, blocks, requests int) {
	a := &suite{Target: Target{URL: one, Client: client, Timeout: time.Minute}, salt: strconv.FormatInt(time.Now().UnixNano(), 36)}
	b := &suite{Target: Target{URL: two, Client: client, Timeout: time.Minute}, salt: a.salt}
	a.discovery(t)
	b.discovery(t)
	if a.blockSize != b.blockSize {
		t.Fatalf("block sizes %d and %d", a.blockSize, b.blockSize)
	}
	rnd := rand.New(rand.NewPCG(uint64(blocks), 1))
	longest := min(a.maxLen, b.maxLen, blocks*a.blockSize/8)
	hits := 0
	for i := range requests {
		var prompt []int
		for part := range 1 + rnd.IntN(3) {
			prompt = append(prompt, a.prompt(1+rnd.IntN(longest/3), fmt.Sprintf("caching-%d-%d", part, rnd.IntN(4)))...)
		}
		prompt = prompt[:min(len(prompt), longest-1)]
		ask := func(s *suite) int {
			var c completion
			s.post(t, "/v1/completions", object{"model": s.model, "prompt": prompt, "max_tokens": 1}, "X-data-parallel-rank", "0").into(t, &c)
			if c.Usage == nil || c.Usage.Details == nil {
				t.Fatal("no cached_tokens in the usage")
			}
			return c.Usage.Details.Cached
		}
		x, y := ask(a), ask(b)
		if x != y {
			t.Fatalf("request %d of %d tokens: %d cached by %s, %d by %s", i, len(prompt), x, one, y, two)
		}
		hits += x
	}
	if hits == 0 {
		t.Error("nothing was cached")
	}
}
