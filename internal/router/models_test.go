package router_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// everyAPI are requests to the endpoints that have a model, without it.
var everyAPI = map[string]string{
	"/v1/chat/completions":      `{"messages":[{"role":"user","content":"hi"}]}`,
	"/v1/completions":           `{"prompt":"hi"}`,
	"/v1/responses":             `{"input":"hi"}`,
	"/v1/messages":              `{"max_tokens":1,"messages":[{"role":"user","content":"hi"}]}`,
	"/v1/messages/count_tokens": `{"messages":[{"role":"user","content":"hi"}]}`,
	"/inference/v1/generate":    `{"token_ids":[1,2]}`,
	"/generate":                 `{"text":"hi"}`,
	"/v1/embeddings":            `{"input":"hi"}`,
	"/v2/embed":                 `{"texts":["hi"]}`,
	"/v1/rerank":                `{"query":"q","documents":["d"]}`,
	"/v1/score":                 `{"text_1":"a","text_2":"b"}`,
	"/classify":                 `{"input":"hi"}`,
	"/pooling":                  `{"input":"hi"}`,
	"/tokenize":                 `{"prompt":"hi"}`,
	"/detokenize":               `{"tokens":[1]}`,
	"/v1/audio/speech":          `{"input":"hi"}`,
	"/v1/audio/transcriptions":  "",
	"/v1/audio/translations":    "",
}

// withModel is the request to a path with a JSON value as its model, "" for no such member.
func withModel(t *testing.T, path, value string) (body []byte, contentType string) {
	t.Helper()
	if in := everyAPI[path]; in != "" {
		if value != "" {
			in = `{"model":` + value + `,` + in[1:]
		}
		return []byte(in), "application/json"
	}
	var b bytes.Buffer
	mw := multipart.NewWriter(&b)
	if value != "" && value != "null" {
		var name string
		if err := json.Unmarshal([]byte(value), &name); err != nil {
			t.Fatal(err)
		}
		_ = mw.WriteField("model", name)
	}
	part, err := mw.CreateFormFile("file", "a.wav")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = part.Write([]byte("RIFF"))
	_ = mw.Close()
	return b.Bytes(), mw.FormDataContentType()
}

// modelOf is the model that an engine was asked for, and the file of a form.
func modelOf(t *testing.T, c *tapped) string {
	t.Helper()
	if !strings.HasPrefix(c.path, "/v1/audio/tran") {
		return rawjson.Value(c.body).Get("model").String()
	}
	_, params, err := mime.ParseMediaType(c.header.Get("Content-Type"))
	if err != nil {
		t.Fatal(err)
	}
	f, err := multipart.NewReader(bytes.NewReader(c.body), params["boundary"]).ReadForm(1 << 20)
	if err != nil {
		t.Fatalf("%v in %q", err, c.body)
	}
	if len(f.Value["model"]) != 1 || len(f.File["file"]) != 1 {
		t.Fatalf("the form has %v and %v", f.Value, f.File)
	}
	file, err := f.File["file"][0].Open()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if b, err := io.ReadAll(file); err != nil || string(b) != "RIFF" {
		t.Fatalf("the file is %q, %v", b, err)
	}
	return f.Value["model"][0]
}

// answering has engines answer everything, so that what they get is seen on every path.
func (p *tap) answering() {
	p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		// Whether it is a leg or the router's own question, an answer like this does no harm.
		c := tapped{path: q.URL.Path}
		if !c.generation() && q.Method == http.MethodGet || q.URL.Path == "/tokenize" && q.Header.Get("X-Request-Id") == "" {
			return false
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"ok":true}`))
		return true
	})
}

// TestModelsOfRequests: what requests that name a model, another one or none are served by.
func TestModelsOfRequests(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1a:profile=instant,model=red,aliases=rouge,loras=navy|sky+1a:profile=instant,model=blue")
	p.answering()
	for _, c := range []struct {
		name string
		test func(*testing.T, *rig, *tap)
	}{{"none of several", noModelOfSeveral}, {"the default", defaultModel}, {"resolved by engines", resolvedByEngines}, {"loaded since", adapterLoadedSince}, {"none of one", noModelOfOne}} {
		t.Run(c.name, func(t *testing.T) {
			r.set(func(*settings.Config) {})
			c.test(t, r.in(t), p)
		})
	}
}

// adapterLoadedSince: a name that no worker has reported is looked for once more, so that an
// adapter which an engine has loaded at run time serves from then on.
func adapterLoadedSince(t *testing.T, r *rig, p *tap) {
	body := []byte(`{"model":"late","prompt":"x"}`)
	r.send(http.MethodPost, "/v1/completions", body).refused(t, http.StatusNotFound, "model_not_found")
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case q.URL.Path == "/v1/models" && strings.HasSuffix(engine, "-1"):
			_, _ = w.Write([]byte(`{"object":"list","data":[{"id":"blue","owned_by":"vllm"},{"id":"late","owned_by":"vllm","parent":"blue"}]}`))
		case q.URL.Path == "/v1/completions":
			_, _ = w.Write([]byte(`{"by":"` + engine + `"}`))
		default:
			return false
		}
		return true
	})
	defer p.answering()
	r.eventually("the adapter", func() error { // the fleet is read again a few seconds after the first look
		a, err := r.try(t.Context(), http.MethodPost, "/v1/completions", body)
		if err == nil && (a.status != http.StatusOK || !strings.Contains(a.String(), `-1"`)) {
			err = errors.New(a.String())
		}
		return err
	})
}

// engineCall is the call that the newest request has become.
func engineCall(t *testing.T, p *tap, path string) *tapped {
	t.Helper()
	calls := slices.DeleteFunc(p.callsOf(path), func(c *tapped) bool { return c.header.Get("X-Request-Id") == "" })
	if len(calls) != 1 {
		t.Fatalf("%s: %d calls of engines", path, len(calls))
	}
	return calls[0]
}

// noModel are the ways of naming none.
var noModel = []string{"", "null", `""`}

// noModelOfSeveral: with several models a request that names none is refused on every
// API, streamed or not, and no engine gets it; the error has the names.
func noModelOfSeveral(t *testing.T, r *rig, p *tap) {
	p.reset()
	for path := range everyAPI {
		for _, value := range noModel {
			for _, stream := range []string{"", `"stream":true,`} {
				body, kind := withModel(t, path, value)
				if stream != "" && body[0] == '{' {
					body = append([]byte("{"+stream), body[1:]...)
				}
				a := r.send(http.MethodPost, path, body, "Content-Type", kind)
				if param := rawjson.Value(a.body).Get("error.param").String(); a.status != http.StatusBadRequest || param != "model" && !strings.HasPrefix(path, "/v1/messages") {
					t.Errorf("%s, model %s: %s, want 400 of the model", path, value, a)
				}
				if !strings.Contains(a.String(), "blue") || !strings.Contains(a.String(), "red") {
					t.Errorf("%s, model %s: %s lacks the names", path, value, a)
				}
			}
		}
		if n := len(slices.DeleteFunc(p.callsOf(path), func(c *tapped) bool { return c.header.Get("X-Request-Id") == "" })); n != 0 {
			t.Errorf("%s: %d calls of engines", path, n)
		}
	}
	// What has no model is answered as before.
	if a := r.send(http.MethodGet, "/version", nil); a.status != http.StatusOK {
		t.Errorf("/version: %s", a)
	}
	if a := r.send(http.MethodGet, "/v1/responses/resp_1", nil); a.status != http.StatusNotFound || rawjson.Value(a.body).Get("error.param").String() == "model" {
		t.Errorf("a stored response: %s", a)
	}
	if _, err := r.Admin.Route(t.Context(), routeOf(t, "/v1/completions", object{"prompt": "hi"})); err == nil || !strings.Contains(err.Error(), "names no model") {
		t.Errorf("a dry run: %v", err)
	}
}

// noModelOfOne: with one model a request that names none is for it, and its engine is
// asked for it by name. Adapters are models of their own, which such a request does not mean.
func noModelOfOne(t *testing.T, r *rig, p *tap) {
	if err := r.Admin.RemoveWorker(t.Context(), "aggregated-1"); err != nil { // that has blue
		t.Fatal(err)
	}
	for path := range everyAPI {
		for _, value := range noModel {
			p.reset()
			body, kind := withModel(t, path, value)
			if a := r.send(http.MethodPost, path, body, "Content-Type", kind); a.status != http.StatusOK {
				t.Errorf("%s, model %s: %s", path, value, a)
				continue
			}
			want := "red"
			if path == "/generate" {
				want = "" // it has no such member
			}
			if got := modelOf(t, engineCall(t, p, path)); got != want {
				t.Errorf("%s, model %s: the engine is asked for %q", path, value, got)
			}
		}
	}
	a := r.post("/v1/completions", object{"prompt": "hi"})
	if c := r.receipt(a.header.Get("X-Dynctl-Decision")); c.Model != "red" || !slices.Contains(c.Notes, "no model in the request; red is the only one served") {
		t.Errorf("the receipt has model %s and notes %q", c.Model, c.Notes)
	}
	dry, err := r.Admin.Route(t.Context(), routeOf(t, "/v1/completions", object{"prompt": "hi"}))
	if err != nil || rawjson.Value(dry.Receipt).Get("model").String() != "red" || !strings.Contains(dry.Text, "no model in the request; red is the only one served") {
		t.Errorf("a dry run: %+v, %v", dry, err)
	}
}

// defaultModel: it serves requests that name no model or an unknown one, on every API,
// and the engine is asked for it by its own name. So are those of aliases and patterns.
func defaultModel(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) {
		c.Routing.DefaultModel = "azure" // an alias
		c.Aliases = []settings.Alias{{Name: "azure", Model: "blue"}, {Name: "claude-*", Model: "red"}, {Name: "claude-haiku-*", Model: "blue"}}
	})
	for path := range everyAPI {
		for value, want := range map[string]string{
			"": "blue", "null": "blue", `""`: "blue", `"gpt-9"`: "blue", `"azure"`: "blue", `"red"`: "red", `"claude-opus-4-1[1m]"`: "red", `"claude-haiku-4-5"`: "blue",
		} {
			p.reset()
			body, kind := withModel(t, path, value)
			if a := r.send(http.MethodPost, path, body, "Content-Type", kind); a.status != http.StatusOK {
				t.Errorf("%s, model %s: %s", path, value, a)
				continue
			}
			c := engineCall(t, p, path)
			if path == "/generate" && slices.Contains(noModel, value) {
				want = ""
			}
			engine := map[string]string{"red": "aggregated-0", "blue": "aggregated-1"}[want]
			if got := modelOf(t, c); got != want || want != "" && c.engine != engine {
				t.Errorf("%s, model %s: %s is asked for %q, want %s for %q", path, value, c.engine, got, engine, want)
			}
		}
	}
	for value, want := range map[string]string{
		"":                   "no model in the request; served by routing.default_model blue",
		`"gpt-9"`:            `unknown model "gpt-9"; served by routing.default_model blue`,
		`"claude-haiku-4-5"`: `model "claude-haiku-4-5" matches the alias "claude-haiku-*"; served by blue`,
	} {
		body, _ := withModel(t, "/v1/completions", value)
		a := r.send(http.MethodPost, "/v1/completions", body)
		if c := r.receipt(a.header.Get("X-Dynctl-Decision")); c.Model != "blue" || !slices.Equal(c.Notes, []string{want}) {
			t.Errorf("model %s: the receipt has model %s and notes %q", value, c.Model, c.Notes)
		}
	}
	var names []string
	for m := range rawjson.Value(r.send(http.MethodGet, "/v1/models", nil).body).Get("data").Elements() {
		names = append(names, m.Get("id").String())
	}
	if slices.Sort(names); fmt.Sprint(names) != "[azure blue navy red rouge sky]" {
		t.Errorf("the models are %v", names)
	}
}

// resolvedByEngines: with routing.any_model a name that no engine lists goes to the engines as it
// is, on every API, streamed or not, and the default is for requests without a name.
func resolvedByEngines(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) { c.Routing.AnyModel, c.Routing.DefaultModel = true, "blue" })
	for path := range everyAPI {
		for value, want := range map[string]string{`"late-lora"`: "late-lora", `"navy"`: "navy", "": "blue"} {
			for _, stream := range []string{"", `"stream":true,`} {
				p.reset()
				body, kind := withModel(t, path, value)
				if stream != "" && body[0] != '{' {
					continue // a form
				}
				if body[0] == '{' {
					body = append([]byte("{"+stream), body[1:]...)
				}
				if a := r.send(http.MethodPost, path, body, "Content-Type", kind); a.status != http.StatusOK {
					t.Errorf("%s%s, model %s: %s", path, stream, value, a)
					continue
				}
				if path == "/generate" && value == "" {
					continue // it has no such member
				}
				if got := modelOf(t, engineCall(t, p, path)); got != want {
					t.Errorf("%s%s, model %s: the engine is asked for %q, want %q", path, stream, value, got, want)
				}
			}
		}
	}
}

// TestPairsServeOneModel: two models, each with a prefill and a decode worker. Whichever
// worker drains or fails, each client gets the answer of its own model.
func TestPairsServeOneModel(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant,model=red+1p1d:profile=instant,model=blue,loras=navy|sky", func(c *settings.Config) {
		c.Routing.Policy, c.Routing.DefaultModel, c.Routing.Seed = "random", "blue", 7
		c.Aliases = []settings.Alias{{Name: "r*", Model: "red"}}
	})
	t.Run("aliases and adapters", func(t *testing.T) { aliasesAndAdapters(t, r.in(t), p) })
	r.set(func(*settings.Config) {})
	check := func(what string) {
		t.Helper()
		p.reset()
		for i, model := range []string{"", "red", "rouge", "blue", "new"} {
			body := object{"prompt": ids(200, i), "max_tokens": 2}
			want := "blue"
			if model != "" {
				body["model"] = model
			}
			if strings.HasPrefix(model, "r") {
				want = "red"
			}
			if got := r.post("/v1/completions", body).completion(t).Model; got != want {
				t.Errorf("%s: model %q is answered by %s", what, model, got)
			}
		}
		for _, l := range p.legs() {
			w := r.worker(l.engine)
			if got := rawjson.Value(l.body).Get("model").String(); !slices.Contains(w.Models, got) {
				t.Errorf("%s: %s, which has %v, is asked for %q", what, l.engine, w.Models, got)
			}
		}
	}
	check("all are there")
	for _, name := range []string{"prefill-0", "prefill-1"} {
		if _, err := r.Admin.DrainWorker(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		check(name + " drains")
		if _, err := r.Admin.ResumeWorker(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Sim.Named("prefill-1").SetFaults(fault.Set{ErrorRate: 1}); err != nil {
		t.Fatal(err)
	}
	check("prefill-1 fails")
}

// aliasesAndAdapters: several models behind one router, each on its own
// workers, under its own names.
func aliasesAndAdapters(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) {
		c.Routing.DefaultModel, c.Aliases = "", []settings.Alias{{Name: "gpt-x", Model: "red"}}
	})
	ask := func(model string) *answer {
		return r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": model, "prompt": ids(64, 901), "max_tokens": 2}))
	}
	for model, on := range map[string]string{"red": "decode-0", "gpt-x": "decode-0", "blue": "decode-1", "navy": "decode-1"} {
		p.reset()
		if a := ask(model); a.status != 200 || !strings.HasPrefix(a.header.Get("X-Dynctl-Worker"), on) {
			t.Errorf("%s: %s on %s", model, a, a.header.Get("X-Dynctl-Worker"))
		}
		for _, l := range p.legs() {
			if m := rawjson.Value(l.body).Get("model").String(); model == "gpt-x" && m != "red" {
				t.Errorf("the alias went to the engine as %q", m)
			}
		}
	}
	ask("green").refused(t, http.StatusNotFound, "model_not_found")
	var names []string
	for m := range rawjson.Value(r.send(http.MethodGet, "/v1/models", nil).body).Get("data").Elements() {
		names = append(names, m.Get("id").String())
	}
	slices.Sort(names)
	if got := strings.Join(names, " "); got != "blue gpt-x navy red sky" {
		t.Errorf("models: %s", got)
	}
	if a := r.send(http.MethodGet, "/v1/models/navy", nil); a.status != 200 || rawjson.Value(a.body).Get("id").String() != "navy" {
		t.Errorf("%s", a)
	}
	r.send(http.MethodGet, "/v1/models/nobody", nil).refused(t, http.StatusNotFound, "model_not_found")
	// An adapter's blocks are its own: the base model's cache is no use to it.
	r.synced()
	c := r.receipt(ask("blue").header.Get("X-Dynctl-Decision"))
	if c.Predicted.CachedTokens == 0 {
		t.Error("the base model finds nothing of its own prompt")
	}
	c = r.receipt(ask("sky").header.Get("X-Dynctl-Decision"))
	if c.Predicted.CachedTokens != 0 {
		t.Errorf("an adapter is promised %d tokens of another one's cache", c.Predicted.CachedTokens)
	}
}
