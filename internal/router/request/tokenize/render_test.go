package tokenize

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
)

func TestRender(t *testing.T) {
	t.Parallel()
	var path, body string
	calls := 0
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		path, body = r.URL.Path, string(b)
		calls++
		_, _ = io.WriteString(w, `{"request_id":"r","token_ids":[1,5,5,2,6],"features":{"mm_hashes":{"video":["v"],"image":["i"]},"mm_placeholders":{"video":[{"offset":4,"length":1}],"image":[{"offset":1,"length":2}]},"kwargs_data":null}}`)
	}))
	defer engine.Close()
	for _, c := range []struct{ model, want string }{
		{"", `{"messages":[],"tool_choice":"auto","mm_payload":"none","return_mm_kwargs":false,"model":"a\"b"}`},
		{"m", `{"messages":[],"tool_choice":"auto","mm_payload":"none","return_mm_kwargs":false,"model":"m"}`},
	} {
		e := NewEngine(EngineOptions{Client: engine.Client(), BaseURL: engine.URL, Model: c.model, CacheBytes: 1 << 20})
		in := []byte(`{"stream":true,"model":"a\"b","messages":[],"kv_transfer_params":{"x":1},"tool_choice":"auto","n":2}`)
		r, err := e.Render(t.Context(), "/v1/chat/completions", in, true)
		if err != nil || path != "/v1/chat/completions/render" || body != c.want {
			t.Fatalf("%s %s, %v", path, body, err)
		}
		want := []Media{{"image", blockhash.Media{ID: "i", Offset: 1, Length: 2}}, {"video", blockhash.Media{ID: "v", Offset: 4, Length: 1}}}
		if !slices.Equal(r.IDs, []uint32{1, 5, 5, 2, 6}) || !slices.Equal(r.Media, want) || r.Cached {
			t.Errorf("%+v", r)
		}
		if r, err = e.Render(t.Context(), "/v1/chat/completions", in, true); err != nil || !r.Cached || !slices.Equal(r.Media, want) {
			t.Errorf("again: %+v, %v", r, err)
		}
		e.Close()
	}
	e := NewEngine(EngineOptions{Client: engine.Client(), BaseURL: engine.URL, CacheBytes: 1 << 20})
	defer e.Close()
	calls = 0
	for range 2 {
		if _, err := e.Render(t.Context(), "/v1/messages", []byte(`{"model":"m"}`), false); err != nil {
			t.Fatal(err)
		}
	}
	if calls != 2 {
		t.Errorf("%d calls for media that are fetched", calls)
	}
	if _, err := e.Render(t.Context(), "/v1/messages", []byte(`[`), true); !errors.Is(err, ErrBadRequest) {
		t.Errorf("no request: %v", err)
	}
}

// rendered prompts that are refused, and one that is not.
var renders = []struct {
	answer string
	ok     bool
}{
	{`{"token_ids":[1,2]}`, true},
	{`{"token_ids":[1,2],"features":null}`, true},
	{`{"token_ids":[1,2],"features":{"mm_hashes":{},"mm_placeholders":{}}}`, true},
	{`{"token_ids":[1,2],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":0,"length":2}]}}}`, true},
	{`{}`, false},
	{`[]`, false},
	{`{"token_ids":[-1]}`, false},
	{`{"token_ids":[1,2],"features":[]}`, false},
	{`{"token_ids":[1,2],"features":{"mm_hashes":{"image":["a"]}}}`, false},
	{`{"token_ids":[1,2],"features":{"mm_hashes":{"image":[""]},"mm_placeholders":{"image":[{"offset":0,"length":1}]}}}`, false},
	{`{"token_ids":[1,2],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":1,"length":2}]}}}`, false},
	{`{"token_ids":[1,2],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":-1,"length":2}]}}}`, false},
	{`{"token_ids":[1,2],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":1,"length":9223372036854775807}]}}}`, false},
	{`{"token_ids":[1,2],"features":{"mm_hashes":{"image":["a"],"audio":["b"]},"mm_placeholders":{"image":[{"offset":0,"length":2}],"audio":[{"offset":1,"length":1}]}}}`, false},
}

func TestRendered(t *testing.T) {
	t.Parallel()
	for _, c := range renders {
		if _, err := parseRendered([]byte(c.answer)); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.answer, err)
		}
	}
}

// FuzzRendered: whatever an engine answers, media have a name and stand among the ids, in order.
func FuzzRendered(f *testing.F) {
	for _, c := range renders {
		f.Add([]byte(c.answer))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := parseRendered(b)
		if err != nil && (a.ids != nil || a.media != nil) {
			t.Fatalf("%+v with %v", a, err)
		}
		end := 0
		for _, m := range a.media {
			if m.ID == "" || m.Offset < end || m.Length < 1 {
				t.Fatalf("%+v", a.media)
			}
			end = m.Offset + m.Length
		}
		if end > len(a.ids) {
			t.Fatalf("media up to %d of %d ids", end, len(a.ids))
		}
	})
}
