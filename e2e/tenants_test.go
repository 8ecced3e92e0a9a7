package e2e

import (
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestTenantsOnVLLM: with keys.salt no prompt of one tenant counts as cached for
// another, by the engine's own counter, whatever endpoint it comes by and whatever salt
// the other sends; what a tenant has sent itself does, and the router predicts both.
func TestTenantsOnVLLM(t *testing.T) {
	list := startEngines(t, "1d")
	e := list[0]
	bin := built(t)
	file := filepath.Join(t.TempDir(), "keys.yaml")
	key := func(tenant string) []string {
		out, err := exec.Command(bin, "keys", "new", tenant, "--file", file).Output()
		if err != nil {
			t.Fatal(err)
		}
		return []string{"Authorization", "Bearer " + strings.TrimSpace(string(out))}
	}
	tenants := [][]string{key("a"), key("b"), key("c")}
	r := serve(t, "--worker", e.URL+",name=a0", "--api-keys-file", file, "--api-keys-salt")
	rng := rand.New(rand.NewPCG(13, 13))
	words := func(n int) string {
		var b strings.Builder
		for range n {
			b.WriteString([]string{"red ", "green ", "blue ", "seven ", "stone ", "river ", "lamp "}[rng.IntN(7)])
		}
		return b.String()
	}
	hits := 0
	for _, c := range []struct {
		path string
		body func(prompt string) map[string]any
	}{
		{"/v1/completions", func(p string) map[string]any { return map[string]any{"prompt": p, "max_tokens": 2} }},
		{"/v1/chat/completions", func(p string) map[string]any {
			return map[string]any{"messages": []any{map[string]any{"role": "user", "content": p}}, "max_tokens": 2}
		}},
		{"/v1/messages", func(p string) map[string]any {
			return map[string]any{"messages": []any{map[string]any{"role": "user", "content": p}}, "max_tokens": 2}
		}},
		{"/v1/responses", func(p string) map[string]any { return map[string]any{"input": p, "max_output_tokens": 2} }},
	} {
		prompt := words(150)
		for i, step := range []struct {
			tenant int
			salt   string
			hit    bool
		}{{0, "", false}, {1, "", false}, {0, "", true}, {2, "", false}, {1, "", true}, {2, "guess", false}, {0, "guess", false}, {0, "guess", true}} {
			body := c.body(prompt)
			body["model"] = e.Model
			if step.salt != "" {
				body["cache_salt"] = step.salt
			}
			r.waitIdle()
			before := counter(t, e.URL, prefixHits)
			a := post(t, r.url, c.path, body, tenants[step.tenant]...).must(t)
			got := counter(t, e.URL, prefixHits) - before
			predicted := a.header.Get("X-Dynctl-Cached-Tokens")
			if (got > 0) != step.hit || (predicted != "" && predicted != "0") != step.hit {
				t.Errorf("%s, step %d of tenant %d with salt %q: %v tokens were cached by the engine's counter, %s by the router's index; want any: %v", c.path, i, step.tenant, step.salt, got, predicted, step.hit)
			}
			if got > 0 {
				hits++
			}
		}
	}
	t.Logf("32 requests of three tenants with the same prompts: %d found blocks, each of its own tenant", hits)
}
