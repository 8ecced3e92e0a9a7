package admission

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestGateLimitsQueuesAndTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := New(Limits{Inflight: 1, Queue: 1, Timeout: time.Second})
		ctx := t.Context()
		if err := g.Enter(ctx); err != nil {
			t.Fatal(err)
		}
		got := make(chan error, 1)
		go func() { got <- g.Enter(ctx) }()
		synctest.Wait()
		if g.Queued() != 1 {
			t.Fatalf("queued %d", g.Queued())
		}
		if err := g.Enter(ctx); !errors.Is(err, ErrFull) {
			t.Fatalf("third request: %v", err)
		}
		g.Leave()
		if err := <-got; err != nil {
			t.Fatalf("queued request: %v", err)
		}
		start := time.Now()
		if err := g.Enter(ctx); !errors.Is(err, ErrTimeout) || time.Since(start) != time.Second {
			t.Fatalf("timed-out request: %v after %v", err, time.Since(start))
		}
		c, cancel := context.WithCancel(ctx)
		cancel()
		if err := g.Enter(c); !errors.Is(err, context.Canceled) {
			t.Fatalf("cancelled request: %v", err)
		}
		if g.Rejected() != 2 || g.Inflight() != 1 || g.Queued() != 0 {
			t.Fatalf("rejected %d inflight %d queued %d", g.Rejected(), g.Inflight(), g.Queued())
		}
		g.Close()
		if err := g.Enter(ctx); !errors.Is(err, ErrClosed) {
			t.Fatalf("closed gate: %v", err)
		}
		select {
		case <-g.Idle():
			t.Fatal("idle while a request runs")
		default:
		}
		g.Leave()
		<-g.Idle()
	})
}

func TestGateIsFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := New(Limits{Inflight: 1, Queue: 10, Timeout: time.Hour})
		if err := g.Enter(t.Context()); err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range 5 {
			wg.Go(func() {
				if err := g.Enter(t.Context()); err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				g.Leave()
			})
			synctest.Wait()
		}
		g.Leave()
		wg.Wait()
		for i, v := range order {
			if i != v {
				t.Fatalf("order %v", order)
			}
		}
		if len(order) != 5 || g.Inflight() != 0 {
			t.Fatalf("order %v inflight %d", order, g.Inflight())
		}
	})
}

func TestGateUnderContentionNeverLeaks(t *testing.T) {
	g := New(Limits{Inflight: 4, Queue: 64, Timeout: time.Millisecond})
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 500 {
				if g.Enter(t.Context()) == nil {
					if n := g.Inflight(); n > 4 {
						t.Errorf("%d in progress", n)
					}
					g.Leave()
				}
			}
		})
	}
	wg.Wait()
	if g.Inflight() != 0 || g.Queued() != 0 {
		t.Fatalf("inflight %d queued %d", g.Inflight(), g.Queued())
	}
}

func BenchmarkEnterLeave(b *testing.B) {
	g := New(Limits{Inflight: 100, Queue: 10, Timeout: time.Second})
	b.ReportAllocs()
	for b.Loop() {
		if err := g.Enter(b.Context()); err != nil {
			b.Fatal(err)
		}
		g.Leave()
	}
}
