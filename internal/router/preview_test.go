package router_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// indexPreview: the words that prefixes begin with are for the role admin that asks for
// them, of which there is one event, and stand nowhere else.
func indexPreview(t *testing.T, r *watched) {
	const bot = "Marigold is the support bot of the harbour office"
	page := func(secret, path string) (int, string) {
		t.Helper()
		q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.AdminURL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		q.Header.Set("Authorization", "Bearer "+secret)
		resp, err := r.Client.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		raw, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(raw)
	}
	const asked = "/admin/v1/index/children?preview=true"

	for _, tail := range []string{"first question, which goes on for some words", "second question, which also goes on"} {
		prompt := strings.Repeat(bot+" and answers in the language of the question. ", 8) + tail
		body := encode(t, object{"model": "sim", "prompt": prompt, "max_tokens": 2})
		if a := r.send(http.MethodPost, "/v1/completions", body, bearer(userSecret)...); a.status != http.StatusOK {
			t.Fatalf("%d %s", a.status, a.body)
		}
		r.synced() // so that the second finds the blocks of the first: flat=true leaves out what was never hit
	}
	begins := bot[:20]
	for _, flat := range []string{"", "&flat=true"} {
		r.eventually("a run of the index to have its words", func() error {
			status, text := page(adminSecret, asked+flat)
			var a admin.IndexChildren
			if err := json.Unmarshal([]byte(text), &a); err != nil || status != http.StatusOK || len(a.Children) == 0 {
				return fmt.Errorf("%d %s", status, text)
			}
			for _, n := range a.Children {
				if n.DepthBlocks == 0 && !strings.HasPrefix(n.Preview, begins) {
					return fmt.Errorf("%+v %s", n, a.PreviewError)
				}
			}
			return nil
		})
	}
	for secret, want := range map[string]int{readSecret: 403, opsSecret: 403, wrongSecret: 401} {
		if status, text := page(secret, asked); status != want || strings.Contains(text, "Marigold") {
			t.Errorf("%.12s: %d %s", secret, status, text)
		}
	}
	shown := r.events("prompts_shown")
	if len(shown) != 1 || !strings.Contains(shown[0].Text, `the key "root"`) {
		t.Errorf("events of several looks within a minute: %+v", shown)
	}
	var seen strings.Builder
	for _, p := range []string{"/admin/v1/status", "/admin/v1/decisions?limit=1000", "/admin/v1/events?limit=1000", "/admin/v1/config", "/admin/v1/snapshot", "/metrics", "/admin/v1/workers", "/admin/v1/index/children", "/admin/v1/index/stats"} {
		status, text := page(adminSecret, p)
		if status != http.StatusOK {
			t.Errorf("%s: %d", p, status)
		}
		seen.WriteString(text)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.log.Len() == 0 || r.recorded.Len() == 0 {
		t.Error("nothing was logged or recorded")
	}
	for what, text := range map[string]string{"the log": r.log.String(), "an answer": seen.String(), "a recording": r.recorded.String()} {
		if i := strings.Index(text, "Marigold"); i >= 0 {
			t.Errorf("%s has words of a prompt: …%s…", what, text[max(0, i-200):min(len(text), i+60)])
		}
	}
}

// indexPreviewWithoutEngines: words that no engine can give are left out, and the answer says why.
func indexPreviewWithoutEngines(t *testing.T, r *watched) {
	r.post("/v1/completions", object{"model": "sim", "prompt": strings.Repeat("Zinnia is another bot. ", 40), "max_tokens": 2}, bearer(userSecret)...)
	r.synced()
	ask := func(q admin.BrowseQuery) (*admin.IndexChildren, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		return r.Admin.IndexChildren(ctx, q)
	}
	for _, e := range r.Sim.Engines() {
		e.Kill()
	}
	r.eventually("the words to be unknown", func() error {
		a, err := ask(admin.BrowseQuery{Preview: true})
		if err != nil || a.PreviewError == "" || !slices.ContainsFunc(a.Children, func(n admin.IndexNode) bool { return n.Preview == "" }) {
			return fmt.Errorf("%+v, %w", a, err)
		}
		return nil
	})
}
