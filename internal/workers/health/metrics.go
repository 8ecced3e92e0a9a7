package health

import (
	"bytes"
	"math"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/samples"
)

// maxRanks bounds the ranks that a page can make the router keep figures of.
const maxRanks = 1024

// page is what one /metrics page reports. Figures of missing series are unknown:
// NaN, zero lengths, false.
type page struct {
	engine    workers.Engine
	figures   []figures
	blockSize int
	// gpuBlocks is the sum over all ranks of the process, cacheTokens is for
	// one rank (seen on vLLM 0.32 with two ranks).
	gpuBlocks, cacheTokens int
	maxTokens              int // SGLang: tokens in one rank's cache
	// connector is the one whose transfers the page has series of.
	connector          workers.Connector
	cacheType          string // vLLM: cache_dtype
	drafts             bool   // vLLM: it drafts, by whatever method
	sleepKnown, asleep bool
	started            float64 // Unix seconds; NaN when not reported
}

// figures are the load series with one pair of rank labels.
type figures struct {
	rank, tp                                             int // -1 without such a label
	running, waiting, usage, queries, hits, externalHits float64
	// arrived counts like externalHits, but at the end of a prefill and not when it is decided
	// to load.
	arrived float64
}

func (p *page) at(rank, tp int) *figures {
	for i := range p.figures {
		if f := &p.figures[i]; f.rank == rank && f.tp == tp {
			return f
		}
	}
	if len(p.figures) >= maxRanks {
		return nil
	}
	nan := math.NaN()
	p.figures = append(p.figures, figures{rank, tp, nan, nan, nan, nan, nan, nan, nan})
	return &p.figures[len(p.figures)-1]
}

var (
	vllmPrefix    = []byte("vllm:")
	rayVLLMPrefix = []byte("ray_vllm_") // Ray Serve renames vllm:
	sglangPrefix  = []byte("sglang:")
	startTime     = []byte("process_start_time_seconds")
)

func wanted(name []byte) bool {
	switch {
	case bytes.HasPrefix(name, vllmPrefix):
		name = name[len(vllmPrefix):]
	case bytes.HasPrefix(name, rayVLLMPrefix):
		name = name[len(rayVLLMPrefix):]
	case bytes.HasPrefix(name, sglangPrefix):
		return true
	default:
		return bytes.Equal(name, startTime)
	}
	switch string(name) {
	case "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc",
		"prefix_cache_queries_total", "prefix_cache_hits_total", "prefix_cache_queries", "prefix_cache_hits",
		"gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total", "gpu_prefix_cache_queries", "gpu_prefix_cache_hits",
		"external_prefix_cache_hits_total", "prompt_tokens_by_source_total", "engine_sleep_state", "cache_config_info", "nixl_xfer_time_seconds_count", "mooncake_xfer_time_seconds_count",
		"spec_decode_num_drafts_total":
		return true
	}
	return false
}

// parsePage reads a /metrics page of vLLM (0.8 to 0.33 names) or SGLang (0.4 to
// 0.5 names).
func parsePage(text []byte) *page {
	p := &page{started: math.NaN()}
	samples.Scan(text, wanted, func(name []byte, l samples.Labels, v float64) {
		switch {
		case bytes.HasPrefix(name, sglangPrefix):
			p.sglang(name[len(sglangPrefix):], l, v)
		case bytes.Equal(name, startTime):
			p.started = v
		case bytes.HasPrefix(name, vllmPrefix):
			p.vllm(name[len(vllmPrefix):], l, v)
		default:
			p.vllm(name[len(rayVLLMPrefix):], l, v)
		}
	})
	return p
}

func (p *page) vllm(name []byte, l samples.Labels, v float64) {
	p.engine = workers.VLLM
	rank, ok := l.Number("engine")
	if !ok {
		rank = -1
	}
	var f *figures
	switch string(name) {
	case "cache_config_info":
		p.info(l)
		p.at(rank, -1)
		return
	case "engine_sleep_state":
		if state, _ := l.Get("sleep_state"); string(state) == "awake" {
			p.sleepKnown = true
			p.asleep = p.asleep || v == 0
		}
		return
	case "nixl_xfer_time_seconds_count":
		p.connector = workers.ConnectorNIXL
		return
	case "mooncake_xfer_time_seconds_count":
		p.connector = workers.ConnectorMooncake
		return
	case "spec_decode_num_drafts_total":
		p.drafts = true
		return
	default:
		if f = p.at(rank, -1); f == nil {
			return
		}
	}
	switch string(name) {
	case "num_requests_running":
		add(&f.running, v)
	case "num_requests_waiting":
		add(&f.waiting, v)
	case "kv_cache_usage_perc", "gpu_cache_usage_perc":
		most(&f.usage, v)
	case "external_prefix_cache_hits_total":
		add(&f.externalHits, v)
	case "prompt_tokens_by_source_total":
		if source, _ := l.Get("source"); string(source) == "external_kv_transfer" {
			add(&f.arrived, v)
		}
	case "prefix_cache_queries_total", "prefix_cache_queries", "gpu_prefix_cache_queries_total", "gpu_prefix_cache_queries":
		add(&f.queries, v)
	case "prefix_cache_hits_total", "prefix_cache_hits", "gpu_prefix_cache_hits_total", "gpu_prefix_cache_hits":
		add(&f.hits, v)
	}
}

func (p *page) info(l samples.Labels) {
	if n, ok := l.Number("block_size"); ok && n > 0 {
		p.blockSize = n
	}
	if s, ok := l.Get("cache_dtype"); ok {
		p.cacheType = clip(string(s), 64)
	}
	if n, ok := l.Number("num_gpu_blocks"); ok {
		p.gpuBlocks = n
	}
	if n, ok := l.Number("kv_cache_size_tokens"); ok {
		p.cacheTokens = n
	}
}

func (p *page) sglang(name []byte, l samples.Labels, v float64) {
	p.engine = workers.SGLang
	rank, ok := l.Number("dp_rank")
	if !ok {
		rank = -1
	}
	tp, ok := l.Number("tp_rank")
	if !ok {
		tp = -1
	}
	switch string(name) {
	case "page_size":
		if v >= 1 && v <= 1<<20 {
			p.blockSize = int(v)
		}
		return
	case "max_total_num_tokens":
		if v >= 1 && v <= 1<<40 {
			p.maxTokens = int(v)
		}
		return
	case "num_running_reqs", "num_queue_reqs", "token_usage", "prompt_tokens_total", "cached_tokens_total":
	default:
		return
	}
	f := p.at(rank, tp)
	if f == nil {
		return
	}
	switch string(name) {
	case "num_running_reqs":
		most(&f.running, v)
	case "num_queue_reqs":
		most(&f.waiting, v)
	case "token_usage":
		most(&f.usage, v)
	case "prompt_tokens_total":
		most(&f.queries, v)
	case "cached_tokens_total": // one series for each cache_source
		add(&f.hits, v)
	}
}

func add(dst *float64, v float64) {
	if math.IsNaN(*dst) {
		*dst = v
	} else {
		*dst += v
	}
}

func most(dst *float64, v float64) {
	if math.IsNaN(*dst) || v > *dst {
		*dst = v
	}
}

// rankLabels are the reported numbers of the ranks, sorted; nil when the page has
// no such label.
func (p *page) rankLabels() []int {
	var out []int
	for _, f := range p.figures {
		if f.rank >= 0 && !slices.Contains(out, f.rank) {
			out = append(out, f.rank)
		}
	}
	slices.Sort(out)
	return out
}

// kvBlocks is the size of one rank's cache in blocks; 0 when not reported.
func (p *page) kvBlocks() int {
	switch {
	case p.blockSize == 0:
		return 0
	case p.cacheTokens > 0:
		return p.cacheTokens / p.blockSize
	case p.gpuBlocks > 0:
		return p.poolBlocks()
	default:
		return p.maxTokens / p.blockSize
	}
}

// poolBlocks is how many blocks one rank's pool has; 0 when not reported.
func (p *page) poolBlocks() int { return p.gpuBlocks / max(1, len(p.rankLabels())) }

// loads are the figures by the position of the rank in a worker with so many
// ranks; an entry is nil when nothing is reported of its rank.
//
// A process that runs only rank 3 of a larger group labels it "3"; it is the
// first rank of its worker all the same.
func (p *page) loads(ranks int, asked, at time.Time) []*workers.Load {
	out := make([]*workers.Load, ranks)
	known := p.rankLabels()
	inOrder := len(known) > 0 && known[len(known)-1] >= ranks && len(known) == ranks
	for i := range p.figures {
		f := &p.figures[i]
		pos := f.rank
		switch {
		case pos < 0 && (len(known) > 0 || ranks > 1):
			continue // a sum over ranks, or nobody knows of which
		case pos < 0:
			pos = 0
		case inOrder:
			pos = slices.Index(known, pos)
		}
		if pos >= ranks {
			continue
		}
		l := f.load(at)
		l.Asked, l.Process = asked, p.started
		if !l.Known() && out[pos] == nil && math.IsNaN(l.PrefixQueries) {
			continue
		}
		if old := out[pos]; old != nil { // another tensor-parallel rank of the same
			l.Unused = l.Unused && old.Unused
			l.Running, l.Waiting = max(l.Running, old.Running), max(l.Waiting, old.Waiting)
			for _, pair := range [][2]*float64{
				{&l.KVUsage, &old.KVUsage}, {&l.PrefixQueries, &old.PrefixQueries},
				{&l.PrefixHits, &old.PrefixHits}, {&l.ExternalHits, &old.ExternalHits},
			} {
				if !math.IsNaN(*pair[1]) {
					most(pair[0], *pair[1])
				}
			}
		}
		out[pos] = &l
	}
	for i, l := range out {
		if l != nil && !l.Known() {
			out[i] = nil
		}
	}
	return out
}

func (f *figures) load(at time.Time) workers.Load {
	l := workers.UnknownLoad(at)
	l.Running, l.Waiting = whole(f.running), whole(f.waiting)
	if f.usage >= 0 && f.usage <= 1.5 { // NaN fails; rounding may exceed 1 a little
		l.KVUsage = min(f.usage, 1)
	}
	l.PrefixQueries, l.PrefixHits, l.ExternalHits = f.queries, f.hits, f.arrived
	if math.IsNaN(f.arrived) {
		l.ExternalHits = f.externalHits
	}
	if math.IsNaN(f.running) && math.IsNaN(f.waiting) && math.IsNaN(f.usage) && f.queries == 0 {
		l.Unused, l.Running, l.Waiting, l.KVUsage = true, 0, 0, 0
	}
	return l
}

// whole is a count, or -1 for what can be none.
func whole(v float64) int {
	if !(v >= 0 && v < 1<<31) {
		return -1
	}
	return int(v + 0.5)
}
