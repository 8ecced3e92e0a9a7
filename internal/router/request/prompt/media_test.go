package prompt

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/media"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestMedia: the engine says where images stand and how it names them. Where it does not, the
// prompt is estimated with what was learned, and the engine is left in peace for a while.
func TestMedia(t *testing.T) {
	var asked []string
	status := http.StatusForbidden
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		asked = append(asked, r.URL.Path)
		var q map[string]any
		if err := json.Unmarshal(body, &q); err != nil || q["model"] != "m" || q["stream"] != nil || q["kv_transfer_params"] != nil || q["return_mm_kwargs"] != false || q["mm_payload"] != "none" {
			t.Errorf("%s: %.200s, %v", r.URL.Path, body, err)
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, `{"token_ids":[1,2,9,9,9,3,8,8,4],"features":{"mm_hashes":{"audio":["s"],"image":["i"]},"mm_placeholders":{"image":[{"offset":2,"length":3}],"audio":[{"offset":6,"length":2}]}}}`)
	}))
	defer engine.Close()
	var kinds []string
	registry := workers.NewRegistry(func(eventlog.Event) {})
	table := media.NewTable()
	s, err := New(Options{Mode: "engine", Registry: registry, CacheBytes: 1 << 20, Media: table, Event: func(e eventlog.Event) { kinds = append(kinds, e.Kind) }})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	spec, err := workers.ParseSpec(workers.Decode, engine.URL+",name=d0,model=m,engine=vllm")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := registry.Apply("flag", []workers.Spec{spec}); err != nil {
		t.Fatal(err)
	}
	w, _ := registry.Snapshot().Worker("d0")
	w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	find := func(kind api.Kind, url, more string) Prompt {
		t.Helper()
		var v api.View
		body := `{"model":"alias","stream":true,"kv_transfer_params":{},"messages":[{"role":"user","content":[{"type":"text","text":"twelve chars"},{"type":"image_url","image_url":{"url":"` + url + `"}},{"type":"input_audio","input_audio":{"data":"YQ==","format":"wav"}}]}]` + more + `}`
		if err := v.Parse([]byte(body), kind, api.Limits{}); err != nil {
			t.Fatal(err)
		}
		defer v.Release()
		return s.Find(t.Context(), &v, "m", registry.Snapshot().Model("m"), nil)
	}
	const data = "data:image/png;base64,aaaa"
	for range 2 {
		p := find(api.Chat, data, "")
		if p.Source != route.FromEstimate || p.ISL != 3+2*media.FirstGuess || p.IDs != nil || p.MediaTokens() != 2*media.FirstGuess || p.Text != 3 || !strings.Contains(p.Note, "403") {
			t.Errorf("an engine without the page: %+v", p)
		}
	}
	if len(asked) != 1 || !slices.Equal(kinds, []string{"tokenizer_degraded"}) || len(s.Troubles()) != 1 {
		t.Errorf("asked %q, events %q, troubles %q", asked, kinds, s.Troubles())
	}
	s.model("m").renders = rests{}
	status = http.StatusOK
	want := []blockhash.Media{{ID: "i", Offset: 2, Length: 3}, {ID: "s", Offset: 6, Length: 2}}
	if p := find(api.Chat, "http://host/picture", ""); p.Source != route.FromEngine || p.ISL != 9 || len(p.IDs) != 9 || !slices.Equal(p.Media, want) || p.Each != nil {
		t.Errorf("a rendered prompt: %+v", p)
	}
	if !slices.Equal(kinds, []string{"tokenizer_degraded", "tokenizer_recovered"}) || len(s.Troubles()) != 0 {
		t.Errorf("events %q, troubles %q", kinds, s.Troubles())
	}
	if n, learned := table.Expect("m", api.MediaImage); n != 3 || !learned {
		t.Errorf("an image is expected to have %d tokens", n)
	}
	for _, c := range []struct {
		kind      api.Kind
		url, more string
		asks      bool
		path      string
	}{
		{api.Chat, "http://host/picture", "", true, "/v1/chat/completions/render"}, // it may be another one now
		{api.Chat, data, "", true, "/v1/chat/completions/render"},
		{api.Chat, data, "", false, ""},
		{api.Messages, data, `,"max_tokens":3`, true, "/v1/messages/render"},
		{api.Chat, data, `,"mm_processor_kwargs":{"a":1}`, true, "/v1/chat/completions/render"},
		{api.Chat, data, `,"prompt_embeds":"x"`, false, ""},
	} {
		before := len(asked)
		find(c.kind, c.url, c.more)
		if (len(asked) > before) != c.asks || c.asks && asked[before] != c.path {
			t.Errorf("%s%s: asked %q", c.url, c.more, asked[before:])
		}
	}
	s.o.Media = table
	status = http.StatusBadRequest
	if p := find(api.Chat, "data:image/png;base64,bbbb", ""); p.ISL != 3+3+2 || !strings.Contains(p.Note, "400") {
		t.Errorf("a refused prompt: %+v", p)
	}
	if len(s.Troubles()) != 0 {
		t.Errorf("one prompt was refused, not all: %q", s.Troubles())
	}
}

// TestMediaByUUID: where no engine renders prompts, a client's names of all items are those of the
// engine, and the items stand where the placeholders of the engine's events are. Where
// one name or place is not certain, the prompt is estimated.
func TestMediaByUUID(t *testing.T) {
	const tokens = `{"count":12,"max_model_len":64,"tokens":[1,2,9,9,9,3,9,9,4,5,6,7]}`
	asked, answer := 0, tokens
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/tokenize" {
			w.WriteHeader(http.StatusForbidden) // no --enable-scale-out
			return
		}
		asked++
		_, _ = io.WriteString(w, answer)
	}))
	defer engine.Close()
	var kinds []string
	registry := workers.NewRegistry(func(eventlog.Event) {})
	table := media.NewTable()
	token, known := uint32(9), true
	s, err := New(Options{
		Mode: "engine", Registry: registry, Media: table, Event: func(e eventlog.Event) { kinds = append(kinds, e.Kind) },
		Placeholder: func(*workers.Worker) (uint32, bool) { return token, known },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	spec, err := workers.ParseSpec(workers.Decode, engine.URL+",name=d0,model=m,engine=vllm")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := registry.Apply("flag", []workers.Spec{spec}); err != nil {
		t.Fatal(err)
	}
	w, _ := registry.Snapshot().Worker("d0")
	w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	find := func(parts, more string) Prompt {
		t.Helper()
		var v api.View
		if err := v.Parse([]byte(`{"model":"m","messages":[{"role":"user","content":[`+parts+`]}]`+more+`}`), api.Chat, api.Limits{}); err != nil {
			t.Fatal(err)
		}
		defer v.Release()
		return s.Find(t.Context(), &v, "m", registry.Snapshot().Model("m"), nil)
	}
	const (
		a     = `{"type":"image_url","image_url":{"url":"http://host/a"},"uuid":"a"}`
		b     = `{"type":"image_url","image_url":{"url":"data:image/png;base64,bbbb"},"uuid":"b"}`
		bare  = `{"type":"image_url","image_url":{"url":"data:image/png;base64,cccc"}}`
		sound = `{"type":"input_audio","input_audio":{"data":"YQ==","format":"wav"},"uuid":"s"}`
	)
	p := find(a+","+b, "")
	want := []blockhash.Media{{ID: "a", Offset: 2, Length: 3}, {ID: "b", Offset: 6, Length: 2}}
	if p.Source != route.FromEngine || p.ISL != 12 || len(p.IDs) != 12 || !slices.Equal(p.Media, want) || p.Note != "" || len(kinds) != 0 {
		t.Errorf("with names: %+v, events %q", p, kinds)
	}
	if n, learned := table.Expect("m", api.MediaImage); !learned || n != 3 {
		t.Errorf("an image is expected to have %d tokens", n)
	}
	for _, c := range []struct {
		name, parts, more string
		asks              bool
	}{
		{"one item without a name", a + "," + bare, "", false},
		{"two kinds", a + "," + sound, "", false},
		{"other preparation", a + "," + b, `,"mm_processor_kwargs":{"a":1}`, false},
		{"a long name", strings.Replace(a, `"uuid":"a"`, `"uuid":"`+strings.Repeat("a", maxUUID+1)+`"`, 1) + "," + b, "", false},
		{"fewer items than runs", a, "", true},
		{"more items than runs", a + "," + b + "," + a, "", true},
	} {
		before := asked
		if p := find(c.parts, c.more); p.Source != route.FromEstimate || p.IDs != nil || p.Media != nil || (asked > before) != c.asks {
			t.Errorf("%s: %+v, asked %d times", c.name, p, asked-before)
		}
	}
	before := asked
	known = false
	if p := find(a+","+b, ""); p.Source != route.FromEstimate || asked != before {
		t.Errorf("no placeholder is known: %+v", p)
	}
	known, answer = true, `{"count":5,"tokens":[1,2,3,4,5]}`
	if p := find(b+","+b, ""); p.Source != route.FromEstimate {
		t.Errorf("no placeholder among the ids: %+v", p)
	}
	if !slices.Equal(kinds, []string{"tokenizer_degraded"}) {
		t.Errorf("events %q", kinds)
	}
}
