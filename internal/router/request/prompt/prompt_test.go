package prompt

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/media"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestFind: ids come from the client, else from an engine, and where there are
// none the length is estimated and the note says why.
func TestFind(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/tokenize" || q.Header.Get("Authorization") != "Bearer key" {
			t.Errorf("%s %s %s", q.Method, q.URL.Path, q.Header.Get("Authorization"))
		}
		_, _ = w.Write([]byte(`{"count":3,"max_model_len":4096,"tokens":[7,8,9]}`))
	}))
	defer engine.Close()
	var kinds []string
	registry := workers.NewRegistry(func(eventlog.Event) {})
	stage := func(mode string) *Stage {
		t.Helper()
		s, err := New(Options{Mode: mode, Registry: registry, Event: func(e eventlog.Event) { kinds = append(kinds, e.Kind) }})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
		return s
	}
	find := func(s *Stage, body string) Prompt {
		t.Helper()
		var v api.View
		if err := v.Parse([]byte(body), api.Completion, api.Limits{}); err != nil {
			t.Fatal(err)
		}
		defer v.Release()
		return s.Find(t.Context(), &v, "m", registry.Snapshot().Model("m"), nil)
	}
	const text = `{"model":"m","prompt":"twelve chars"}`
	s := stage("engine")
	if p := find(s, `{"model":"m","prompt":[1,2]}`); p.Source != route.FromIDs || !slices.Equal(p.IDs, []uint32{1, 2}) || p.ISL != 2 {
		t.Errorf("ids of the client: %+v", p)
	}
	if p := find(stage("estimate"), text); p.Source != route.FromEstimate || p.ISL != 3 || p.IDs != nil || p.Note != "" {
		t.Errorf("an estimate: %+v", p)
	}
	var image api.View
	if err := image.Parse([]byte(`{"messages":[{"role":"user","content":[{"type":"text","text":"twelve chars"},{"type":"image_url","image_url":{"url":"http://x/y"}}]}]}`), api.Chat, api.Limits{}); err != nil {
		t.Fatal(err)
	}
	if p := s.Find(t.Context(), &image, "m", registry.Snapshot().Model("m"), nil); p.Source != route.FromEstimate || p.ISL != 3+media.FirstGuess || !strings.Contains(p.Note, "no engine names the images") {
		t.Errorf("a prompt with an image: %+v", p)
	}
	image.Release()
	if p := find(stage("auto"), text); p.Source != route.FromEstimate || p.Note != "" {
		t.Errorf("ids that nobody needs: %+v", p)
	}
	for range 2 {
		if p := find(s, text); p.Source != route.FromEstimate || !strings.Contains(p.Note, "no usable worker") {
			t.Errorf("without engines: %+v", p)
		}
	}
	if got := s.Troubles(); len(got) != 1 || !slices.Equal(kinds, []string{"tokenizer_degraded"}) {
		t.Errorf("troubles %q, events %q", got, kinds)
	}
	spec, err := workers.ParseSpec(workers.Decode, engine.URL+",name=d0,model=m")
	if err != nil {
		t.Fatal(err)
	}
	spec.APIKey = "key"
	if _, err := registry.Apply("flag", []workers.Spec{spec}); err != nil {
		t.Fatal(err)
	}
	w, _ := registry.Snapshot().Worker("d0")
	w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	if p := find(s, text); p.Source != route.FromEngine || !slices.Equal(p.IDs, []uint32{7, 8, 9}) || p.ISL != 3 {
		t.Errorf("ids of the engine: %+v", p)
	}
	if got := s.Troubles(); len(got) != 0 || !slices.Equal(kinds, []string{"tokenizer_degraded", "tokenizer_recovered"}) {
		t.Errorf("troubles %q, events %q", got, kinds)
	}
	if _, err := New(Options{Mode: "local", Path: "/nosuch/tokenizer.json"}); err == nil || !strings.Contains(err.Error(), "--tokenizer-path") {
		t.Errorf("a tokenizer that is not there: %v", err)
	}
}

// TestMessagesOfEnginesThatAreNotVLLM: what vLLM makes of messages and responses
// is not what another engine makes of them, so no engine is asked for their tokens.
func TestMessagesOfEnginesThatAreNotVLLM(t *testing.T) {
	asked := 0
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked++
		_, _ = w.Write([]byte(`{"count":3,"max_model_len":4096,"tokens":[7,8,9]}`))
	}))
	defer engine.Close()
	for _, c := range []struct {
		kind   api.Kind
		body   string
		engine string
		source route.Source
	}{
		{api.Messages, `{"model":"m","messages":[{"role":"user","content":"a"}]}`, "vllm", route.FromEngine},
		{api.Messages, `{"model":"m","messages":[{"role":"user","content":"a"}]}`, "sglang", route.FromEstimate},
		{api.Responses, `{"model":"m","input":"a"}`, "vllm", route.FromEngine},
		{api.Responses, `{"model":"m","input":"a"}`, "sglang", route.FromEstimate},
		{api.Chat, `{"model":"m","messages":[{"role":"user","content":"a"}]}`, "sglang", route.FromEngine},
	} {
		registry := workers.NewRegistry(func(eventlog.Event) {})
		spec, err := workers.ParseSpec(workers.Decode, engine.URL+",name=d0,model=m,engine="+c.engine)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := registry.Apply("flag", []workers.Spec{spec}); err != nil {
			t.Fatal(err)
		}
		w, _ := registry.Snapshot().Worker("d0")
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
		s, err := New(Options{Mode: "engine", Registry: registry, Event: func(eventlog.Event) {}})
		if err != nil {
			t.Fatal(err)
		}
		var v api.View
		if err := v.Parse([]byte(c.body), c.kind, api.Limits{}); err != nil {
			t.Fatal(err)
		}
		asked = 0
		p := s.Find(t.Context(), &v, "m", registry.Snapshot().Model("m"), nil)
		if p.Source != c.source || (p.Source == route.FromEngine) != (asked == 1) || (p.Note == "") != (asked == 1) {
			t.Errorf("%s of %s: %+v, asked %d times", c.kind, c.engine, p, asked)
		}
		v.Release()
		s.Close()
	}
}

// TestPromptsThatTheEngineCuts: ids are of no use where the engine cuts the
// prompt, and a limit that changes nothing changes nothing here.
func TestPromptsThatTheEngineCuts(t *testing.T) {
	s, err := New(Options{Mode: "estimate", Registry: workers.NewRegistry(func(eventlog.Event) {})})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, c := range []struct {
		kind   api.Kind
		body   string
		isl    int
		source route.Source
		cut    bool
	}{
		{api.Completion, `{"prompt":[1,2,3,4]}`, 4, route.FromIDs, false},
		{api.Completion, `{"prompt":[1,2,3,4],"truncate_prompt_tokens":3}`, 3, route.FromEstimate, true},
		{api.Completion, `{"prompt":[1,2,3,4],"truncate_prompt_tokens":4}`, 4, route.FromIDs, false},
		{api.Completion, `{"prompt":[1,2,3,4],"truncate_prompt_tokens":-1}`, 4, route.FromIDs, true},
		{api.Completion, `{"prompt":[1,2,3,4],"truncate_prompt_tokens":null}`, 4, route.FromIDs, false},
		{api.Chat, `{"messages":[{"role":"user","content":"sixteen letters!"}],"truncate_prompt_tokens":2}`, 2, route.FromEstimate, true},
		{api.Responses, `{"input":"sixteen letters!","truncation":"auto"}`, 4, route.FromEstimate, true},
		{api.Responses, `{"input":"sixteen letters!","truncation":"disabled"}`, 4, route.FromEstimate, false},
	} {
		var v api.View
		if err := v.Parse([]byte(c.body), c.kind, api.Limits{}); err != nil {
			t.Fatal(err)
		}
		if p := s.Find(t.Context(), &v, "m", nil, nil); p.ISL != c.isl || p.Source != c.source || p.Truncated != c.cut || (p.Source == route.FromIDs) != (p.IDs != nil) {
			t.Errorf("%s: %+v", c.body, p)
		}
	}
}

// TestWorkersWhoseChatsDiffer: a prefill and a decode worker of one model that
// make different tokens of a chat are named, once, until they do not any more.
func TestWorkersWhoseChatsDiffer(t *testing.T) {
	registry := workers.NewRegistry(func(eventlog.Event) {})
	var events []eventlog.Event
	s, err := New(Options{Mode: "engine", Registry: registry, Event: func(e eventlog.Event) { events = append(events, e) }})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var specs []workers.Spec
	for _, name := range []string{"p0", "d0", "d1", "x"} {
		role := workers.Decode
		if name == "p0" {
			role = workers.Prefill
		}
		spec, err := workers.ParseSpec(role, "http://"+name+":1,name="+name)
		if err != nil {
			t.Fatal(err)
		}
		specs = append(specs, spec)
	}
	if _, err := registry.Apply("flag", specs); err != nil {
		t.Fatal(err)
	}
	learn := func(name, model, tokens string) {
		t.Helper()
		w, ok := registry.Snapshot().Worker(name)
		if !ok {
			t.Fatalf("no worker %s", name)
		}
		if _, err := registry.Update(w, workers.Learned{Facts: workers.Facts{Models: []string{model}, ChatTokens: tokens}}); err != nil {
			t.Fatal(err)
		}
		s.compare(registry.Snapshot())
	}
	learn("p0", "m", "37:aa")
	learn("d0", "m", "37:aa")
	learn("x", "other", "99:cc")
	if len(events) != 0 || len(s.Troubles()) != 0 {
		t.Errorf("events %+v, troubles %q", events, s.Troubles())
	}
	learn("d1", "m", "39:bb")
	learn("d1", "m", "39:bb")
	if len(events) != 1 || events[0].Kind != "chat_tokens_differ" || !strings.Contains(events[0].Text, "p0 (37 tokens) and d1 (39)") || strings.Contains(events[0].Text, "d0") {
		t.Errorf("events %+v", events)
	}
	if got := s.Troubles(); len(got) != 1 || !strings.Contains(got[0], "p0 (37 tokens) and d1 (39)") {
		t.Errorf("troubles %q", got)
	}
	learn("d1", "m", "37:aa")
	if len(events) != 2 || events[1].Kind != "chat_tokens_agree" || len(s.Troubles()) != 0 {
		t.Errorf("events %+v, troubles %q", events, s.Troubles())
	}
}
