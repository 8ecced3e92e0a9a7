package virtual_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

func config() engine.Config {
	return engine.Config{
		BlockSize: 4, Blocks: 4096, MaxSeqs: 64, MaxBatchedTokens: 512, Model: "m", Seed: 1, NameSeed: 1,
		Timing: engine.Mocker{}, Next: func(_ []uint32, draw uint64) uint32 { return uint32(300 + draw%500) }, EOS: 2, OSL: 50, Connector: true,
	}
}

func add(t rapid.TB, w *virtual.World, cfg engine.Config) *virtual.Rank {
	t.Helper()
	r, err := w.Add(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func drain(t rapid.TB, w *virtual.World) {
	t.Helper()
	if err := w.Drain(1 << 20); err != nil {
		t.Fatal(err)
	}
}

func prompt(n, tag int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(1000 + tag*31 + i*i%997)
	}
	return out
}

// reference is the answer of an engine that nothing disturbs.
func reference(t rapid.TB, q engine.Request) (tokens []uint32) {
	w := virtual.NewWorld()
	r := add(t, w, config())
	q.ID, q.Pull, q.Pin, q.Key.Salt = "ref", nil, false, ""
	q.Sink = func(o engine.Output) {
		if o.HasToken {
			tokens = append(tokens, o.Token)
		}
	}
	if err := r.Submit(q); err != nil {
		t.Fatal(err)
	}
	drain(t, w)
	return tokens
}

// Whatever happens on a small, crowded rank — sharing, eviction, preemption,
// chunking, aborts, remote prefill — each answer is the one of a quiet rank,
// no block is lost, and the events describe the cache.
func TestAnswersDoNotDependOnTheWeather(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		w := virtual.NewWorld()
		cfg := config()
		cfg.Blocks = rapid.IntRange(24, 60).Draw(t, "blocks")
		cfg.MaxSeqs = rapid.IntRange(1, 8).Draw(t, "seqs")
		cfg.MaxBatchedTokens = rapid.IntRange(1, 64).Draw(t, "budget")
		cfg.Noise = 0.1
		cfg.HostBlocks = rapid.SampledFrom([]int{0, 5, 30, 300}).Draw(t, "host")
		cfg.Storage = rapid.Bool().Draw(t, "storage")
		mirror := map[uint64]int{}
		cfg.Publish = func(_ engine.Time, events []cache.Event) {
			for _, e := range events {
				if e.Tier != cache.Device {
					continue
				}
				switch e.Kind {
				case cache.Stored:
					if len(e.Tokens) != len(e.Names)*cfg.BlockSize {
						t.Fatalf("%d tokens in %d blocks", len(e.Tokens), len(e.Names))
					}
					for _, n := range e.Names {
						mirror[n]++
					}
				case cache.Removed:
					if mirror[e.Names[0]]--; mirror[e.Names[0]] == 0 {
						delete(mirror, e.Names[0])
					}
				case cache.Cleared:
					clear(mirror)
				}
			}
		}
		d := add(t, w, cfg)
		pcfg := config()
		pcfg.Lease = time.Second
		p := add(t, w, pcfg)

		type result struct {
			q      engine.Request
			tokens []uint32
			finish engine.Finish
			err    error
		}
		var all []*result
		n := rapid.IntRange(1, 25).Draw(t, "requests")
		for i := range n {
			q := engine.Request{
				ID:        fmt.Sprint("r", i),
				Tokens:    prompt(rapid.IntRange(1, 50).Draw(t, "isl"), rapid.IntRange(0, 3).Draw(t, "tag")),
				MaxTokens: rapid.IntRange(1, 30).Draw(t, "osl"),
				MinTokens: rapid.IntRange(0, 3).Draw(t, "min"),
				IgnoreEOS: rapid.Bool().Draw(t, "ignore"),
				Choice:    rapid.IntRange(0, 1).Draw(t, "choice"),
				Key:       blockhash.Key{Salt: rapid.SampledFrom([]string{"", "s"}).Draw(t, "salt")},
			}
			res := &result{q: q}
			all = append(all, res)
			q.Sink = func(o engine.Output) {
				if o.HasToken {
					res.tokens = append(res.tokens, o.Token)
				}
				if o.Finish != engine.Running {
					res.finish, res.err = o.Finish, o.Err
				}
			}
			at := time.Duration(rapid.IntRange(0, 400).Draw(t, "at")) * time.Millisecond
			remote := rapid.Bool().Draw(t, "remote")
			w.At(at, func() {
				if !remote {
					if err := d.Submit(q); err != nil {
						t.Fatal(err)
					}
					return
				}
				leg := engine.Request{ID: q.ID, Tokens: q.Tokens, MaxTokens: 1, Key: q.Key, Pin: true}
				leg.Sink = func(o engine.Output) {
					if o.Finish == engine.FinishLength {
						q.Pull = p.Pull(q.ID, o.Pinned)
						w.At(w.Now(), func() {
							if err := d.Submit(q); err != nil {
								t.Fatal(err)
							}
						})
					}
				}
				if err := p.Submit(leg); err != nil {
					t.Fatal(err)
				}
			})
			if rapid.IntRange(0, 4).Draw(t, "abort") == 0 {
				w.At(at+time.Duration(rapid.IntRange(0, 300).Draw(t, "abort at"))*time.Millisecond, func() { d.Abort(q.ID) })
			}
		}
		if err := w.Drain(100000); err != nil { // a livelock shows here
			t.Fatal(err)
		}
		for _, res := range all {
			want := reference(t, res.q)
			switch res.finish {
			case engine.FinishLength, engine.FinishStop:
				if d := cmp.Diff(want, res.tokens); d != "" {
					t.Fatalf("%s (-quiet +crowded):\n%s", res.q.ID, d)
				}
			case engine.FinishAbort:
				if len(res.tokens) > len(want) || !slices.Equal(res.tokens, want[:len(res.tokens)]) {
					t.Fatalf("%s: %v is no beginning of %v", res.q.ID, res.tokens, want)
				}
			default:
				t.Fatalf("%s ended with %q: %v", res.q.ID, res.finish, res.err)
			}
		}
		for i, r := range []*virtual.Rank{d, p} {
			s := r.Core().Stats(w.Now())
			if s.UsedBlocks != 0 || s.Running+s.Waiting+s.Pinned != 0 {
				t.Fatalf("rank %d is not idle: %+v", i, s)
			}
		}
		c := d.Core().Cache()
		// Events are published with steps; nothing may be outstanding.
		if rest := c.Events(); len(rest) != 0 {
			t.Fatalf("%d events were not published", len(rest))
		}
		seqs := c.Seqs(nil)
		for _, s := range seqs {
			if mirror[c.Name(s)] == 0 {
				t.Fatal("a cached block was never announced")
			}
		}
		if len(seqs) != len(mirror) {
			t.Fatalf("events report %d blocks, the cache has %d", len(mirror), len(seqs))
		}
	})
}

// trace runs a busy world and writes down everything that comes out of it.
func trace(t testing.TB, seed uint64) []string {
	w := virtual.NewWorld()
	var log []string
	var ranks []*virtual.Rank
	for i := range 3 {
		cfg := config()
		cfg.Blocks, cfg.Noise, cfg.NoiseSeed, cfg.NameSeed = 50, 0.05, seed+uint64(i), seed
		cfg.Publish = func(now engine.Time, events []cache.Event) { log = append(log, fmt.Sprint(i, now, len(events))) }
		ranks = append(ranks, add(t, w, cfg))
	}
	for i := range 60 {
		w.At(time.Duration(i)*7*time.Millisecond, func() {
			r := ranks[i%3]
			if r.Core() == nil {
				return
			}
			err := r.Submit(engine.Request{ID: fmt.Sprint(i), Tokens: prompt(1+i*7%90, i%5), MaxTokens: 20, Sink: func(o engine.Output) {
				log = append(log, fmt.Sprintf("%d %v %d %s %d %v", i, o.At, o.Token, o.Finish, o.Cached, o.Err))
			}})
			if err != nil {
				log = append(log, err.Error())
			}
		})
	}
	w.At(150*time.Millisecond, func() { ranks[1].Kill("test") })
	w.At(250*time.Millisecond, func() {
		if err := ranks[1].Restart(99); err != nil {
			t.Error(err)
		}
	})
	drain(t, w)
	return log
}

func TestSameSeedSameHistory(t *testing.T) {
	a, b := trace(t, 5), trace(t, 5)
	if d := cmp.Diff(a, b); d != "" {
		t.Errorf("two runs differ:\n%s", d)
	}
	if slices.Equal(a, trace(t, 6)) {
		t.Error("another seed changes nothing")
	}
	if len(a) < 500 {
		t.Errorf("only %d lines of history", len(a))
	}
}

// What a pull evicts is published when it begins, as by vLLM, and not with the
// next step: there may be none for long, or none at all if the client leaves.
func TestPullPublishesWhatItEvicts(t *testing.T) {
	w := virtual.NewWorld()
	p := add(t, w, config())
	cfg := config()
	cfg.Blocks = 24
	removed := 0
	cfg.Publish = func(_ engine.Time, events []cache.Event) {
		for _, e := range events {
			if e.Kind == cache.Removed {
				removed++
			}
		}
	}
	d := add(t, w, cfg)
	if err := d.Submit(engine.Request{ID: "before", Tokens: prompt(80, 1), MaxTokens: 1, IgnoreEOS: true}); err != nil {
		t.Fatal(err)
	}
	drain(t, w)
	q := engine.Request{ID: "q", Tokens: prompt(60, 2), MaxTokens: 1}
	leg := q
	leg.Pin = true
	leg.Sink = func(o engine.Output) {
		if o.Finish == engine.FinishLength {
			q.Pull = p.Pull(q.ID, o.Pinned)
		}
	}
	if err := p.Submit(leg); err != nil {
		t.Fatal(err)
	}
	for q.Pull == nil && w.Step() {
	}
	cached := len(d.Core().Cache().Seqs(nil))
	if err := d.Submit(q); err != nil {
		t.Fatal(err)
	}
	if gone := cached - len(d.Core().Cache().Seqs(nil)); gone == 0 || removed != gone {
		t.Errorf("%d blocks evicted for the pull, %d published", gone, removed)
	}
}

func TestKilledRankFailsItsRequests(t *testing.T) {
	w := virtual.NewWorld()
	r := add(t, w, config())
	var got error
	if err := r.Submit(engine.Request{ID: "a", Tokens: prompt(100, 1), MaxTokens: 50, Sink: func(o engine.Output) { got = o.Err }}); err != nil {
		t.Fatal(err)
	}
	w.Run(20 * time.Millisecond)
	r.Kill("test")
	if !errors.Is(got, virtual.ErrDown) {
		t.Errorf("%v, want ErrDown", got)
	}
	if err := r.Submit(engine.Request{ID: "b", Tokens: prompt(5, 1)}); !errors.Is(err, virtual.ErrDown) {
		t.Errorf("Submit on a dead rank: %v", err)
	}
	drain(t, w)
}

// The times of a lone request are the model's, to the nanosecond.
func TestTimesAreTheModels(t *testing.T) {
	profile := engine.Profile{Prefill: [3]float64{10, 0.05, 1e-5}, Decode: [3]float64{5, 1, 0.001}, Transfers: [2]float64{3, 0.002}}
	const isl = 1000
	measure := func(cfg engine.Config, remote bool) (ttft, e2e time.Duration) {
		w := virtual.NewWorld()
		d, p := add(t, w, cfg), add(t, w, cfg)
		q := engine.Request{ID: "x", Tokens: prompt(isl, 3), MaxTokens: 3, IgnoreEOS: true, Sink: func(o engine.Output) {
			if ttft == 0 {
				ttft = o.At
			}
			e2e = o.At
		}}
		submit := func(r *virtual.Rank, q engine.Request) {
			if err := r.Submit(q); err != nil {
				t.Error(err)
			}
		}
		if !remote {
			submit(d, q)
		} else {
			submit(p, engine.Request{ID: "x", Tokens: q.Tokens, MaxTokens: 1, Pin: true, Sink: func(o engine.Output) {
				q.Pull = p.Pull("x", o.Pinned)
				w.At(w.Now(), func() { submit(d, q) })
			}})
		}
		drain(t, w)
		return ttft, e2e
	}
	ms := func(v float64) time.Duration { return time.Duration(v * float64(time.Millisecond)) }
	near := func(what string, got, want time.Duration) {
		t.Helper()
		if (got - want).Abs() > 10 {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	cfg := config()
	cfg.Timing, cfg.MaxBatchedTokens = profile, 8192
	pre := 10 + 0.05*isl + 1e-5*isl*isl
	ttft, e2e := measure(cfg, false)
	near("local ttft", ttft, ms(pre))
	near("local e2e", e2e, ms(pre+2*(5+1)+0.001*(isl+1+isl+2)))
	ttft, _ = measure(cfg, true)
	near("remote ttft", ttft, ms(pre+3+0.002*isl+5+1+0.001*isl))
	cfg.MaxBatchedTokens = 300 // four chunks: the constant counts four times
	ttft, _ = measure(cfg, false)
	near("chunked ttft", ttft, ms(pre+3*10))
	cfg.Speed = 4
	ttft, _ = measure(cfg, false)
	near("ttft at speed 4", ttft, ms((pre+3*10)/4))

	cfg = config()
	cfg.MaxBatchedTokens = 8192
	ttft, _ = measure(cfg, false)
	near("mocker ttft", ttft, ms(4.209989e-7*isl*isl+1.518344e-2*isl+16.50142))
}

func TestNoiseHasItsSpread(t *testing.T) {
	cfg := config()
	cfg.Timing, cfg.Noise = engine.Profile{Decode: [3]float64{10, 0, 0}}, 0.05
	w := virtual.NewWorld()
	r := add(t, w, cfg)
	var last engine.Time
	var gaps []float64
	err := r.Submit(engine.Request{ID: "x", Tokens: prompt(1, 1), MaxTokens: 2000, IgnoreEOS: true, Sink: func(o engine.Output) {
		gaps = append(gaps, (o.At-last).Seconds()*1000)
		last = o.At
	}})
	if err != nil {
		t.Fatal(err)
	}
	drain(t, w)
	mean, sq := 0.0, 0.0
	for _, g := range gaps {
		mean += g / float64(len(gaps))
	}
	for _, g := range gaps {
		sq += (g - mean) * (g - mean) / float64(len(gaps))
	}
	if sd := math.Sqrt(sq) / mean; math.Abs(mean-10) > 0.1 || math.Abs(sd-0.05) > 0.005 {
		t.Errorf("mean %.3f ms, relative deviation %.4f", mean, sd)
	}
}

// A cached prompt of n tokens gets floor((n-1)/bs)·bs cached tokens: the last
// one is always computed.
func TestLastTokenIsAlwaysComputed(t *testing.T) {
	for n := 1; n <= 13; n++ {
		w := virtual.NewWorld()
		r := add(t, w, config())
		cached := -1
		for _, id := range []string{"first", "second"} {
			if err := r.Submit(engine.Request{ID: id, Tokens: prompt(n, 1), MaxTokens: 1, Sink: func(o engine.Output) { cached = o.Cached }}); err != nil {
				t.Fatal(err)
			}
			drain(t, w)
		}
		if want := (n - 1) / 4 * 4; cached != want {
			t.Errorf("%d tokens: %d cached, want %d", n, cached, want)
		}
	}
}

func TestPreemptionCountsAndRecovers(t *testing.T) {
	w := virtual.NewWorld()
	cfg := config()
	cfg.Blocks = 16 // 15 usable: two requests of 40 tokens do not fit
	r := add(t, w, cfg)
	ended := 0
	for i := range 2 {
		if err := r.Submit(engine.Request{ID: fmt.Sprint(i), Tokens: prompt(24, i), MaxTokens: 24, IgnoreEOS: true, Sink: func(o engine.Output) {
			if o.Finish == engine.FinishLength {
				ended++
			}
		}}); err != nil {
			t.Fatal(err)
		}
	}
	drain(t, w)
	if s := r.Core().Stats(w.Now()); ended != 2 || s.Preemptions == 0 {
		t.Errorf("%d ended, %d preemptions", ended, s.Preemptions)
	}
	if err := r.Submit(engine.Request{ID: "long", Tokens: prompt(61, 1)}); !errors.Is(err, engine.ErrTooLong) {
		t.Errorf("a prompt larger than the cache: %v", err)
	}
}

// The lease of a prefill lasts as long as its decode waits in a queue, and ends
// when the decode gives up.
func TestLeaseLastsWhileTheDecodeWaits(t *testing.T) {
	for _, leave := range []bool{false, true} {
		w := virtual.NewWorld()
		cfg := config()
		cfg.Lease, cfg.MaxSeqs = time.Second, 1
		cfg.Timing = engine.Profile{Decode: [3]float64{100, 0, 0}}
		d, p := add(t, w, cfg), add(t, w, cfg)
		if err := d.Submit(engine.Request{ID: "long", Tokens: prompt(5, 1), MaxTokens: 50, IgnoreEOS: true}); err != nil {
			t.Fatal(err)
		}
		q := engine.Request{ID: "x", Tokens: prompt(40, 2), MaxTokens: 1}
		leg := q
		leg.Pin = true
		var end engine.Output
		leg.Sink = func(o engine.Output) {
			q.Pull = p.Pull("x", o.Pinned)
			q.Sink = func(o engine.Output) { end = o }
			w.At(w.Now(), func() {
				if err := d.Submit(q); err != nil {
					t.Error(err)
				}
			})
		}
		if err := p.Submit(leg); err != nil {
			t.Fatal(err)
		}
		w.Run(3 * time.Second)
		if s := p.Core().Stats(w.Now()); s.Pinned != 1 || s.Expired != 0 {
			t.Errorf("while it waits: %d pinned, %d expired", s.Pinned, s.Expired)
		}
		if leave {
			d.Abort("x")
			w.Run(3*time.Second + time.Millisecond)
			if s := p.Core().Stats(w.Now()); s.Pinned != 0 || s.Expired != 0 {
				t.Errorf("after it left: %d pinned, %d expired", s.Pinned, s.Expired)
			}
		}
		drain(t, w)
		if want := map[bool]engine.Finish{false: engine.FinishLength, true: engine.FinishAbort}[leave]; end.Finish != want {
			t.Errorf("ended with %q, want %q: %v", end.Finish, want, end.Err)
		}
		if s := p.Core().Stats(w.Now()); s.Pinned != 0 || s.Expired != 0 || s.UsedBlocks != 0 {
			t.Errorf("at the end: %+v", s)
		}
	}
}

func BenchmarkWorld(b *testing.B) {
	// One request of 2,000 tokens, half shared, 100 answered, on 16 ranks.
	cfg := config()
	cfg.BlockSize, cfg.Blocks, cfg.MaxBatchedTokens = 16, 16384, 8192
	cfg.Publish = func(engine.Time, []cache.Event) {}
	w := virtual.NewWorld()
	for range 16 {
		add(b, w, cfg)
	}
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		n++
		p := append(prompt(1000, n%7), prompt(1000, n)...)
		if err := w.Ranks()[n%16].Submit(engine.Request{ID: fmt.Sprint(n), Tokens: p, MaxTokens: 100, IgnoreEOS: true}); err != nil {
			b.Fatal(err)
		}
		w.Run(w.Now() + 50*time.Millisecond)
	}
}
