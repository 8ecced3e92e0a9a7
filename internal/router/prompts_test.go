package router_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestTokenizers: with engine tokens the prediction is exact; without events or
// tokens the router still brings a prompt back to where it went.
func TestTokenizers(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("shared words of a long system prompt that many requests have. ", 40)
	chat := func(tail string) object {
		return object{"model": "sim", "messages": []object{{"role": "system", "content": text}, {"role": "user", "content": tail}}, "max_tokens": 2}
	}
	t.Run("engine is exact", func(t *testing.T) {
		t.Parallel()
		r := start(t, "2a:profile=instant", func(c *settings.Config) { c.Tokens.Tokenizer = "engine" })
		for i := range 6 {
			a := r.post("/v1/chat/completions", chat(fmt.Sprint("question ", i)))
			c := r.receipt(a.header.Get("X-Dynctl-Decision"))
			if c.Inputs.ISLSource != "engine" || c.Inputs.ISL != c.Outcome.PromptTokens || c.Predicted.CachedTokens != c.Outcome.CachedTokens {
				t.Errorf("isl %d by %s, the engine counts %d; %d cached tokens predicted, %d found", c.Inputs.ISL, c.Inputs.ISLSource, c.Outcome.PromptTokens, c.Predicted.CachedTokens, c.Outcome.CachedTokens)
			}
			if i > 0 && c.Outcome.CachedTokens == 0 {
				t.Error("no affinity")
			}
			r.synced()
		}
		storedResponseOfAWorkerThatLeft(t, r)
	})
	t.Run("approximate without events", func(t *testing.T) {
		t.Parallel()
		r := start(t, "3a:profile=instant,events=off", func(c *settings.Config) { c.Tokens.Tokenizer = "estimate" })
		first := r.post("/v1/chat/completions", chat("first")).header.Get("X-Dynctl-Worker")
		for i := range 6 {
			a := r.post("/v1/chat/completions", chat(fmt.Sprint("question ", i)))
			c := r.receipt(a.header.Get("X-Dynctl-Decision"))
			if a.header.Get("X-Dynctl-Worker") != first || !c.Inputs.Approximate || c.Outcome.CachedTokens == 0 {
				t.Errorf("went to %s, the prefix is on %s; approximate %v, %d cached", a.header.Get("X-Dynctl-Worker"), first, c.Inputs.Approximate, c.Outcome.CachedTokens)
			}
		}
		// So it does with ids.
		a, _ := r.complete(append(ids(320, 1), 1, 2, 3))
		for i := range 5 {
			b, _ := r.complete(append(ids(320, 1), ids(30, 50+i)...))
			if b.header.Get("X-Dynctl-Worker") != a.header.Get("X-Dynctl-Worker") {
				t.Errorf("went to %s, not %s", b.header.Get("X-Dynctl-Worker"), a.header.Get("X-Dynctl-Worker"))
			}
		}
	})
	t.Run("local that disagrees is not used", func(t *testing.T) {
		t.Parallel()
		file := tokenizerFile(t)
		r := start(t, "1a:profile=instant", func(c *settings.Config) { c.Tokens.Tokenizer, c.Tokens.Path = "local", file })
		r.eventually("the self-check", func() error {
			if len(r.events("tokenizer_checked")) == 0 {
				return fmt.Errorf("no event")
			}
			return nil
		})
		a := r.post("/v1/chat/completions", chat("who counts"))
		c := r.receipt(a.header.Get("X-Dynctl-Decision"))
		if c.Inputs.ISLSource != "engine" || c.Inputs.ISL != c.Outcome.PromptTokens {
			t.Errorf("isl %d by %s, the engine counts %d", c.Inputs.ISL, c.Inputs.ISLSource, c.Outcome.PromptTokens)
		}
		if s := r.status(); !strings.Contains(strings.Join(s.Reasons, " "), "local tokenizer") {
			t.Errorf("status does not show the disagreement: %v", s.Reasons)
		}
	})
}

// tokenizerFile finds a tokenizer.json among the test data.
func tokenizerFile(t *testing.T) string {
	t.Helper()
	found := ""
	_ = filepath.WalkDir(filepath.Join("..", "..", "testdata", "tokenizer"), func(p string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && d.Name() == "tokenizer.json" && found == "" {
			found = p
		}
		return nil
	})
	if found == "" {
		t.Fatal("no tokenizer.json under testdata/tokenizer")
	}
	return found
}

// TestChatTemplatesThatDiffer: a prefill and a decode engine that make different tokens
// of a chat are found and reported before the first request; chats stay with the
// decode engine, and prompts of ids go on as they did.
func TestChatTemplatesThatDiffer(t *testing.T) {
	t.Parallel()
	p := &tap{}
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if engine != "prefill-0" || q.URL.Path != "/tokenize" {
			return false
		}
		writeJSON(w, []byte(`{"count":3,"max_model_len":4096,"tokens":[7,8,9]}`))
		return true
	})
	r := startWith(t, loopback.Options{Fleet: "1p1d:profile=instant", Specs: p.specs(t)}, func(c *settings.Config) { c.Tokens.Tokenizer = "estimate" })
	if err := loopback.Wait(r.wait(), "the event", func() error {
		e := r.events("chat_tokens_differ")
		if len(e) == 1 && strings.Contains(e[0].Text, "prefill-0 (3 tokens) and decode-0 (") {
			return nil
		}
		return fmt.Errorf("events %+v", e)
	}); err != nil {
		t.Fatal(err)
	}
	st, err := r.Admin.Status(t.Context())
	if err != nil || !strings.Contains(fmt.Sprintf("%+v", st), "make different tokens of the same chat: prefill-0 (3 tokens)") {
		t.Errorf("status %+v, %v", st, err)
	}
	for path, c := range map[string]struct {
		body object
		path string
	}{
		"/v1/chat/completions": {object{"model": "sim", "messages": []object{{"role": "user", "content": strings.Repeat("a chat ", 50)}}, "max_tokens": 2}, "local"},
		"/v1/completions":      {object{"model": "sim", "prompt": ids(200, 1), "max_tokens": 2}, "remote"},
	} {
		a := r.post(path, c.body)
		if rec := r.receipt(a.header.Get("X-Dynctl-Decision")); rec.Path != c.path {
			t.Errorf("%s: %s (%s)", path, rec.Path, rec.ReasonText)
		}
	}
}

// TestEndpoints: what is not generation is never split; responses stick to the
// worker that has them; other APIs pass.
func TestEndpoints(t *testing.T) {
	t.Parallel()
	r := start(t, "1p2d:profile=instant")
	for path, body := range map[string]object{
		"/v1/embeddings":            {"model": "sim", "input": []string{"one", "two"}},
		"/v1/rerank":                {"model": "sim", "query": "q", "documents": []string{"a", "b"}},
		"/rerank":                   {"model": "sim", "query": "q", "documents": []string{"a", "b"}},
		"/v1/score":                 {"model": "sim", "text_1": "a", "text_2": []string{"b", "c"}},
		"/tokenize":                 {"model": "sim", "prompt": "some words"},
		"/detokenize":               {"model": "sim", "tokens": ids(5, 1)},
		"/v1/messages":              {"model": "sim", "max_tokens": 4, "messages": []object{{"role": "user", "content": strings.Repeat("many words ", 100)}}},
		"/v1/messages/count_tokens": {"model": "sim", "messages": []object{{"role": "user", "content": "hello"}}},
		"/v1/responses":             {"model": "sim", "input": strings.Repeat("many words ", 100), "max_output_tokens": 4},
		"/inference/v1/generate":    {"model": "sim", "token_ids": ids(100, 3), "sampling_params": object{"max_tokens": 3}},
	} {
		a := r.post(path, body)
		split := path == "/inference/v1/generate" || path == "/v1/messages" || path == "/v1/responses"
		if got := a.header.Get("X-Dynctl-Path"); (got == "remote") != split {
			t.Errorf("%s went %s", path, got)
		}
	}
	if n := r.touched("prefill-0"); n != 3 {
		t.Errorf("the prefill worker got %d requests, want the three that generate", n)
	}
	// Nothing to count is no prompt; the engine says what it thinks of it.
	if a := r.send(http.MethodPost, "/v1/completions", []byte(`{"model":"sim"}`)); a.status != http.StatusBadRequest {
		t.Errorf("%s", a)
	}
	// Anthropic's clients get errors in their own shape.
	a := r.send(http.MethodPost, "/v1/messages", []byte(`{"model":"nobody","max_tokens":1,"messages":[]}`))
	if a.status != 404 || rawjson.Value(a.body).Get("type").String() != "error" || rawjson.Value(a.body).Get("error.type").String() == "" {
		t.Errorf("%s", a)
	}

	for i := range 6 {
		first := r.post("/v1/responses", object{"model": "sim", "input": fmt.Sprint("conversation ", i), "max_output_tokens": 3, "store": true, "stream": i%2 == 1})
		id := rawjson.Value(first.body).Get("id").String()
		if i%2 == 1 {
			_, data, _ := bytes.Cut(first.body, []byte("data: "))
			line, _, _ := bytes.Cut(data, []byte("\n"))
			id = rawjson.Value(line).Get("response.id").String()
		}
		if id == "" {
			t.Fatalf("no id in %s", first)
		}
		turn := object{"model": "sim", "input": "and then", "max_output_tokens": 3, "previous_response_id": id}
		if d, err := r.Admin.Route(t.Context(), routeOf(t, "/v1/responses", turn)); err != nil || rawjson.Value(d.Receipt).Get("decode.chosen").String() != first.header.Get("X-Dynctl-Worker") || rawjson.Value(d.Receipt).Get("decode.eligible_ranks").String() != "1" {
			t.Errorf("a dry run of the next turn, whose past is on %s: %v, %s", first.header.Get("X-Dynctl-Worker"), err, rawjson.Value(d.Receipt).Get("decode.chosen"))
		}
		next := r.send(http.MethodPost, "/v1/responses", encode(t, turn))
		if w := next.header.Get("X-Dynctl-Worker"); w != first.header.Get("X-Dynctl-Worker") {
			t.Errorf("the next turn went to %s, its past is on %s: %s", w, first.header.Get("X-Dynctl-Worker"), next)
		}
	}
	b := r.send(http.MethodPost, "/v1/responses", []byte(`{"model":"sim","input":"x","previous_response_id":"resp_nobody"}`))
	if b.status != 404 {
		t.Errorf("an unknown response: %s", b)
	}
	_, err := r.Admin.Route(t.Context(), routeOf(t, "/v1/responses", object{"model": "sim", "input": "x", "previous_response_id": "resp_nobody"}))
	if err == nil || !strings.Contains(err.Error(), "is not known here") {
		t.Errorf("a dry run after an unknown response: %v", err)
	}
}

// storedResponseOfAWorkerThatLeft: a response whose worker is down or drains may be
// there again; of one whose worker has left the client is told that it is gone.
func storedResponseOfAWorkerThatLeft(t *testing.T, r *rig) {
	first := r.post("/v1/responses", object{"model": "sim", "input": "a conversation", "max_output_tokens": 3, "store": true})
	id := rawjson.Value(first.body).Get("id").String()
	name, _, _ := strings.Cut(first.header.Get("X-Dynctl-Worker"), "/")
	turn := encode(t, object{"model": "sim", "input": "and then", "max_output_tokens": 3, "previous_response_id": id})
	both := func(status int, code, text string) {
		t.Helper()
		for _, a := range []*answer{r.send(http.MethodGet, "/v1/responses/"+id, nil), r.send(http.MethodPost, "/v1/responses", turn)} {
			if e := a.refused(t, status, code); !strings.Contains(e.Error.Message, text) {
				t.Errorf("%s", a)
			}
		}
	}
	if _, err := r.Admin.DrainWorker(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	both(http.StatusServiceUnavailable, "no_decode_worker", "draining")
	if err := r.Admin.RemoveWorker(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	both(http.StatusNotFound, "invalid_request", "the worker that has it has left")
	for _, c := range []struct {
		a     *answer
		param string
	}{{r.send(http.MethodGet, "/v1/responses/"+id, nil), ""}, {r.send(http.MethodPost, "/v1/responses", turn), "previous_response_id"}} {
		if p := rawjson.Value(c.a.body).Get("error.param").String(); p != c.param || c.a.header.Get("Retry-After") != "" {
			t.Errorf("%s, Retry-After %q", c.a, c.a.header.Get("Retry-After"))
		}
	}
}
