package simulate

import (
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/dynctl/dynctl/internal/router/placement/decide"
)

// Quantiles of a latency, in milliseconds.
type Quantiles struct {
	Mean float64 `json:"mean_ms"`
	P50  float64 `json:"p50_ms"`
	P90  float64 `json:"p90_ms"`
	P95  float64 `json:"p95_ms"`
	P99  float64 `json:"p99_ms"`
	Max  float64 `json:"max_ms"`
}

// Result is the result of a simulated run.
type Result struct {
	Policy    string `json:"policy"`
	Threshold int    `json:"threshold_tokens"`
	// Auto says that the cheaper path was taken, and by Threshold before enough was
	// known.
	Auto bool `json:"threshold_auto,omitempty"`
	// KVBlocks is one rank's cache in blocks, 0 without limit.
	KVBlocks int    `json:"kv_blocks"`
	Label    string `json:"label,omitempty"`
	// ClosedLoop is Setup.ClosedLoop.
	ClosedLoop bool `json:"closed_loop,omitempty"`

	Requests  uint64 `json:"requests"`
	Completed uint64 `json:"completed"`
	Failed    uint64 `json:"failed"`
	Remote    uint64 `json:"remote"`
	Degraded  uint64 `json:"degraded"`
	// Waited are the requests that waited for a place, Wait how long; Refused are those
	// of the failed that found no room in the queue or waited too long.
	Waited  uint64    `json:"waited"`
	Refused uint64    `json:"refused"`
	Wait    Quantiles `json:"wait"`
	// HitRatio is the share of prompt tokens that engines took from their own
	// prefix caches, and from where they offload to; Bound what one shared cache would give, OfBound the ratio.
	HitRatio float64 `json:"hit_ratio"`
	Bound    float64 `json:"bound_ratio"`
	OfBound  float64 `json:"hit_of_bound_ratio"`
	// Predicted is the router's own expectation of HitRatio.
	Predicted float64 `json:"predicted_hit_ratio"`

	TTFT Quantiles `json:"ttft"`
	ITL  Quantiles `json:"itl"`
	E2E  Quantiles `json:"e2e"`
	// Good requests kept both limits; Goodput is their number per second.
	Good     float64 `json:"good_ratio"`
	Goodput  float64 `json:"goodput_rps"`
	TokensPS float64 `json:"output_tokens_per_s"`
	// Imbalance is the busiest rank's computed prompt tokens over the mean of
	// the ranks that prefill; RequestImbalance the same of requests answered.
	Imbalance        float64 `json:"prefill_imbalance"`
	RequestImbalance float64 `json:"request_imbalance"`
	// Regret is by how many blocks, by kv's cost function, the chosen rank cost more than the
	// cheapest, on average. Missed is the share of prompt tokens that another rank had and the
	// chosen one had not.
	Regret float64 `json:"regret_blocks"`
	Missed float64 `json:"missed_hit_ratio"`

	// Gaps are the times of more than an hour without a request, which a run skips; the
	// longest ended with request GapBefore of the trace, counted from 1. They count in
	// VirtualS and in what is per second.
	Gaps        int     `json:"gaps,omitempty"`
	LongestGapS float64 `json:"longest_gap_s,omitempty"`
	GapBefore   int     `json:"longest_gap_before_request,omitempty"`

	Evictions   uint64  `json:"evicted_blocks"`
	Preemptions uint64  `json:"preemptions"`
	VirtualS    float64 `json:"virtual_s"`
	WallS       float64 `json:"wall_s"`
}

// Rule is the requested threshold.
func (r *Result) Rule() string { return decide.Threshold{Tokens: r.Threshold, Auto: r.Auto}.String() }

// record notes a time of a request that counts.
func (f *flight) record(h *hdrhistogram.Histogram, d time.Duration) {
	if !f.early {
		_ = h.RecordValue(min(max(d.Microseconds(), 1), 1e10)) // within the bounds
	}
}

func quantiles(h *hdrhistogram.Histogram) Quantiles {
	q := func(p float64) float64 { return float64(h.ValueAtQuantile(p)) / 1000 }
	if h.TotalCount() == 0 {
		return Quantiles{}
	}
	return Quantiles{Mean: h.Mean() / 1000, P50: q(50), P90: q(90), P95: q(95), P99: q(99), Max: float64(h.Max()) / 1000}
}

func (r *run) result() *Result {
	res := &r.res
	res.Policy, res.Threshold, res.Auto, res.ClosedLoop = string(r.s.Decode), r.s.Rule.Threshold, r.s.Rule.Auto, r.s.ClosedLoop
	if r.s.Prefill != r.s.Decode {
		res.Policy += ", prefill " + string(r.s.Prefill)
	}
	res.TTFT, res.ITL, res.E2E, res.Wait = quantiles(r.ttft), quantiles(r.itl), quantiles(r.e2e), quantiles(r.line.wait)
	share := func(n, of uint64) float64 {
		if of == 0 {
			return 0
		}
		return float64(n) / float64(of)
	}
	res.HitRatio, res.Predicted, res.Missed = share(r.hits, r.prompt), share(r.predicted, r.prompt), share(r.lost, r.prompt)
	res.Good = share(r.good, res.Requests)
	if r.decisions > 0 {
		res.Regret = r.regret / float64(r.decisions)
	}
	if s := (r.last - r.s.CountFrom).Seconds(); s > 0 {
		res.Goodput, res.TokensPS, res.VirtualS = float64(r.good)/s, float64(r.output)/s, s
	}
	var computed, requests []uint64
	for _, k := range r.ranks {
		if k.worker.Role.CanDecode() {
			requests = append(requests, k.requests)
		}
		if k.worker.Role.CanPrefill() == (res.Remote > 0) {
			computed = append(computed, k.computed)
		}
		if c := k.eng.Core(); c != nil {
			res.Preemptions += c.Stats(r.world.Now()).Preemptions
		}
	}
	res.Imbalance, res.RequestImbalance = imbalance(computed), imbalance(requests)
	return res
}

// imbalance is the greatest over the mean.
func imbalance(n []uint64) float64 {
	var sum, top uint64
	for _, v := range n {
		sum += v
		top = max(top, v)
	}
	if sum == 0 {
		return 0
	}
	return math.Round(float64(top)/(float64(sum)/float64(len(n)))*1e6) / 1e6
}
