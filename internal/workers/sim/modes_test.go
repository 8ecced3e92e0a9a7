package sim_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/blockhash"
	"github.com/dynctl/dynctl/internal/router/kvevent"
	"github.com/dynctl/dynctl/internal/router/zmtp"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// SGLang

type sglAnswer struct {
	Text string
	Meta struct {
		FinishReason     object `json:"finish_reason"`
		CompletionTokens int    `json:"completion_tokens"`
		CachedTokens     int    `json:"cached_tokens"`
		DPRank           int    `json:"dp_rank"`
	} `json:"meta_info"`
}

func generate(t *testing.T, e *sim.Engine, prompt []int, extra object) (int, string) {
	t.Helper()
	body := object{"input_ids": prompt, "sampling_params": object{"max_new_tokens": 12, "ignore_eos": true}}
	for k, v := range extra {
		body[k] = v
	}
	status, b, err := tryPost(t.Context(), e.URL()+"/generate", body)
	if err != nil {
		return 0, err.Error()
	}
	return status, string(b)
}

func TestSGLangRendezvous(t *testing.T) {
	r := start(t, "1p1d1a:engine=sglang,profile=instant,block=1,kv_blocks=4096,dp=2,bootstrap_wait=300ms")
	p, d, a := r.Engine(0), r.Engine(1), r.Engine(2)
	boot := p.Worker().Bootstrap
	prompt := ids(40, 3)
	status, b := generate(t, a, prompt, nil)
	if status != 200 {
		t.Fatal(status, b)
	}
	want := decode[sglAnswer](t, []byte(b)).Text
	triple := func(room int) object {
		return object{"bootstrap_host": boot.Host, "bootstrap_port": boot.Port, "bootstrap_room": room}
	}
	legs := func(room int) (ps int, pb string, ds int, db string) {
		var wg sync.WaitGroup
		wg.Add(1)
		go func() {
			defer wg.Done()
			ps, pb = generate(t, p, prompt, triple(room))
		}()
		ds, db = generate(t, d, prompt, triple(room))
		wg.Wait()
		return ps, pb, ds, db
	}
	ps, pb, ds, db := legs(7)
	if ps != 200 || ds != 200 {
		t.Fatalf("prefill %d %s\ndecode %d %s", ps, pb, ds, db)
	}
	if got := decode[sglAnswer](t, []byte(db)); got.Text != want {
		t.Errorf("decode says %q, want %q", got.Text, want)
	}
	if got := decode[sglAnswer](t, []byte(pb)); got.Meta.CompletionTokens != 1 || got.Meta.DPRank != 1 {
		t.Errorf("prefill leg: %+v, want one token on rank room mod dp = 1", got)
	}
	s, err := d.Counters()
	if err != nil {
		t.Fatal(err)
	}
	if s[0].External+s[1].External != 40 || s[0].Local+s[1].Local != 0 {
		t.Errorf("decode ranks: %d pulled, %d computed", s[0].External+s[1].External, s[0].Local+s[1].Local)
	}
	eventually(t, "prefill keeps nothing", func() bool {
		s, err := p.Counters()
		return err == nil && s[0].Pinned+s[1].Pinned == 0
	})
	t.Run("decode alone times out", func(t *testing.T) {
		if status, b := generate(t, d, ids(9, 1), triple(8)); status != 500 || !strings.Contains(b, `"object":"error"`) {
			t.Errorf("%d %s", status, b)
		}
	})
	t.Run("prefill alone times out", func(t *testing.T) {
		if status, b := generate(t, p, ids(9, 1), triple(9)); status != 500 {
			t.Errorf("%d %s", status, b)
		}
	})
	t.Run("prefill that leaves fails the decode", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _, _ = tryPost(ctx, p.URL()+"/generate", object{"input_ids": prompt, "bootstrap_host": boot.Host, "bootstrap_port": boot.Port, "bootstrap_room": 10})
		}()
		cancel()
		<-done
		if status, b := generate(t, d, prompt, triple(10)); status != 500 {
			t.Errorf("%d %s", status, b)
		}
	})
	t.Run("no room", func(t *testing.T) {
		if status, b := generate(t, p, prompt, nil); status != 400 || !strings.Contains(b, "boostrap room id") {
			t.Errorf("%d %s", status, b)
		}
	})
	t.Run("fake host probes alone", func(t *testing.T) {
		for _, e := range []*sim.Engine{p, d} {
			status, b := generate(t, e, prompt, object{"bootstrap_host": "2.2.2.2", "bootstrap_room": 0})
			if status != 200 {
				t.Errorf("%s: %d %s", e.Name(), status, b)
			}
		}
	})
	t.Run("rank out of range", func(t *testing.T) {
		if status, b := generate(t, a, prompt, object{"routed_dp_rank": 2}); status != 400 {
			t.Errorf("%d %s", status, b)
		}
	})
	t.Run("server info", func(t *testing.T) {
		resp, err := http.Get(p.URL() + "/server_info")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var info struct {
			Mode string `json:"disaggregation_mode"`
			Port int    `json:"disaggregation_bootstrap_port"`
			Page int    `json:"page_size"`
			DP   int    `json:"dp_size"`
		}
		if err := json.NewDecoder(resp.Body).Decode(&info); err != nil {
			t.Fatal(err)
		}
		if info.Mode != "prefill" || info.Port != boot.Port || info.Page != 1 || info.DP != 2 {
			t.Errorf("%+v", info)
		}
	})
}

// Shared storage and LMCache

func TestSharedStorage(t *testing.T) {
	for name, opt := range map[string]string{"memory": "", "folder": ",store=" + t.TempDir()} {
		t.Run(name, func(t *testing.T) {
			r := start(t, "1p1d:connector=shared-storage,profile=instant"+opt)
			p, d := r.Engine(0), r.Engine(1)
			prompt := ids(100, 4)
			_, want, _ := complete(t, p, prompt, nil)
			status, got, c := complete(t, d, prompt, nil)
			if status != 200 || got != want || c.Usage.PromptTokensDetails.CachedTokens != 96 {
				t.Errorf("%d %q (want %q), %+v", status, got, want, c.Usage)
			}
			// Whole prompts only.
			if _, _, c := complete(t, d, append(ids(100, 4), ids(40, 5)...), nil); c.Usage.PromptTokensDetails.CachedTokens != 96 {
				t.Errorf("local prefix of another prompt: %+v", c.Usage)
			}
			if s := counters(t, d); s.External != 96 {
				t.Errorf("%d external tokens, want 96", s.External)
			}
		})
	}
}

func TestLMCache(t *testing.T) {
	r := start(t, "1p1d:connector=lmcache,profile=instant")
	p, d := r.Engine(0), r.Engine(1)
	prompt := ids(100, 6)
	_, want, _ := complete(t, p, prompt, nil)
	l := d.Worker().LMCache
	if l == nil {
		t.Fatal("the decode tells no receiver")
	}
	status, b := post(t, p.URL()+"/v1/completions", object{"prompt": prompt, "max_tokens": 1, "kv_transfer_params": object{
		"ret_first_tok": true,
		"disagg_spec":   object{"req_id": "r1", "receiver_host": l.Host, "receiver_init_port": l.InitPorts, "receiver_alloc_port": l.AllocPorts},
	}})
	var kv struct {
		First *int `json:"first_tok"`
	}
	if err := json.Unmarshal(decode[completion](t, b).KV, &kv); err != nil || status != 200 || kv.First == nil {
		t.Fatalf("%d %s", status, b)
	}
	first := r.Vocab().Text(uint32(*kv.First))
	status, b = post(t, d.URL()+"/v1/completions", object{"prompt": append(slices.Clone(prompt), *kv.First), "max_tokens": 11, "ignore_eos": true})
	c := decode[completion](t, b)
	if got := first + c.Choices[0].Text; status != 200 || got != want {
		t.Errorf("%d %q, want %q", status, got, want)
	}
	if s := counters(t, d); s.External != 96 || s.Local != 5 {
		t.Errorf("external %d, local %d, want 96 and 5", s.External, s.Local)
	}
	if status, b := post(t, p.URL()+"/v1/completions", object{"prompt": prompt, "max_tokens": 1, "kv_transfer_params": object{"disagg_spec": object{"receiver_host": "127.0.0.1", "receiver_init_port": []int{}}}}); status != 500 {
		t.Errorf("no receiver port: %d %s", status, b)
	}
}

// Events

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
// SGLang tells of its replay: a port taken at random would be somebody else's to
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

func TestRestartBeginsAnew(t *testing.T) {
	r := start(t, "1a:profile=instant")
	e := r.Engine(0)
	complete(t, e, ids(100, 1), nil)
	before := e.Worker()
	if n, err := e.Cached(0); err != nil || len(n) == 0 {
		t.Fatal(n, err)
	}
	names := map[uint64]bool{}
	collect := func(m map[uint64]bool) func(uint64, []byte) {
		return func(_ uint64, payload []byte) {
			var d kvevent.Decoder
			var b kvevent.Batch
			if err := d.Decode(payload, &b); err != nil {
				t.Fatal(err)
			}
			for _, e := range b.Events {
				for _, h := range e.Hashes {
					m[h] = true
				}
			}
		}
	}
	replay(t, before.Events[0].Replay, 0, collect(names))
	if status, b := post(t, e.URL()+"/sim/v1/restart", nil); status != 202 {
		t.Fatalf("%d %s", status, b)
	}
	eventually(t, "the restart", func() bool { up, _ := e.Running(); return up && e.Incarnation() == 1 })
	if d := cmp.Diff(before.Events, e.Worker().Events); d != "" {
		t.Errorf("sockets moved:\n%s", d)
	}
	if n, err := e.Cached(0); err != nil || len(n) != 0 {
		t.Error("the cache survived")
	}
	complete(t, e, ids(100, 1), nil)
	again := map[uint64]bool{}
	replay(t, before.Events[0].Replay, 0, collect(again))
	for h := range again {
		if names[h] {
			t.Fatal("block names survived the restart")
		}
	}
	if len(again) == 0 {
		t.Error("no events after the restart")
	}
}

// Faults

func TestFaults(t *testing.T) {
	r := start(t, "1a:profile=instant")
	e := r.Engine(0)
	set := func(f object) {
		t.Helper()
		if status, b := post(t, e.URL()+"/sim/v1/faults", f); status != 200 {
			t.Fatalf("%d %s", status, b)
		}
	}
	ask := func() (int, []byte, error) {
		return tryPost(t.Context(), e.URL()+"/v1/completions", object{"prompt": "hello", "max_tokens": 20, "ignore_eos": true, "stream": true})
	}
	t.Run("bad sets are refused", func(t *testing.T) {
		for _, f := range []object{{"error_rate": 2}, {"colour": "red"}, {"delay": "soon"}, {"error_status": 200}} {
			if status, b := post(t, e.URL()+"/sim/v1/faults", f); status != 400 {
				t.Errorf("%v: %d %s", f, status, b)
			}
		}
	})
	t.Run("errors", func(t *testing.T) {
		set(object{"error_rate": 1, "error_status": 503})
		if status, _, err := ask(); status != 503 || err != nil {
			t.Errorf("%d %v", status, err)
		}
		if resp, err := http.Get(e.URL() + "/health"); err != nil || resp.StatusCode != 200 {
			t.Errorf("health: %v %v", resp, err)
		} else {
			resp.Body.Close()
		}
		set(object{"error_rate": 1, "all_paths": true})
		if resp, err := http.Get(e.URL() + "/health"); err != nil || resp.StatusCode != 500 {
			t.Errorf("health: %v %v", resp, err)
		} else {
			resp.Body.Close()
		}
	})
	t.Run("die mid-stream", func(t *testing.T) {
		set(object{"die_rate": 1, "die_after_tokens": 0})
		if _, b, err := ask(); err == nil {
			t.Errorf("a whole answer: %s", b)
		}
	})
	t.Run("delay", func(t *testing.T) {
		set(object{"delay": "30ms"})
		began := time.Now()
		if status, _, err := ask(); status != 200 || err != nil || time.Since(began) < 30*time.Millisecond {
			t.Errorf("%d %v after %v", status, err, time.Since(began))
		}
	})
	t.Run("hang, then go on", func(t *testing.T) {
		set(object{"hang": true})
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		if _, _, err := tryPost(ctx, e.URL()+"/tokenize", object{"prompt": "x"}); err == nil {
			t.Error("answered")
		}
		done := make(chan int, 1)
		go func() { status, _, _ := ask(); done <- status }()
		set(object{})
		if status := <-done; status != 200 {
			t.Errorf("%d", status)
		}
	})
	t.Run("refuse for a time", func(t *testing.T) {
		set(object{"refuse": true, "for": "2s"}) // time enough to meet it
		eventually(t, "connections are refused", func() bool {
			_, _, err := tryPost(t.Context(), e.URL()+"/tokenize", object{"prompt": "x"})
			return err != nil && strings.Contains(err.Error(), "refused")
		})
		// A connection from before may still be served while new ones are refused.
		eventually(t, "the fault ends", func() bool { return e.Faults() == (fault.Set{}) })
		eventually(t, "connections are taken again", func() bool {
			_, _, err := tryPost(t.Context(), e.URL()+"/tokenize", object{"prompt": "x"})
			return err == nil
		})
	})
	t.Run("events", func(t *testing.T) {
		w := e.Worker()
		sub, err := zmtp.DialSub(t.Context(), w.Events[0].Endpoint, zmtp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer sub.Close()
		pub, err := e.Publisher(0)
		if err != nil {
			t.Fatal(err)
		}
		if err := pub.WaitSubscribers(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		from := pub.Next()
		set(object{"drop_events": 1})
		complete(t, e, ids(40, 21), nil)
		set(object{"reorder_events": 1})
		complete(t, e, ids(40, 22), nil)
		complete(t, e, ids(40, 23), nil)
		set(object{})
		complete(t, e, ids(40, 24), nil)
		end := pub.Next()
		var got []uint64
		var m zmtp.Message
		for len(got) == 0 || slices.Max(got) < end-1 {
			if err := sub.Recv(&m); err != nil {
				t.Fatal(err)
			}
			_, seq, _, err := kvevent.ParseLive(m.Frames())
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, seq)
		}
		if got[0] == from || slices.IsSorted(got) {
			t.Errorf("sequences from %d on: %v, want a gap and a swap", from, got)
		}
		seqs := func() (out []uint64) {
			replay(t, w.Events[0].Replay, from, func(seq uint64, _ []byte) { out = append(out, seq) })
			return out
		}
		whole := slices.DeleteFunc(seqs(), func(seq uint64) bool { return seq >= end })
		if len(whole) != int(end-from) || !slices.IsSorted(whole) {
			t.Errorf("replay from %d to %d gives %v", from, end, whole)
		}
		// What fails to be published is nowhere.
		set(object{"lose_events": 1})
		first := pub.Next()
		complete(t, e, ids(40, 25), nil)
		eventually(t, "its number is used up", func() bool { return pub.Next() > first })
		lost := pub.Next()
		set(object{})
		well := pub.Next()
		complete(t, e, ids(40, 26), nil)
		eventually(t, "the next batch", func() bool { return pub.Next() > well })
		if got := seqs(); slices.ContainsFunc(got, func(seq uint64) bool { return seq >= first && seq < lost }) || got[len(got)-1] < well {
			t.Errorf("replay gives %v, want all but %d to %d, and those from %d on", got, first, lost-1, well)
		}
		// A ROUTER that drops says nothing, not even that it is done.
		c, err := zmtp.DialDealer(t.Context(), w.Events[0].Replay, zmtp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		set(object{"drop_replay": 1})
		before, last := pub.Replays(), pub.Next()-1
		if err := c.Send(kvevent.ReplayRequest(from)...); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the question was answered", func() bool { return pub.Replays() == before+1 })
		set(object{})
		if err := c.Send(kvevent.ReplayRequest(last)...); err != nil {
			t.Fatal(err)
		}
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
		if seq, _, end, err := kvevent.ParseReplay(m.Frames()); err != nil || end || seq != last {
			t.Errorf("the first answer is %d (end %v, %v), want %d, of the second question", seq, end, err, last)
		}
	})
}

// TestClearedComesWithTheNextStep: vLLM publishes after steps only, so that a cache
// that was cleared without one is told of with the next request.
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

func TestAutoRestart(t *testing.T) {
	r := start(t, "1p1d:profile=instant,auto_restart=10ms")
	d := r.Engine(1)
	if status, b, _ := complete(t, d, ids(100, 1), edit(prefill(t, r.Engine(0), ids(100, 1)), object{"remote_block_ids": []any{}})); status != 500 {
		t.Fatalf("%d %s", status, b)
	}
	eventually(t, "the engine comes back", func() bool { up, _ := d.Running(); return up && d.Incarnation() == 1 })
	if status, _, _ := complete(t, d, ids(100, 1), nil); status != 200 {
		t.Errorf("%d", status)
	}
}

func TestCloseDuringTraffic(t *testing.T) {
	f, err := sim.ParseFleet("2a:speed=20")
	if err != nil {
		t.Fatal(err)
	}
	r, err := sim.Start(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var begun sync.WaitGroup
	for i := range 16 {
		wg.Add(1)
		begun.Add(1)
		go func() {
			defer wg.Done()
			begun.Done()
			for range 50 {
				if _, _, err := tryPost(t.Context(), r.Engine(i%2).URL()+"/v1/completions", object{"prompt": ids(200, i), "max_tokens": 20, "stream": true}); err != nil {
					return
				}
			}
		}()
	}
	begun.Wait()
	eventually(t, "traffic runs", func() bool { s, err := r.Engine(0).Counters(); return err == nil && s[0].Generated > 20 })
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	http.DefaultClient.CloseIdleConnections()
}

func TestSameSeedSameEngine(t *testing.T) {
	run := func() object {
		r := start(t, "1p:profile=instant,seed=9")
		p := prefill(t, r.Engine(0), ids(50, 1))
		delete(p, "remote_port")
		return p
	}
	if d := cmp.Diff(run(), run()); d != "" {
		t.Errorf("two runs differ:\n%s", d)
	}
}

func TestControl(t *testing.T) {
	r := start(t, "1p1d:profile=instant")
	srv := httptest.NewServer(r.Control())
	defer srv.Close()
	p, d := r.Engine(0), r.Engine(1)
	call := func(path string, body any, want int) []byte {
		t.Helper()
		status, b := post(t, srv.URL+"/sim/v1/engines/"+path, body)
		if status != want {
			t.Errorf("%s: %d %s, want %d", path, status, b, want)
		}
		return b
	}
	call("decode-0/kill", nil, 200)
	if up, why := d.Running(); up || why != "killed" {
		t.Error(up, why)
	}
	if s := decode[sim.Status](t, call("decode-0/restart", nil, 200)); !s.Running || s.Incarnation != 1 {
		t.Errorf("%+v", s)
	}
	call("prefill-0/faults", object{"refuse": true}, 200)
	eventually(t, "connections are refused", func() bool {
		_, _, err := tryPost(t.Context(), p.URL()+"/tokenize", object{"prompt": "x"})
		return err != nil
	})
	call("prefill-0/faults", object{"refuse": "yes"}, 400)
	call("prefill-9/faults", object{}, 404)
	call("prefill-0/faults", object{}, 200)
	eventually(t, "connections are taken", func() bool {
		_, _, err := tryPost(t.Context(), p.URL()+"/tokenize", object{"prompt": "x"})
		return err == nil
	})
	// Faults may be set while an engine is down; they hold from its start.
	call("decode-0/kill", nil, 200)
	call("decode-0/faults", object{"error_rate": 1}, 200)
	call("decode-0/restart", nil, 200)
	if status, _, _ := complete(t, d, ids(5, 1), nil); status != 500 {
		t.Errorf("%d", status)
	}
	resp, err := http.Get(srv.URL + "/sim/v1/engines")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var list struct{ Engines []sim.Status }
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil || len(list.Engines) != 2 || list.Engines[1].Faults.ErrorRate != 1 {
		t.Errorf("%+v %v", list, err)
	}
}
