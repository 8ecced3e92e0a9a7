package e2e

import (
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// vllmBin is the command of an installed vLLM; the test is skipped without one.
func vllmBin(t *testing.T) string {
	t.Helper()
	need(t)
	home := os.Getenv("DYNCTL_ENGINES_HOME")
	if home == "" {
		dir, err := os.UserHomeDir()
		if err != nil {
			t.Fatal(err)
		}
		home = filepath.Join(dir, ".cache", "dynctl-engines")
	}
	bin := filepath.Join(home, "venv", "bin", "vllm")
	if _, err := os.Stat(bin); err != nil {
		t.Skipf("skipped: no vLLM is installed here (%v)", err)
	}
	return bin
}

// tokens is how many token ids the tiny models know.
const tokens = 512

// tinyModel writes a model of an architecture with four small layers, without
// weights: vLLM fills them in by itself, the same in each process
// (--load-format dummy). Each byte is a token.
func tinyModel(t *testing.T, arch string, more map[string]any) string {
	t.Helper()
	config := map[string]any{
		"architectures": []string{arch}, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
		"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": tokens,
		"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": false,
		"tie_word_embeddings": false, "eos_token_id": 257, "pad_token_id": 256, "bos_token_id": nil, "hidden_act": "silu",
	}
	maps.Copy(config, more)
	// The names that byte-level tokenizers give to bytes: what can be printed is
	// its own name, the others follow behind the 256 of Latin-1.
	vocab, next := map[string]int{"<|endoftext|>": 256, "<|im_end|>": 257}, rune(256)
	for b := range rune(256) {
		name := b
		if b < '!' || b > '~' && b < 0xA1 || b == 0xAD {
			name, next = next, next+1
		}
		vocab[string(name)] = int(b)
	}
	level := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
	special := func(id int, text string) map[string]any {
		return map[string]any{"id": id, "content": text, "special": true, "normalized": false, "lstrip": false, "rstrip": false, "single_word": false}
	}
	dir := t.TempDir()
	for name, v := range map[string]any{
		"config.json": config,
		"tokenizer.json": map[string]any{
			"version": "1.0", "pre_tokenizer": level, "decoder": level, "added_tokens": []any{special(256, "<|endoftext|>"), special(257, "<|im_end|>")},
			"model": map[string]any{"type": "BPE", "vocab": vocab, "merges": []string{}},
		},
		"tokenizer_config.json": map[string]any{
			"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
			"chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
		},
	} {
		raw, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), raw, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// startVLLM runs vLLM on CPU until the test ends and waits until it answers. It
// returns its URL. env is added to its environment.
func startVLLM(t *testing.T, model, addr string, env []string, args ...string) string {
	t.Helper()
	wait := launchVLLM(t, model, addr, env, args...)
	wait()
	return "http://" + addr
}

// launchVLLM is startVLLM for engines that wait for each other: it returns at once,
// with what waits until the engine answers.
func launchVLLM(t *testing.T, model, addr string, env []string, args ...string) (wait func()) {
	t.Helper()
	bin := vllmBin(t)
	host, port, _ := strings.Cut(addr, ":")
	cmd := exec.Command(bin, append([]string{
		"serve", model, "--served-model-name", "tiny", "--load-format", "dummy", "--host", host, "--port", port,
		"--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", "--block-size", "32", "--enable-prefix-caching", "--enable-prompt-tokens-details",
		"--disable-uvicorn-access-log",
		// A fixed port would be bound on every interface.
		"--kv-events-config", `{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:0","replay_endpoint":"tcp://*:0"}`,
	}, args...)...)
	cmd.Env = append(os.Environ(), append([]string{
		"HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "VLLM_HOST_IP=127.0.0.1",
	}, env...)...)
	log, err := os.Create(filepath.Join(t.TempDir(), "vllm.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // its workers end with it
	start := time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	tail := func() string {
		raw, _ := os.ReadFile(log.Name())
		return string(raw[max(0, len(raw)-6000):])
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-ended
		if t.Failed() {
			t.Logf("log of vLLM:\n%s", tail())
		}
	})
	return func() {
		t.Helper()
		late, tick := time.After(5*time.Minute), time.NewTicker(200*time.Millisecond)
		defer tick.Stop()
		for {
			if resp, err := http.Get("http://" + addr + "/health"); err == nil {
				resp.Body.Close()
				if resp.StatusCode == http.StatusOK {
					break
				}
			}
			select {
			case err := <-ended:
				ended <- err
				t.Fatalf("vLLM ended: %v\n%s", err, tail())
			case <-late:
				t.Fatalf("vLLM does not answer after %v", time.Since(start).Round(time.Second))
			case <-tick.C:
			}
		}
		t.Logf("vLLM %s answers after %v", filepath.Base(model), time.Since(start).Round(time.Second))
	}
}
