package kvindex

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"
)

// fleet fills an index with ranks of 16,384 blocks each: one head of 32 blocks that all share, then
// conversations of 512 blocks of their own.
func fleet(b *testing.B, ranks int) (x *Index, prompts [][]uint64) {
	b.Helper()
	x = newTest(b, Options{MaxRanks: ranks})
	rnd := rand.New(rand.NewPCG(1, 2))
	head := make([]uint64, 32)
	for i := range head {
		head[i] = rnd.Uint64()
	}
	var batch Batch
	for r := range ranks {
		if err := x.AddRank(Rank(r), fmt.Sprint("rank-", r)); err != nil {
			b.Fatal(err)
		}
		for range 16384 / 512 {
			p := append([]uint64{}, head...)
			for len(p) < 512 {
				p = append(p, rnd.Uint64())
			}
			prompts = append(prompts, p)
			batch.Reset()
			batch.Store(0, false, p, p)
			if res := x.Apply(Rank(r), &batch); res.Refused > 0 {
				b.Fatal(res)
			}
		}
	}
	return x, prompts
}

// BenchmarkOverlap looks up chains of 512 blocks of which one rank holds all and 63 the head, alone and
// beside a writer that turns over 1 M and as many blocks a second as it can.
func BenchmarkOverlap(b *testing.B) {
	for name, rate := range map[string]float64{"alone": 0, "writer=1M/s": 1e6, "writer=max": 1e12} {
		b.Run(name, func(b *testing.B) {
			x, prompts := fleet(b, 64)
			var stop atomic.Bool
			done := make(chan struct{})
			go func() {
				defer close(done)
				turnOver(x, prompts[:len(prompts)/2], rate, &stop)
			}()
			rnd := rand.New(rand.NewPCG(3, 4))
			asked := prompts[len(prompts)/2:]
			var q Query
			b.ReportAllocs()
			for b.Loop() {
				x.Overlap(asked[rnd.IntN(len(asked))], &q)
			}
			stop.Store(true)
			<-done
			if q.Best() != 512 {
				b.Fatalf("best depth %d", q.Best())
			}
		})
	}
}

// turnOver evicts and stores conversations again at a rate of block operations per second.
func turnOver(x *Index, prompts [][]uint64, rate float64, stop *atomic.Bool) {
	var batch Batch
	start, ops := time.Now(), 0
	for i := 0; rate > 0 && !stop.Load(); i++ {
		if float64(ops) > rate*time.Since(start).Seconds() {
			continue
		}
		p := prompts[i%len(prompts)]
		batch.Reset()
		for j := 511; j >= 256; j-- {
			batch.Remove(p[j])
		}
		batch.Store(p[255], true, p[256:], p[256:])
		x.Apply(Rank(i%len(prompts)/(16384/512)), &batch)
		ops += 512
	}
}

// BenchmarkApply evicts and stores 256 blocks per batch, as a full rank does; one iteration is one
// block operation.
func BenchmarkApply(b *testing.B) {
	x, prompts := fleet(b, 64)
	var batch Batch
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		if n++; n%512 != 0 {
			continue
		}
		i := n / 512
		p := prompts[i%len(prompts)]
		batch.Reset()
		for j := 511; j >= 256; j-- {
			batch.Remove(p[j])
		}
		batch.Store(p[255], true, p[256:], p[256:])
		x.Apply(Rank(i%len(prompts)/(16384/512)), &batch)
	}
}

func BenchmarkChildren(b *testing.B) {
	x, _ := fleet(b, 64)
	top, err := x.Children(Root, BrowseOptions{})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := x.Children(top.Children[0].ID, BrowseOptions{Sort: ByBlocks}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkStats(b *testing.B) {
	x, _ := fleet(b, 64)
	b.ReportAllocs()
	for b.Loop() {
		if s := x.Stats(); s.Memberships != 64*(32+32*480) {
			b.Fatal(s.Memberships)
		}
	}
}
