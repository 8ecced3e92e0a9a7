//go:build unix

package router

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/router/blockhash"
	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/workers"
)

// cpuTime is the CPU time of this process so far: on a busy machine it tells
// more than the clock.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkDecision is hash, overlap, select and plan for a prompt of 8,192
// tokens over 64 ranks that hold different parts of it.
func BenchmarkDecision(b *testing.B) {
	const ranks, tokens, block = 64, 8192, 16
	for _, kind := range []string{"aggregated", "disaggregated"} {
		b.Run(kind, func(b *testing.B) {
			c := DefaultConfig()
			for i := range ranks {
				spec := fmt.Sprintf("http://127.0.0.1:%d,engine=vllm,model=bench,block_size=%d,events=tcp://127.0.0.1:%d", 20000+i, block, 30000+i)
				switch {
				case kind == "aggregated":
					c.Worker = append(c.Worker, spec)
				case i%2 == 0:
					c.Prefill = append(c.Prefill, spec+",connector=nixl")
				default:
					c.Decode = append(c.Decode, spec+",connector=nixl")
				}
			}
			r, err := New(context.Background(), Options{Config: c})
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := r.Close(context.Background()); err != nil {
					b.Error(err)
				}
			}()
			ids := make([]uint32, tokens)
			for i := range ids {
				ids[i] = uint32(i * 7919)
			}
			locals := blockhash.Locals(nil, ids, block, blockhash.Key{})
			names := blockhash.Chain(nil, locals)
			for i, w := range r.registry.Snapshot().Workers {
				w.State.SetCondition(workers.Condition{Health: workers.Healthy})
				for _, k := range w.Ranks {
					slot := kvindex.Rank(k.Slot)
					if err := r.index.AddRank(slot, k.Label); err != nil {
						b.Fatal(err)
					}
					var batch kvindex.Batch
					n := len(names) * (i + 1) / (ranks + 1)
					batch.Store(0, false, names[:n], locals[:n])
					r.index.Apply(slot, &batch)
					// Without a live feed the guesses decide; both are asked.
					if err := r.guesses.AddRank(slot, k.Label); err != nil {
						b.Fatal(err)
					}
					r.guesses.Sent(slot, locals[:n], names[:n], r.started)
				}
			}
			var d decision
			var v api.View
			one := func() {
				d.reset()
				d.settings, d.fleet, d.model = r.settings.Load(), r.registry.Snapshot(), "bench"
				d.list = d.fleet.Model("bench")
				d.prompt = tokenized{ids: ids, isl: len(ids), source: disagg.FromIDs}
				facts := disagg.Facts{Kind: api.Completion, Splittable: true, ISL: len(ids), Source: disagg.FromIDs, N: 1, Prompts: 1, MaxTokens: 16, TokenIDs: ids}
				r.hash(&d, &v)
				r.decide(&d, facts, "", 0)
			}
			one()
			if n := testing.AllocsPerRun(10, one); n != 0 {
				b.Errorf("%v allocations for a decision", n)
			}
			if d.plan.Err != nil || d.plan.CachedTokens == 0 || len(d.in.Decode.Candidates)+len(d.in.Prefill.Candidates) < ranks {
				b.Fatalf("not the decision to measure: %+v", d.plan)
			}
			b.ReportAllocs()
			start := cpuTime(b)
			for b.Loop() {
				one()
			}
			b.ReportMetric(float64(cpuTime(b)-start)/1e3/float64(b.N), "cpu-µs/op")
		})
	}
}
