package simulate

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/admission"
)

// poisson are requests of so many a second, of whatever lengths, a third of which begin
// as an earlier one.
func poisson(seed uint64, n int, rate float64) (all []arrivals.Request) {
	rng := rand.New(rand.NewPCG(seed, 77))
	at := time.Duration(0)
	for i := range n {
		at += time.Duration(rng.ExpFloat64() / rate * float64(time.Second))
		q := arrivals.Request{Number: i, At: at}
		q.BlockSize, q.IDs, q.OSL = 64, trace.LocalIDs, 1+rng.IntN(120)
		family := uint64(i) + 1000
		if rng.IntN(3) == 0 {
			family = rng.Uint64N(20)
		}
		for b := range 1 + rng.IntN(24) {
			q.Blocks = append(q.Blocks, family<<32|uint64(b))
		}
		q.ISL = 64 * len(q.Blocks)
		all = append(all, q)
	}
	return all
}

func limitedSetup(t *testing.T, fleetText string, seed uint64) Setup {
	return Setup{
		Fleet:   fleet(t, fleetText),
		Options: decide.Options{Decode: selector.KV, Prefill: selector.KV, Weights: selector.DefaultWeights(), Rule: decide.Rule{Threshold: 256, Fallback: decide.FallbackLocal}},
		Seed:    seed, Limits: admission.Limits{Queue: 1 << 20},
	}
}

// TestLimitsCostNothingBelowSaturation: the same requests on the same fleet, with and
// without limits at what the engines take at once: the first token is never more than
// 5 % later at the 99th percentile.
func TestLimitsCostNothingBelowSaturation(t *testing.T) {
	seeds := uint64(40)
	if testing.Short() {
		seeds = 10
	}
	waited, worst := uint64(0), 0.0
	for seed := range seeds {
		text, rate := "4a:block=64,kv_blocks=4096,max_seqs=8", 18+float64(seed%5)*5
		if seed%2 == 1 {
			text = "2p4d:block=64,kv_blocks=4096,max_seqs=8"
		}
		src := arrivals.FromSlice(poisson(seed, 4000, rate))
		without := limitedSetup(t, text, seed)
		with := without
		with.Busy.Requests = 8
		a, err := Run(t.Context(), src, without)
		if err != nil {
			t.Fatal(err)
		}
		b, err := Run(t.Context(), src, with)
		if err != nil {
			t.Fatal(err)
		}
		if b.Completed != b.Requests || a.Completed != a.Requests {
			t.Fatalf("seed %d: %d and %d of %d completed", seed, a.Completed, b.Completed, a.Requests)
		}
		waited += b.Waited
		worst = max(worst, b.TTFT.P99/a.TTFT.P99)
		if b.TTFT.P99 > 1.05*a.TTFT.P99 {
			t.Errorf("seed %d, %s at %.0f/s: p99 of the first token %.1f ms with limits, %.1f without; %d waited", seed, text, rate, b.TTFT.P99, a.TTFT.P99, b.Waited)
		}
	}
	if waited < 10*seeds {
		t.Errorf("%d requests waited in %d seeds: that shows nothing", waited, seeds)
	}
	t.Logf("%d seeds: at worst %.3f of the 99th percentile without limits; %d requests waited", seeds, worst, waited)
}

// TestTenantsShareRanksByWeight: above saturation, while all tenants have requests
// waiting, each gets tokens by its weight, whatever its requests are like.
func TestTenantsShareRanksByWeight(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 3))
		all := poisson(seed, 900, 3000)
		weights := map[string]int{"a": 1, "b": 1 + rng.IntN(3), "c": 1 + rng.IntN(4)}
		left, names := map[string]int{}, []string{"a", "b", "c"}
		tenant := func(q *arrivals.Request) (string, int) {
			name := names[q.Number%3]
			return name, weights[name]
		}
		for i := range all {
			q := &all[i]
			if name, _ := tenant(q); name == "b" { // few large ones
				q.Blocks = slices.Concat(q.Blocks, q.Blocks, q.Blocks)
				for k := range q.Blocks {
					q.Blocks[k] = uint64(i)<<32 | uint64(k)
				}
				q.ISL = 64 * len(q.Blocks)
			}
			left[names[i%3]]++
		}
		served, over := map[string]float64{}, false
		s := limitedSetup(t, "3a:block=64,kv_blocks=4096,max_seqs=8", seed)
		s.Busy.Requests, s.Tenant = 1+rng.IntN(8), tenant
		s.Placed = func(q *arrivals.Request, at time.Duration) {
			name, weight := tenant(q)
			if left[name]--; left[name] == 0 {
				over = true // it has nothing waiting any more
			}
			if !over && at > time.Second { // all have come
				served[name] += float64(q.ISL+q.OSL) / float64(weight)
			}
		}
		r, err := Run(t.Context(), arrivals.FromSlice(all), s)
		if err != nil {
			t.Fatal(err)
		}
		if r.Completed != r.Requests || r.Waited < 800 {
			t.Fatalf("seed %d: %+v", seed, r)
		}
		sum, squares := 0.0, 0.0
		for _, v := range served {
			sum, squares = sum+v, squares+v*v
		}
		if jain := sum * sum / (3 * squares); jain < 0.95 {
			t.Errorf("seed %d: Jain's index of tokens by weight is %.3f: %v by %v", seed, jain, served, weights)
		}
	}
}

// TestSimulatedLimits: a limit makes requests wait, none runs beyond it, and a queue
// that is short or impatient refuses them.
func TestSimulatedLimits(t *testing.T) {
	src := arrivals.FromSlice(poisson(1, 200, 500))
	for name, c := range map[string]struct {
		change func(*Setup)
		refuse bool
	}{
		"ranks":           {func(s *Setup) { s.Busy.Requests = 4 }, false},
		"prefill tokens":  {func(s *Setup) { s.Busy.PrefillTokens = 2000 }, false},
		"engines' queues": {func(s *Setup) { s.Busy.Waiting, s.Scrape = 1, 20*time.Millisecond }, false},
		"in progress":     {func(s *Setup) { s.Limits.Inflight = 8 }, false},
		"a short queue":   {func(s *Setup) { s.Busy.Requests, s.Limits.Queue = 4, 10 }, true},
		"no patience":     {func(s *Setup) { s.Busy.Requests, s.Limits.Timeout = 4, time.Second }, true},
	} {
		s := limitedSetup(t, "2a:block=64,kv_blocks=4096,max_seqs=8", 1)
		c.change(&s)
		r, err := Run(t.Context(), src, s)
		if err != nil {
			t.Fatal(err)
		}
		if r.Completed+r.Refused != 200 || r.Failed != r.Refused || (r.Refused > 0) != c.refuse {
			t.Errorf("%s: %d completed, %d refused, %d failed of 200", name, r.Completed, r.Refused, r.Failed)
		}
		if r.Waited == 0 || r.Wait.P99 <= 0 {
			t.Errorf("%s: %d waited, p99 %v", name, r.Waited, r.Wait.P99)
		}
	}
}
