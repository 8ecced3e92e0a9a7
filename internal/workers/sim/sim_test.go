package sim_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/workers/sim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs a fleet for the time of the test.
func start(t *testing.T, text string) *sim.Running {
	t.Helper()
	f, err := sim.ParseFleet(text)
	if err != nil {
		t.Fatal(err)
	}
	r, err := sim.Start(context.Background(), f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return r
}

// restart ends e and starts it again. Connections of its former life are not used any
// more: a POST that goes out on one before its end has been read fails with EOF.
func restart(t *testing.T, e *sim.Engine) {
	t.Helper()
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
	http.DefaultClient.CloseIdleConnections()
}

type object = map[string]any

// post sends a JSON body and returns status and body.
func post(t *testing.T, url string, body any, header ...string) (int, []byte) {
	t.Helper()
	status, b, err := tryPost(t.Context(), url, body, header...)
	if err != nil {
		t.Fatal(err)
	}
	return status, b
}

func tryPost(ctx context.Context, url string, body any, header ...string) (int, []byte, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(b))
	if err != nil {
		return 0, nil, err
	}
	q.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		q.Header.Set(header[i], header[i+1])
	}
	r, err := http.DefaultClient.Do(q)
	if err != nil {
		return 0, nil, err
	}
	defer r.Body.Close()
	out, err := io.ReadAll(r.Body)
	return r.StatusCode, out, err
}

func decode[T any](t *testing.T, b []byte) (v T) {
	t.Helper()
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatalf("%v in %s", err, b)
	}
	return v
}

type completion struct {
	Choices []struct {
		Text         string
		FinishReason string `json:"finish_reason"`
	}
	Usage struct {
		PromptTokens        int `json:"prompt_tokens"`
		CompletionTokens    int `json:"completion_tokens"`
		PromptTokensDetails struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	KV json.RawMessage `json:"kv_transfer_params"`
}

// ids is a prompt of n tokens that depends on tag.
func ids(n, tag int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = 300 + (i*7919+tag*104729+i*i*tag)%3000
	}
	return out
}

var prefillParams = object{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil, "remote_port": nil}

// prefill runs a prefill leg and returns its parameters.
func prefill(t *testing.T, e *sim.Engine, prompt []int) object {
	t.Helper()
	status, b := post(t, e.URL()+"/v1/completions", object{"model": "sim", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": prefillParams})
	if status != 200 {
		t.Fatalf("prefill: %d %s", status, b)
	}
	c := decode[completion](t, b)
	if string(c.KV) == "null" {
		t.Fatalf("no kv_transfer_params in %s", b)
	}
	return decode[object](t, c.KV)
}

// complete runs a plain request of 12 tokens.
func complete(t *testing.T, e *sim.Engine, prompt []int, params any) (int, string, completion) {
	t.Helper()
	status, b := post(t, e.URL()+"/v1/completions", object{"model": "sim", "prompt": prompt, "max_tokens": 12, "ignore_eos": true, "kv_transfer_params": params})
	if status != 200 {
		return status, string(b), completion{}
	}
	c := decode[completion](t, b)
	return status, c.Choices[0].Text, c
}

func TestRemotePrefillMovesKV(t *testing.T) {
	r := start(t, "1p1d:profile=instant")
	p, d := r.Engine(0), r.Engine(1)
	for n := 1; n < 70; n += 3 {
		prompt := ids(n, n)
		_, want, _ := complete(t, p, append([]int{}, prompt...), nil)
		params := prefill(t, p, prompt)
		status, got, c := complete(t, d, prompt, params)
		if status != 200 || got != want {
			t.Fatalf("%d tokens: %d %q, want %q", n, status, got, want)
		}
		if c.Usage.PromptTokensDetails.CachedTokens != 0 {
			t.Errorf("pulled tokens are counted as cached: %+v", c.Usage)
		}
	}
	s, err := d.Counters()
	if err != nil {
		t.Fatal(err)
	}
	if s[0].External == 0 || s[0].Local != 0 || s[0].External != s[0].Prompt {
		t.Errorf("decode computed prompts: %+v", s[0])
	}
	if ps, _ := p.Counters(); ps[0].Pinned != 0 {
		t.Errorf("prefill still pins %d requests", ps[0].Pinned)
	}
	resp, err := http.Get(d.URL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	page, _ := io.ReadAll(resp.Body)
	if !strings.Contains(string(page), `vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="external_kv_transfer"} `) {
		t.Errorf("metrics page:\n%s", page)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
