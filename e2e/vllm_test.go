package e2e

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
)

// The counters by which a real vLLM engine proves what it did.
const (
	externalHits = "vllm:external_prefix_cache_hits_total"
	prefixHits   = "vllm:prefix_cache_hits_total"
	promptTokens = "vllm:prompt_tokens_total"
	bySource     = "vllm:prompt_tokens_by_source_total"
	nixlBytes    = "vllm:nixl_bytes_transferred_sum"
)

func ids(rng *rand.Rand, n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = 10 + rng.IntN(400)
	}
	return out
}

// completion asks for greedy tokens after a prompt of token ids.
func completion(model string, prompt []int, n int, stream bool) map[string]any {
	return map[string]any{"model": model, "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": true, "stream": stream}
}

func by(list []engine, role string) (out []engine) {
	for _, e := range list {
		if e.Role == role {
			out = append(out, e)
		}
	}
	return out
}

// TestRemotePrefillOnVLLM: requests over the threshold are prefilled remotely,
// the decode engine's own counters prove the pull, the text is that of one
// engine alone, and below the threshold the prefill engine is not touched.
func TestRemotePrefillOnVLLM(t *testing.T) {
	list := startEngines(t, "1p1d")
	p, d := by(list, "prefill")[0], by(list, "decode")[0]
	r := serve(t, "--prefill", p.URL+",name=p0", "--decode", d.URL+",name=d0", "--routing-threshold", "256")
	rng := rand.New(rand.NewPCG(1, 1))
	prefix := ids(rng, 320)

	before := counter(t, d.URL, externalHits)
	bytesBefore := counter(t, d.URL, nixlBytes)
	pulled := 0
	for i := range 6 {
		prompt := append(append([]int{}, prefix...), ids(rng, 256+32*i)...)
		a := post(t, r.url, "/v1/completions", completion(d.Model, prompt, 12, i%2 == 1)).must(t)
		c := r.explain(a)
		if c.Path != "remote" || c.Outcome.SilentRecompute {
			t.Fatalf("prompt %d of %d tokens went %s (%s)", i, len(prompt), c.Path, c.ReasonText)
		}
		pulled += c.Predicted.RemoteTokens
		// The prefill engine computes the whole prompt by itself.
		alone := post(t, p.URL, "/v1/completions", completion(p.Model, prompt, 12, false)).must(t)
		if a.text != alone.text || a.text == "" {
			t.Errorf("prompt %d: %q through the router, %q from one engine", i, a.text, alone.text)
		}
		r.waitIdle()
	}
	if got := counter(t, d.URL, externalHits) - before; int(got) < pulled-6 || int(got) > pulled {
		t.Errorf("the decode engine pulled %v tokens, the router planned %d", got, pulled)
	}
	if got := counter(t, d.URL, nixlBytes) - bytesBefore; got <= 0 {
		t.Errorf("no bytes were transferred")
	}
	t.Logf("decode engine: %v tokens over the connector, %v bytes; planned %d tokens",
		counter(t, d.URL, externalHits)-before, counter(t, d.URL, nixlBytes)-bytesBefore, pulled)

	touched := counter(t, p.URL, promptTokens)
	for range 5 {
		a := post(t, r.url, "/v1/completions", completion(d.Model, ids(rng, 200), 4, false)).must(t)
		if got := a.header.Get("X-Dynctl-Path"); got != "local" {
			t.Errorf("a short prompt went %s", got)
		}
	}
	// A long prompt whose head is cached on the decode engine is short, too.
	a := post(t, r.url, "/v1/completions", completion(d.Model, append(append([]int{}, prefix...), ids(rng, 100)...), 4, false)).must(t)
	if got := a.header.Get("X-Dynctl-Path"); got != "local" {
		t.Errorf("420 tokens of which 320 are cached went %s: %s", got, r.explain(a).ReasonText)
	}
	if got := counter(t, p.URL, promptTokens); got != touched {
		t.Errorf("the prefill engine computed %v tokens for requests below the threshold", got-touched)
	}

	chat := map[string]any{"model": d.Model, "max_tokens": 8, "temperature": 0, "stream": true,
		"messages": []any{map[string]any{"role": "user", "content": strings.Repeat("Tell me about disaggregated prefill. ", 60)}}}
	c := post(t, r.url, "/v1/chat/completions", chat).must(t)
	chat["stream"] = false
	alone := post(t, p.URL, "/v1/chat/completions", chat).must(t)
	if c.header.Get("X-Dynctl-Path") != "remote" || c.text != alone.text {
		t.Errorf("chat went %s: %q through the router, %q from one engine", c.header.Get("X-Dynctl-Path"), c.text, alone.text)
	}
	_ = bySource
}

// TestMessagesAndResponsesOnVLLM: requests to /v1/messages and /v1/responses are
// counted as the engine counts them, whatever they hold, go remote, are pulled in
// full by the decode engine's own counter, and give the text of one engine alone.
func TestMessagesAndResponsesOnVLLM(t *testing.T) {
	template, err := filepath.Abs(filepath.Join("testdata", "tools.jinja"))
	if err != nil {
		t.Fatal(err)
	}
	list := startEngines(t, "1p1d", "--", "--chat-template", template, "--trust-request-chat-template",
		"--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details")
	p, d := by(list, "prefill")[0], by(list, "decode")[0]
	r := serve(t, "--prefill", p.URL+",name=p0", "--decode", d.URL+",name=d0", "--tokenizer", "engine")
	type object = map[string]any
	words := strings.Repeat("Tell me about disaggregated prefill. ", 40)
	schema := object{"properties": object{"z": object{"type": "string"}, "a": object{"type": "number"}}, "required": []string{"z"}}
	user := func(content any) object { return object{"role": "user", "content": content} }
	for i, c := range []struct {
		name, path string
		body       object
	}{
		{"messages: text", "/v1/messages", object{"messages": []any{user(words)}}},
		{"messages: system, no thinking", "/v1/messages", object{"system": "be brief", "thinking": object{"type": "disabled"}, "messages": []any{user(words)}}},
		{"messages: effort", "/v1/messages", object{"output_config": object{"effort": "high"}, "messages": []any{user(words)}}},
		{"messages: blocks and tools", "/v1/messages", object{
			"system": []any{object{"type": "text", "text": "x-anthropic-billing-header: cc=1;"}, object{"type": "text", "text": "be brief. "}, object{"type": "text", "text": "be kind <&>"}},
			"tools":  []any{object{"name": "weather", "description": "The weather é", "input_schema": schema}, object{"name": "time", "input_schema": object{"type": "object"}}},
			"messages": []any{
				user([]any{object{"type": "text", "text": words}, object{"type": "text", "text": "and there?"}}),
				object{"role": "assistant", "content": []any{object{"type": "thinking", "thinking": "hm", "signature": "s"}, object{"type": "text", "text": "I look"}, object{"type": "tool_use", "id": "t1", "name": "weather", "input": object{"z": "A & B", "a": 1.50}}}},
				user([]any{object{"type": "tool_result", "tool_use_id": "t1", "content": []any{object{"type": "text", "text": "rain"}, object{"type": "text", "text": "cold"}}}, object{"type": "text", "text": "so?"}}),
			},
		}},
		{"responses: text", "/v1/responses", object{"input": words, "instructions": "be brief"}},
		{"responses: effort", "/v1/responses", object{"input": words, "reasoning": object{"effort": "low"}}},
		{"responses: items and tools", "/v1/responses", object{
			"tools": []any{object{"type": "function", "name": "weather", "description": "d", "parameters": schema, "strict": nil}, object{"type": "function", "name": "time", "parameters": object{"type": "object"}, "strict": true}},
			"input": []any{
				object{"role": "developer", "content": "be brief"},
				user([]any{object{"type": "input_text", "text": words}, object{"type": "input_text", "text": "and there?"}}),
				object{"type": "reasoning", "id": "r1", "summary": []any{}, "content": []any{object{"type": "reasoning_text", "text": "hm"}}},
				object{"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": []any{object{"type": "output_text", "text": "I look", "annotations": []any{}}}},
				object{"type": "function_call", "call_id": "c1", "name": "weather", "arguments": `{"z": "<X>", "a": 2}`},
				object{"type": "function_call_output", "call_id": "c1", "output": "rain"},
			},
		}},
		{"responses: an answer to go on with", "/v1/responses", object{"input": []any{
			user(words), object{"type": "message", "id": "m2", "role": "assistant", "status": "incomplete", "content": []any{object{"type": "output_text", "text": "It is", "annotations": []any{}}}},
		}}},
		{"chat: effort", "/v1/chat/completions", object{"reasoning_effort": "low", "messages": []any{user(words)}}},
		{"chat: no thinking", "/v1/chat/completions", object{"reasoning_effort": "none", "chat_template_kwargs": object{"other": 1}, "messages": []any{user(words)}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.body["model"], c.body["temperature"], c.body["cache_salt"] = d.Model, 0, fmt.Sprint("salt ", i)
			limit := map[string]string{"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_tokens"}[c.path]
			if c.body[limit] == nil {
				c.body[limit] = 8
			}
			if c.body["stream"] = i%2 == 1; i%2 == 1 && c.path == "/v1/chat/completions" {
				c.body["stream_options"] = object{"include_usage": true}
			}
			before := counter(t, d.URL, externalHits)
			a := post(t, r.url, c.path, c.body).must(t)
			rec := r.explain(a)
			if rec.Path != "remote" || rec.Inputs.ISLSource != "engine" || rec.Outcome.Status != 200 {
				t.Fatalf("%s (%s), isl %d by %s, notes %q", rec.Path, rec.ReasonText, rec.Inputs.ISL, rec.Inputs.ISLSource, rec.Notes)
			}
			if rec.Inputs.ISL != rec.Legs[0].PromptTokens || rec.Inputs.ISL != rec.Outcome.PromptTokens {
				t.Errorf("isl %d, prefill counts %d, decode %d", rec.Inputs.ISL, rec.Legs[0].PromptTokens, rec.Outcome.PromptTokens)
			}
			pulled := int(counter(t, d.URL, externalHits) - before)
			if pulled != rec.Inputs.ISL {
				t.Errorf("the decode engine pulled %d of %d tokens", pulled, rec.Inputs.ISL)
			}
			c.body["stream"] = false
			delete(c.body, "stream_options")
			alone := post(t, p.URL, c.path, c.body).must(t)
			if a.text != alone.text {
				t.Errorf("%q through the router, %q from one engine", a.text, alone.text)
			}
			// What is cached now is predicted by the engine's events.
			r.waitIdle()
			again := r.explain(post(t, r.url, c.path, c.body).must(t))
			if want := (rec.Inputs.ISL - 1) / again.Inputs.BlockSize * again.Inputs.BlockSize; again.Predicted.CachedTokens != want {
				t.Errorf("the decode rank is thought to hold %d tokens of %d, want %d", again.Predicted.CachedTokens, again.Inputs.ISL, want)
			}
			t.Logf("%d tokens, %d pulled, %q", rec.Inputs.ISL, pulled, a.text)
		})
	}
}

// TestPredictionOnVLLM: for 200 prompts with shared heads, on an engine whose
// cache is far too small for them, the overlap predicted from the engine's own
// events equals the cached tokens that it reports.
func TestPredictionOnVLLM(t *testing.T) {
	list := startEngines(t, "1d", "--kv-blocks", "96")
	e := list[0]
	r := serve(t, "--worker", e.URL+",name=a0")
	rng := rand.New(rand.NewPCG(7, 7))
	var heads [12][]int
	for i := range heads {
		heads[i] = ids(rng, 320)
	}
	reused, evictions := 0, 0
	for i := range 200 {
		h := heads[min(rng.IntN(12), rng.IntN(12))]
		prompt := append([]int{}, h[:64+32*rng.IntN(9)]...)
		if rng.IntN(4) > 0 {
			prompt = append(prompt, ids(rng, rng.IntN(160))...)
		}
		r.waitIdle()
		a := post(t, r.url, "/v1/completions", completion(e.Model, prompt, 1+rng.IntN(8), false)).must(t)
		if a.cached < 0 {
			t.Fatal("the engine does not report cached tokens")
		}
		c := r.explain(a)
		if c.Predicted.CachedTokens != a.cached {
			t.Errorf("prompt %d of %d tokens: predicted %d cached tokens, the engine reports %d", i, len(prompt), c.Predicted.CachedTokens, a.cached)
		}
		if a.cached > 0 {
			reused++
		}
	}
	s, err := r.admin.IndexStats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	evictions = int(s.Totals.Removed)
	if evictions == 0 || reused < 50 {
		t.Errorf("%d blocks evicted, %d prompts reused blocks: the test proved little", evictions, reused)
	}
	t.Logf("200 prompts, %d with cached tokens, %d blocks evicted: prediction equal each time", reused, evictions)
}

// TestAffinityOnVLLM: two aggregated engines, groups of prompts with a common
// head: each group stays on one engine, and the engines' own hit counters show
// it.
func TestAffinityOnVLLM(t *testing.T) {
	list := startEngines(t, "2d")
	args := []string{}
	for i, e := range list {
		args = append(args, "--worker", fmt.Sprintf("%s,name=a%d", e.URL, i))
	}
	r := serve(t, args...)
	affinity(t, r, list[0].Model, func() float64 {
		sum := 0.0
		for _, e := range list {
			sum += counter(t, e.URL, prefixHits)
		}
		return sum
	})
}

// affinity sends groups of prompts with common heads and checks, by the
// engines' own counters, that each head was computed once.
func affinity(t *testing.T, r *router, model string, hits func() float64) {
	t.Helper()
	rng := rand.New(rand.NewPCG(3, 3))
	before := hits()
	where := map[int]map[string]bool{}
	want := 0
	var heads [6][]int
	for g := range heads {
		heads[g] = ids(rng, 256)
	}
	for round := range 4 {
		for g, h := range heads {
			a := post(t, r.url, "/v1/completions", completion(model, append(append([]int{}, h...), ids(rng, 40)...), 4, false)).must(t)
			if where[g] == nil {
				where[g] = map[string]bool{}
			}
			where[g][a.header.Get("X-Dynctl-Worker")] = true
			if round > 0 {
				want += 256
			}
			r.waitIdle()
		}
	}
	used := map[string]bool{}
	for g, w := range where {
		if len(w) != 1 {
			t.Errorf("group %d was spread over %v", g, w)
		}
		for k := range w {
			used[k] = true
		}
	}
	if len(used) < 2 {
		t.Errorf("all groups went to %v", used)
	}
	if got := hits() - before; int(got) != want {
		t.Errorf("the engines' prefix caches hit %v tokens, want %d", got, want)
	}
	t.Logf("%d groups over %v, %d tokens hit by the engines' counters", len(where), used, want)
}

// TestDataParallelRanksOnVLLM: the ranks of one engine behind one port are
// routed to one by one.
func TestDataParallelRanksOnVLLM(t *testing.T) {
	list := startEngines(t, "1d:dp=2")
	r := serve(t, "--worker", list[0].URL+",name=a0")
	r.until("both ranks are known", func() bool {
		l, err := r.admin.Ranks(t.Context())
		return err == nil && len(l.Ranks) == 2 && l.Ranks[0].Feed.State == "live" && l.Ranks[1].Feed.State == "live"
	})
	affinity(t, r, list[0].Model, func() float64 { return counter(t, list[0].URL, prefixHits) })
	for rank := range 2 {
		if got := counter(t, list[0].URL, promptTokens, fmt.Sprintf(`engine="%d"`, rank)); got == 0 {
			t.Errorf("rank %d computed nothing", rank)
		}
	}
}

// TestTwoByTwoOnVLLM: any prefill engine serves any decode engine.
func TestTwoByTwoOnVLLM(t *testing.T) {
	list := startEngines(t, "2p2d")
	args := []string{"--policy", "round_robin"}
	for _, e := range list {
		args = append(args, "--"+e.Role, e.URL+",name="+e.Name)
	}
	r := serve(t, args...)
	rng := rand.New(rand.NewPCG(5, 5))
	pairs := map[string]bool{}
	before := map[string]float64{}
	for _, e := range list {
		before[e.Name] = counter(t, e.URL, externalHits)
	}
	for i := range 8 {
		prompt := ids(rng, 300)
		a := post(t, r.url, "/v1/completions", completion(list[0].Model, prompt, 8, i%2 == 0)).must(t)
		pairs[a.header.Get("X-Dynctl-Prefill-Worker")+" "+a.header.Get("X-Dynctl-Worker")] = true
		alone := post(t, by(list, "prefill")[0].URL, "/v1/completions", completion(list[0].Model, prompt, 8, false)).must(t)
		if a.text != alone.text {
			t.Errorf("prompt %d: %q through the router, %q from one engine", i, a.text, alone.text)
		}
	}
	for _, e := range by(list, "decode") {
		if got := counter(t, e.URL, externalHits) - before[e.Name]; got < 4*299-8 {
			t.Errorf("%s pulled %v tokens", e.Name, got)
		}
	}
	t.Logf("pairs used: %v", pairs)
}
