package prompt

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestFind: ids come from the client, else from an engine, and where there are
// none the length is estimated and it is told why.
func TestFind(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/tokenize" || q.Header.Get("Authorization") != "Bearer key" {
			t.Errorf("%s %s %s", q.Method, q.URL.Path, q.Header.Get("Authorization"))
		}
		_, _ = w.Write([]byte(`{"count":3,"max_model_len":4096,"tokens":[7,8,9]}`))
	}))
	defer engine.Close()
	var kinds []string
	registry := workers.NewRegistry(func(workers.Event) {})
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
	if p := find(s, `{"model":"m","prompt":[1,2]}`); p.Source != disagg.FromIDs || !slices.Equal(p.IDs, []uint32{1, 2}) || p.ISL != 2 {
		t.Errorf("ids of the client: %+v", p)
	}
	if p := find(stage("estimate"), text); p.Source != disagg.FromEstimate || p.ISL != 3 || p.IDs != nil || p.Note != "" {
		t.Errorf("an estimate: %+v", p)
	}
	if p := find(stage("auto"), text); p.Source != disagg.FromEstimate || p.Note != "" {
		t.Errorf("ids that nobody needs: %+v", p)
	}
	for range 2 {
		if p := find(s, text); p.Source != disagg.FromEstimate || !strings.Contains(p.Note, "no usable worker") {
			t.Errorf("without engines: %+v", p)
		}
	}
	if got := s.Troubles(); len(got) != 1 || !slices.Equal(kinds, []string{"tokenizer_degraded"}) {
		t.Errorf("troubles %q, told %q", got, kinds)
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
	if p := find(s, text); p.Source != disagg.FromEngine || !slices.Equal(p.IDs, []uint32{7, 8, 9}) || p.ISL != 3 {
		t.Errorf("ids of the engine: %+v", p)
	}
	if got := s.Troubles(); len(got) != 0 || !slices.Equal(kinds, []string{"tokenizer_degraded", "tokenizer_recovered"}) {
		t.Errorf("troubles %q, told %q", got, kinds)
	}
	if _, err := New(Options{Mode: "local", Path: "/nosuch/tokenizer.json"}); err == nil || !strings.Contains(err.Error(), "--tokenizer-path") {
		t.Errorf("a tokenizer that is not there: %v", err)
	}
}
