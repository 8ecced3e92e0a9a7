package kvfeed

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/zmtp"
)

// A publisher that sends nonsense costs its own rank the trust, and no more.
func TestHostilePublisher(t *testing.T) {
	t.Parallel()
	good := newPublisher(t, 30, 1)
	bad := newPublisher(t, 31, 1)
	f := newFixture(t, func(o *Options) {
		o.ReplayBurst, o.ReplayEvery = 4, time.Hour
		o.HoldBytes, o.HoldTotal = 64<<10, 64<<10
	})
	f.add(good.source(true))
	if err := f.x.AddRank(1, "bad/dp0"); err != nil {
		t.Fatal(err)
	}
	if err := f.Add(1, Key{Worker: "bad"}, bad.source(true), nil); err != nil {
		t.Fatal(err)
	}
	good.subscribed()
	bad.subscribed()
	began := time.Now()
	rng := rand.New(rand.NewPCG(1, 1))
	payload := func() []byte {
		if len(bad.e.Log) == 0 || rng.IntN(3) == 0 {
			bad.e.Step()
		}
		p := bytes.Clone(bad.e.Log[rng.IntN(len(bad.e.Log))])
		for range rng.IntN(4) {
			p[rng.IntN(len(p))] = byte(rng.Uint32())
		}
		return p[:rng.IntN(len(p)+1)]
	}
	seqs := []func() uint64{
		func() uint64 { return 0 }, func() uint64 { return math.MaxUint64 - 1 }, rng.Uint64,
		func() uint64 { return rng.Uint64N(100) },
	}
	for i := range 3000 {
		bad.set(func() {
			p := payload()
			bad.pub.Send([]byte("kv"), kvevent.AppendSeq(nil, seqs[rng.IntN(len(seqs))]()), p)
		})
		if i%100 == 0 {
			good.steps(1)
		}
	}
	f.caughtUp(good)
	f.equals(good)
	s := f.until(func(Status) bool { return f.Status()[1].Batches+f.Status()[1].Duplicates > 100 })
	if s.Dropped != 0 {
		t.Errorf("the good rank lost its entries: %+v", s)
	}
	b := f.Status()[1]
	if b.Replays > 4 {
		t.Errorf("%d replays, the budget is 4", b.Replays)
	}
	for _, kind := range []string{"feed_unknown", "feed_gap", "feed_restart"} {
		n := f.emitted(kind)
		if most := emitBurst + 1 + int(time.Since(began)/emitEvery); n > most { // however long it took
			t.Errorf("%d events %s for one rank, at most %d wanted", n, kind, most)
		}
	}
	if n := len(f.one().Reason); n > 1000 {
		t.Errorf("reason of %d bytes", n)
	}
}

// What is not a KV event message ends the connection, and reconnects back off.
func TestHostileFrames(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 32, 1)
	f := newFixture(t, func(o *Options) { o.BackoffMin, o.BackoffMax = 50*time.Millisecond, time.Hour })
	f.add(p.source(false))
	for i, frames := range [][][]byte{
		{{}, {1, 2, 3}, {}},
		{{}, make([]byte, 8)},
		{{}, bytes.Repeat([]byte{0xff}, 8), {}},
	} {
		f.until(func(s Status) bool { return s.State == Live })
		p.subscribed()
		p.pub.Send(frames...)
		f.until(func(s Status) bool { return s.Malformed == uint64(i)+1 && s.State == Connecting })
	}
	if s := f.one(); !strings.Contains(s.Reason, "replay's end") {
		t.Errorf("status %+v", s)
	}
}

// More live batches than may wait for a replay are dropped and fetched later.
func TestHeldBatchesAreBounded(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 34, 1)
	p.set(func() { p.silent = true })
	f := newFixture(t, func(o *Options) { o.HoldBytes, o.ReplayIdle = 4<<10, time.Minute })
	f.add(p.source(true))
	p.subscribed()
	p.steps(100)
	s := f.until(func(s Status) bool { return s.Overrun > 10 })
	if s.State != Replaying || s.Trusted || f.held.Load() > 4<<10 {
		t.Errorf("%d bytes held, status %+v", f.held.Load(), s)
	}
	// The next connection gets what this one could not hold.
	p.set(func() { p.silent = false })
	p.hangUp(func() { f.until(func(s Status) bool { return s.State == Connecting }) })
	f.caughtUp(p)
	f.equals(p)
}

// A port that speaks no ZMTP, or accepts and says nothing.
func TestHostilePort(t *testing.T) {
	t.Parallel()
	for name, greet := range map[string]string{"another protocol": "HTTP/1.1 400 Bad Request\r\n\r\n", "silence": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					defer c.Close()
					_, _ = c.Write([]byte(greet))
				}
			}()
			t.Cleanup(func() { _ = ln.Close(); <-done })
			f := newFixture(t, func(o *Options) {
				o.Socket.HandshakeTimeout = 30 * time.Millisecond
				o.StaleAfter = 200 * time.Millisecond
			})
			f.add(workers.EventSource{Endpoint: "tcp://" + ln.Addr().String()})
			f.until(func(s Status) bool { return s.State == Stale && s.ConnectErrors > 2 })
		})
	}
}

// The pauses between attempts to connect double up to the longest one, and half of each
// is random.
func TestAttemptsPause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var tried []time.Time
		f := newFixture(t, func(o *Options) {
			o.BackoffMin, o.BackoffMax = 100*time.Millisecond, time.Second
			o.Sources = func(context.Context, string) ([]workers.EventSource, error) {
				tried = append(tried, time.Now())
				return nil, errors.New("not up yet")
			}
		})
		f.add(workers.EventSource{})
		<-time.After(10 * time.Second)
		synctest.Wait()
		if len(tried) < 10 {
			t.Fatalf("%d attempts in ten seconds", len(tried))
		}
		longest := 100 * time.Millisecond
		for i := 1; i < len(tried); i++ {
			if pause := tried[i].Sub(tried[i-1]); pause < longest/2 || pause > longest {
				t.Errorf("a pause of %v before attempt %d, want %v to %v", pause, i, longest/2, longest)
			}
			longest = min(2*longest, time.Second)
		}
	})
}

// A replay socket that answers with what nobody asked for.
func TestHostileReplay(t *testing.T) {
	t.Parallel()
	batch := func(seq uint64) []byte {
		return kvevent.AppendBatch(nil, &kvevent.Batch{TS: 5, Rank: 0, Events: []kvevent.Event{
			kvmodel.Stored(0, []uint64{seq + 1000}, kvmodel.Tokens(int(seq%1000), kvmodel.Block), kvmodel.Block),
		}}, kvevent.Encoding{})
	}
	type answer func(c *zmtp.Conn, start uint64) error
	const replays = 3 // that the feed may ask for
	for name, a := range map[string]answer{
		"old batches without end": func(c *zmtp.Conn, _ uint64) error {
			for {
				if err := c.Send([]byte{}, kvevent.AppendSeq(nil, 0), batch(0)); err != nil {
					return err
				}
			}
		},
		"new batches without end": func(c *zmtp.Conn, start uint64) error {
			for seq := start; ; seq++ {
				if err := c.Send([]byte{}, kvevent.AppendSeq(nil, seq), batch(seq)); err != nil {
					return err
				}
			}
		},
		"numbers that jump": func(c *zmtp.Conn, start uint64) error {
			for seq := start; ; seq += 1 << 40 {
				if err := c.Send([]byte{}, kvevent.AppendSeq(nil, seq), batch(seq)); err != nil {
					return err
				}
			}
		},
		"wrong frames": func(c *zmtp.Conn, _ uint64) error { return c.Send([]byte("x")) },
		"hang up":      func(*zmtp.Conn, uint64) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPublisher(t, 33, 1)
			rep, err := zmtp.ListenRouter(context.Background(), "tcp://127.0.0.1:0", zmtp.Options{}, func(_ context.Context, c *zmtp.Conn) error {
				var m zmtp.Message
				if err := c.Recv(&m); err != nil {
					return err
				}
				start := binary.BigEndian.Uint64(m.Frames()[1])
				return a(c, start)
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = rep.Close() })
			f := newFixture(t, func(o *Options) {
				o.ReplayBatches, o.ReplayTotal = 2000, time.Second
				o.ReplayBurst, o.ReplayEvery = replays, time.Hour
			})
			f.add(workers.EventSource{Endpoint: p.pubAt, Replay: rep.Endpoint()})
			p.subscribed()
			p.steps(5)
			s := f.until(func(s Status) bool { return s.State == Live })
			if s.Replays > replays {
				t.Errorf("%d replays", s.Replays)
			}
			p.steps(20)
			// Where the last replay lied after the last batch had come, it takes
			// one more batch to show that, for as long as there are replays.
			for last := int64(24); ; last++ {
				if s := f.until(func(s Status) bool { return s.State == Live && s.LastSeq >= last }); s.LastSeq == last {
					break
				}
				lied := f.one()
				if lied.Replays > replays || last-24 > replays { // each replay can lie once
					t.Fatalf("status %+v after %d batches", lied, last)
				}
				p.steps(1)
				f.until(func(s Status) bool { return s.Restarts > lied.Restarts || s.LastSeq == last+1 })
			}
		})
	}
}

// A burst of events of one kind comes whole, then one in each interval, which counts those
// between.
func TestQuota(t *testing.T) {
	t.Parallel()
	var now time.Time
	q := quota{left: emitBurst, last: now}
	for n := range emitBurst + 3 {
		if more, ok := q.allow(now); ok != (n < emitBurst) || more != "" {
			t.Errorf("event %d: %t %q", n, ok, more)
		}
	}
	for n := range 20 {
		now = now.Add(emitEvery / 4)
		want := ""
		if n%4 == 3 {
			want = " (and 3 more like this since the last event)"
			if n == 3 {
				want = " (and 6 more like this since the last event)"
			}
		}
		if more, ok := q.allow(now); ok != (want != "") || more != want {
			t.Errorf("%v later: %t %q, want %q", now.Sub(time.Time{}), ok, more, want)
		}
	}
}
