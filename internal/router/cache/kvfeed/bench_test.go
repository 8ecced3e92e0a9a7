package kvfeed

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/workers"
)

// BenchmarkFeed is the whole way from a TCP socket to the index. The publisher
// writes frames made beforehand as fast as they are taken; both ends share the
// cores.
func BenchmarkFeed(b *testing.B) {
	payloads, blocks := kvmodel.Traffic(16, 32, 256)
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
