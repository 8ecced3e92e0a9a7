package health

import (
	"compress/gzip"
	"io"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"

	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/samples"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func data(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func load(running, waiting int, usage, queries, hits, external float64) *workers.Load {
	return &workers.Load{Running: running, Waiting: waiting, KVUsage: usage, PrefixQueries: queries, PrefixHits: hits, ExternalHits: external, Process: math.NaN()}
}

// unused is the load of a rank that has served nothing since its start.
func unused() *workers.Load {
	l := load(0, 0, 0, 0, 0, 0)
	l.Unused = true
	return l
}

func TestParsePage(t *testing.T) {
	nan := math.NaN()
	tests := []struct {
		name   string
		text   string
		ranks  int
		engine workers.Engine
		labels []int
		block  int
		blocks int
		asleep bool
		nixl   bool
		want   []*workers.Load
	}{
		{
			"vLLM 0.32 with two ranks: num_gpu_blocks is a sum", string(data(t, "vllm-0.32.0-dp2.prom")), 2,
			workers.VLLM, []int{0, 1}, 32, 96, false, false,
			[]*workers.Load{load(0, 0, 0, 14203, 8256, 0), load(0, 0, 0, 10942, 7392, 0)},
		},
		{
			"vLLM 0.32 with two ranks that have served nothing", string(data(t, "vllm-0.32.0-dp2-fresh.prom")), 2,
			workers.VLLM, []int{0, 1}, 32, 1024, false, false,
			[]*workers.Load{unused(), unused()},
		},
		{
			"vLLM 0.32 with two ranks after the first request", string(data(t, "vllm-0.32.0-dp2-first-request.prom")), 2,
			workers.VLLM, []int{0, 1}, 32, 1024, false, false,
			[]*workers.Load{load(0, 0, 0, 3, 0, 0), unused()},
		},
		{
			"what came counts, and not what was to come", `vllm:num_requests_running{engine="0"} 1
vllm:external_prefix_cache_hits_total{engine="0"} 900
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 300
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 5000
`, 1,
			workers.VLLM, []int{0}, 0, 0, false, false, []*workers.Load{load(1, -1, nan, nan, nan, 300)},
		},
		{
			"no load series, though prompts were counted: unknown", `vllm:prefix_cache_queries_total{engine="0"} 5` + "\n", 1,
			workers.VLLM, []int{0}, 0, 0, false, false, []*workers.Load{nil},
		},
		{
			"vLLM 0.32 behind NIXL", string(data(t, "vllm-0.32.0-decode.prom")), 1,
			workers.VLLM, []int{0}, 32, 1024, false, true,
			[]*workers.Load{load(0, 0, 0, 20099, 448, 13247)},
		},
		{
			"sum without the size in tokens", `vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="200"} 1
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="200"} 1
`, 2, workers.VLLM, []int{0, 1}, 16, 100, false, false, []*workers.Load{nil, nil},
		},
		{
			"old vLLM names, no rank label", `vllm:num_requests_running{model_name="m"} 3
vllm:num_requests_waiting{model_name="m"} 1
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="m"} 10
vllm:gpu_prefix_cache_hits_total{model_name="m"} 4
vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1
`, 1, workers.VLLM, nil, 16, 10, false, false, []*workers.Load{load(3, 1, 0.5, 10, 4, nan)},
		},
		{
			"a sum over ranks is no rank's load", "vllm:num_requests_running 3\n", 2, workers.VLLM, nil, 0, 0, false, false, []*workers.Load{nil, nil},
		},
		{
			"rank 3 of a group that runs elsewhere", `vllm:num_requests_running{engine="3"} 2` + "\n", 1,
			workers.VLLM, []int{3}, 0, 0, false, false, []*workers.Load{load(2, -1, nan, nan, nan, nan)},
		},
		{
			"two models add up, usage does not", `vllm:num_requests_running{engine="0",model_name="a"} 2
vllm:num_requests_running{engine="0",model_name="b"} 3
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.2
vllm:kv_cache_usage_perc{engine="0",model_name="b"} 0.7
`, 1, workers.VLLM, []int{0}, 0, 0, false, false, []*workers.Load{load(5, -1, 0.7, nan, nan, nan)},
		},
		{
			"asleep", `vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0
vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 1
vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1
`, 1, workers.VLLM, nil, 0, 0, true, false, []*workers.Load{nil},
		},
		{
			"Ray Serve", `ray_vllm_num_requests_waiting{engine="0"} 4` + "\n", 1,
			workers.VLLM, []int{0}, 0, 0, false, false, []*workers.Load{load(-1, 4, nan, nan, nan, nan)},
		},
		{
			"no statistics: unknown, not idle", "python_gc_objects_collected_total 1\nprocess_start_time_seconds 12\n", 1, "", nil, 0, 0, false, false, []*workers.Load{nil},
		},
		{
			"nonsense values", `vllm:num_requests_running{engine="0"} -1
vllm:num_requests_waiting{engine="0"} NaN
vllm:kv_cache_usage_perc{engine="0"} 77
vllm:num_requests_running{engine="1"} 1e99
`, 2, workers.VLLM, []int{0, 1}, 0, 0, false, false, []*workers.Load{nil, nil},
		},
		{
			"SGLang with data-parallel attention", string(data(t, "sglang-dp2.prom")), 2,
			workers.SGLang, []int{0, 1}, 64, 10000, false, false,
			[]*workers.Load{load(5, 2, 0.28, 400, 120, nan), load(7, 0, 0.5, nan, nan, nan)},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := parsePage([]byte(tt.text))
			type facts struct {
				Engine        workers.Engine
				Block, Blocks int
				Asleep, NIXL  bool
			}
			if diff := cmp.Diff(facts{tt.engine, tt.block, tt.blocks, tt.asleep, tt.nixl}, facts{p.engine, p.blockSize, p.kvBlocks(), p.asleep, p.connector == workers.ConnectorNIXL}); diff != "" {
				t.Errorf("page (-want +got):\n%s", diff)
			}
			if p.gpuBlocks > 0 && p.poolBlocks() < tt.blocks {
				t.Errorf("%d blocks in the pool, fewer than the rank's %d", p.poolBlocks(), tt.blocks)
			}
			if diff := cmp.Diff(tt.labels, p.rankLabels()); diff != "" {
				t.Errorf("rank labels (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.want, p.loads(tt.ranks, time.Time{}, time.Time{}), cmpopts.EquateNaNs(), cmpopts.IgnoreFields(workers.Load{}, "Process")); diff != "" {
				t.Errorf("loads (-want +got):\n%s", diff)
			}
		})
	}
}

// TestWholeCapturedPages reads complete pages of a real engine.
func TestWholeCapturedPages(t *testing.T) {
	dir := filepath.Join("..", "..", "..", "testdata", "captures")
	for name, ranks := range map[string]int{"metrics-vllm-0.32.0-dp2.prom.gz": 2, "metrics-vllm-0.32.0-prefill.prom.gz": 1, "metrics-vllm-0.32.0-decode.prom.gz": 1} {
		t.Run(name, func(t *testing.T) {
			f, err := os.Open(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			z, err := gzip.NewReader(f)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(z)
			if err != nil {
				t.Fatal(err)
			}
			p := parsePage(b)
			if p.engine != workers.VLLM || p.blockSize != 32 || p.kvBlocks() == 0 {
				t.Errorf("engine %q, %d blocks of %d tokens", p.engine, p.kvBlocks(), p.blockSize)
			}
			if n := len(p.rankLabels()); n != ranks || !p.sleepKnown || p.asleep {
				t.Errorf("%d ranks, want %d; sleep known %v, asleep %v", n, ranks, p.sleepKnown, p.asleep)
			}
			for i, l := range p.loads(ranks, time.Now(), time.Now()) {
				if l == nil {
					t.Fatalf("rank %d has no load", i)
				}
				if l.Running < 0 || l.Waiting < 0 || math.IsNaN(l.KVUsage) || !(l.PrefixQueries > 0) {
					t.Errorf("rank %d: %d running, %d waiting, KV usage %v, %v queries", i, l.Running, l.Waiting, l.KVUsage, l.PrefixQueries)
				}
				if ranks == 1 && !(l.Process > 1e9) {
					t.Errorf("rank %d: its process began at %v", i, l.Process)
				}
			}
		})
	}
}

func TestScanAllocatesNothing(t *testing.T) {
	text := data(t, "vllm-0.32.0-dp2.prom")
	n := 0
	allocs := testing.AllocsPerRun(100, func() {
		samples.Scan(text, wanted, func(_ []byte, l samples.Labels, _ float64) {
			if _, ok := l.Number("engine"); ok {
				n++
			}
		})
	})
	if allocs != 0 || n == 0 {
		t.Errorf("%v allocations, %d samples", allocs, n)
	}
}

func FuzzScan(f *testing.F) {
	f.Add(data(f, "vllm-0.32.0-dp2.prom"))
	f.Add(data(f, "sglang-dp2.prom"))
	f.Add([]byte("a{b=\"\\"))
	f.Add([]byte(`vllm:num_requests_running{engine="99999999999"} 1e400`))
	f.Fuzz(func(t *testing.T, text []byte) {
		p := parsePage(text)
		if len(p.figures) > maxRanks || p.kvBlocks() < 0 {
			t.Fatalf("page %+v", p)
		}
		for _, l := range p.loads(4, time.Time{}, time.Time{}) {
			if l == nil {
				continue
			}
			if l.Running < -1 || l.Waiting < -1 || !l.Known() {
				t.Fatalf("load %+v", l)
			}
			if l.KVUsage < 0 || l.KVUsage > 1 {
				t.Fatalf("KV usage %v", l.KVUsage)
			}
		}
	})
}

func BenchmarkParsePage(b *testing.B) {
	text := data(b, "vllm-0.32.0-dp2.prom")
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		parsePage(text).loads(2, time.Time{}, time.Time{})
	}
}
