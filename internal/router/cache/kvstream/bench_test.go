package kvstream

import (
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

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
			x := newIndex(b, kvindex.Options{})
			payloads, blocks := kvmodel.Traffic(bb.engineBlock, bb.chain, 6000)
			bytes := 0
			for _, p := range payloads {
				bytes += len(p)
			}
			s := New(x, 0, 16)
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

// BenchmarkUsable is the overlap of a prompt of 512 blocks that the rank holds: of
// a plain rank, and of ranks of hybrid models as their layers are in use.
func BenchmarkUsable(b *testing.B) {
	const blocks = 512
	toks := kvmodel.Tokens(1, (blocks+1)*16)
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
			x := newIndex(b, kvindex.Options{})
			s := New(x, 0, 16)
			full := kvmodel.Stored(0, names, toks[:blocks*16], 16)
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
	toks := kvmodel.Tokens(1, blocks*16)
	device := kvevent.Batch{TS: 1}
	copied := kvevent.Batch{TS: 1}
	gone := kvevent.Batch{TS: 1}
	var names []uint64
	for i := range uint64(blocks) {
		names = append(names, i+1)
		copied.Events = append(copied.Events, placeholder(kvevent.CPU, i+1))
	}
	device.Events = append(device.Events, kvmodel.Stored(0, names, toks, 16))
	gone.Events = append(gone.Events, tiered(kvevent.CPU, kvmodel.Removed(names...)))
	x := newIndex(b, kvindex.Options{})
	s := New(x, 0, 16)
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
