package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// runClient runs a script of testdata against a router with simulated engines. It must
// end well, no request may fail, as many streams as the client has left must be known
// as that, and nothing of them may still run.
func runClient(t *testing.T, python, script, path string, left uint64) admin.Traffic {
	t.Helper()
	r := serve(t, "--sim", "2p2d", "--routing-threshold", "64")
	out, err := exec.Command(python, filepath.Join("testdata", script), r.url+path).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("the client failed: %v", err)
	}
	var s *admin.Status
	r.until("nothing is in progress", func() bool {
		s, err = r.admin.Status(t.Context())
		return err == nil && s.Traffic.Inflight == 0
	})
	r.waitIdle()
	if s.Traffic.Failed != 0 || s.Traffic.Remote == 0 || s.Traffic.Cancelled != left {
		t.Errorf("traffic %+v: want no failure, requests with remote prefill, and %d streams left", s.Traffic, left)
	}
	return s.Traffic
}

// TestAnthropicClient: messages, streams, tools and their results, usage, errors in
// Anthropic's shape, a stream that is left.
func TestAnthropicClient(t *testing.T) {
	need(t)
	runClient(t, libraries.python(t), "anthropic_client.py", "", 1)
}

// TestLangChain: its models for chat completions, responses and messages, with streams,
// batches, tools and usage, a stream left by each; embeddings; errors.
func TestLangChain(t *testing.T) {
	need(t)
	runClient(t, libraries.python(t), "langchain_client.py", "", 3)
}

// TestLiteLLM: its providers openai, hosted_vllm and anthropic, with streams, tools,
// concurrent requests, usage and errors.
func TestLiteLLM(t *testing.T) {
	need(t)
	runClient(t, libraries.python(t), "litellm_client.py", "", 0)
}

// tokenizerFolder is a tokenizer in the form that Hugging Face's library loads.
func tokenizerFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	raw, err := os.ReadFile(filepath.Join("..", "testdata", "tokenizer", "gpt2", "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{
		"tokenizer.json": raw, "config.json": []byte(`{"model_type":"gpt2"}`),
		"tokenizer_config.json": []byte(`{"tokenizer_class":"PreTrainedTokenizerFast","model_max_length":32768,"eos_token":"<|endoftext|>"}`),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// generate runs a load generator and reads the file of its result.
func generate(t *testing.T, result any, file, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
	raw, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(raw, result)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// counted checks that a router counts as many requests to an endpoint, all of them
// answered well, and as many tokens as their sender. What a client asks besides, such as
// the tokens of a prompt, counts apart.
func counted(t *testing.T, r *router, endpoint string, requests, tokens uint64) {
	t.Helper()
	label := fmt.Sprintf("endpoint=%q", endpoint)
	all, well := counter(t, r.metrics, "dynctl_requests_total", label), counter(t, r.metrics, "dynctl_requests_total", label, `code="200"`)
	if all != float64(requests) || well != all {
		t.Errorf("%v requests, %v answered well: want %d", all, well, requests)
	}
	s, err := r.admin.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if f := s.Traffic; f.CompletionTokens != tokens || f.Failed+f.Cancelled != 0 || f.Remote == 0 {
		t.Errorf("traffic %+v: want %d tokens of answers, and remote prefill", f, tokens)
	}
}

// TestVLLMBenchServe: vLLM's load generator, over completions and over chats, counts
// what the router counts.
func TestVLLMBenchServe(t *testing.T) {
	need(t)
	vllm, err := exec.LookPath("vllm")
	if err != nil {
		if vllm, err = exec.LookPath(filepath.Join(enginesHome(), "venv", "bin", "vllm")); err != nil {
			t.Skipf("skipped: vllm is not installed (%v)", err)
		}
	}
	dir := tokenizerFolder(t)
	for backend, at := range map[string]struct{ path, endpoint string }{"openai": {"/v1/completions", "completion"}, "openai-chat": {"/v1/chat/completions", "chat"}} {
		t.Run(backend, func(t *testing.T) {
			r := serve(t, "--sim", "2p2d:speed=10", "--routing-threshold", "64")
			var got struct {
				Completed uint64   `json:"completed"`
				Failed    uint64   `json:"failed"`
				Tokens    uint64   `json:"total_output_tokens"`
				Errors    []string `json:"errors"`
			}
			generate(t, &got, filepath.Join(dir, backend+".json"), vllm, "bench", "serve", "--backend", backend, "--endpoint", at.path, "--base-url", r.url,
				"--model", "sim", "--tokenizer", dir, "--dataset-name", "random", "--random-input-len", "300", "--random-output-len", "16", "--num-prompts", "40",
				"--max-concurrency", "8", "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", dir, "--result-filename", backend+".json")
			if got.Completed != 40 || got.Failed != 0 || got.Tokens != 640 {
				t.Errorf("vllm bench serve saw %+v", got)
			}
			counted(t, r, at.endpoint, got.Completed, got.Tokens)
		})
	}
}

// TestGuideLLM: guidellm's requests all succeed, and are what the router counts.
func TestGuideLLM(t *testing.T) {
	need(t)
	tool := filepath.Join(filepath.Dir(guide.python(t)), "guidellm")
	dir := tokenizerFolder(t)
	r := serve(t, "--sim", "2p2d:speed=10", "--routing-threshold", "64")
	file := filepath.Join(dir, "guide.json")
	var got struct {
		Benchmarks []struct {
			Metrics struct {
				Totals struct{ Successful, Errored, Incomplete uint64 } `json:"request_totals"`
			} `json:"metrics"`
		} `json:"benchmarks"`
	}
	generate(t, &got, file, tool, "run", "--backend", fmt.Sprintf("kind=openai_http,target=%s,model=sim", r.url), "--profile", "kind=concurrent,streams=4",
		"--constraint", "kind=max_requests,count=40", "--tokenizer", "kind=hf_auto,model="+dir, "--data", "kind=synthetic_text,prompt_tokens=200,output_tokens=16",
		"--output", "kind=json,path="+file, "--disable-console-interactive")
	if len(got.Benchmarks) != 1 {
		t.Fatalf("%+v", got)
	}
	n := got.Benchmarks[0].Metrics.Totals
	if n.Successful != 40 || n.Errored+n.Incomplete != 0 {
		t.Errorf("guidellm saw %+v", n)
	}
	counted(t, r, "chat", 40, 640)
}
