package selector_test

import (
	"bufio"
	"compress/gzip"
	"container/heap"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/dynctl/dynctl/internal/rig/external"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// request is one line of a Mooncake request trace: one hash id per prefix
// block of 512 tokens, the last one partial.
type request struct {
	Timestamp    float64  `json:"timestamp"` // ms
	InputLength  int      `json:"input_length"`
	OutputLength int      `json:"output_length"`
	HashIDs      []uint32 `json:"hash_ids"`
}

const traceBlock = 512 // tokens

// conversationTrace reads the conversation trace or skips the test.
func conversationTrace(tb testing.TB) []request {
	tb.Helper()
	f, err := os.Open(external.Conversation(tb))
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		tb.Fatal(err)
	}
	var out []request
	sc := bufio.NewScanner(z)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		var r request
		if err := json.Unmarshal(sc.Bytes(), &r); err != nil {
			tb.Fatal(err)
		}
		out = append(out, r)
	}
	if err := sc.Err(); err != nil {
		tb.Fatal(err)
	}
	return out
}

// lru is a prefix cache of blocks with least-recently-used eviction; a prompt
// is touched tail first, so that leaves go before their parents.
type lru struct {
	cap        int // blocks, 0 = unlimited
	at         map[uint32]*lruNode
	head, tail *lruNode // head is newest
}

type lruNode struct {
	id         uint32
	prev, next *lruNode
}

func newLRU(capacity int) *lru { return &lru{cap: capacity, at: map[uint32]*lruNode{}} }

func (c *lru) overlap(ids []uint32) int {
	for i, id := range ids {
		if c.at[id] == nil {
			return i
		}
	}
	return len(ids)
}

func (c *lru) store(ids []uint32) {
	for _, id := range slices.Backward(ids) {
		n := c.at[id]
		if n == nil {
			n = &lruNode{id: id}
			c.at[id] = n
		} else {
			c.unlink(n)
		}
		n.next = c.head
		if c.head != nil {
			c.head.prev = n
		}
		c.head = n
		if c.tail == nil {
			c.tail = n
		}
	}
	for c.cap > 0 && len(c.at) > c.cap {
		n := c.tail
		c.unlink(n)
		delete(c.at, n.id)
	}
}

func (c *lru) unlink(n *lruNode) {
	if n.prev != nil {
		n.prev.next = n.next
	} else {
		c.head = n.next
	}
	if n.next != nil {
		n.next.prev = n.prev
	} else {
		c.tail = n.prev
	}
	n.prev, n.next = nil, nil
}

// fleet describes one simulated run: aggregated ranks with the mocker's
// published timing polynomials, prefill first come first served in chunks of
// 8192 tokens, KV stored (and known to the router) when a prefill ends. The
// router's side is the shipped code: Rank and the ledger.
type fleet struct {
	ranks    int
	capacity int     // cache of one rank in trace blocks, 0 = unlimited
	speedup  float64 // arrivals this many times faster
	policy   selector.Policy
	weights  selector.Weights
}

type outcome struct {
	hit       float64 // share of prompt tokens found in a cache
	ttft      []float64
	imbalance float64 // busiest rank's prefill time over the mean
	itl       float64 // mean ms per token
}

func (o *outcome) p(q float64) float64 {
	return o.ttft[min(int(q*float64(len(o.ttft))), len(o.ttft)-1)]
}

type event struct {
	at   float64
	seq  int
	kind int // 0 arrival, 1 prefill done, 2 request done
	req  int
	rank int
}

type events []event

func (h events) Len() int { return len(h) }
func (h events) Less(i, j int) bool {
	if h[i].at != h[j].at {
		return h[i].at < h[j].at
	}
	return h[i].seq < h[j].seq
}
func (h events) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *events) Push(x any)   { *h = append(*h, x.(event)) }
func (h *events) Pop() any {
	old := *h
	e := old[len(old)-1]
	*h = old[:len(old)-1]
	return e
}

func decodeMS(u float64) float64 { return max(1, -25.74*u*u+54.01*u+5.74) }

func prefillMS(tokens int, step float64) float64 {
	ms := 0.0
	for tokens > 0 {
		t := float64(min(tokens, 8192))
		ms += 4.209989e-7*t*t + 1.518344e-2*t + 16.50142 + step
		tokens -= 8192
	}
	return ms
}

// kvTokens is one rank's KV cache for the decode timing: 16384 blocks of 64.
const kvTokens = 16384 * 64

func (f fleet) run(reqs []request) outcome {
	type rankState struct {
		cache     *lru
		rank      *workers.Rank
		free      float64 // when its prefill queue is empty
		prefillMS float64
		decoding  int
	}
	ranks := make([]rankState, f.ranks)
	cands := make([]decision.Candidate, f.ranks)
	for i := range ranks {
		ranks[i].cache = newLRU(f.capacity)
		ranks[i].rank = &workers.Rank{Slot: uint32(i), Label: fmt.Sprintf("sim-%02d/dp0", i)}
		cands[i] = decision.Candidate{Rank: ranks[i].rank.Label, Slot: uint32(i), HasLoad: true, KVUsage: math.NaN(), KVBlocks: kvTokens / traceBlock}
	}
	h := make(events, 0, len(reqs)*2)
	for i, r := range reqs {
		h = append(h, event{at: r.Timestamp / f.speedup, seq: i, req: i})
	}
	heap.Init(&h)
	seq := len(reqs)
	var (
		out         outcome
		rk          selector.Ranking
		total, hits int
		itls        float64
		book        = ledger.New()
		held        = make([]*ledger.Reservation, len(reqs))
	)
	for h.Len() > 0 {
		e := heap.Pop(&h).(event)
		r := &reqs[e.req]
		seq++
		switch e.kind {
		case 0:
			for i := range ranks {
				s, c := &ranks[i], &cands[i]
				l := book.Load(s.rank)
				c.OverlapBlocks, c.ResidentBlocks = s.cache.overlap(r.HashIDs), len(s.cache.at)
				c.ActiveRequests, c.PrefillTokens, c.DecodeBlocks = l.Requests, l.PrefillTokens, l.DecodeBlocks
				c.FreshTokens, c.LastTurn, c.Running = l.Fresh, l.LastTurn, l.Requests
			}
			in := selector.Input{
				Phase: route.Aggregated, Policy: f.policy, Weights: f.weights, ISL: r.InputLength, BlockSize: traceBlock,
				Candidates: cands, Draw: splitmix(uint64(e.req)), Turn: uint64(e.req),
			}
			selector.Pick(&in, &rk)
			b, _ := rk.Best()
			s := &ranks[b]
			cached := min(cands[b].OverlapBlocks*traceBlock, r.InputLength)
			fresh := r.InputLength - cached
			held[e.req] = book.Reserve(s.rank, ledger.Claim{PrefillTokens: fresh, ContextTokens: r.InputLength, BlockSize: traceBlock})
			step := 0.0
			if s.decoding > 0 {
				step = decodeMS(f.usage(book, s.rank))
			}
			ms := prefillMS(max(fresh, 1), step)
			s.free = max(e.at, s.free) + ms
			s.prefillMS += ms
			out.ttft = append(out.ttft, s.free-e.at)
			hits += cached
			total += r.InputLength
			heap.Push(&h, event{at: s.free, seq: seq, kind: 1, req: e.req, rank: b})
		case 1:
			s := &ranks[e.rank]
			held[e.req].FirstToken()
			s.cache.store(r.HashIDs)
			s.decoding++
			itl := decodeMS(f.usage(book, s.rank))
			itls += itl
			heap.Push(&h, event{at: e.at + itl*float64(r.OutputLength), seq: seq, kind: 2, req: e.req, rank: e.rank})
		case 2:
			ranks[e.rank].decoding--
			held[e.req].Release()
		}
	}
	slices.Sort(out.ttft)
	out.hit = float64(hits) / float64(total)
	out.itl = itls / float64(len(reqs))
	var sum, top float64
	for i := range ranks {
		sum += ranks[i].prefillMS
		top = max(top, ranks[i].prefillMS)
	}
	out.imbalance = top / (sum / float64(len(ranks)))
	return out
}

// usage is the share of a rank's KV cache that running requests hold.
func (fleet) usage(book *ledger.Ledger, r *workers.Rank) float64 {
	return min(float64(book.Load(r).DecodeBlocks*traceBlock)/kvTokens, 1)
}

func splitmix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// sharedCache is the hit rate of one cache of the given size (0 = unlimited)
// that all requests share, stored at arrival: the bound.
func sharedCache(reqs []request, capacity int) float64 {
	c := newLRU(capacity)
	hits, total := 0, 0
	for _, r := range reqs {
		hits += min(c.overlap(r.HashIDs)*traceBlock, r.InputLength)
		total += r.InputLength
		c.store(r.HashIDs)
	}
	return float64(hits) / float64(total)
}

// leastHits is the share of one shared cache's hits that policy kv must keep on the hour
// of real conversations. It is a floor: the weights are chosen by good requests over many
// workloads (docs/lab/policies.md), and not by these hits.
const leastHits = 0.93

// TestQuality runs the hour of real conversations over 16 ranks: kv keeps leastHits, and
// no worse a p99 TTFT than least_loaded. With -v it prints the tables of
// docs/adr/0004-cost-function.md by the weights of now.
func TestQuality(t *testing.T) {
	if testing.Short() {
		t.Skip("a whole trace, a dozen times")
	}
	reqs := conversationTrace(t)
	blocks := 0
	for _, r := range reqs {
		blocks += len(r.HashIDs)
	}
	if len(reqs) != 12031 || blocks != 288500 {
		t.Fatalf("trace has %d requests and %d blocks, want 12031 and 288500", len(reqs), blocks)
	}
	const n = 16
	for _, capacity := range []int{0, 2048, 512} {
		bound := sharedCache(reqs, capacity*n)
		t.Logf("cache of a rank: %d blocks of 512 tokens (0 = unlimited); one shared cache hits %.2f%% of tokens", capacity, 100*bound)
		for _, speedup := range []float64{1, 4, 10} {
			if speedup == 4 && !testing.Verbose() {
				continue
			}
			run := func(name string, p selector.Policy, w selector.Weights) *outcome {
				o := fleet{ranks: n, capacity: capacity, speedup: speedup, policy: p, weights: w}.run(reqs)
				t.Logf("| %4d | x%-2.0f | %-26s | %5.1f%% | %5.1f%% | %4.0f | %4.0f | %4.2f | %4.1f |",
					capacity, speedup, name, 100*o.hit, 100*o.hit/bound, o.p(.5), o.p(.99), o.imbalance, o.itl)
				return &o
			}
			w := selector.DefaultWeights()
			least := run("least_loaded", selector.LeastLoaded, w)
			if testing.Verbose() {
				run("round_robin", selector.RoundRobin, w)
				run("power_of_two", selector.PowerOfTwo, w)
				run("kv_dynamo", selector.KVDynamo, w)
			}
			kv := run("kv", selector.KV, w)
			if kv.p(.99) > least.p(.99) {
				t.Errorf("cache %d, x%v: kv has p99 TTFT %.0f ms, least_loaded %.0f ms", capacity, speedup, kv.p(.99), least.p(.99))
			}
			if speedup == 1 && kv.hit < leastHits*bound {
				t.Errorf("cache %d: kv hits %.2f%% of the shared cache's tokens, want %.0f%%", capacity, 100*kv.hit/bound, 100*leastHits)
			}
			if speedup != 1 || !testing.Verbose() {
				continue
			}
			for _, v := range []struct {
				name string
				set  func(w *selector.Weights)
			}{
				{"kv queue=1", func(w *selector.Weights) { w.Queue = 1 }},
				{"kv decode_load=1/64", func(w *selector.Weights) { w.DecodeLoad = 1. / 64 }},
				{"kv decode_load=1", func(w *selector.Weights) { w.DecodeLoad = 1 }},
				{"kv stall=0", func(w *selector.Weights) { w.Stall = 0 }},
				{"kv spread=0", func(w *selector.Weights) { w.Spread = 0 }},
				{"kv all of dynamo's", func(w *selector.Weights) { w.Queue, w.DecodeLoad, w.Stall, w.Spread = 1, 1, 0, 0 }},
			} {
				x := w
				v.set(&x)
				run(v.name, selector.KV, x)
			}
		}
	}
}

// TestQualityOfOtherFleets guards against weights that fit one fleet size by
// luck: without the spread term, 14 to 18 ranks get anything from 94 to 98 %
// of the bound with small caches, and as little as 87 % with another decode
// weight.
func TestQualityOfOtherFleets(t *testing.T) {
	if testing.Short() {
		t.Skip("a whole trace, six times")
	}
	reqs := conversationTrace(t)
	fleets := []int{14, 18}
	if testing.Verbose() {
		fleets = []int{14, 15, 17, 18}
	}
	for _, total := range []int{0, 16 * 2048, 16 * 512} {
		for _, n := range fleets {
			bound := sharedCache(reqs, total/n*n)
			o := fleet{ranks: n, capacity: total / n, speedup: 1, policy: selector.KV, weights: selector.DefaultWeights()}.run(reqs)
			t.Logf("%d ranks of %d blocks: %.1f%% of the shared cache's hits, p99 TTFT %.0f ms, imbalance %.2f", n, total/n, 100*o.hit/bound, o.p(.99), o.imbalance)
			if o.hit < leastHits*bound {
				t.Errorf("%d ranks of %d blocks: %.2f%% of the shared cache's hits, want %.0f%%", n, total/n, 100*o.hit/bound, 100*leastHits)
			}
		}
	}
}
