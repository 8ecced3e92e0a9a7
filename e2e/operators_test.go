package e2e

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestStoppedEnginesOnVLLM: an engine that hangs under load, first a prefill engine and then
// a decode engine, costs no request: the other one answers, and after SIGCONT the engine
// gets requests again.
func TestStoppedEnginesOnVLLM(t *testing.T) {
	list := startEngines(t, "2p2d")
	args := []string{"--routing-threshold", "64"}
	for _, e := range list {
		args = append(args, "--"+e.Role, e.URL+",name="+e.Name)
	}
	r := serve(t, args...)

	// Clients without a pause. Each answer is announced, and those of a victim are counted.
	var wg sync.WaitGroup
	var stop atomic.Bool
	answered := make(chan string, 1024)
	for i := range 6 {
		rng := rand.New(rand.NewPCG(41, uint64(i)))
		wg.Go(func() {
			for n := 0; !stop.Load(); n++ {
				a := post(t, r.url, "/v1/completions", completion(list[0].Model, ids(rng, 100+rng.IntN(200)), 12, n%2 == 0))
				if a.status != 200 || a.text == "" || strings.Contains(string(a.body), `"error":{`) {
					t.Errorf("client %d, request %d: status %d: %.300s", i, n, a.status, a.body)
				}
				answered <- a.header.Get("X-Dynctl-Prefill-Worker") + " " + a.header.Get("X-Dynctl-Worker")
			}
		})
	}
	defer wg.Wait()
	defer stop.Store(true)

	usable := func(name string) (is bool) {
		l, err := r.admin.Ranks(t.Context())
		if err != nil {
			return false
		}
		for _, k := range l.Ranks {
			is = is || k.Worker == name && k.Usable
		}
		return is
	}
	// until waits until so many answers have passed a test.
	until := func(what string, n int, ok func(ranks string) bool) {
		r.until(what, func() bool {
			for len(answered) > 0 {
				if ok(<-answered) {
					n--
				}
			}
			return n <= 0
		})
	}
	all := func(string) bool { return true }
	for _, victim := range []engine{by(list, "prefill")[0], by(list, "decode")[0]} {
		names := func(ranks string) bool { return strings.Contains(ranks, victim.Name) }
		until("the fleet answers", 6, all)
		until(victim.Name+" has requests", 1, names)
		t.Cleanup(func() { _ = syscall.Kill(-victim.PID, syscall.SIGCONT) })
		if err := syscall.Kill(-victim.PID, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		r.until(victim.Name+" is seen to hang", func() bool { return !usable(victim.Name) })
		until("the other engine answers", 12, func(ranks string) bool { return !names(ranks) })
		if err := syscall.Kill(-victim.PID, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		r.until(victim.Name+" is usable", func() bool { return usable(victim.Name) })
		until(victim.Name+" has requests again", 2, names)
	}
}

// TestCachedTokensOfPairsOnVLLM: the cached tokens that a client of a pair reads are those
// that the prefill engine took from its cache by its own counter, on four APIs.
func TestCachedTokensOfPairsOnVLLM(t *testing.T) {
	list := startEngines(t, "1p1d")
	p, d := by(list, "prefill")[0], by(list, "decode")[0]
	r := serve(t, "--prefill", p.URL+",name=p0", "--decode", d.URL+",name=d0", "--routing-threshold", "0")
	reported := regexp.MustCompile(`"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)`)
	words := strings.Repeat("The river was wide, and the other side was far away. ", 30)
	for _, c := range []struct {
		path, limit string
		body        func(text string) map[string]any
	}{
		{"/v1/completions", "max_tokens", func(text string) map[string]any { return map[string]any{"prompt": text} }},
		{"/v1/chat/completions", "max_tokens", func(text string) map[string]any {
			return map[string]any{"messages": []any{map[string]any{"role": "user", "content": text}}}
		}},
		{"/v1/responses", "max_output_tokens", func(text string) map[string]any { return map[string]any{"input": text} }},
		{"/v1/messages", "max_tokens", func(text string) map[string]any {
			return map[string]any{"messages": []any{map[string]any{"role": "user", "content": text}}}
		}},
	} {
		for _, stream := range []bool{false, true} {
			most := 0
			for i := range 3 {
				body := c.body(fmt.Sprint(c.path, stream, words, strings.Repeat("Boat ", 20*i)))
				body["model"], body["temperature"], body["stream"], body[c.limit] = d.Model, 0, stream, 6
				if stream && strings.HasSuffix(c.path, "completions") {
					body["stream_options"] = map[string]any{"include_usage": true}
				}
				before := counter(t, p.URL, prefixHits)
				a := post(t, r.url, c.path, body).must(t)
				rec := r.explain(a)
				hits := int(counter(t, p.URL, prefixHits) - before)
				found := reported.FindAllSubmatch(a.body, -1)
				if len(found) == 0 || rec.Path != "remote" {
					t.Fatalf("%s, stream %v: %s (%s) without cached tokens: %s", c.path, stream, rec.Path, rec.ReasonText, a.body)
				}
				got, err := strconv.Atoi(string(found[len(found)-1][1]))
				if err != nil {
					t.Fatal(err)
				}
				if got != hits || rec.Outcome.CachedTokens != hits {
					t.Errorf("%s, stream %v, prompt %d: the client reads %d cached tokens, the receipt %d, the prefill engine counted %d", c.path, stream, i, got, rec.Outcome.CachedTokens, hits)
				}
				most = max(most, hits)
				r.waitIdle()
			}
			if most == 0 {
				t.Errorf("%s, stream %v: nothing was ever cached: the test proved nothing", c.path, stream)
			}
		}
	}
}

// TestEchoOfChatsOnVLLM: vLLM computes a chat with echo again on the engine that answers, so
// such a chat stays in one piece, and no prefill engine computes for it.
func TestEchoOfChatsOnVLLM(t *testing.T) {
	list := startEngines(t, "1p1d")
	p, d := by(list, "prefill")[0], by(list, "decode")[0]
	r := serve(t, "--prefill", p.URL+",name=p0", "--decode", d.URL+",name=d0", "--routing-threshold", "0")
	chat := map[string]any{
		"model": d.Model, "max_tokens": 6, "temperature": 0, "echo": true, "add_generation_prompt": false, "continue_final_message": true,
		"messages": []any{map[string]any{"role": "user", "content": "Go on"}, map[string]any{"role": "assistant", "content": strings.Repeat("The river was wide. ", 40)}},
	}
	alone := post(t, p.URL, "/v1/chat/completions", chat).must(t)
	touched := counter(t, p.URL, promptTokens)
	for _, stream := range []bool{false, true} {
		chat["stream"] = stream
		a := post(t, r.url, "/v1/chat/completions", chat).must(t)
		rec := r.explain(a)
		if rec.Path != "local" || rec.Outcome.SilentRecompute || a.text != alone.text {
			t.Errorf("stream %v: %s (%s), recomputed %v, %q, from one engine %q", stream, rec.Path, rec.ReasonText, rec.Outcome.SilentRecompute, a.text, alone.text)
		}
	}
	if got := counter(t, p.URL, promptTokens); got != touched {
		t.Errorf("the prefill engine computed %v tokens for chats that stay whole", got-touched)
	}
}

// TestAdapterAtRunTimeOnVLLM: an adapter that is loaded on one of two engines while the
// router runs serves its first request, all its requests go to that engine, and once it is
// unloaded, its name is unknown.
func TestAdapterAtRunTimeOnVLLM(t *testing.T) {
	need(t)
	t.Setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
	list := startEngines(t, "2d", "--", "--enable-lora", "--max-lora-rank", "8")
	r := serve(t, "--worker", list[0].URL+",name=a0", "--worker", list[1].URL+",name=a1")
	dir := writeAdapter(t, filepath.Join(enginesHome(), "models", list[0].Model))
	rng := rand.New(rand.NewPCG(9, 9))
	ask := func(stream bool) answer {
		return post(t, r.url, "/v1/completions", completion("ada", ids(rng, 120), 6, stream))
	}
	call := func(action string, workers ...string) {
		t.Helper()
		c := admin.ControlCall{Action: action, Workers: workers, Adapter: "ada", Timeout: admin.ControlTimeout}
		if action == admin.LoadAdapter {
			c.Path = dir
		}
		got, err := r.admin.Control(t.Context(), c)
		if err != nil || got.Failed > 0 {
			t.Fatalf("%s: %v %+v", action, err, got)
		}
	}
	// Behind the router's back, as an operator's script does it.
	post(t, list[0].URL, "/v1/load_lora_adapter", map[string]any{"lora_name": "ada", "lora_path": dir}).must(t)
	for i := range 6 {
		a := ask(i%2 == 1).must(t)
		if got := a.header.Get("X-Dynctl-Worker"); got != "a0" && !strings.HasPrefix(got, "a0/") {
			t.Errorf("request %d went to %s, which does not have the adapter", i, got)
		}
	}
	call(admin.LoadAdapter, "a1")
	prompt := ids(rng, 90)
	with := post(t, r.url, "/v1/completions", completion("ada", prompt, 6, false)).must(t)
	if without := post(t, r.url, "/v1/completions", completion(list[0].Model, prompt, 6, false)).must(t); with.text == without.text {
		t.Errorf("with and without the adapter the answer is %q: the test proved nothing", with.text)
	}
	call(admin.UnloadAdapter)
	if a := ask(false); a.status != 404 {
		t.Errorf("after the adapter was unloaded everywhere: status %d: %s", a.status, a.body)
	}
}

// writeAdapter writes a LoRA adapter with random weights for the q_proj of each layer of a
// model, in the form of PEFT (adapter_config.json and adapter_model.safetensors).
func writeAdapter(t *testing.T, model string) (dir string) {
	t.Helper()
	var config struct {
		Hidden int `json:"hidden_size"`
		Layers int `json:"num_hidden_layers"`
		Heads  int `json:"num_attention_heads"`
		Dim    int `json:"head_dim"`
	}
	raw, err := os.ReadFile(filepath.Join(model, "config.json"))
	if err == nil {
		err = json.Unmarshal(raw, &config)
	}
	if err != nil {
		t.Fatal(err)
	}
	const rank = 8
	type tensor struct {
		DType   string `json:"dtype"`
		Shape   [2]int `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	header, data, rng := map[string]tensor{}, []byte{}, rand.New(rand.NewPCG(3, 4))
	add := func(name string, rows, columns int) {
		from := len(data)
		for range rows * columns {
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(rng.NormFloat64())))
		}
		header[name] = tensor{"F32", [2]int{rows, columns}, [2]int{from, len(data)}}
	}
	for i := range config.Layers {
		name := fmt.Sprintf("base_model.model.model.layers.%d.self_attn.q_proj.lora_", i)
		add(name+"A.weight", rank, config.Hidden)
		add(name+"B.weight", config.Heads*config.Dim, rank)
	}
	head, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	settings, err := json.Marshal(map[string]any{
		"peft_type": "LORA", "r": rank, "lora_alpha": rank, "lora_dropout": 0, "bias": "none", "task_type": "CAUSAL_LM",
		"target_modules": []string{"q_proj"}, "base_model_name_or_path": model,
	})
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	tensors := append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(head))), head...), data...)
	for name, content := range map[string][]byte{"adapter_config.json": settings, "adapter_model.safetensors": tensors} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
