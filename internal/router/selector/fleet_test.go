package selector

import (
	"bufio"
	"compress/gzip"
	"container/heap"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
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

// conversationTrace reads the shared conversation trace or skips the test.
func conversationTrace(tb testing.TB) []request {
	tb.Helper()
	path := filepath.FromSlash("../../../../shared/traces/conversation_trace.jsonl.gz")
	f, err := os.Open(path)
	if err != nil {
		tb.Skipf("the conversation trace is not here: %v", err)
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
// 8192 tokens, KV stored (and known to the router) when a prefill ends.
type fleet struct {
	ranks    int
	capacity int     // cache of one rank in trace blocks, 0 = unlimited
	speedup  float64 // arrivals this many times faster
	policy   Policy
	weights  Weights
	rank     func(*Input, *Ranking) // nil: Rank
	predict  bool
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
		cache                    *lru
		free                     float64 // when its prefill queue is empty
		requests, prefill, block int
		last                     uint64
		prefillMS                float64
		decoding                 int
	}
	ranks := make([]rankState, f.ranks)
	cands := make([]Candidate, f.ranks)
	for i := range ranks {
		ranks[i].cache = newLRU(f.capacity)
		cands[i] = Candidate{Label: fmt.Sprintf("sim-%02d/dp0", i), Slot: uint32(i), HasLoad: true, KVBlocks: kvTokens / traceBlock}
	}
	h := make(events, 0, len(reqs)*2)
	for i, r := range reqs {
		h = append(h, event{at: r.Timestamp / f.speedup, seq: i, req: i})
	}
	heap.Init(&h)
	seq := len(reqs)
	var (
		out   outcome
		rk    Ranking
		total int
		hits  int
		turn  uint64
		fresh = make([]int, len(reqs)) // uncached tokens at routing
		itls  float64
	)
	choose := f.rank
	if choose == nil {
		choose = Rank
	}
	for h.Len() > 0 {
		e := heap.Pop(&h).(event)
		r := &reqs[e.req]
		switch e.kind {
		case 0:
			for i := range ranks {
				s, c := &ranks[i], &cands[i]
				c.OverlapBlocks = s.cache.overlap(r.HashIDs)
				c.ActiveRequests, c.PrefillTokens, c.DecodeBlocks = s.requests, s.prefill, s.block
				c.LastTurn, c.ResidentBlocks = s.last, len(s.cache.at)
				c.Running = s.requests
				c.KVUsage = math.NaN()
			}
			in := Input{Phase: Aggregated, Policy: f.policy, Weights: f.weights, ISL: r.InputLength, BlockSize: traceBlock,
				Candidates: cands, Draw: mix(uint64(e.req)), Turn: uint64(e.req)}
			choose(&in, &rk)
			b, _ := rk.Best()
			s := &ranks[b]
			turn++
			s.last = turn
			cached := min(cands[b].OverlapBlocks*traceBlock, r.InputLength)
			fresh[e.req] = r.InputLength - cached
			s.requests++
			s.prefill += fresh[e.req]
			s.block += len(r.HashIDs)
			// The engine looks up its cache when the prefill starts.
			if f.predict {
				s.cache.store(r.HashIDs)
			}
			start := max(e.at, s.free)
			u := min(float64(s.block*traceBlock)/kvTokens, 1)
			step := 0.0
			if s.decoding > 0 {
				step = decodeMS(u)
			}
			ms := prefillMS(max(fresh[e.req], 1), step)
			s.free = start + ms
			s.prefillMS += ms
			out.ttft = append(out.ttft, s.free-e.at)
			hits += cached
			total += r.InputLength
			seq++
			heap.Push(&h, event{at: s.free, seq: seq, kind: 1, req: e.req, rank: b})
		case 1:
			s := &ranks[e.rank]
			s.prefill -= fresh[e.req]
			s.cache.store(r.HashIDs)
			s.decoding++
			itl := decodeMS(min(float64(s.block*traceBlock)/kvTokens, 1))
			itls += itl
			seq++
			heap.Push(&h, event{at: e.at + itl*float64(r.OutputLength), seq: seq, kind: 2, req: e.req, rank: e.rank})
		case 2:
			s := &ranks[e.rank]
			s.requests--
			s.decoding--
			s.block -= len(r.HashIDs)
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
