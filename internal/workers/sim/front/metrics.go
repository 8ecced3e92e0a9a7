package front

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// metricsPage builds a Prometheus text page.
type metricsPage struct {
	b strings.Builder
}

// family starts a metric.
func (p *metricsPage) family(name, kind, help string) {
	fmt.Fprintf(&p.b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
}

// sample writes one value; labels are name, value, name, value …
func (p *metricsPage) sample(name string, v float64, labels ...string) {
	p.b.WriteString(name)
	p.labels(labels...)
	p.b.WriteByte(' ')
	p.b.WriteString(formatFloat(v))
	p.b.WriteByte('\n')
}

func (p *metricsPage) labels(labels ...string) {
	for i := 0; i+1 < len(labels); i += 2 {
		if i == 0 {
			p.b.WriteByte('{')
		} else {
			p.b.WriteByte(',')
		}
		p.b.WriteString(labels[i])
		p.b.WriteByte('=')
		p.b.WriteString(strconv.Quote(labels[i+1]))
	}
	if len(labels) > 0 {
		p.b.WriteByte('}')
	}
}

func (p *metricsPage) histogram(name string, h engine.Histogram, labels ...string) {
	var n uint64
	for i, c := range h.Counts {
		n += c
		le := "+Inf"
		if i < len(h.Bounds) {
			le = formatFloat(h.Bounds[i])
		}
		p.sample(name+"_bucket", float64(n), append([]string{"le", le}, labels...)...)
	}
	p.sample(name+"_count", float64(n), labels...)
	p.sample(name+"_sum", h.Sum, labels...)
}

// metricsFacts are what the page says besides the counters.
type metricsFacts struct {
	Model     string
	Role      workers.Role
	Connector workers.Connector
	// BlockSize and Blocks are of one rank.
	BlockSize, Blocks, MaxModelLen int
	// SleepLevel is 0 for an engine that is awake.
	SleepLevel int
	// FirstRank is the place of the first rank in its deployment.
	FirstRank int
	// Started is when the engine's process was started.
	Started time.Time
}

// transferFamily is a histogram of a connector's transfers.
type transferFamily struct {
	name, help string
	sum        func(*engine.Stats) float64
}

// vllmMetrics is the page of a vLLM engine with the counters of its ranks: the series
// that a router reads, and the common histograms.
func vllmMetrics(f metricsFacts, all []engine.Stats) string {
	p := &metricsPage{}
	// With several ranks vLLM makes the page of several processes' counters, and
	// the process's own figures are not on it.
	if len(all) == 1 {
		p.family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
		p.sample("process_start_time_seconds", float64(f.Started.UnixMilli()/10)/100) // in the kernel's ticks
	}
	model := f.Model
	series := func(name, kind, help string, has func(*engine.Stats) bool, value func(*engine.Stats) float64, extra ...string) {
		if help != "" {
			p.family(name, kind, help)
		}
		for i := range all {
			if !has(&all[i]) {
				continue
			}
			p.sample(name, value(&all[i]), append([]string{"engine", strconv.Itoa(f.FirstRank + i), "model_name", model}, extra...)...)
		}
	}
	each := func(name, kind, help string, value func(*engine.Stats) float64, extra ...string) {
		series(name, kind, help, func(*engine.Stats) bool { return true }, value, extra...)
	}
	// With several ranks vLLM makes the series of a rank's load at its first step.
	load := func(name, help string, value func(*engine.Stats) float64, extra ...string) {
		series(name, "gauge", help, func(t *engine.Stats) bool { return len(all) == 1 || t.Steps > 0 }, value, extra...)
	}
	counter := func(name, help string, value func(*engine.Stats) uint64, extra ...string) {
		each(name, "counter", help, func(t *engine.Stats) float64 { return float64(value(t)) }, extra...)
	}
	hist := func(name, help string, value func(*engine.Stats) engine.Histogram) {
		p.family(name, "histogram", help)
		for i := range all {
			p.histogram(name, value(&all[i]), "engine", strconv.Itoa(f.FirstRank+i), "model_name", model)
		}
	}
	transfers := func(families []transferFamily) {
		for _, h := range families {
			p.family(h.name, "histogram", h.help)
			for i := range all {
				labels := []string{"engine", strconv.Itoa(f.FirstRank + i), "model_name", model}
				p.sample(h.name+"_bucket", float64(all[i].Transfers), append([]string{"le", "+Inf"}, labels...)...)
				p.sample(h.name+"_count", float64(all[i].Transfers), labels...)
				p.sample(h.name+"_sum", h.sum(&all[i]), labels...)
			}
		}
	}
	switch f.Connector.Reported() {
	case workers.ConnectorNIXL:
		transfers([]transferFamily{
			{"vllm:nixl_xfer_time_seconds", "Histogram of transfer duration for NIXL KV Cache transfers.", func(t *engine.Stats) float64 { return t.TransferSeconds }},
			{"vllm:nixl_bytes_transferred", "Histogram of bytes transferred per NIXL KV Cache transfers.", func(t *engine.Stats) float64 { return t.TransferBytes }},
			{"vllm:nixl_num_descriptors", "Histogram of number of descriptors per NIXL  KV Cache transfers.", func(t *engine.Stats) float64 { return float64(t.Descriptors) }},
		})
		counter("vllm:nixl_num_failed_transfers_total", "Number of failed NIXL KV Cache transfers.", func(t *engine.Stats) uint64 { return t.FailedTransfers })
		counter("vllm:nixl_num_kv_expired_reqs_total", "Number of requests that had their KV expire. NOTE: This metric is tracked on the P instance.", func(t *engine.Stats) uint64 { return t.Expired })
		counter("vllm:nixl_num_notifications_after_expiry_total", "Number of completion notifications for requests that were no longer tracked.", func(t *engine.Stats) uint64 { return t.LateNotes })
	case workers.ConnectorMooncake:
		transfers([]transferFamily{
			{"vllm:mooncake_xfer_time_seconds", "Histogram of transfer duration for Mooncake KV Cache transfers.", func(t *engine.Stats) float64 { return t.TransferSeconds }},
			{"vllm:mooncake_bytes_transferred", "Histogram of bytes transferred per Mooncake KV Cache transfer.", func(t *engine.Stats) float64 { return t.TransferBytes }},
		})
		counter("vllm:mooncake_num_failed_transfers_total", "Number of failed Mooncake KV Cache transfers.", func(t *engine.Stats) uint64 { return t.FailedTransfers })
		counter("vllm:mooncake_num_kv_expired_reqs_total", "Number of requests that had their KV expire. NOTE: This metric is tracked on the P instance.", func(t *engine.Stats) uint64 { return t.Expired })
	default:
	}
	load("vllm:num_requests_running", "Number of requests in model execution batches.", func(t *engine.Stats) float64 { return float64(t.Running) })
	load("vllm:num_requests_waiting", "Number of requests waiting to be processed.", func(t *engine.Stats) float64 { return float64(t.Waiting) })
	load("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", func(t *engine.Stats) float64 { return float64(t.Waiting - t.Deferred) }, "reason", "capacity")
	load("vllm:num_requests_waiting_by_reason", "", func(t *engine.Stats) float64 { return float64(t.Deferred) }, "reason", "deferred")
	for i, state := range []string{"awake", "weights_offloaded", "discard_all"} {
		help := ""
		if i == 0 {
			help = "Engine sleep state."
		}
		each("vllm:engine_sleep_state", "gauge", help, func(*engine.Stats) float64 {
			if f.SleepLevel == i {
				return 1
			}
			return 0
		}, "sleep_state", state)
	}
	load("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", func(t *engine.Stats) float64 { return t.KVUsage })
	p.family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
	for i := range all {
		p.sample("vllm:cache_config_info", 1,
			"_block_size_resolved", "True", "block_size", strconv.Itoa(f.BlockSize), "cache_dtype", "auto",
			"enable_prefix_caching", "True", "engine", strconv.Itoa(f.FirstRank+i), "gpu_memory_utilization", "0.92",
			"kv_cache_size_tokens", strconv.Itoa(f.BlockSize*f.Blocks),
			// With several ranks vLLM shows the sum of their blocks.
			"num_gpu_blocks", strconv.Itoa(f.Blocks*len(all)), "prefix_caching_hash_algo", "sha256")
	}
	counter("vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", func(t *engine.Stats) uint64 { return t.PrefixQueries })
	counter("vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", func(t *engine.Stats) uint64 { return t.PrefixHits })
	counter("vllm:external_prefix_cache_queries_total", "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried tokens.", func(t *engine.Stats) uint64 { return t.ExternalQueries })
	counter("vllm:external_prefix_cache_hits_total", "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached tokens.", func(t *engine.Stats) uint64 { return t.ExternalHits })
	counter("vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", func(t *engine.Stats) uint64 { return t.Preemptions })
	counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", func(t *engine.Stats) uint64 { return t.Prompt })
	counter("vllm:prompt_tokens_by_source_total", "Number of prompt tokens by source.", func(t *engine.Stats) uint64 { return t.Local }, "source", "local_compute")
	counter("vllm:prompt_tokens_by_source_total", "", func(t *engine.Stats) uint64 { return t.Cached }, "source", "local_cache_hit")
	counter("vllm:prompt_tokens_by_source_total", "", func(t *engine.Stats) uint64 { return t.External }, "source", "external_kv_transfer")
	counter("vllm:prompt_tokens_cached_total", "Number of cached prompt tokens (local + external).", func(t *engine.Stats) uint64 { return t.Cached + t.External })
	counter("vllm:generation_tokens_total", "Number of generation tokens processed.", func(t *engine.Stats) uint64 { return t.Generated })
	for i, why := range []engine.Finish{engine.FinishStop, engine.FinishLength, engine.FinishAbort, engine.FinishError} {
		help := ""
		if i == 0 {
			help = "Count of successfully processed requests."
		}
		counter("vllm:request_success_total", help, func(t *engine.Stats) uint64 { return t.Finished[why] }, "finished_reason", string(why))
	}
	hist("vllm:request_prompt_tokens", "Number of prefill tokens processed.", func(t *engine.Stats) engine.Histogram { return t.PromptLen })
	hist("vllm:request_generation_tokens", "Number of generation tokens processed.", func(t *engine.Stats) engine.Histogram { return t.AnswerLen })
	hist("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", func(t *engine.Stats) engine.Histogram { return t.TTFT })
	hist("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", func(t *engine.Stats) engine.Histogram { return t.ITL })
	hist("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", func(t *engine.Stats) engine.Histogram { return t.E2E })
	hist("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", func(t *engine.Stats) engine.Histogram { return t.Queue })
	hist("vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", func(t *engine.Stats) engine.Histogram { return t.Prefill })
	hist("vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", func(t *engine.Stats) engine.Histogram { return t.Decode })
	return p.b.String()
}

// sglangMetrics is the page of an SGLang engine with the counters of its ranks.
func sglangMetrics(f metricsFacts, all []engine.Stats) string {
	p := &metricsPage{}
	kind := "unified"
	switch f.Role {
	case workers.Prefill:
		kind = "prefill"
	case workers.Decode:
		kind = "decode"
	case workers.Aggregated:
	}
	labels := func(i int) []string {
		l := []string{"engine_type", kind, "model_name", f.Model, "moe_ep_rank", "0", "pp_rank", "0", "tp_rank", "0"}
		if len(all) > 1 {
			l = append([]string{"dp_rank", strconv.Itoa(i)}, l...)
		}
		return l
	}
	each := func(name, kind, help string, value func(*engine.Stats) float64) {
		p.family(name, kind, help)
		for i := range all {
			p.sample(name, value(&all[i]), labels(i)...)
		}
	}
	each("sglang:num_running_reqs", "gauge", "The number of running requests.", func(t *engine.Stats) float64 { return float64(t.Running) })
	each("sglang:num_queue_reqs", "gauge", "The number of requests in the waiting queue.", func(t *engine.Stats) float64 { return float64(t.Waiting) })
	each("sglang:num_used_tokens", "gauge", "The number of used tokens.", func(t *engine.Stats) float64 { return float64(t.UsedBlocks * f.BlockSize) })
	each("sglang:token_usage", "gauge", "The token usage.", func(t *engine.Stats) float64 { return t.KVUsage })
	each("sglang:max_total_num_tokens", "gauge", "Maximum total number of tokens in the KV cache pool.", func(*engine.Stats) float64 { return float64((f.Blocks - 1) * f.BlockSize) })
	each("sglang:page_size", "gauge", "The page size of the KV cache.", func(*engine.Stats) float64 { return float64(f.BlockSize) })
	each("sglang:context_len", "gauge", "The context length.", func(*engine.Stats) float64 { return float64(f.MaxModelLen) })
	each("sglang:cached_tokens_total", "counter", "Number of cached prompt tokens.", func(t *engine.Stats) float64 { return float64(t.Cached) })
	each("sglang:prompt_tokens_total", "counter", "Number of prefill tokens processed.", func(t *engine.Stats) float64 { return float64(t.Prompt) })
	each("sglang:generation_tokens_total", "counter", "Number of generation tokens processed.", func(t *engine.Stats) float64 { return float64(t.Generated) })
	each("sglang:num_retracted_requests_total", "counter", "Number of retracted requests.", func(t *engine.Stats) float64 { return float64(t.Preemptions) })
	each("sglang:kv_transfer_total_tokens_total", "counter", "Prompt tokens that came from a remote prefill.", func(t *engine.Stats) float64 { return float64(t.External) })
	for _, h := range []struct {
		name string
		get  func(*engine.Stats) engine.Histogram
	}{
		{"sglang:time_to_first_token_seconds", func(t *engine.Stats) engine.Histogram { return t.TTFT }},
		{"sglang:inter_token_latency_seconds", func(t *engine.Stats) engine.Histogram { return t.ITL }},
		{"sglang:e2e_request_latency_seconds", func(t *engine.Stats) engine.Histogram { return t.E2E }},
	} {
		p.family(h.name, "histogram", "Histogram of "+strings.ReplaceAll(strings.TrimPrefix(h.name, "sglang:"), "_", " ")+".")
		for i := range all {
			p.histogram(h.name, h.get(&all[i]), labels(i)...)
		}
	}
	return p.b.String()
}

// formatFloat writes a float as Python does: 1.0, never 1.
func formatFloat(v float64) string {
	t := strconv.FormatFloat(v, 'g', -1, 64)
	if !strings.ContainsAny(t, ".eIN") {
		t += ".0"
	}
	return t
}
