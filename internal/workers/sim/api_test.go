package sim_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

var weather = []object{{"type": "function", "function": object{"name": "weather", "parameters": object{
	"type":       "object",
	"properties": object{"city": object{"type": "string"}, "days": object{"type": "integer"}, "unit": object{"enum": []string{"C", "F"}}},
	"required":   []string{"days", "city", "unit"},
}}}}

func TestForcedToolCall(t *testing.T) {
	url := start(t, "1a:profile=instant").Engine(0).URL() + "/v1/chat/completions"
	body := object{"messages": []object{{"role": "user", "content": "Weather?"}}, "tools": weather, "max_tokens": 6, "ignore_eos": true}
	type answer struct {
		Choices []struct {
			Message struct {
				ToolCalls []struct {
					Function struct{ Name, Arguments string }
				} `json:"tool_calls"`
			}
			Delta struct {
				ToolCalls []struct {
					Function struct{ Name, Arguments string }
				} `json:"tool_calls"`
			}
			FinishReason string `json:"finish_reason"`
		}
	}
	check := func(name, arguments string) {
		t.Helper()
		var args struct {
			City string
			Days int
			Unit string
		}
		if err := json.Unmarshal([]byte(arguments), &args); err != nil || name != "weather" {
			t.Errorf("%s(%s): %v", name, arguments, err)
		}
		if args.City == "" || args.Days != 1 || args.Unit != "C" {
			t.Errorf("a city, 1 day and the unit C are wanted: %s", arguments)
		}
	}
	for _, choice := range []any{"required", object{"type": "function", "function": object{"name": "weather"}}} {
		body["tool_choice"] = choice
		_, b := post(t, url, body)
		f := decode[answer](t, b).Choices[0].Message.ToolCalls[0].Function
		check(f.Name, f.Arguments)
		body["stream"] = true
		_, b = post(t, url, body)
		delete(body, "stream")
		var name, args string
		for _, e := range strings.Split(string(b), "\n\n") {
			if e = strings.TrimPrefix(e, "data: "); !strings.HasPrefix(e, "{") {
				continue
			}
			for _, c := range decode[answer](t, []byte(e)).Choices[0].Delta.ToolCalls {
				name += c.Function.Name
				args += c.Function.Arguments
			}
		}
		check(name, args)
		if args != f.Arguments {
			t.Errorf("streamed %q, whole %q", args, f.Arguments)
		}
	}
	body["tool_choice"] = "auto"
	if _, b := post(t, url, body); strings.Contains(string(b), "tool_calls") {
		t.Errorf("an unforced call: %s", b)
	}
	body["tool_choice"] = object{"type": "function", "function": object{"name": "nothing"}}
	if status, _ := post(t, url, body); status != 400 {
		t.Errorf("unknown tool: %d", status)
	}
}

func TestOtherAPIs(t *testing.T) {
	r := start(t, "1a:profile=instant,loras=ad1|ad2,aliases=gpt")
	url := r.Engine(0).URL()
	ask := func(path string, body object) object {
		t.Helper()
		status, b := post(t, url+path, body)
		if status != 200 {
			t.Fatalf("%s: %d %s", path, status, b)
		}
		return decode[object](t, b)
	}
	chat := []object{{"role": "user", "content": "Tell me a story"}}
	whole := func(a object) string {
		return a["choices"].([]any)[0].(map[string]any)["message"].(map[string]any)["content"].(string)
	}
	text := whole(ask("/v1/chat/completions", object{"messages": chat, "max_tokens": 9, "ignore_eos": true}))

	t.Run("responses", func(t *testing.T) {
		body := object{"input": "Tell me a story", "max_output_tokens": 9, "ignore_eos": true}
		a := ask("/v1/responses", body)
		got := a["output"].([]any)[0].(map[string]any)["content"].([]any)[0].(map[string]any)["text"]
		if got != text || a["object"] != "response" || a["status"] != "incomplete" {
			t.Errorf("%v, want %q", a, text)
		}
		body["stream"] = true
		_, b := post(t, url+"/v1/responses", body)
		var kinds []string
		streamed := ""
		for _, e := range strings.Split(strings.TrimSpace(string(b)), "\n\n") {
			kind, data, _ := strings.Cut(strings.TrimPrefix(e, "event: "), "\ndata: ")
			d := decode[object](t, []byte(data))
			if d["type"] != kind || int(d["sequence_number"].(float64)) != len(kinds) {
				t.Errorf("event %s", e)
			}
			kinds = append(kinds, kind)
			if kind == "response.output_text.delta" {
				streamed += d["delta"].(string)
			}
		}
		if streamed != text || kinds[0] != "response.created" || kinds[len(kinds)-1] != "response.completed" {
			t.Errorf("%q by %v, want %q", streamed, kinds, text)
		}
	})
	t.Run("messages", func(t *testing.T) {
		body := object{"messages": chat, "max_tokens": 9, "ignore_eos": true, "model": "sim"}
		a := ask("/v1/messages", body)
		if got := a["content"].([]any)[0].(map[string]any)["text"]; got != text || a["stop_reason"] != "max_tokens" || a["type"] != "message" {
			t.Errorf("%v, want %q", a, text)
		}
		body["stream"] = true
		_, b := post(t, url+"/v1/messages", body)
		streamed, last := "", ""
		for _, e := range strings.Split(strings.TrimSpace(string(b)), "\n\n") {
			kind, data, _ := strings.Cut(strings.TrimPrefix(e, "event: "), "\ndata: ")
			d := decode[object](t, []byte(data))
			if kind == "content_block_delta" {
				streamed += d["delta"].(map[string]any)["text"].(string)
			}
			last = kind
		}
		if streamed != text || last != "message_stop" {
			t.Errorf("%q, last event %s", streamed, last)
		}
		n := ask("/v1/messages/count_tokens", object{"messages": chat})["input_tokens"].(float64)
		if tok := ask("/tokenize", object{"messages": chat})["count"].(float64); n != tok {
			t.Errorf("%v counted, %v tokenized", n, tok)
		}
		body = object{"messages": chat, "max_tokens": 9, "ignore_eos": true, "tools": []object{{"name": "f", "input_schema": object{}}}, "tool_choice": object{"type": "any"}}
		if c := ask("/v1/messages", body)["content"].([]any)[0].(map[string]any); c["type"] != "tool_use" || c["name"] != "f" {
			t.Errorf("%v", c)
		}
		if status, b := post(t, url+"/v1/messages", object{"messages": chat}); status != 400 || !strings.Contains(string(b), `"type":"invalid_request_error"`) {
			t.Errorf("%d %s", status, b)
		}
	})
	t.Run("tokens in, tokens out", func(t *testing.T) {
		ids := ask("/tokenize", object{"messages": chat})["tokens"]
		a := ask("/inference/v1/generate", object{"token_ids": ids, "sampling_params": object{"max_tokens": 9, "ignore_eos": true}})
		out := a["choices"].([]any)[0].(map[string]any)["token_ids"]
		if got := ask("/detokenize", object{"tokens": out})["prompt"]; got != text {
			t.Errorf("%q, want %q", got, text)
		}
	})
	t.Run("embeddings", func(t *testing.T) {
		a := ask("/v1/embeddings", object{"input": []string{"a cat", "a dog"}, "dimensions": 16})
		if d := a["data"].([]any); len(d) != 2 || len(d[1].(map[string]any)["embedding"].([]any)) != 16 {
			t.Errorf("%v", a)
		}
		a = ask("/v1/embeddings", object{"input": "a cat", "encoding_format": "base64"})
		if _, ok := a["data"].([]any)[0].(map[string]any)["embedding"].(string); !ok {
			t.Errorf("%v", a)
		}
	})
	t.Run("rerank and score", func(t *testing.T) {
		for _, path := range []string{"/rerank", "/v1/rerank", "/v2/rerank"} {
			a := ask(path, object{"query": "green apple", "documents": []string{"war and peace", "green apple"}, "top_n": 1})
			if res := a["results"].([]any); len(res) != 1 || res[0].(map[string]any)["index"].(float64) != 1 {
				t.Errorf("%s: %v", path, a)
			}
		}
		for _, path := range []string{"/score", "/v1/score"} {
			if a := ask(path, object{"text_1": "x", "text_2": []string{"x", "y"}}); len(a["data"].([]any)) != 2 {
				t.Errorf("%s: %v", path, a)
			}
		}
	})
	t.Run("models", func(t *testing.T) {
		if got := whole(ask("/v1/chat/completions", object{"model": "gpt", "messages": chat, "max_tokens": 9, "ignore_eos": true})); got != text {
			t.Errorf("an alias says %q, want %q", got, text)
		}
		seen := map[string]bool{text: true}
		for _, m := range []string{"ad1", "ad2"} {
			got := whole(ask("/v1/chat/completions", object{"model": m, "messages": chat, "max_tokens": 9, "ignore_eos": true}))
			if seen[got] {
				t.Errorf("adapter %s says what another does", m)
			}
			seen[got] = true
		}
	})
	t.Run("sleep", func(t *testing.T) {
		post(t, url+"/sleep?level=1", nil)
		resp, err := http.Get(url + "/is_sleeping")
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(b) != `{"is_sleeping":true}` {
			t.Errorf("%s", b)
		}
		post(t, url+"/wake_up", nil)
		ask("/v1/completions", object{"prompt": "x", "max_tokens": 1})
	})
	t.Run("multi-turn prompts share their prefix", func(t *testing.T) {
		long := strings.Repeat("tell me more ", 30)
		turn := []object{{"role": "user", "content": long}}
		a := ask("/v1/chat/completions", object{"messages": turn, "max_tokens": 60, "ignore_eos": true})
		turn = append(turn, object{"role": "assistant", "content": whole(a)}, object{"role": "user", "content": "go on"})
		a = ask("/v1/chat/completions", object{"messages": turn, "max_tokens": 1})
		u := a["usage"].(map[string]any)
		cached := u["prompt_tokens_details"].(map[string]any)["cached_tokens"].(float64)
		// All of the first prompt and answer but the last token and part block.
		if n := u["prompt_tokens"].(float64); cached < n-16-16 {
			t.Errorf("%v of %v tokens cached: generated blocks do not count", cached, n)
		}
	})
}

func TestParseFleet(t *testing.T) {
	f, err := sim.ParseFleet("2p4d:dp=2,engine=sglang,block=8+1a:model=other,connector=none,error_rate=0.5")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, g := range f.Groups {
		got = append(got, fmt.Sprintf("%d %s %d %s %d %q %s %v", g.Count, g.Role, g.DP, g.Engine, g.BlockSize, g.Connector, g.Model, g.Faults.ErrorRate))
	}
	want := []string{"2 prefill 2 sglang 8 \"sglang\" sim 0", "4 decode 2 sglang 8 \"sglang\" sim 0", "1 aggregated 1 vllm 16 \"\" other 0.5"}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if g := f.Groups[0]; g.Role != workers.Prefill {
		t.Error(g.Role)
	}
	for text, part := range map[string]string{
		"":                                "empty",
		"two":                             "counts like 2p2d",
		"0p":                              "1 to",
		"2000a":                           "1 to",
		"1a:dp":                           "key=value",
		"1a:dp=x":                         "dp",
		"1a:colour=red":                   "unknown option",
		"1a:engine=trt":                   "not one of",
		"1a:dp=0":                         "not between",
		"1a:speed=-1":                     "speed",
		"1p:engine=sglang,connector=nixl": "does not fit",
		"1a:error_rate=3":                 "share",
		"2p:port=18100+1d:port=18101":     "18100 to 18101 already",
		"2p1d:port=65534":                 "ports end at 65535",
	} {
		if _, err := sim.ParseFleet(text); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%q: %v, want %q", text, err, part)
		}
	}
	_, err = sim.ParseFleet("1a:dp=0,colour=red")
	if err == nil || !strings.Contains(err.Error(), "colour") || !strings.Contains(err.Error(), "dp=0") {
		t.Errorf("not everything is reported: %v", err)
	}
}

func FuzzParseFleet(f *testing.F) {
	for _, s := range []string{"2p2d", "1a:dp=2", "2p4d:dp=2,engine=sglang,block=16+1a", "1p:", "+", "1a:,,="} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		fleet, err := sim.ParseFleet(text)
		if err != nil {
			return
		}
		for _, g := range fleet.Groups {
			if err := g.Validate(); err != nil || g.Count < 1 {
				t.Errorf("%q gives an invalid group: %v", text, err)
			}
		}
	})
}

func TestStartFailsCleanly(t *testing.T) {
	g := sim.DefaultGroup()
	g.Role, g.Count, g.Profile = workers.Aggregated, 1, t.TempDir()+"/none.yaml"
	if _, err := sim.Start(t.Context(), sim.Fleet{Groups: []sim.Group{g}}); err == nil || !strings.Contains(err.Error(), "none.yaml") {
		t.Errorf("%v", err)
	}
	file := t.TempDir() + "/bad.yaml"
	if err := os.WriteFile(file, []byte("prefill_ms: [1,2,3]\nprefil: 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	g.Profile = file
	if _, err := sim.Start(t.Context(), sim.Fleet{Groups: []sim.Group{g}}); err == nil || !strings.Contains(err.Error(), "prefil") {
		t.Errorf("%v", err)
	}
}

// Whatever a body holds, the answer is JSON or a stream, and the engine lives.
func FuzzBodies(f *testing.F) {
	paths := []string{
		"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize",
		"/v1/embeddings", "/rerank", "/score", "/inference/v1/generate", "/sim/v1/faults",
	}
	for i, s := range []string{
		`{"prompt":[1,2],"max_tokens":2,"stop":["a"],"n":2,"stream":true,"stream_options":{"include_usage":true}}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"tools":[{"function":{"name":"f"}}],"tool_choice":"required","max_tokens":2}`,
		`{"input":"x","max_output_tokens":2}`, `{"messages":[{"role":"user","content":"x"}],"max_tokens":2,"system":"y"}`,
		`{"prompt":"x"}`, `{"tokens":[1,2,4294967295]}`, `{"input":["x"],"dimensions":3}`, `{"query":"x","documents":["y",{"text":"z"}]}`,
		`{"text_1":"x","text_2":["y"]}`, `{"token_ids":[5],"sampling_params":{"max_tokens":2}}`, `{"delay":"-1s"}`,
	} {
		f.Add(uint8(i), s)
	}
	fleet, err := sim.ParseFleet("1a:profile=instant,max_model_len=300,osl=4")
	if err != nil {
		f.Fatal(err)
	}
	r, err := sim.Start(f.Context(), fleet)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		if err := r.Close(); err != nil {
			f.Error(err)
		}
	})
	f.Fuzz(func(t *testing.T, path uint8, body string) {
		p := paths[int(path)%len(paths)]
		if p == "/sim/v1/faults" && !strings.Contains(body, "-") {
			return // a set that is accepted would disturb the next inputs
		}
		resp, err := http.Post(r.Engine(0).URL()+p, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatalf("%s: %v", p, err)
		}
		if resp.StatusCode == 500 {
			t.Errorf("%s: %s", p, b)
		}
		if resp.Header.Get("Content-Type") == "application/json" && !json.Valid(b) {
			t.Errorf("%s: not JSON: %s", p, b)
		}
	})
}
