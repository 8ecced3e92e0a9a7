package conformance

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
)

func (s *suite) completion(t *testing.T) {
	prompt := s.prompt(70, "completion")
	text, u := s.complete(t, s.URL, prompt, 12, nil)
	if u.Prompt != 70 || u.Completion != 12 || u.Total != 82 {
		t.Errorf("usage %+v", u)
	}
	t.Run("is a function of the prompt", func(t *testing.T) {
		if again, _ := s.complete(t, s.URL, prompt, 12, object{"cache_salt": s.salt}); again != text {
			t.Errorf("%q, then %q", text, again)
		}
		other := append([]int(nil), prompt...)
		other[3]++
		if again, _ := s.complete(t, s.URL, other, 12, nil); again == text {
			t.Error("an early token does not matter")
		}
	})
	t.Run("streams the same text", func(t *testing.T) {
		events := s.post(t, "/v1/completions", object{"model": s.model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true, "stream": true, "stream_options": object{"include_usage": true}}).sse(t)
		n := len(events)
		if n < 3 || events[n-1] != "[DONE]" {
			t.Fatalf("events %q", events)
		}
		var got strings.Builder
		for i, e := range events[:n-1] {
			var c completion
			if err := json.Unmarshal([]byte(e), &c); err != nil {
				t.Fatal(err)
			}
			if c.Object != "text_completion" || !strings.HasPrefix(c.ID, "cmpl-") {
				t.Errorf("chunk %s", e)
			}
			if i == n-2 {
				if len(c.Choices) != 0 || c.Usage == nil || c.Usage.Completion != 12 {
					t.Errorf("usage chunk %s", e)
				}
				continue
			}
			if c.Usage != nil {
				t.Errorf("usage in %s", e)
			}
			got.WriteString(*c.Choices[0].Text)
			if last := i == n-3; last != (c.finish() == "length") {
				t.Errorf("finish_reason in chunk %d of %d: %s", i, n, e)
			}
		}
		if got.String() != text {
			t.Errorf("stream %q, want %q", got.String(), text)
		}
	})
	t.Run("usage in every chunk", func(t *testing.T) {
		events := s.post(t, "/v1/completions", object{"model": s.model, "prompt": prompt, "max_tokens": 4, "ignore_eos": true, "stream": true, "stream_options": object{"include_usage": true, "continuous_usage_stats": true}}).sse(t)
		for _, e := range events[:len(events)-1] {
			var c completion
			if err := json.Unmarshal([]byte(e), &c); err != nil || c.Usage == nil || c.Usage.Prompt != 70 {
				t.Errorf("chunk %s", e)
			}
		}
	})
	t.Run("text and ids are the same prompt", func(t *testing.T) {
		const words = "one two three four five six seven eight"
		var tok struct{ Tokens []int }
		s.post(t, "/tokenize", object{"model": s.model, "prompt": words}).into(t, &tok)
		want, _ := s.complete(t, s.URL, tok.Tokens, 8, nil)
		var c completion
		s.post(t, "/v1/completions", object{"model": s.model, "prompt": words, "max_tokens": 8, "temperature": 0, "ignore_eos": true}).into(t, &c)
		if *c.Choices[0].Text != want {
			t.Errorf("%q by text, %q by ids", *c.Choices[0].Text, want)
		}
	})
	t.Run("several prompts", func(t *testing.T) {
		var c completion
		s.post(t, "/v1/completions", object{"model": s.model, "prompt": [][]int{prompt, s.prompt(30, "second")}, "max_tokens": 12, "temperature": 0, "ignore_eos": true}).into(t, &c)
		if len(c.Choices) != 2 || c.Choices[1].Index != 1 || *c.Choices[0].Text != text || c.Usage.Prompt != 100 {
			t.Errorf("%+v", c)
		}
	})
	t.Run("n choices", func(t *testing.T) {
		var c completion
		s.post(t, "/v1/completions", object{"model": s.model, "prompt": prompt, "max_tokens": 3, "n": 3, "temperature": 1, "ignore_eos": true}).into(t, &c)
		if len(c.Choices) != 3 || c.Usage.Completion != 9 || c.Usage.Prompt != 70 {
			t.Errorf("%d choices, usage %+v", len(c.Choices), c.Usage)
		}
	})
	t.Run("stop string", func(t *testing.T) {
		stop := strings.TrimSpace(text)
		if len(stop) > 6 {
			stop = stop[len(stop)/2 : len(stop)/2+3]
		}
		want, _, _ := strings.Cut(text, stop)
		var c completion
		s.post(t, "/v1/completions", object{"model": s.model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true, "stop": stop}).into(t, &c)
		if *c.Choices[0].Text != want || c.finish() != "stop" || c.Choices[0].StopReason != stop {
			t.Errorf("stop at %q: %q, %s, %v; want %q", stop, *c.Choices[0].Text, c.finish(), c.Choices[0].StopReason, want)
		}
	})
	t.Run("echo", func(t *testing.T) {
		var c completion
		s.post(t, "/v1/completions", object{"model": s.model, "prompt": "say it again", "max_tokens": 1, "echo": true}).into(t, &c)
		if !strings.HasPrefix(*c.Choices[0].Text, "say it again") {
			t.Errorf("%q", *c.Choices[0].Text)
		}
	})
	t.Run("request id", func(t *testing.T) {
		var c completion
		s.post(t, "/v1/completions", object{"model": s.model, "prompt": "x", "max_tokens": 1}, "X-Request-Id", "my-id-1").into(t, &c)
		if c.ID != "cmpl-my-id-1" {
			t.Errorf("id %q", c.ID)
		}
	})
}

func (s *suite) chat(t *testing.T) {
	messages := []object{{"role": "system", "content": "You are a careful assistant."}, {"role": "user", "content": []object{{"type": "text", "text": "Explain imports " + s.salt}}}}
	body := object{"model": s.model, "messages": messages, "max_tokens": 10, "temperature": 0, "ignore_eos": true}
	var c completion
	s.post(t, "/v1/chat/completions", body).into(t, &c)
	if c.Object != "chat.completion" || !strings.HasPrefix(c.ID, "chatcmpl-") || len(c.Choices) != 1 || c.Choices[0].Message == nil || c.Choices[0].Message.Role != "assistant" || c.finish() != "length" {
		t.Fatalf("%+v", c)
	}
	want := c.Choices[0].Message.Content
	body["stream"] = true
	body["stream_options"] = object{"include_usage": true}
	events := s.post(t, "/v1/chat/completions", body).sse(t)
	n := len(events)
	if events[n-1] != "[DONE]" {
		t.Errorf("last event %q", events[n-1])
	}
	var got strings.Builder
	for i, e := range events[:n-1] {
		var c completion
		if err := json.Unmarshal([]byte(e), &c); err != nil {
			t.Fatal(err)
		}
		if c.Object != "chat.completion.chunk" {
			t.Errorf("chunk %s", e)
		}
		if i == n-2 {
			if len(c.Choices) != 0 || c.Usage == nil || c.Usage.Completion != 10 {
				t.Errorf("usage chunk %s", e)
			}
			continue
		}
		d := c.Choices[0].Delta
		if (i == 0) != (d.Role == "assistant") || i == 0 && d.Content != "" {
			t.Errorf("chunk %d: %s", i, e)
		}
		got.WriteString(d.Content)
	}
	if got.String() != want {
		t.Errorf("stream %q, want %q", got.String(), want)
	}
	delete(body, "stream")
	delete(body, "stream_options")
	delete(body, "max_tokens")
	body["max_completion_tokens"] = 3
	s.post(t, "/v1/chat/completions", body).into(t, &c)
	if c.Usage.Completion != 3 {
		t.Errorf("max_completion_tokens 3 gives %+v", c.Usage)
	}
}

func (s *suite) cache(t *testing.T) {
	for _, n := range []int{s.blockSize - 1, s.blockSize, s.blockSize + 1, 3 * s.blockSize, 3*s.blockSize + 5} {
		prompt := s.prompt(n, "cache")
		salt := object{"cache_salt": s.salt + string(rune('a'+n%26))}
		first, _ := s.complete(t, s.URL, prompt, 2, salt)
		// One rank only: with several, the second request may meet another.
		var again completion
		s.post(t, "/v1/completions", object{"model": s.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": true, "cache_salt": salt["cache_salt"]}, "X-data-parallel-rank", "0").into(t, &again)
		s.post(t, "/v1/completions", object{"model": s.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": true, "cache_salt": salt["cache_salt"]}, "X-data-parallel-rank", "0").into(t, &again)
		if *again.Choices[0].Text != first {
			t.Errorf("%d tokens: %q cached, %q not", n, *again.Choices[0].Text, first)
		}
		want := (n - 1) / s.blockSize * s.blockSize
		if again.Usage.Details == nil || again.Usage.Details.Cached != want {
			t.Errorf("%d tokens: usage %+v, want %d cached", n, again.Usage, want)
		}
	}
	t.Run("counters", func(t *testing.T) {
		n := 2*s.blockSize + 1
		prompt := s.prompt(n, "counters")
		if d := s.grows(t, s.URL, float64(n), func() { s.complete(t, s.URL, prompt, 4, nil) }, "vllm:prompt_tokens_total"); d != float64(n) {
			t.Errorf("prompt tokens grow by %v, want %d", d, n)
		}
		if d := s.grows(t, s.URL, 4, func() { s.complete(t, s.URL, prompt, 4, nil) }, "vllm:generation_tokens_total"); d != 4 {
			t.Errorf("generated tokens grow by %v, want 4", d)
		}
		if d := s.grows(t, s.URL, float64(n), func() { s.complete(t, s.URL, prompt, 4, nil) }, "vllm:prefix_cache_queries_total"); d != float64(n) {
			t.Errorf("prefix cache queries grow by %v, want %d", d, n)
		}
	})
}

func (s *suite) errors(t *testing.T) {
	long := s.prompt(s.maxLen+1, "long")
	for _, c := range []struct {
		name   string
		body   any
		header []string
		status int
		param  string // "" = any
	}{
		{"unknown model", object{"model": "nope", "prompt": "x"}, nil, 404, "model"},
		{"prompt too long", object{"model": s.model, "prompt": long, "max_tokens": 1}, nil, 400, "input_tokens"},
		{"max_tokens 0 or less", object{"model": s.model, "prompt": "x", "max_tokens": -1}, nil, 400, ""},
		{"params of a wrong type", object{"model": s.model, "prompt": "x", "kv_transfer_params": "x"}, nil, 400, "body.kv_transfer_params"},
		{"max_tokens of a wrong type", object{"model": s.model, "prompt": "x", "max_tokens": "many"}, nil, 400, ""},
		{"malformed JSON", `{"model": `, nil, 400, ""},
		{"stream options without a stream", object{"model": s.model, "prompt": "x", "stream_options": object{"include_usage": true}}, nil, 400, ""},
		{"rank out of range", object{"model": s.model, "prompt": "x"}, []string{"X-data-parallel-rank", "99"}, 400, ""},
		{"no prompt", object{"model": s.model, "prompt": []int{}}, nil, 400, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := s.post(t, "/v1/completions", c.body, c.header...)
			var e struct {
				Error *struct {
					Message string
					Type    string
					Param   *string
					Code    int
				}
			}
			if err := json.Unmarshal(a.body, &e); err != nil || e.Error == nil {
				t.Fatalf("status %d, body %s", a.status, a.body)
			}
			if a.status != c.status || e.Error.Code != c.status || e.Error.Message == "" || e.Error.Type == "" {
				t.Errorf("status %d, body %s; want %d", a.status, a.body, c.status)
			}
			if c.param != "" && (e.Error.Param == nil || *e.Error.Param != c.param) {
				t.Errorf("param in %s, want %q", a.body, c.param)
			}
		})
	}
	t.Run("rank that is no number", func(t *testing.T) {
		if a := s.post(t, "/v1/completions", object{"model": s.model, "prompt": "x", "max_tokens": 1}, "X-data-parallel-rank", "zero"); a.status != 200 {
			t.Errorf("status %d: %s", a.status, a.body)
		}
	})
	t.Run("unknown path", func(t *testing.T) {
		if a := s.get(t, "/no/such/path"); a.status != http.StatusNotFound {
			t.Errorf("status %d", a.status)
		}
	})
	t.Run("wrong method", func(t *testing.T) {
		if a := s.get(t, "/v1/completions"); a.status != http.StatusMethodNotAllowed {
			t.Errorf("status %d", a.status)
		}
	})
}
