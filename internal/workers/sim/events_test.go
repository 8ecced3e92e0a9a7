package sim_test

import (
	"context"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/zmtp"
)

// view follows the events of one rank as a router would, to know what its
// cache holds.
type view struct {
	nodes map[uint64]uint64 // engine name → sequence hash
	count map[uint64]int
	next  uint64
}

func (v *view) apply(t *testing.T, seq uint64, payload []byte) {
	t.Helper()
	if seq < v.next {
		return
	}
	if seq != v.next {
		t.Fatalf("sequence %d after %d", seq, v.next)
	}
	v.next++
	var d kvevent.Decoder
	var b kvevent.Batch
	if err := d.Decode(payload, &b); err != nil || b.Skipped+b.Unknown > 0 {
		t.Fatalf("%v %v", err, b.Reason)
	}
	for _, e := range b.Events {
		switch e.Kind {
		case kvevent.Stored:
			first := 0
			if e.HasParent {
				first = 1
			}
			locals := blockhash.LocalsAt(nil, e.Tokens, int(e.BlockSize), first, nil, blockhash.Key{LoRA: e.LoRAName, Salt: e.Salt})
			seqs := blockhash.Chain(nil, locals)
			for i, h := range e.Hashes {
				if parent := e.Parent; e.HasParent {
					if i > 0 {
						parent = e.Hashes[i-1]
					}
					seqs[i] = blockhash.Next(v.nodes[parent], locals[i])
				}
				v.nodes[h] = seqs[i]
				v.count[h]++
			}
		case kvevent.Removed:
			for _, h := range e.Hashes {
				v.count[h]--
			}
		case kvevent.Cleared:
			clear(v.count)
		}
	}
}

func (v *view) seqs() []uint64 {
	var out []uint64
	for h, n := range v.count {
		if n > 0 {
			out = append(out, v.nodes[h])
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// replay asks a replay socket for everything from a sequence on.
func replay(t *testing.T, endpoint string, from uint64, apply func(seq uint64, payload []byte)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := zmtp.DialDealer(ctx, endpoint, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Send(kvevent.ReplayRequest(from)...); err != nil {
		t.Fatal(err)
	}
	var m zmtp.Message
	for {
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
		seq, payload, end, err := kvevent.ParseReplay(m.Frames())
		if err != nil {
			t.Fatal(err)
		}
		if end {
			return
		}
		apply(seq, payload)
	}
}

// Engines count the ports of their ranks up from that of rank 0, which is all that
// SGLang reports of its replay: a port taken at random would be somebody else's to
// whoever counts.
func TestPortsCountUpWithTheRank(t *testing.T) {
	for _, engine := range []string{"vllm", "sglang"} {
		r := start(t, "2a:dp=4,profile=instant,engine="+engine)
		for _, e := range r.Engines() {
			port := func(endpoint string) int {
				u, err := url.Parse(endpoint)
				if err != nil {
					t.Fatal(err)
				}
				n, err := strconv.Atoi(u.Port())
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			first := e.Worker().Events[0]
			for i, s := range e.Worker().Events {
				if port(s.Endpoint) != port(first.Endpoint)+i || port(s.Replay) != port(first.Replay)+i {
					t.Errorf("%s: rank %d is at %s and %s, rank 0 at %s and %s", e.Name(), i, s.Endpoint, s.Replay, first.Endpoint, first.Replay)
				}
			}
		}
	}
}

func TestEventsDescribeTheCaches(t *testing.T) {
	for _, opt := range []string{"events=map", "events=array,hash=bin", "events=map,hash=bin", "engine=sglang,events=map", "engine=sglang,events=array"} {
		t.Run(opt, func(t *testing.T) {
			t.Parallel()
			r := start(t, "1a:dp=2,profile=instant,kv_blocks=40,loras=ad1,max_model_len=400,"+opt)
			e := r.Engine(0)
			w := e.Worker()
			live := &view{nodes: map[uint64]uint64{}, count: map[uint64]int{}}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			sub, err := zmtp.DialSub(ctx, w.Events[1].Endpoint, zmtp.Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer sub.Close()
			pub, err := e.Publisher(1)
			if err != nil {
				t.Fatal(err)
			}
			if err := pub.WaitSubscribers(ctx, 1); err != nil {
				t.Fatal(err)
			}
			for i := range 25 {
				body := object{"prompt": ids(20+i*11%150, i%6), "max_tokens": 20, "ignore_eos": true}
				if i%4 == 0 {
					body["cache_salt"] = "pepper"
				}
				if i%5 == 0 && !strings.Contains(opt, "sglang") {
					body["model"] = "ad1"
				}
				post(t, e.URL()+"/v1/completions", body, "X-data-parallel-rank", []string{"0", "1"}[min(i%3, 1)])
			}
			var m zmtp.Message
			for live.next < pub.Next() {
				if err := sub.Recv(&m); err != nil {
					t.Fatal(err)
				}
				_, seq, payload, err := kvevent.ParseLive(m.Frames())
				if err != nil {
					t.Fatal(err)
				}
				live.apply(t, seq, payload)
			}
			if live.next == 0 {
				t.Fatal("no events")
			}
			for rank, v := range []*view{{nodes: map[uint64]uint64{}, count: map[uint64]int{}}, {nodes: map[uint64]uint64{}, count: map[uint64]int{}}} {
				replay(t, w.Events[rank].Replay, 0, func(seq uint64, payload []byte) { v.apply(t, seq, payload) })
				want, err := e.Cached(rank)
				if err != nil {
					t.Fatal(err)
				}
				slices.Sort(want)
				if d := cmp.Diff(want, v.seqs()); d != "" {
					t.Errorf("rank %d (-cache +replayed):\n%s", rank, d)
				}
				if rank == 1 {
					if d := cmp.Diff(want, live.seqs()); d != "" {
						t.Errorf("rank %d (-cache +live):\n%s", rank, d)
					}
				}
			}
		})
	}
}

func TestPublisherDials(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	l, err := zmtp.ListenSub(ctx, "tcp://127.0.0.1:0", zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r := start(t, "1a:profile=instant,dial="+l.Endpoint())
	if w := r.Engine(0).Worker(); !w.Events[0].Bind || w.Events[0].Endpoint != l.Endpoint() {
		t.Errorf("%+v", w.Events)
	}
	c, err := l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	pub, err := r.Engine(0).Publisher(0)
	if err != nil {
		t.Fatal(err)
	}
	if err := pub.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	complete(t, r.Engine(0), ids(50, 1), nil)
	var m zmtp.Message
	if err := c.Recv(&m); err != nil {
		t.Fatal(err)
	}
	if _, seq, _, err := kvevent.ParseLive(m.Frames()); err != nil || seq != 0 {
		t.Errorf("sequence %d, %v", seq, err)
	}
}

// TestClearedComesWithTheNextStep: vLLM publishes after steps only, so that a cache
// that was cleared without one is published with the next request.
func TestClearedComesWithTheNextStep(t *testing.T) {
	r := start(t, "1a:profile=instant")
	e := r.Engine(0)
	pub, err := e.Publisher(0)
	if err != nil {
		t.Fatal(err)
	}
	complete(t, e, ids(40, 1), nil)
	eventually(t, "the blocks of the first prompt", func() bool { return pub.Next() > 0 })
	from := pub.Next()
	for _, path := range []string{"/reset_prefix_cache", "/sleep?level=1", "/wake_up"} {
		if status, b := post(t, e.URL()+path, nil); status != 200 {
			t.Fatalf("%s: %d %s", path, status, b)
		}
	}
	if n := pub.Next(); n != from {
		t.Errorf("%d batches without a step", n-from)
	}
	complete(t, e, ids(40, 2), nil)
	eventually(t, "the blocks of the second prompt", func() bool { return pub.Next() > from })
	var kinds []kvevent.Kind
	replay(t, e.Worker().Events[0].Replay, from, func(_ uint64, payload []byte) {
		var d kvevent.Decoder
		var b kvevent.Batch
		if err := d.Decode(payload, &b); err != nil {
			t.Fatal(err)
		}
		for _, ev := range b.Events {
			kinds = append(kinds, ev.Kind)
		}
	})
	if len(kinds) < 2 || kinds[0] != kvevent.Cleared || !slices.Contains(kinds, kvevent.Stored) {
		t.Errorf("events %v, want that the cache was cleared, then what the step has stored", kinds)
	}
}
