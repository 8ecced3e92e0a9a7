package replicas

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rig/virtualnet"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
)

// TestLostChange: a change that is lost on its way costs a request and an answer, not the
// second until the next full state.
func TestLostChange(t *testing.T) {
	w := virtual.NewWorld()
	net := &virtualnet.Net{World: w, Rand: rand.New(rand.NewPCG(1, 1)), Least: time.Millisecond, Most: time.Millisecond}
	clock := func() time.Time { return start.Add(w.Now()) }
	var own [2]int
	var ex [2]*Exchange
	for i := range ex {
		var err error
		ex[i], err = NewExchange(Identity{Fleet: "a", Origin: fmt.Sprint(i), Epoch: start}, net.Port(), clock, func(into []Row) []Row {
			return append(into, busy(7, own[i]))
		}, More{})
		if err != nil {
			t.Fatal(err)
		}
		ex[i].View().SetRanks([]Rank{7})
		var step func()
		step = func() { w.At(ex[i].Step().Sub(start), step) }
		w.At(0, step)
	}
	w.Run(120 * time.Millisecond)
	net.Loss = 1
	own[0] = 4
	w.Run(180 * time.Millisecond) // published at 150 ms
	net.Loss = 0
	wantLoad(t, ex[1].View(), clock(), 7, 0, 179*time.Millisecond)
	// The heartbeat at 400 ms shows the gap. Request and answer take 1 ms each.
	w.Run(402 * time.Millisecond)
	wantLoad(t, ex[1].View(), clock(), 7, 0, 401*time.Millisecond)
	w.Run(403 * time.Millisecond)
	wantLoad(t, ex[1].View(), clock(), 7, 4, 0)
}

// bus is a transport in real time, within one process.
type bus struct {
	mu      sync.Mutex
	members []*seat
}

type seat struct {
	bus      *bus
	messages chan []byte
	done     sync.WaitGroup
	err      error
}

func (b *bus) join() *seat {
	s := &seat{bus: b, messages: make(chan []byte, 64)}
	b.members = append(b.members, s)
	return s
}

func (s *seat) Publish(m []byte) error {
	if s.err != nil {
		return s.err
	}
	s.bus.mu.Lock()
	defer s.bus.mu.Unlock()
	for _, to := range s.bus.members {
		to.messages <- append([]byte(nil), m...)
	}
	return nil
}

func (s *seat) Subscribe(received func([]byte), _ func(string)) error {
	if s.err != nil {
		return s.err
	}
	s.done.Go(func() {
		for m := range s.messages {
			received(m)
		}
	})
	return nil
}

func (s *seat) Close() error {
	close(s.messages)
	s.done.Wait()
	return nil
}

// TestRun: two routers that run know each other's load within the rhythm, count what cannot
// be read and what cannot be sent, and one that ends is gone after its lifetime.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bus
		seats := []*seat{b.join(), b.join()}
		var ex [2]*Exchange
		var stop [2]func()
		for i, s := range seats {
			var err error
			ex[i], err = NewExchange(Identity{Fleet: "a", Origin: fmt.Sprint(i), Epoch: time.Now(), Settings: "old"}, s, time.Now, func(into []Row) []Row { return append(into, busy(7, i+1)) }, More{})
			if err != nil {
				t.Fatal(err)
			}
			ex[i].View().SetRanks([]Rank{7})
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() { ex[i].Run(ctx) })
			stop[i] = func() { cancel(); running.Wait() }
		}
		wait := func(d time.Duration) {
			<-time.After(d)
			synctest.Wait()
		}
		ex[1].SetSettings("new")
		wait(3 * time.Second)
		for i := range ex {
			if l, age, ok := ex[i].View().Load(time.Now(), 7); !ok || l.Requests != 2-i || age > Heartbeat {
				t.Errorf("router %d has %+v, %v old, %v", i, l, age, ok)
			}
		}
		if err := seats[1].Publish([]byte("?")); err != nil {
			t.Fatal(err)
		}
		wait(0)
		s := ex[0].View().Snapshot(time.Now())
		if o := s.Origins[0]; o.Settings != "new" || o.Gaps > 0 || !o.Complete || s.Refused != 1 || !strings.Contains(s.LastRefused, "message from another router refused") {
			t.Errorf("%+v", s)
		}
		stop[1]()
		wait(Lifetime)
		wantNothing(t, ex[0].View(), time.Now(), 7)
		stop[0]()
		wait(Heartbeat)
		seats[0].err = errors.New("no network")
		ex[0].Step()
		if n, err := ex[0].Failed(); n != 1 || !errors.Is(err, seats[0].err) {
			t.Errorf("%d messages failed, %v", n, err)
		}
		if _, err := NewExchange(self, seats[0], time.Now, nil, More{}); !errors.Is(err, seats[0].err) {
			t.Errorf("got %v", err)
		}
		for _, s := range seats {
			_ = s.Close()
		}
	})
}

// TestIdentity: what other routers would refuse is an error at the start.
func TestIdentity(t *testing.T) {
	for _, id := range []Identity{{}, {Origin: "x"}, {Epoch: start}, {Origin: "\xff", Epoch: start}, {Origin: "x", Epoch: start, Settings: strings.Repeat("x", MaxText+1)}} {
		if _, err := NewExchange(id, &seat{}, time.Now, nil, More{}); err == nil {
			t.Errorf("%+v is taken", id)
		}
	}
}

// BenchmarkSecond is what one router of four does in a second in which each of 128 ranks
// changes at every router each 50 ms: 1e7 ns/op are 1 % of a core.
func BenchmarkSecond(b *testing.B) {
	const routers, ranks = 4, 128
	var list []Rank
	own := make([]Row, ranks)
	for i := range ranks {
		list = append(list, RankOf("http://engine", i))
		own[i].Rank = list[i]
	}
	v := newTestView(list...)
	var pub [routers]*Publisher
	for i := range pub {
		pub[i] = NewPublisher(Identity{Fleet: "a", Origin: fmt.Sprint(i), Epoch: start})
	}
	now := start
	var m Message
	var sent int
	change := func(n int) {
		for i := range own {
			own[i].Load = Load{n % 50, n % 20, n % 100_000, n % 9000, 0, n % 100_000}
			n++
		}
	}
	n := 1
	for b.Loop() {
		for range 20 {
			now = now.Add(Pace)
			n++
			for i, p := range pub {
				if i > 0 {
					b.StopTimer()
				}
				change(n)
				out := p.Publish(now, own)
				if i > 0 {
					b.StartTimer()
				}
				for _, o := range out {
					if i == 0 {
						sent += len(o)
						continue
					}
					if err := m.Decode(o); err != nil {
						b.Fatal(err)
					}
					v.Apply(now, &m)
				}
			}
		}
	}
	b.ReportMetric(float64(sent)/float64(b.N), "bytes-sent/op")
}

// BenchmarkLoad is what a decision pays for one of 128 ranks with three other routers.
func BenchmarkLoad(b *testing.B) {
	v := newTestView(5, 6, 7, 8)
	for i := range 3 {
		m := state(1, true, busy(7, 1))
		m.Origin = fmt.Sprint(i)
		v.Apply(start, m)
	}
	for b.Loop() {
		v.Load(start, 7)
	}
}
