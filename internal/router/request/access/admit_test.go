package access

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// stored are the keys of a file: what stands of each, and what is shown for it.
func stored(t *testing.T, pairs ...string) *Store {
	t.Helper()
	text := "keys:\n"
	for i := 0; i < len(pairs); i += 2 {
		text += fmt.Sprintf("  - {%s, sha256: %s}\n", pairs[i], hashOf(pairs[i+1]))
	}
	path := filepath.Join(t.TempDir(), "keys.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := NewStore(Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// refused is the error that a client is sent.
func refused(t *testing.T, err error) *api.Error {
	t.Helper()
	var e *api.Error
	if !errors.As(err, &e) {
		t.Fatalf("not refused with an error for the client: %v", err)
	}
	return e
}

// TestAdmit: who may begin a request, and with what the others are refused. No engine is
// shown a key, right or wrong.
func TestAdmit(t *testing.T) {
	s := stored(t, "name: user, rate: 6", "one", "name: reader, roles: [read]", "two")
	now := time.Unix(1000, 0)
	for _, c := range []struct {
		what, shown string
		required    bool
		key, reason string
		status      int
		code        api.Code
		mentions    string
	}{
		{"a key", "Bearer one", true, "user", "", 0, "", ""},
		{"one more than its rate", "Bearer one", true, "", ReasonRate, 429, api.CodeRateLimited, `"user" has used up its requests, its rate is 6 a minute`},
		{"a rate counts where none is required", "Bearer one", false, "", ReasonRate, 429, api.CodeRateLimited, "its rate is 6 a minute"},
		{"none", "", true, "", ReasonKey, 401, api.CodeUnauthorized, "requires an API key"},
		{"none where none is required", "", false, "", "", 0, "", ""},
		{"a wrong one", "Bearer three", true, "", ReasonKey, 401, api.CodeUnauthorized, "wrong, or was revoked"},
		{"a wrong one where none is required", "Bearer three", false, "", ReasonKey, 401, api.CodeUnauthorized, "wrong, or was revoked"},
		{"one for the admin API", "Bearer two", true, "", ReasonKey, 403, api.CodeForbidden, `"reader" is for the admin API only`},
		{"no bearer token", "Basic one", true, "", ReasonKey, 401, api.CodeUnauthorized, "Authorization: Bearer KEY"},
	} {
		h := http.Header{"Accept": {"*/*"}}
		if c.shown != "" {
			h.Set("Authorization", c.shown)
		}
		k, reason, err := s.Admit(h, c.required, now)
		if len(h) != 1 {
			t.Errorf("%s: what is passed on has %v", c.what, h)
		}
		name := ""
		if k != nil {
			name = k.Name
		}
		if name != c.key || reason != c.reason || (err != nil) != (c.status != 0) {
			t.Errorf("%s: key %q, reason %q, %v", c.what, name, reason, err)
			continue
		}
		if err == nil {
			continue
		}
		if e := refused(t, err); e.Status != c.status || e.Code != c.code || !strings.Contains(e.Message, c.mentions) || (e.RetryAfter > 0) != (c.status == 429) {
			t.Errorf("%s: %+v", c.what, e)
		}
	}
	if k, _, err := s.Admit(http.Header{"X-Api-Key": {"one"}}, true, now.Add(time.Minute)); err != nil || k.Name != "user" {
		t.Errorf("a minute later: %v, %v", k, err)
	}
}

// TestRefusal: a key for some models is refused any other, by whichever of its names, with
// the list of its own.
func TestRefusal(t *testing.T) {
	s := stored(t, "name: some, models: [nice, m2]", "one", "name: all", "two")
	some, all := s.Find("one"), s.Find("two")
	for _, of := range [][2]string{{"nice", "m1"}, {"other", "m2"}} {
		if err := some.Refusal(of[0], of[:]...); err != nil {
			t.Errorf("%v: %v", of, err)
		}
	}
	if err := all.Refusal("anything", "anything"); err != nil {
		t.Error(err)
	}
	// The last but one asks by a name of the key's, which is another model's here.
	for _, asked := range []string{"m1", "", "m2", strings.Repeat("x", 5000)} {
		e := refused(t, some.Refusal(asked, "claude-*", "m1"))
		if e.Status != 403 || e.Code != api.CodeForbidden || e.Param != "model" {
			t.Errorf("%.10q: %d %s of %q, want 403 %s of the model", asked, e.Status, e.Code, e.Param, api.CodeForbidden)
		}
		if !strings.Contains(e.Message, `is for ["nice" "m2"]`) || strings.Contains(e.Message, "claude") || len(e.Message) > 1000 {
			t.Errorf("%.10q: %d bytes: %s", asked, len(e.Message), e.Message)
		}
	}
}

// TestAdapterRefusal: a key for some models gets no adapter beside them, by whichever member
// of the body.
func TestAdapterRefusal(t *testing.T) {
	s := stored(t, "name: one, models: [m]", "one", "name: both, models: [m, adapter]", "two", "name: all", "three")
	one, both, all := s.Find("one"), s.Find("two"), s.Find("three")
	for _, c := range []struct {
		key     *Key
		body    string
		refused string // the member
	}{
		{one, `{"model":"m","lora_path":"adapter"}`, "lora_path"},
		{one, `{"model":"m","lora_p\u0061th":"adapter"}`, "lora_path"},
		{one, `{"model":"m","lora_path":["m",null,"adapter"]}`, "lora_path"},
		{one, `{"model":"m","lora_path":""}`, ""},
		{one, `{"model":"m","lora_path":null}`, ""},
		{one, `{"model":"m","lora_path":["m",null]}`, ""},
		{one, `{"model":"m"}`, ""},
		{one, `{"model":"m","lora_id":"1"}`, "lora_id"},
		{one, `{"model":"m","lora_request":{"lora_path":"x"}}`, "lora_request"},
		{one, `{"model":"m","lora_request":null}`, ""},
		{both, `{"model":"m","lora_path":"adapter"}`, ""},
		{both, `{"model":"m","lora_path":["adapter","m","other"]}`, "lora_path"},
		{all, `{"model":"m","lora_path":"adapter","lora_id":"1"}`, ""},
		{nil, `{"model":"m","lora_path":["adapter"]}`, ""},
	} {
		for _, kind := range []api.Kind{api.Chat, api.Completion, api.SGLangGenerate, api.Embeddings} {
			var v api.View
			if err := v.Parse([]byte(c.body), kind, api.Limits{}); err != nil {
				t.Fatal(err)
			}
			err := c.key.AdapterRefusal(&v)
			if (err != nil) != (c.refused != "") {
				t.Errorf("%s: %v", c.body, err)
			} else if err != nil {
				if e := refused(t, err); e.Status != 403 || e.Param != c.refused {
					t.Errorf("%s: %+v", c.body, e)
				}
			}
		}
	}
	var v api.View
	for _, body := range []string{`{"lora_path":7}`, `{"lora_path":{}}`, `{"lora_path":["a",[]]}`} {
		if err := v.Parse([]byte(body), api.SGLangGenerate, api.Limits{}); err == nil {
			t.Errorf("%s is taken", body)
		}
	}
}

// TestWithheld: tenants neither name responses nor go before others in engines.
func TestWithheld(t *testing.T) {
	for _, c := range []struct {
		kind   api.Kind
		steers bool
		want   string
	}{{api.Chat, false, "[priority]"}, {api.Chat, true, "[]"}, {api.Responses, false, "[priority request_id]"}, {api.Responses, true, "[request_id]"}} {
		if got := fmt.Sprint(Withheld(c.kind, c.steers)); got != c.want {
			t.Errorf("%v: %s, want %s", c.kind, got, c.want)
		}
	}
}

// TestSaltPrompt: a prompt that gets into a cache has its tenant's salt, whatever salt it
// came with, or does not reach an engine that would drop it.
func TestSaltPrompt(t *testing.T) {
	worker := func(engine workers.Engine, version string) []*workers.Worker {
		return []*workers.Worker{{Name: "new", Facts: workers.Facts{Engine: workers.VLLM, Version: "0.32.0"}}, {Name: "w", Facts: workers.Facts{Engine: engine, Version: version}}}
	}
	good := worker(workers.VLLM, "0.33.1")
	for _, c := range []struct {
		kind   api.Kind
		path   string
		list   []*workers.Worker
		salted bool
		why    string
	}{
		{api.Chat, "/v1/chat/completions", worker(workers.SGLang, ""), true, ""},
		{api.Completion, "/v1/completions", worker(workers.VLLM, "0.9.0"), true, ""},
		{api.Responses, "/v1/responses", good, true, ""},
		{api.Messages, "/v1/messages", good, true, ""},
		{api.Embeddings, "/v1/embeddings", good, true, ""},
		{api.Messages, "/v1/messages", worker(workers.VLLM, "0.31.9"), false, "worker w is not known to be vLLM 0.32"},
		{api.Rerank, "/rerank", worker(workers.VLLM, ""), false, "worker w is not known"},
		{api.Pooling, "/pooling", worker(workers.SGLang, "0.32.0"), false, "worker w is not known"},
		{api.Messages, "/v1/messages", nil, false, "no worker of its model is there"},
		{api.Embeddings, "/v2/embed", good, false, "no member of the body"},
		{api.SGLangGenerate, "/generate", good, false, "no member of the body"},
		{api.Transcription, "/v1/audio/transcriptions", good, false, "no member of the body"},
		{api.Transcription, "/v1/audio/translations", good, false, "no member of the body"},
		{api.Speech, "/v1/audio/speech", good, false, "no member of the body"},
		{api.ResponseObject, "/v1/responses/r", good, false, ""},
		{api.Tokenize, "/tokenize", good, false, ""},
	} {
		v := api.View{CacheSalt: "the client's"}
		salted, err := SaltPrompt(&v, c.kind, c.path, "web", c.list)
		if salted != c.salted || (err != nil) != (c.why != "") {
			t.Errorf("%s: salted %v, %v", c.path, salted, err)
			continue
		}
		if want := map[bool]string{true: Salt("web", "the client's"), false: "the client's"}[c.salted]; v.CacheSalt != want {
			t.Errorf("%s has the salt %q", c.path, v.CacheSalt)
		}
		if err == nil {
			continue
		}
		if e := refused(t, err); e.Status != 403 || !strings.Contains(e.Message, c.why) || !strings.Contains(e.Message, c.path) {
			t.Errorf("%s: %+v", c.path, e)
		}
	}
}
