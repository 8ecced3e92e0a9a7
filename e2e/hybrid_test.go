package e2e

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestHybridOnVLLM: on real vLLM with models whose layers have caches of several
// kinds, the prefix predicted from the engine's own events is what it reports as
// cached. The pool is so small that blocks are removed all the time. Where no group has
// full attention, that takes the engine's names of blocks to be stated; without, the rank
// says that nothing is known of its cache, and why.
func TestHybridOnVLLM(t *testing.T) {
	vllmBin(t)
	layers := func(other string) []string { return []string{other, other, other, "full_attention"} }
	pairs := []string{"sliding_attention", "full_attention", "sliding_attention", "full_attention"}
	for _, c := range []struct {
		name, arch string
		config     map[string]any
		env, args  []string
		worker     string // further settings of the worker
		unknown    string // the kind of cache that the rank's reason names
	}{
		{name: "gemma3", arch: "Gemma3ForCausalLM", config: map[string]any{
			"model_type": "gemma3_text", "sliding_window": 128, "layer_types": layers("sliding_attention"), "query_pre_attn_scalar": 64,
			"rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh", "sliding_window_pattern": 4,
		}},
		{name: "gpt-oss", arch: "GptOssForCausalLM", config: gptOSS(pairs)},
		{name: "olmo3", arch: "Olmo3ForCausalLM", config: map[string]any{
			"model_type": "olmo3", "sliding_window": 70, "layer_types": layers("sliding_attention"),
		}},
		{name: "lfm2", arch: "Lfm2ForCausalLM", config: map[string]any{
			"model_type": "lfm2", "layer_types": layers("conv"), "conv_L_cache": 3, "conv_bias": false, "block_dim": 128, "block_ff_dim": 256,
			"block_multiple_of": 64, "block_auto_adjust_ff_dim": false, "norm_eps": 1e-6, "conv_dim": 128,
		}},
		{name: "llama4", arch: "Llama4ForCausalLM", config: map[string]any{
			"model_type": "llama4_text", "attention_chunk_size": 128, "layer_types": layers("chunked_attention"), "no_rope_layers": []int{1, 1, 1, 0},
			"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 256, "moe_layers": []int{},
			"use_qk_norm": true, "attn_temperature_tuning": false,
		}, env: []string{"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1"}, worker: ",attention_chunk=128"},
		{name: "qwen3-next", arch: "Qwen3NextForCausalLM", config: map[string]any{
			"model_type": "qwen3_next", "layer_types": layers("linear_attention"), "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64,
			"linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
			"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []int{},
			"norm_topk_prob": true, "partial_rotary_factor": 0.25,
		}, args: []string{"--dtype", "bfloat16"}}, // on a CPU its kernel takes nothing else
		{name: "mistral", arch: "MistralForCausalLM", config: map[string]any{"model_type": "mistral", "sliding_window": 128}, unknown: "sliding_window"},
		{name: "mistral, names stated", arch: "MistralForCausalLM", config: map[string]any{"model_type": "mistral", "sliding_window": 128},
			env: []string{"PYTHONHASHSEED=7"}, worker: ",kv_hash=sha256,kv_hash_seed=7"},
	} {
		t.Run(c.name, func(t *testing.T) {
			url := startVLLM(t, tinyModel(t, c.arch, c.config), freeAddr(t), c.env, append([]string{
				"--no-disable-hybrid-kv-cache-manager", "--max-model-len", "1024", "--num-gpu-blocks-override", "200",
			}, c.args...)...)
			r := serve(t, "--worker", url+",name=a0"+c.worker)
			if c.unknown == "" {
				predicted(t, r)
				return
			}
			prompt := ids(rand.New(rand.NewPCG(2, 2)), 300)
			for range 2 {
				a := post(t, r.url, "/v1/completions", completion("tiny", prompt, 2, false)).must(t)
				if got := r.explain(a).Predicted.CachedTokens; got > 0 {
					t.Errorf("predicted %d cached tokens of a cache of which nothing is known", got)
				}
			}
			r.until("the rank is unknown and says why", func() bool {
				l, err := r.admin.Ranks(t.Context())
				return err == nil && len(l.Ranks) == 1 && l.Ranks[0].Feed.State == "unknown" && strings.Contains(l.Ranks[0].Feed.Reason, c.unknown)
			})
		})
	}
}

// gptOSS is a small model of the kind of gpt-oss: windows beside full attention,
// and experts, so that vLLM runs its ranks as ranks of one deployment.
func gptOSS(layers []string) map[string]any {
	return map[string]any{
		"model_type": "gpt_oss", "sliding_window": 128, "layer_types": layers, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": json.Number("7.0"), // not 7: its type is checked
	}
}

// predicted sends prompts with common heads and compares each prediction with
// what the engine reports as cached.
func predicted(t *testing.T, r *router) {
	t.Helper()
	const prompts = 150
	rng := rand.New(rand.NewPCG(11, 11))
	var heads [10][]int
	for i := range heads {
		heads[i] = ids(rng, 480)
	}
	reused, tokens := 0, 0
	for i := range prompts {
		h := heads[min(rng.IntN(len(heads)), rng.IntN(len(heads)))]
		prompt := append([]int{}, h[:64+32*rng.IntN(14)]...)
		if rng.IntN(4) > 0 {
			prompt = append(prompt, ids(rng, rng.IntN(200))...)
		}
		r.waitIdle()
		a := post(t, r.url, "/v1/completions", completion("tiny", prompt, 1+rng.IntN(8), false)).must(t)
		if a.cached < 0 {
			t.Fatal("the engine does not report cached tokens")
		}
		got := r.explain(a).Predicted.CachedTokens
		if got != a.cached {
			t.Errorf("prompt %d of %d tokens: predicted %d cached tokens, the engine reports %d", i, len(prompt), got, a.cached)
		}
		if a.cached > 0 {
			reused++
		}
		tokens += a.cached
	}
	s, err := r.admin.IndexStats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	l, err := r.admin.Ranks(t.Context())
	if err != nil || len(l.Ranks) != 1 || len(l.Ranks[0].Feed.CacheGroups) == 0 {
		t.Fatalf("the rank has reported no cache groups: %+v, %v", l, err)
	}
	// The index, which counts removals, holds full attention.
	full := slices.ContainsFunc(l.Ranks[0].Feed.CacheGroups, func(g admin.CacheGroup) bool { return g.Kind == "full_attention" })
	if reused < prompts/5 || full && s.Totals.Removed == 0 {
		t.Errorf("%d of %d prompts reused blocks, %d blocks removed: the test proved little", reused, prompts, s.Totals.Removed)
	}
	t.Logf("cache groups: %+v", l.Ranks[0].Feed.CacheGroups)
	t.Logf("%d prompts, %d with %d cached tokens in all, %d removals: prediction equal each time", prompts, reused, tokens, s.Totals.Removed)
}
