package router

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestKnownModelsWait: requests for a model that the configuration names, or whose workers have
// left, wait for a worker on every API. Other models are unknown at once.
func TestKnownModelsWait(t *testing.T) {
	c := settings.Default()
	c.Limits.WaitForWorker, c.Limits.QueueTimeout = true, time.Millisecond
	c.Aliases = []settings.Alias{{Name: "alias", Model: "named"}}
	r := idle(t, c)
	spec, err := workers.ParseSpec(workers.Aggregated, "http://127.0.0.1:1,name=w,model=left")
	if err != nil {
		t.Fatal(err)
	}
	for _, specs := range [][]workers.Spec{{spec}, nil} {
		if _, err := r.registry.Apply("test", specs); err != nil {
			t.Fatal(err)
		}
	}
	send := func(path, body string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		r.ServeHTTP(w, httptest.NewRequest(http.MethodPost, path, strings.NewReader(body)))
		return w
	}
	for path, rest := range map[string]string{
		"/v1/chat/completions": `"messages":[{"role":"user","content":"hi"}]`,
		"/v1/completions":      `"prompt":"hi"`,
		"/v1/responses":        `"input":"hi","stream":true`,
		"/v1/messages":         `"max_tokens":1,"messages":[{"role":"user","content":"hi"}]`,
		"/v1/embeddings":       `"input":"hi"`,
	} {
		for _, model := range []string{"alias", "named", "left"} {
			w := send(path, `{"model":"`+model+`",`+rest+`}`)
			if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" || !strings.Contains(w.Body.String(), "waited too long in the queue") {
				t.Errorf("%s of %s: %d %s", path, model, w.Code, w.Body)
			}
		}
		if w := send(path, `{"model":"other",`+rest+`}`); strings.Contains(w.Body.String(), "queue") {
			t.Errorf("%s of an unknown model: %d %s", path, w.Code, w.Body)
		}
	}
	ep, err := api.Lookup(http.MethodPost, "/v1/completions")
	if err != nil {
		t.Fatal(err)
	}
	dry, err := r.door.DryRun(t.Context(), ep, admin.RouteRequest{Body: []byte(`{"model":"left","prompt":"hi"}`)})
	if err != nil || !strings.Contains(strings.Join(dry.Notes, "\n"), "would wait in the queue of left") {
		t.Errorf("a dry run: %+v, %v", dry, err)
	}
}
