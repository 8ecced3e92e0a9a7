package disagg

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

func TestLMCacheSpec(t *testing.T) {
	reg, err := ParseDecoderRegistry([]byte(`{"http://127.0.0.1:8108/":{"receiver_host":"d0","receiver_init_port":[1,2],"receiver_alloc_port":[3,4]}}`))
	if err != nil {
		t.Fatal(err)
	}
	ask := func(o Options, d Dispatch) string {
		t.Helper()
		tr := begin(t, workers.ConnectorLMCache, o, d)
		var v struct {
			Params json.RawMessage `json:"kv_transfer_params"`
		}
		if err := json.Unmarshal([]byte(spliced(t, api.Completion, `{"prompt":"a","min_tokens":3}`, tr.PrefillEdits())), &v); err != nil {
			t.Fatal(err)
		}
		return string(v.Params)
	}
	d := dispatch(workers.ConnectorLMCache) // decode-0 is at :8108
	const of = `{"ret_first_tok":false,"disagg_spec":{"req_id":"810f561d65b277a9","receiver_host":%s}}`
	registered := fmt.Sprintf(of, `"d0","receiver_init_port":[1,2],"receiver_alloc_port":[3,4]`)
	own := fmt.Sprintf(of, `"own","receiver_init_port":[7300],"receiver_alloc_port":[7400]`)
	other := d
	other.Decode.Worker = worker("decode-10", workers.Decode, workers.ConnectorLMCache, 1)
	other.Decode.Worker.LMCache = &workers.LMCacheDecoder{Host: "own", InitPorts: []int{7300}, AllocPorts: []int{7400}}
	t.Run("22: nixl has no spec", func(t *testing.T) {
		for _, e := range begin(t, workers.ConnectorNIXL, Options{Decoders: reg}, d).PrefillEdits() {
			if strings.Contains(string(e.Value), "disagg_spec") {
				t.Errorf("%s: %s", e.Key, e.Value)
			}
		}
	})
	t.Run("23: the worker's own without a registry", func(t *testing.T) { sameJSON(t, own, ask(Options{}, other)) })
	t.Run("24 and 28: the chosen decoder's", func(t *testing.T) { sameJSON(t, registered, ask(Options{Decoders: reg}, d)) })
	t.Run("25: values are copied", func(t *testing.T) {
		s, err := reg.Spec(d.Decode.Worker)
		if err != nil {
			t.Fatal(err)
		}
		s.InitPorts[0], s.Host = 99, "changed"
		sameJSON(t, registered, ask(Options{Decoders: reg}, d))
	})
	t.Run("26: an unknown decoder's own", func(t *testing.T) { sameJSON(t, own, ask(Options{Decoders: reg}, other)) })
	t.Run("no receiver at all", func(t *testing.T) {
		c, err := NewConnector(workers.ConnectorLMCache, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Begin(d); err == nil || !strings.Contains(err.Error(), "decode-0") {
			t.Errorf("got %v, want an error that names the worker", err)
		}
	})
}

func TestLMCacheFirstToken(t *testing.T) {
	d := dispatch(workers.ConnectorLMCache)
	d.Decode.Worker.LMCache = &workers.LMCacheDecoder{Host: "d", InitPorts: []int{1}, AllocPorts: []int{2}}
	d.Facts.TokenIDs, d.Facts.MinTokens = []uint32{5, 6, 4294967295}, 3
	const body = `{"prompt":"abc","max_tokens":8,"min_tokens":3,"stream":true}`
	answer := func(params, finish string) []byte {
		return []byte(`{"id":"x","choices":[{"text":" hi","finish_reason":"` + finish + `"}],"kv_transfer_params":` + params + `}`)
	}
	tr := begin(t, workers.ConnectorLMCache, Options{}, d)
	sameJSON(t, `{"prompt":[5,6,4294967295],"max_tokens":1,"stream":false,"kv_transfer_params":{"ret_first_tok":true,"disagg_spec":{"req_id":"810f561d65b277a9","receiver_host":"d","receiver_init_port":[1],"receiver_alloc_port":[2]}}}`,
		spliced(t, api.Completion, body, tr.PrefillEdits()))
	if err := tr.CheckPrefill(answer(`{"first_tok":77}`, "length")); err != nil {
		t.Fatal(err)
	}
	sameJSON(t, `{"prompt":[5,6,4294967295,77],"max_tokens":7,"min_tokens":2,"stream":true}`, decodeBody(t, tr, api.Completion, body))
	if f, ok := tr.FirstToken(); !ok || f != (FirstToken{" hi"}) {
		t.Errorf("first token %+v, %v", f, ok)
	}
	for _, tt := range []struct {
		name, params, finish string
		want                 error
	}{
		{"missing", `null`, "length", ErrMissingParams},
		{"no token", `{}`, "length", ErrMissingParams},
		{"a string", `{"first_tok":"77"}`, "length", ErrBadParams},
		{"negative", `{"first_tok":-1}`, "length", ErrBadParams},
		{"ended at once", `{"first_tok":77}`, "stop", nil},
	} {
		tr := begin(t, workers.ConnectorLMCache, Options{}, d)
		if err := tr.CheckPrefill(answer(tt.params, tt.finish)); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
		if _, ok := tr.FirstToken(); ok {
			t.Errorf("%s: there is a first token", tt.name)
		}
	}
	// D3, D4: without a limit of its own, in a chat, or with logprobs, the
	// decode leg gets the client's body and gives every token.
	for name, change := range map[string]func(*api.Facts){
		"no max_tokens": func(f *api.Facts) { f.MaxTokens = -1 }, "max_tokens 1": func(f *api.Facts) { f.MaxTokens = 1 }, "chat": func(f *api.Facts) { f.Kind = api.Chat },
		"logprobs": func(f *api.Facts) { f.Logprobs = true }, "echo": func(f *api.Facts) { f.Echo = true }, "no ids": func(f *api.Facts) { f.TokenIDs = nil },
		"usage at the end of the stream": func(f *api.Facts) { f.StreamUsage = true },
	} {
		x := d
		change(&x.Facts)
		tr := begin(t, workers.ConnectorLMCache, Options{}, x)
		if err := tr.CheckPrefill(answer(`null`, "length")); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if edits, err := tr.DecodeEdits(); err != nil || len(edits) != 0 {
			t.Errorf("%s: decode edits %v, %v", name, edits, err)
		}
	}
}

func TestParseDecoderRegistryErrors(t *testing.T) {
	for text, want := range map[string]string{
		`[]`:                                   "decoder registry",
		`{} {}`:                                "follows",
		`{"u":{"receiver_host":"h","port":1}}`: "unknown field",
		`{"u":{"receiver_init_port":[1],"receiver_alloc_port":[2]}}`:                                "no receiver_host",
		`{"u":{"receiver_host":"h","receiver_init_port":[1],"receiver_alloc_port":[]}}`:             "1 init ports and 0 alloc ports",
		`{"u":{"receiver_host":"h","receiver_init_port":[70000],"receiver_alloc_port":[1]}}`:        "70000 is not a port",
		`{"a":{"receiver_host":""},"b":{"receiver_host":"h","receiver_init_port":[0,1]}}`:           "a: no receiver_host",
		`{"a":{"receiver_host":"h","receiver_init_port":["x"],"receiver_alloc_port":["receiver"]}}`: "decoder registry",
	} {
		if _, err := ParseDecoderRegistry([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func FuzzParseDecoderRegistry(f *testing.F) {
	f.Add([]byte(`{"http://d:1":{"receiver_host":"h","receiver_init_port":[1],"receiver_alloc_port":[2]}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := ParseDecoderRegistry(text)
		if err != nil {
			return
		}
		for u, s := range r.byURL {
			if checkSpec(&s) != nil {
				t.Errorf("%q: %+v passed", u, s)
			}
		}
	})
}
