package doctor

import (
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// What a prediction that does not fit may come from is said in the words of the setting
// that would correct it.
func TestMisfit(t *testing.T) {
	t.Parallel()
	hybrid := []admin.CacheGroup{{Kind: "full_attention", Block: 16}, {Group: 1, Kind: "sliding_window", Window: 40, Block: 16}}
	chunks := []admin.CacheGroup{{Kind: "full_attention", Block: 16}, {Group: 1, Kind: "chunked_local_attention", Block: 32}}
	const unexplained = "the index and the engine disagree"
	for _, tt := range []struct {
		name             string
		w                admin.Worker
		groups           []admin.CacheGroup
		predicted, found int
		want             string
	}{
		{"one block too many", admin.Worker{}, nil, 160, 144, "kv_last_block=dropped for w"},
		{"one block too many of a hybrid rank", admin.Worker{}, hybrid, 160, 144, "kv_last_block=dropped for w"},
		{"one block too few", admin.Worker{KVLastBlock: "dropped"}, nil, 144, 160, "kv_last_block=kept"},
		{"one block too few, and none is dropped", admin.Worker{}, nil, 144, 160, unexplained},
		{"one block too many although one is dropped", admin.Worker{KVLastBlock: "dropped"}, nil, 160, 144, unexplained},
		{"chunks of unknown size", admin.Worker{}, chunks, 0, 160, "attention_chunk=N for w"},
		{"chunks of a stated size", admin.Worker{AttentionChunk: 64}, chunks, 0, 160, unexplained},
		{"a window that holds less", admin.Worker{}, hybrid, 160, 64, "kv_copies=single for w"},
		{"the same with single copies", admin.Worker{KVCopies: "single"}, hybrid, 160, 64, unexplained},
		{"far too many", admin.Worker{}, nil, 160, 32, unexplained},
		{"no receipt", admin.Worker{}, nil, -1, 16, unexplained},
	} {
		w := tt.w
		w.Name, w.BlockSizeTokens = "w", 16
		w.Ranks = []admin.Rank{{Label: "w/dp0"}, {Label: "w/dp1", Feed: admin.Feed{CacheGroups: tt.groups}}}
		e := &exam{facts: &fleet.Facts{Workers: []admin.Worker{{Name: "v"}, w}}}
		if got := e.misfit("w/dp1", tt.predicted, tt.found); !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// Engines whose handshake over NIXL fails are named, with why, and blocks of 16 tokens.
func TestHandshakes(t *testing.T) {
	t.Parallel()
	w := func(name, role, connector, version, cache string, block int) admin.Worker {
		return admin.Worker{Name: name, Engine: "vllm", Role: role, Connector: connector, Version: version, CacheType: cache, BlockSizeTokens: block, Models: []string{"m"}, DP: 1, Ranks: []admin.Rank{{Engine: &admin.EngineLoad{}}}}
	}
	for _, tt := range []struct {
		name  string
		ws    []admin.Worker
		check string
		state State
		says  string
	}{
		{"alike", []admin.Worker{w("p", "prefill", "nixl", "0.32.0", "auto", 64), w("d", "decode", "nixl", "0.32.0", "auto", 64)}, "handshake", "", ""},
		{"two versions", []admin.Worker{w("p", "prefill", "nixl", "0.32.0", "auto", 64), w("d", "decode", "nixl", "0.33.0", "auto", 64)}, "handshake", Fail, "vLLM 0.32.0 and 0.33.0 (connector versions 14 and 15)"},
		{"in the middle of an update", []admin.Worker{w("p", "prefill", "nixl", "0.32.0", "auto", 64), w("q", "prefill", "nixl", "0.33.0", "auto", 64), w("d", "decode", "nixl", "0.33.0", "auto", 64)}, "handshake", Warn, "it pairs with 1 prefill worker, and NIXL would refuse p"},
		{"two types of cache", []admin.Worker{w("p", "prefill", "nixl-push", "0.33.0", "fp8", 64), w("d", "decode", "nixl-push", "0.33.0", "auto", 64)}, "handshake", Fail, "cache_dtype fp8 and auto"},
		{"over Mooncake", []admin.Worker{w("p", "prefill", "mooncake", "0.32.0", "auto", 16), w("d", "decode", "mooncake", "0.33.0", "auto", 16)}, "handshake", "", ""},
		{"small blocks", []admin.Worker{w("p", "prefill", "nixl", "0.33.0", "auto", 16), w("d", "decode", "nixl", "0.33.0", "auto", 16)}, "block size over NIXL", Warn, "blocks of 16 tokens"},
		{"small blocks over Mooncake", []admin.Worker{w("p", "prefill", "mooncake", "0.33.0", "auto", 16)}, "block size over NIXL", "", ""},
		{"small blocks of an engine alone", []admin.Worker{w("a", "aggregated", "nixl", "0.33.0", "auto", 16)}, "block size over NIXL", "", ""},
	} {
		e := &exam{r: &Report{}}
		e.contradictions(tt.ws)
		i := slices.IndexFunc(e.r.Findings, func(f Finding) bool { return f.Check == tt.check })
		if (i >= 0) != (tt.state != "") || i >= 0 && (e.r.Findings[i].State != tt.state || !strings.Contains(e.r.Findings[i].Text, tt.says)) {
			t.Errorf("%s: %+v", tt.name, e.r.Findings)
		}
	}
}

// A model with several cache groups that moves them over NIXL is named, with the
// engine's defect; other connectors and models are not.
func TestHybridOverNIXL(t *testing.T) {
	t.Parallel()
	hybrid := []admin.CacheGroup{{Kind: "full_attention", Block: 16}, {Group: 1, Kind: "sliding_window", Window: 40, Block: 16}}
	for _, tt := range []struct {
		connector string
		groups    []admin.CacheGroup
		warned    bool
	}{{"nixl", hybrid, true}, {"nixl-push", hybrid, true}, {"nixl", nil, false}, {"lmcache", hybrid, false}, {"", hybrid, false}} {
		e := &exam{r: &Report{}}
		e.contradictions([]admin.Worker{{Name: "w", Connector: tt.connector, DP: 1, Ranks: []admin.Rank{{Label: "w/dp0", Feed: admin.Feed{CacheGroups: tt.groups}}}}})
		warned := slices.ContainsFunc(e.r.Findings, func(f Finding) bool {
			return f.Check == "hybrid over NIXL" && f.Subject == "w" && f.State == Warn && strings.Contains(f.Text, "52234")
		})
		if warned != tt.warned {
			t.Errorf("%q with %d groups: warned: %v", tt.connector, len(tt.groups), warned)
		}
	}
}
