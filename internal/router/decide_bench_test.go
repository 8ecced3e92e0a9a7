//go:build unix

package router

import (
	"context"
	"fmt"
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/routing"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// cpuTime is the CPU time of this process so far: on a busy machine it says
// more than the clock.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// benchRouter is a router that runs nothing, with healthy workers.
func benchRouter(b *testing.B, kind string, ranks int) *Router {
	b.Helper()
	c := settings.Default()
	switch kind {
	case "threshold":
		c.Routing.Threshold.Tokens = 2048
	case "auto", "blocks", "times":
		c.Routing.Threshold = decide.Threshold{Tokens: 2048, Auto: true}
		if kind == "blocks" {
			c.Routing.Policy = "kv_blocks"
		}
	}
	for i := range ranks {
		spec := fmt.Sprintf("http://127.0.0.1:%d,engine=vllm,model=bench,block_size=%d,events=tcp://127.0.0.1:%d", 20000+i, benchBlock, 30000+i)
		switch {
		case kind == "aggregated" || kind == "busy":
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
	b.Cleanup(func() {
		if err := r.Close(context.Background()); err != nil {
			b.Error(err)
		}
	})
	for _, w := range r.registry.Snapshot().Workers {
		w.State.SetCondition(workers.Condition{Health: workers.Healthy})
	}
	return r
}

const benchBlock = 16 // tokens

// BenchmarkDecision is hash, overlap, select and plan for a prompt of 8,192
// tokens over ranks that hold different parts of it. Busy ones are aggregated, have
// work in flight, and their engines have reported a load. With "auto" the costs of both paths
// are known and compared. With "blocks" and "times" those of every rank are, too, and the ranks
// are busy: policy kv_blocks chooses among them, or kv.
func BenchmarkDecision(b *testing.B) {
	for _, kind := range []string{"aggregated", "disaggregated", "threshold", "auto", "blocks", "times", "busy"} {
		for _, ranks := range []int{64, 512, 2048} {
			b.Run(fmt.Sprintf("%s/%d", kind, ranks), func(b *testing.B) { benchDecision(b, kind, ranks) })
		}
	}
}

func benchDecision(b *testing.B, kind string, ranks int) {
	const tokens, block = 8192, benchBlock
	r, loaded := benchRouter(b, kind, ranks), kind == "blocks" || kind == "times"
	ids := make([]uint32, tokens)
	for i := range ids {
		ids[i] = uint32(i * 7919)
	}
	locals := blockhash.Locals(nil, ids, block, blockhash.Key{})
	names := blockhash.Chain(nil, locals)
	for i, w := range r.registry.Snapshot().Workers {
		for _, k := range w.Ranks {
			slot := kvindex.Rank(k.Slot)
			if err := r.index.AddRank(slot, k.Label); err != nil {
				b.Fatal(err)
			}
			var batch kvindex.Batch
			n := len(names) * ((i*37)%ranks + 1) / (ranks + 1) // in no order
			batch.Store(0, false, names[:n], locals[:n])
			r.index.Apply(slot, &batch)
			// Without a live feed the predicted blocks decide; both are asked.
			if err := r.predicted.AddRank(slot, k.Number, k.Label); err != nil {
				b.Fatal(err)
			}
			if kind == "busy" || loaded {
				r.ledger.Reserve(k, ledger.Claim{PrefillTokens: 512 * (i % 9), ContextTokens: 4096 + i, BlockSize: block})
				k.SetLoad(&workers.Load{Running: i % 7, Waiting: i % 3, KVUsage: 0.5, At: r.started})
			}
			r.predicted.Sent(slot, k.Number, locals[:n], names[:n], r.started)
		}
	}
	if kind == "auto" || loaded {
		l, w := r.costs.Of("bench"), cost.Work{Tokens: 4096, Context: 8192}
		for range cost.EnoughComputed {
			if loaded {
				var a cost.Running
				on := cost.Decoding{Running: 3, Held: 9000}
				l.Ran(&a, 1, 0, on)
				l.Ran(&a, 17, 160*time.Millisecond, on)
			}
			l.Took(cost.PrefillLeg, &w, 80*time.Millisecond, 0)
			l.Took(cost.TransferLeg, &w, 8*time.Millisecond, 0)
		}
	}
	var q routing.Request
	var v api.View
	one := func() {
		q.Release()
		q.Settings, q.Fleet, q.Model = r.settings.Load(), r.registry.Snapshot(), "bench"
		q.List = q.Fleet.Model("bench")
		q.Prompt = prompt.Prompt{IDs: ids, ISL: len(ids), Source: route.FromIDs}
		q.Run.Criteria.Facts = api.Facts{Kind: api.Completion, Splittable: true, ISL: len(ids), Source: route.FromIDs, N: 1, Prompts: 1, MaxTokens: 16, TokenIDs: ids}
		r.decider.Hash(&q, &v, time.Now())
		r.decider.Decide(&q)
	}
	one()
	if n := testing.AllocsPerRun(10, one); n != 0 {
		b.Errorf("%v allocations for a decision", n)
	}
	if q.Run.Plan.Err != nil || q.Run.Plan.CachedTokens == 0 || len(q.Run.In.Decode.Candidates)+len(q.Run.In.Prefill.Candidates) < ranks {
		b.Fatalf("not the decision to measure: %+v", q.Run.Plan)
	}
	if (kind == "auto" || loaded) && q.Run.Plan.CostRevision == 0 || q.Run.Plan.Decode.InTime != (kind == "times") {
		b.Fatalf("costs did not decide: %+v", q.Run.Plan)
	}
	b.ReportAllocs()
	start := cpuTime(b)
	for b.Loop() {
		one()
	}
	b.ReportMetric(float64(cpuTime(b)-start)/1e3/float64(b.N), "cpu-µs/op")
}

// BenchmarkObserved is what receipts, metrics and traffic figures cost one
// request, without the request: to be set against BenchmarkRequest.
func BenchmarkObserved(b *testing.B) {
	for _, ranks := range []int{2, 64} {
		b.Run(fmt.Sprintf("%d-ranks", ranks), func(b *testing.B) {
			r := benchRouter(b, "aggregated", ranks)
			ep, err := api.Lookup(http.MethodPost, "/v1/chat/completions")
			if err != nil {
				b.Fatal(err)
			}
			facts := api.Facts{Kind: api.Chat, Splittable: true, ISL: 256, Source: route.FromEstimate, N: 1, Prompts: 1, MaxTokens: 16}
			var record lifecycle.Record
			q := new(routing.Request)
			q.Settings, q.Fleet, q.Model = r.settings.Load(), r.registry.Snapshot(), "bench"
			q.List = q.Fleet.Model("bench")
			q.Prompt = prompt.Prompt{ISL: 256, Source: route.FromEstimate}
			q.Run.Criteria.Facts = facts
			r.decider.Decide(q)
			if q.Run.Plan.Err != nil {
				b.Fatal(q.Run.Plan.Err)
			}
			peer := q.Run.In.DecodePeers[q.Run.Plan.DecodeIndex]
			b.ReportAllocs()
			start := cpuTime(b)
			for b.Loop() {
				now := time.Now()
				record = lifecycle.Record{To: r.stream, Live: r.receipts.Begin(now), Routing: q, Endpoint: ep, Model: "bench", Start: now}
				record.Tokenized(q.Prompt.Source)
				record.Decided()
				leg := record.BeginLeg(route.Decode, peer, nil, now)
				leg.Head(http.StatusOK)
				leg.End(nil, time.Now())
				record.Answer.Finish, record.Answer.Prompt, record.Answer.Completion = "stop", 256, 16
				record.Ended(lifecycle.Outcome{Status: http.StatusOK, Took: time.Since(now)})
			}
			b.ReportMetric(float64(cpuTime(b)-start)/1e3/float64(b.N), "cpu-µs/op")
		})
	}
}
