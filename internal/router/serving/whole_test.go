package serving_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestRequestsThatStayWhole: what an answer says of the prompt itself only the engine knows that
// computed it, so that one engine serves such a request, or refuses it where none can.
func TestRequestsThatStayWhole(t *testing.T) {
	const chat, generate = "/v1/chat/completions", "/inference/v1/generate"
	long := strings.Repeat("word ", 200)
	prompts := map[string]string{
		chat: `"messages":[{"role":"user","content":"` + long + `"}],"max_tokens":12`, "/v1/messages": `"messages":[{"role":"user","content":"` + long + `"}],"max_tokens":12`,
		"/v1/responses": `"input":"` + long + `"`, generate: `"token_ids":[` + strings.TrimSuffix(strings.Repeat("1000,", 64), ",") + `]`,
	}
	for _, c := range []struct {
		path, more string
		legs       int
	}{
		{completions, "", 2},
		{completions, `,"return_routed_experts":true`, 1},
		{completions, `,"return_routed_experts":false`, 2},
		{completions, `,"echo":true`, 2},
		{completions, `,"echo":true,"logprobs":1`, 1},
		{completions, `,"prompt_logprobs":0`, 1},
		{chat, "", 2},
		{chat, `,"return_routed_experts":true`, 1},
		{chat, `,"echo":true`, 1},
		{chat, `,"echo":false`, 2},
		{"/v1/messages", "", 2},
		{"/v1/messages", `,"return_routed_experts":true`, 1},
		{"/v1/responses", "", 2},
		{"/v1/responses", `,"return_routed_experts":true`, 1},
		{generate, `,"sampling_params":{"max_tokens":12}`, 2},
		{generate, `,"sampling_params":{"max_tokens":12,"prompt_logprobs":1}`, 1},
		{generate, `,"sampling_params":{"max_tokens":12},"return_routed_experts":true`, 1},
	} {
		for _, fleet := range []string{"1p1d", "1p1d sglang"} {
			for _, stream := range []bool{false, true} {
				if fleet == "1p1d sglang" && c.path != completions && c.path != chat {
					continue // SGLang has no transfers there
				}
				t.Run(fmt.Sprintf("%s/%s%s/%v", fleet, c.path, c.more, stream), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						r := fakeengine.New(t, fleet)
						for name := range strings.FieldsSeq("prefill-0 decode-0") {
							// Messages and Responses carry transfers since then.
							if _, err := r.Registry.Update(r.Worker(name), workers.Learned{Facts: workers.Facts{Models: []string{"m"}, Version: "0.32.0"}}); err != nil {
								t.Fatal(err)
							}
						}
						q := ask(stream, c.more)
						if prompt := prompts[c.path]; prompt != "" {
							q = fakeengine.Ask{Path: c.path, Body: fmt.Sprintf(`{"model":"m",%s,"stream":%v%s}`, prompt, stream, c.more)}
						}
						got := r.Send(t.Context(), q)
						status, legs := 200, c.legs
						if fleet == "1p1d sglang" && legs == 1 { // its decode engine serves nothing alone
							status, legs = 400, 0
						}
						if n := len(r.Requests("")); got.Status != status || n != legs {
							t.Errorf("%d legs, want %d: %s, want %d", n, legs, got, status)
						}
					})
				})
			}
		}
	}
}

// TestRequestsThatFitNoRank: a prompt and an answer that exceed the context of every decode
// worker are refused before any leg; where one has room, or may have, engines judge.
func TestRequestsThatFitNoRank(t *testing.T) {
	for _, c := range []struct {
		name    string
		lengths []int // of the decode workers
		engine  workers.Engine
		more    string
		status  int
		param   string
	}{
		{"to the last token", []int{76, 76}, workers.VLLM, "", 200, ""},
		{"the answer is too long", []int{75, 70}, workers.VLLM, "", 400, "max_tokens"},
		{"one has room", []int{75, 76}, workers.VLLM, "", 200, ""},
		{"the prompt is too long", []int{63, 63}, workers.VLLM, "", 400, ""},
		{"one that does not report its length", []int{75, 0}, workers.VLLM, "", 200, ""},
		{"an engine that may cut the prompt", []int{75, 75}, workers.SGLang, "", 200, ""},
		{"a prompt that is cut as asked for", []int{75, 75}, workers.VLLM, `,"truncate_prompt_tokens":32`, 200, ""},
	} {
		for _, fleet := range []string{"2a", "1p2d"} {
			for _, stream := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/%v", c.name, fleet, stream), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						r := fakeengine.New(t, fleet)
						specs := fakeengine.Specs(t, fleet)
						n := 0
						for i := range specs {
							if specs[i].Role.CanDecode() {
								specs[i].MaxModelLen = c.lengths[n]
								n++
							}
							if specs[i].Engine = c.engine; c.engine == workers.SGLang && specs[i].Role != workers.Aggregated {
								specs[i].Connector, specs[i].Bootstrap = workers.ConnectorSGLang, &workers.Bootstrap{Host: specs[i].Name, Port: 8998}
							}
						}
						r.Apply(specs)
						got := r.Send(t.Context(), ask(stream, c.more))
						if got.Status != c.status || c.status == 200 && !whole(got, stream) {
							t.Fatalf("%s, want %d", got, c.status)
						}
						if c.status == 400 && (got.Err == nil || got.Err.Param != c.param || len(r.Requests("")) > 0) {
							t.Errorf("%d requests to engines: %s, of %q", len(r.Requests("")), got, got.Err.Param)
						}
					})
				})
			}
		}
	}
}
