package e2e

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// TestRecordingOfVLLM: a recording made in front of real engines, with
// evictions and requests at the same time, replays with every decision
// reproduced. DYNCTL_E2E_KEEP names a file to keep the recording in, as that in
// testdata/trace was made; DYNCTL_E2E_PREFILL and DYNCTL_E2E_DECODE use engines
// that run already.
func TestRecordingOfVLLM(t *testing.T) {
	need(t)
	list := []engine{
		{Name: "p0", Role: "prefill", Model: "tiny", URL: os.Getenv("DYNCTL_E2E_PREFILL")},
		{Name: "d0", Role: "decode", Model: "tiny", URL: os.Getenv("DYNCTL_E2E_DECODE")},
	}
	if list[0].URL == "" || list[1].URL == "" {
		list = startEngines(t, "1p1d", "--kv-blocks", "96", "--model", "tiny")
	}
	p, d := by(list, "prefill")[0], by(list, "decode")[0]
	path := filepath.Join(t.TempDir(), "vllm.jsonl")
	t.Run("record", func(t *testing.T) {
		r := serve(t, "--prefill", p.URL, "--decode", d.URL, "--routing-threshold", "96", "--record", path)
		rng := rand.New(rand.NewPCG(11, 11))
		var heads [5][]int
		for i := range heads {
			heads[i] = ids(rng, 640)
		}
		prompts := make(chan []int)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for prompt := range prompts {
					if a := post(t, r.url, "/v1/completions", completion(d.Model, prompt, 4, false)); a.status != 200 {
						t.Errorf("status %d: %s", a.status, a.body)
					}
				}
			})
		}
		for range 72 {
			prompt := append([]int{}, heads[rng.IntN(5)][:64+rng.IntN(576)]...)
			prompts <- append(prompt, ids(rng, 16+rng.IntN(120))...)
		}
		close(prompts)
		wg.Wait()
		r.waitIdle()
	})
	if t.Failed() {
		return
	}
	bin := built(t)
	out, err := exec.Command(bin, "replay", path, "--verify", "--min-match", "1", "-o", "json").Output()
	if err != nil {
		t.Fatalf("replay --verify: %v\n%s", err, out)
	}
	var report map[string]any
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatal(err)
	}
	t.Logf("verified: %v", report["verify"])
	if keep := os.Getenv("DYNCTL_E2E_KEEP"); keep != "" {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(keep, raw, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
