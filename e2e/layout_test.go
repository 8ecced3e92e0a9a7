package e2e

import (
	"fmt"
	"net"
	"testing"
)

// TestLayoutsOnVLLM: the ranks of one deployment of vLLM, behind one port (internal) and
// behind one each (external and hybrid). Prompts go to the rank that holds them, by the
// engines' own counters; what a worker is wrongly stated to be is refused.
func TestLayoutsOnVLLM(t *testing.T) {
	vllmBin(t)
	// To be a deployment a model must have experts, which a CPU does not exchange
	// between ranks; the number alone makes vLLM take this one for such a model.
	model := tinyModel(t, "Qwen3ForCausalLM", map[string]any{"model_type": "qwen3", "num_experts": 4})
	args := []string{"--max-model-len", "1024", "--num-gpu-blocks-override", "400", "--data-parallel-size", "2"}
	t.Run("internal", func(t *testing.T) {
		url := startVLLM(t, model, freeAddr(t), nil, args...)
		r := serve(t, "--worker", url+",name=a0")
		r.live(2)
		affinity(t, r, "tiny", func() float64 { return counter(t, url, prefixHits) })
		for rank := range 2 {
			if counter(t, url, promptTokens, fmt.Sprintf(`engine="%d"`, rank)) == 0 {
				t.Errorf("rank %d computed nothing", rank)
			}
		}
	})
	for _, c := range []struct {
		name string
		of   func(rank int) []string
	}{
		{"external", func(rank int) []string { return []string{"--data-parallel-rank", fmt.Sprint(rank)} }},
		{"hybrid", func(rank int) []string {
			return []string{"--data-parallel-hybrid-lb", "--data-parallel-size-local", "1", "--data-parallel-start-rank", fmt.Sprint(rank)}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, rpc, err := net.SplitHostPort(freeAddr(t))
			if err != nil {
				t.Fatal(err)
			}
			var urls []string
			var waits []func()
			for rank := range 2 {
				addr := freeAddr(t)
				urls = append(urls, "http://"+addr)
				more := append([]string{"--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", rpc}, c.of(rank)...)
				waits = append(waits, launchVLLM(t, model, addr, nil, append(append([]string{}, args...), more...)...))
			}
			for _, wait := range waits {
				wait()
			}
			r := serve(t, "--worker", urls[0]+",name=a0", "--worker", urls[1]+",name=a1")
			r.live(2)
			affinity(t, r, "tiny", func() float64 { return counter(t, urls[0], prefixHits) + counter(t, urls[1], prefixHits) })
			for rank, url := range urls {
				if counter(t, url, promptTokens, fmt.Sprintf(`engine="%d"`, rank)) == 0 {
					t.Errorf("rank %d computed nothing", rank)
				}
			}
			wrong := serveUntil(t, "the wrong layout is reported", func(r *router) bool {
				l, err := r.admin.Workers(t.Context())
				if err != nil {
					return false
				}
				for _, w := range l.Workers {
					if w.Name == "a1" && w.Conflict != "" {
						t.Logf("reported: %s", w.Conflict)
						return true
					}
				}
				return false
			}, "--worker", urls[0]+",name=a0", "--worker", urls[1]+",name=a1,lb=internal,dp=2")
			before := counter(t, urls[1], promptTokens)
			for i := range 6 {
				post(t, wrong.url, "/v1/completions", completion("tiny", []int{10 + i, 20, 30}, 1, false)).must(t)
			}
			if got := counter(t, urls[1], promptTokens); got != before {
				t.Errorf("a worker with a layout that is not its engine's got requests: %v tokens of prompts", got-before)
			}
		})
	}
}

// live waits until so many ranks are known and their events are followed.
func (r *router) live(ranks int) {
	r.t.Helper()
	r.until("all ranks are known", func() bool {
		l, err := r.admin.Ranks(r.t.Context())
		if err != nil || len(l.Ranks) != ranks {
			return false
		}
		for _, k := range l.Ranks {
			if k.Feed.State != "live" {
				return false
			}
		}
		return true
	})
}
