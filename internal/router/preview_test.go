package router_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestIndexPreview: the words that prefixes begin with are for the role admin that asks for
// them, of which there is one event, and stand nowhere else.
func TestIndexPreview(t *testing.T) {
	const bot = "Marigold is the support bot of the harbour office"
	var mu sync.Mutex
	var log, recorded bytes.Buffer
	rigOf := func(tokens int) *rig {
		path := keysFile(t)
		r := startCold(t, loopback.Options{
			Fleet: "1a:profile=instant", Admin: router.AdminOptions{TokenFile: tokenFile(t)},
			Logger: slog.New(slog.NewJSONHandler(locked{&mu, &log}, &slog.HandlerOptions{Level: slog.LevelDebug})),
			Observer: router.Observer{
				Decision: func(_ time.Time, d *trace.Decision) { fmt.Fprintf(locked{&mu, &recorded}, "%+v\n", *d) },
				Outcome:  func(c *receipt.Receipt) { _ = json.NewEncoder(locked{&mu, &recorded}).Encode(c) },
			},
		}, func(c *settings.Config) { c.Keys.File, c.Keys.Admin, c.Index.Preview = path, true, tokens })
		if err := r.Ready(r.wait()); err != nil {
			t.Fatal(err)
		}
		return r
	}
	page := func(r *rig, secret, path string) (int, string) {
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

	r := rigOf(24)
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
			status, text := page(r, adminSecret, asked+flat)
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
		if status, text := page(r, secret, asked); status != want || strings.Contains(text, "Marigold") {
			t.Errorf("%.12s: %d %s", secret, status, text)
		}
	}
	shown := r.events("prompts_shown")
	if len(shown) != 1 || !strings.Contains(shown[0].Text, `the key "root"`) {
		t.Errorf("events of several looks within a minute: %+v", shown)
	}
	var seen strings.Builder
	for _, p := range []string{"/admin/v1/status", "/admin/v1/decisions?limit=1000", "/admin/v1/events?limit=1000", "/admin/v1/config", "/admin/v1/snapshot", "/metrics", "/admin/v1/workers", "/admin/v1/index/children", "/admin/v1/index/stats"} {
		status, text := page(r, adminSecret, p)
		if status != http.StatusOK {
			t.Errorf("%s: %d", p, status)
		}
		seen.WriteString(text)
	}
	mu.Lock()
	if log.Len() == 0 || recorded.Len() == 0 {
		t.Error("nothing was logged or recorded")
	}
	for what, text := range map[string]string{"the log": log.String(), "an answer": seen.String(), "a recording": recorded.String()} {
		if i := strings.Index(text, "Marigold"); i >= 0 {
			t.Errorf("%s has words of a prompt: …%s…", what, text[max(0, i-200):min(len(text), i+60)])
		}
	}
	mu.Unlock()

	off := rigOf(0)
	if status, text := page(off, adminSecret, asked); status != http.StatusConflict || !strings.Contains(text, "--index-preview") {
		t.Errorf("off: %d %s", status, text)
	}
}

// TestIndexPreviewWithoutEngines: words that no engine can give are left out, and the answer says why.
func TestIndexPreviewWithoutEngines(t *testing.T) {
	r := start(t, "1a:profile=instant", func(c *settings.Config) { c.Index.Preview = 24 })
	if a := r.post("/v1/completions", object{"model": "sim", "prompt": strings.Repeat("Marigold is a bot. ", 40), "max_tokens": 2}); a.status != http.StatusOK {
		t.Fatalf("%d %s", a.status, a.body)
	}
	r.synced()
	ask := func(q admin.BrowseQuery) (*admin.IndexChildren, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		return r.Admin.IndexChildren(ctx, q)
	}
	r.Sim.Engines()[0].Kill()
	r.eventually("the words to be unknown", func() error {
		a, err := ask(admin.BrowseQuery{Preview: true})
		if err != nil || len(a.Children) == 0 || a.Children[0].Preview != "" || a.PreviewError == "" {
			return fmt.Errorf("%+v, %w", a, err)
		}
		return nil
	})
}
