package e2e

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// TestPushOnVLLM: engines with NixlPushConnector, whose prefill engine writes the KV.
// Texts are those of one engine, the engines' counters show who computed what, and the
// legs start together once the prefill engine's address is known.
func TestPushOnVLLM(t *testing.T) {
	list := startEngines(t, "1p1d", "--cold", "--", "--kv-transfer-config", `{"kv_connector":"NixlPushConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}`)
	p, d := by(list, "prefill")[0], by(list, "decode")[0]
	const spec = ",connector=nixl-push"
	r := serve(t, "--prefill", p.URL+",name=p0"+spec, "--decode", d.URL+",name=d0"+spec, "--routing-threshold", "256")
	rng := rand.New(rand.NewPCG(1, 1))
	head := ids(rng, 320)
	before, computed, pushed := counter(t, d.URL, externalHits), counter(t, d.URL, bySource, `source="local_compute"`), counter(t, p.URL, nixlBytes)
	moved := 0
	// remote sends a prompt through the router and to the prefill engine alone.
	remote := func(path string, body map[string]any) {
		t.Helper()
		a := post(t, r.url, path, body, "X-Request-Id", "the-clients-own").must(t)
		c := r.explain(a)
		if c.Path != "remote" || c.Outcome.SilentRecompute {
			t.Fatalf("%s went %s (%s)", path, c.Path, c.ReasonText)
		}
		moved += c.Predicted.RemoteTokens
		if alone := post(t, p.URL, path, body).must(t); a.text != alone.text || a.text == "" {
			t.Errorf("%s: %q through the router, %q from one engine", path, a.text, alone.text)
		}
		r.waitIdle()
	}
	// Prompts with a head in common, and one id for all: the decode engine has a part of
	// them, and none must get the KV of another.
	for i := range 8 {
		remote("/v1/completions", completion(d.Model, append(append([]int{}, head...), ids(rng, 256+32*i)...), 12, i%2 == 1))
	}
	for i := range 3 {
		remote("/v1/chat/completions", map[string]any{
			"model": d.Model, "max_tokens": 8, "temperature": 0, "stream": i == 1,
			"messages": []any{map[string]any{"role": "user", "content": fmt.Sprint(i, strings.Repeat(" tell me about disaggregated prefill", 60))}},
		})
	}
	got := counter(t, d.URL, externalHits) - before
	// For chats the router may know the length from the engine only.
	if int(got) < moved-11 || int(got) > moved {
		t.Errorf("the decode engine got %v tokens, the router planned %d", got, moved)
	}
	if n := counter(t, d.URL, bySource, `source="local_compute"`) - computed; n != 0 {
		t.Errorf("the decode engine computed %v tokens by itself", n)
	}
	if n := counter(t, p.URL, nixlBytes) - pushed; n <= 0 {
		t.Error("the prefill engine pushed no bytes")
	}
	t.Logf("%v tokens were pushed, %d planned", got, moved)
}
