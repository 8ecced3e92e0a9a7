package kvfeed

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"

	"github.com/dynctl/dynctl/internal/router/blockhash"
	"github.com/dynctl/dynctl/internal/router/kvevent"
	"github.com/dynctl/dynctl/internal/router/kvgroup"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/workers"
)

// traffic is what a busy rank with a full cache publishes: chains of blocks of
// 16 tokens, each batch storing some and removing as many of the oldest, one
// event per removal as vLLM sends them. It returns payloads for one round; a
// round leaves the cache as it found it, so that it can be repeated.
// Blocks are counted as the router's.
func traffic(engineBlock, chain, batches int) (payloads [][]byte, blocks int) {
	const kept = 64 // chains in the cache
	serial := uint64(0)
	hash := func(c, i int) uint64 { return mix64(uint64(c%(batches+kept))<<20 | uint64(i) + 1) }
	for c := range batches + kept {
		b := kvevent.Batch{TS: 1.7e9 + float64(c), Rank: 0}
		e := stored(0, nil, nil, int32(engineBlock))
		for i := range chain {
			e.Hashes = append(e.Hashes, hash(c, i))
		}
		for range chain * engineBlock {
			serial++
			e.Tokens = append(e.Tokens, uint32(mix64(serial)%150000))
		}
		for i := chain - 1; i >= 0; i-- {
			b.Events = append(b.Events, removed(hash(c+batches, i)))
		}
		b.Events = append(b.Events, e)
		blocks += 2 * chain * engineBlock / 16
		payloads = append(payloads, kvevent.AppendBatch(nil, &b, kvevent.Encoding{}))
	}
	return payloads, blocks
}

// BenchmarkStream is the path from a batch's bytes to the index: number, msgpack,
// hashes, index. A block is one stored or removed.
func BenchmarkStream(b *testing.B) {
	for _, bb := range []struct {
		name               string
		engineBlock, chain int
	}{
		{"16 tokens, 32 blocks a batch", 16, 32},
		{"16 tokens, 4 blocks a batch", 16, 4},
		{"64 tokens in 4 parts, 32 blocks a batch", 64, 32},
	} {
		b.Run(bb.name, func(b *testing.B) {
			x := kvindex.New(kvindex.Options{})
			defer x.Close()
			if err := x.AddRank(0, "w/dp0"); err != nil {
				b.Fatal(err)
			}
			payloads, blocks := traffic(bb.engineBlock, bb.chain, 256)
			bytes := 0
			for _, p := range payloads {
				bytes += len(p)
			}
			s := NewStream(x, 0, 16)
			seq := uint64(0)
			round := func() {
				for _, p := range payloads {
					if v := s.Offer(seq, p); v.Kind != Apply {
						b.Fatalf("batch %d is %v", seq, v.Kind)
					}
					seq++
				}
			}
			round()
			b.ReportAllocs()
			b.SetBytes(int64(bytes))
			for b.Loop() {
				round()
			}
			b.ReportMetric(float64(blocks)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mblocks/s")
			if c := s.Counters(); c.Orphans+c.Skipped+c.Dropped+c.Unreadable != 0 {
				b.Fatalf("counters %+v", c)
			}
		})
	}
}

// BenchmarkFeed is the whole way from a TCP socket to the index. The publisher
// writes frames made beforehand as fast as they are taken; both ends share the
// cores.
func BenchmarkFeed(b *testing.B) {
	payloads, blocks := traffic(16, 32, 256)
	x := kvindex.New(kvindex.Options{})
	defer x.Close()
	if err := x.AddRank(0, "w/dp0"); err != nil {
		b.Fatal(err)
	}
	m, err := New(Options{Index: x, BlockSize: 16})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- m.Run(ctx) }()
	defer func() {
		cancel()
		<-done
	}()
	var seq atomic.Uint64
	start, written := make(chan int), make(chan error)
	endpoint, closePub := rawPublisher(b, func(w *bufio.Writer) error {
		var frame []byte
		for rounds := range start {
			for range rounds {
				for _, p := range payloads {
					frame = append(frame[:0], 1, 0, 1, 8)
					frame = kvevent.AppendSeq(frame, seq.Add(1)-1)
					frame = append(frame, 2)
					frame = kvevent.AppendSeq(frame, uint64(len(p)))
					if _, err := w.Write(frame); err != nil {
						return err
					}
					if _, err := w.Write(p); err != nil {
						return err
					}
				}
			}
			written <- w.Flush()
		}
		return nil
	})
	defer closePub()
	defer close(start)
	if err := m.Add(0, Key{Worker: "w"}, workers.EventSource{Endpoint: endpoint}, nil); err != nil {
		b.Fatal(err)
	}
	send := func(rounds int) {
		start <- rounds
		if err := <-written; err != nil {
			b.Fatal(err)
		}
		for m.Status()[0].LastSeq != int64(seq.Load())-1 {
		}
	}
	send(2)
	b.ReportAllocs()
	b.ResetTimer()
	send(b.N)
	b.ReportMetric(float64(blocks)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mblocks/s")
}

// rawPublisher is a PUB socket by hand, for one subscriber.
func rawPublisher(tb testing.TB, serve func(*bufio.Writer) error) (endpoint string, stop func()) {
	tb.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			done <- err
			return
		}
		defer c.Close()
		greeting := make([]byte, 64)
		greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
		copy(greeting[12:], "NULL")
		ready := "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
		if _, err := c.Write(append(greeting, ready...)); err != nil {
			done <- err
			return
		}
		go func() { _, _ = io.Copy(io.Discard, c) }()
		done <- serve(bufio.NewWriterSize(c, 256<<10))
	}()
	return fmt.Sprintf("tcp://%s", ln.Addr()), func() {
		_ = ln.Close()
		if err := <-done; err != nil {
			tb.Errorf("publisher: %v", err)
		}
	}
}

// BenchmarkUsable is the overlap of a prompt of 512 blocks that the rank holds: of
// a plain rank, and of ranks of hybrid models as their layers are in use.
func BenchmarkUsable(b *testing.B) {
	const blocks = 512
	toks := tokens(1, (blocks+1)*16)
	var names []uint64
	for i := range uint64(blocks) {
		names = append(names, i+1)
	}
	for _, bb := range []struct {
		name   string
		kind   kvevent.CacheKind
		window int32
	}{
		{"plain", kvevent.CacheAbsent, 0},
		{"window of 128", kvevent.SlidingWindow, 128},
		{"window of 1024", kvevent.SlidingWindow, 1024},
		{"window of 4096", kvevent.SlidingWindow, 4096},
		{"mamba", kvevent.Mamba, 0},
	} {
		b.Run(bb.name, func(b *testing.B) {
			x := kvindex.New(kvindex.Options{})
			defer x.Close()
			if err := x.AddRank(0, "w/dp0"); err != nil {
				b.Fatal(err)
			}
			s := NewStream(x, 0, 16)
			full := stored(0, names, toks[:blocks*16], 16)
			full.Group, full.CacheKind = 0, kvevent.FullAttention
			batch := kvevent.Batch{TS: 1, Events: []kvevent.Event{full}}
			if bb.kind != kvevent.CacheAbsent {
				other := full
				other.Group, other.CacheKind, other.SlidingWindow = 1, bb.kind, bb.window
				batch.Events = append(batch.Events, other)
			}
			if v := s.Offer(0, kvevent.AppendBatch(nil, &batch, kvevent.Encoding{Form: kvevent.VLLMMap})); v.Kind != Apply {
				b.Fatal(v)
			}
			locals := blockhash.Locals(nil, toks, 16, blockhash.Key{})
			p := kvgroup.Prompt{Seq: blockhash.Chain(nil, locals), Tokens: len(toks)}
			var q kvindex.Query
			b.ReportAllocs()
			for b.Loop() {
				x.Overlap(locals, &q)
				if n, _ := s.Usable(q.Depth(0), p); n != blocks {
					b.Fatal(n)
				}
			}
		})
	}
}

// BenchmarkTiers takes a batch in which an engine copies a prompt of 2,048 blocks to its
// host's memory, an event for each block.
func BenchmarkTiers(b *testing.B) {
	const blocks = 2048
	toks := tokens(1, blocks*16)
	device := kvevent.Batch{TS: 1}
	copied := kvevent.Batch{TS: 1}
	gone := kvevent.Batch{TS: 1}
	var names []uint64
	for i := range uint64(blocks) {
		names = append(names, i+1)
		copied.Events = append(copied.Events, placeholder(kvevent.CPU, i+1))
	}
	device.Events = append(device.Events, stored(0, names, toks, 16))
	gone.Events = append(gone.Events, tiered(kvevent.CPU, removed(names...)))
	x := kvindex.New(kvindex.Options{})
	defer x.Close()
	if err := x.AddRank(0, "w/dp0"); err != nil {
		b.Fatal(err)
	}
	s := NewStream(x, 0, 16)
	seq := uint64(0)
	offer := func(payload []byte) {
		if v := s.Offer(seq, payload); v.Kind != Apply {
			b.Fatal(v)
		}
		seq++
	}
	encode := func(batch *kvevent.Batch) []byte {
		return kvevent.AppendBatch(nil, batch, kvevent.Encoding{Form: kvevent.VLLMMap})
	}
	offer(encode(&device))
	in, out := encode(&copied), encode(&gone)
	b.ReportAllocs()
	for b.Loop() {
		offer(in)
		if s.Tiers().CPU != blocks {
			b.Fatalf("%+v", s.Tiers())
		}
		offer(out)
	}
}
