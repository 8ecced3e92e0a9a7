package admission

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestGateLimitsQueuesAndTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(Limits{Inflight: 1, Queue: 1, Timeout: time.Second})
		ctx := t.Context()
		if _, err := l.Enter(ctx, Claim{}); err != nil {
			t.Fatal(err)
		}
		got := make(chan error, 1)
		go func() { _, err := l.Enter(ctx, Claim{}); got <- err }()
		synctest.Wait()
		if l.Queue().Waiting() != 1 {
			t.Fatalf("queued %d", l.Queue().Waiting())
		}
		if _, err := l.Enter(ctx, Claim{}); !errors.Is(err, ErrFull) {
			t.Fatalf("third request: %v", err)
		}
		l.Leave()
		if err := <-got; err != nil {
			t.Fatalf("queued request: %v", err)
		}
		start := time.Now()
		if _, err := l.Enter(ctx, Claim{}); !errors.Is(err, ErrTimeout) || time.Since(start) != time.Second {
			t.Fatalf("timed-out request: %v after %v", err, time.Since(start))
		}
		c, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := l.Enter(c, Claim{}); !errors.Is(err, context.Canceled) {
			t.Fatalf("cancelled request: %v", err)
		}
		if l.Queue().Rejected() != 2 || l.Inflight() != 1 || l.Queue().Waiting() != 0 {
			t.Fatalf("rejected %d inflight %d queued %d", l.Queue().Rejected(), l.Inflight(), l.Queue().Waiting())
		}
		if err := l.Arrive(); err != nil {
			t.Fatal(err)
		}
		l.Close()
		if err := l.Arrive(); !errors.Is(err, ErrClosed) {
			t.Fatalf("closed limiter: %v", err)
		}
		select {
		case <-l.Idle():
			t.Fatal("idle while a request runs")
		default:
		}
		l.Leave()
		l.Depart()
		<-l.Idle()
	})
}

func TestGateIsFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(Limits{Inflight: 1, Queue: 10, Timeout: time.Hour})
		if _, err := l.Enter(t.Context(), Claim{}); err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range 5 {
			wg.Go(func() {
				if _, err := l.Enter(t.Context(), Claim{}); err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				l.Leave()
			})
			synctest.Wait()
		}
		l.Leave()
		wg.Wait()
		for i, v := range order {
			if i != v {
				t.Fatalf("order %v", order)
			}
		}
		if len(order) != 5 || l.Inflight() != 0 {
			t.Fatalf("order %v inflight %d", order, l.Inflight())
		}
	})
}

func TestGateUnderContentionNeverLeaks(t *testing.T) {
	l := NewLimiter(Limits{Inflight: 4, Queue: 64, Timeout: time.Millisecond})
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 500 {
				if _, err := l.Enter(t.Context(), Claim{}); err == nil {
					if n := l.Inflight(); n > 4 {
						t.Errorf("%d in progress", n)
					}
					l.Leave()
				}
			}
		})
	}
	wg.Wait()
	if l.Inflight() != 0 || l.Queue().Waiting() != 0 {
		t.Fatalf("inflight %d queued %d", l.Inflight(), l.Queue().Waiting())
	}
}

func BenchmarkEnterLeave(b *testing.B) {
	l := NewLimiter(Limits{Inflight: 100, Queue: 10, Timeout: time.Second})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := l.Enter(b.Context(), Claim{}); err != nil {
			b.Fatal(err)
		}
		l.Leave()
	}
}

// TestLimiterForgetsThoseWhoLeave: however requests come, wait, leave and are
// admitted, only those that are still there hold a slot.
func TestLimiterForgetsThoseWhoLeave(t *testing.T) {
	for seed := range uint64(200) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 7))
			limits := Limits{Inflight: 1 + rng.IntN(3), Queue: 1 + rng.IntN(4), Timeout: time.Minute}
			l := NewLimiter(limits)
			var wg sync.WaitGroup
			var inside, waiting atomic.Int64
			for range 60 {
				ctx, leave := context.WithCancel(t.Context())
				// No client leaves in the very moment in which a request is done:
				// which of them is first would be open.
				stay, work := time.Duration(rng.IntN(50))*time.Millisecond+time.Microsecond, time.Duration(rng.IntN(20))*time.Millisecond
				left := rng.IntN(2) == 0
				wg.Go(func() {
					defer leave()
					if l.Arrive() != nil {
						t.Error("the limiter is open")
						return
					}
					defer l.Depart()
					if left {
						defer time.AfterFunc(stay, leave).Stop()
					}
					waiting.Add(1)
					_, err := l.Enter(ctx, Claim{})
					waiting.Add(-1)
					if err != nil {
						if errors.Is(err, ErrFull) && int(inside.Load()+waiting.Load()) < limits.Inflight+limits.Queue {
							t.Errorf("full with %d inside and %d waiting", inside.Load(), waiting.Load())
						}
						return
					}
					if ctx.Err() != nil {
						t.Error("admitted after it had left")
					}
					inside.Add(1)
					<-time.After(work)
					inside.Add(-1)
					l.Leave()
				})
				<-time.After(time.Duration(rng.IntN(6)) * time.Millisecond)
				synctest.Wait()
				if n := l.Inflight(); n > limits.Inflight || n != int(inside.Load()) || l.Queue().Waiting() != int(waiting.Load()) {
					t.Errorf("seed %d: %d in progress, %d are; %d queued, %d are", seed, n, inside.Load(), l.Queue().Waiting(), waiting.Load())
				}
			}
			l.Close()
			wg.Wait()
			<-l.Idle()
			if l.Present() != 0 || l.Inflight() != 0 || l.Queue().Waiting() != 0 {
				t.Errorf("seed %d: %d present, %d in progress, %d queued", seed, l.Present(), l.Inflight(), l.Queue().Waiting())
			}
		})
	}
}

// TestMemory: whatever is taken and given back at once by many, the limit holds,
// nothing is lost, and the two states are reported in turns, the last one rightly.
func TestMemory(t *testing.T) { synctest.Test(t, testMemory) }

func testMemory(t *testing.T) {
	const limit = 1000
	var mu sync.Mutex
	var states []bool
	m := NewMemory(limit, func(full bool, _ int64) { mu.Lock(); states = append(states, full); mu.Unlock() })
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 3))
			var mine []int64
			for range 5000 {
				if n := rng.Int64N(300); rng.IntN(2) == 0 && m.Take(n) {
					mine = append(mine, n)
				} else if len(mine) > 0 {
					m.Give(mine[0])
					mine = mine[1:]
				}
				if used := m.Used(); used < 0 || used > limit {
					t.Errorf("%d of %d used", used, limit)
				}
			}
			for _, n := range mine {
				m.Give(n)
			}
		})
	}
	wg.Wait()
	<-time.After(2 * fullFor)
	synctest.Wait()
	if m.Used() != 0 || m.Full() {
		t.Errorf("%d used, full %v", m.Used(), m.Full())
	}
	for i, full := range states {
		if full != (i%2 == 0) {
			t.Fatalf("states %v", states)
		}
	}
	if len(states) == 0 || states[len(states)-1] {
		t.Errorf("%d states were reported, the last one full", len(states))
	}
	if !m.Take(limit) || m.Take(1) || !m.Take(0) || !m.Full() {
		t.Error("the whole memory can be taken, and no more")
	}
	if m.SetLimit(2 * limit); m.Full() || !m.Take(limit) {
		t.Error("a greater limit is not in force")
	}
}

// TestMemoryIsNotFullInTurns: one request after another that is refused beside a
// small one is not reported each time, and the state ends without another.
func TestMemoryIsNotFullInTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var full, free atomic.Int64
		m := NewMemory(100, func(is bool, _ int64) {
			if is {
				full.Add(1)
			} else {
				free.Add(1)
			}
		})
		if !m.Take(40) {
			t.Fatal("no room in an empty memory")
		}
		for range 100 {
			if m.Take(70) {
				t.Fatal("more than there is")
			}
			if !m.Take(50) {
				t.Fatal("refused although it fits")
			}
			m.Give(50)
			<-time.After(fullFor / 10)
		}
		synctest.Wait()
		if full.Load() != 1 || free.Load() != 0 || !m.Full() {
			t.Errorf("reported full %d times, free %d times, full %v", full.Load(), free.Load(), m.Full())
		}
		<-time.After(2 * fullFor)
		synctest.Wait()
		if full.Load() != 1 || free.Load() != 1 || m.Full() {
			t.Errorf("reported full %d times, free %d times, full %v after the last refusal", full.Load(), free.Load(), m.Full())
		}
	})
}

// TestMemoryIsSilentOnceClosed: nothing is reported after Close, whether it was
// full then, was refused later or is given back what is left.
func TestMemoryIsSilentOnceClosed(t *testing.T) {
	for _, after := range []string{"nothing", "refused", "given", "a greater limit"} {
		synctest.Test(t, func(t *testing.T) {
			var calls atomic.Int64
			m := NewMemory(100, func(bool, int64) { calls.Add(1) })
			if !m.Take(60) || m.Take(60) {
				t.Fatal("the limit is not kept")
			}
			m.Close()
			m.Close()
			switch after {
			case "refused":
				if m.Take(60) {
					t.Error("the limit is not kept once closed")
				}
			case "given":
				m.Give(60)
			case "a greater limit":
				m.SetLimit(1000)
			}
			// The bubble ends only when no timer is left that would call.
			<-time.After(3 * fullFor)
			synctest.Wait()
			if n := calls.Load(); n != 1 {
				t.Errorf("%s after the end: called %d times, want once, before it", after, n)
			}
		})
	}
}
