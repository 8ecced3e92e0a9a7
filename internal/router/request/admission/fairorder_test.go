package admission

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// jain is Jain's index of fairness: 1 when all have the same.
func jain(x []float64) float64 {
	sum, squares := 0.0, 0.0
	for _, v := range x {
		sum, squares = sum+v, squares+v*v
	}
	return sum * sum / (float64(len(x)) * squares)
}

// TestTenantsShareByWeight: above saturation tenants get tokens by their weights,
// however many requests each of them has and however large they are, and no place is
// free while a request waits.
func TestTenantsShareByWeight(t *testing.T) {
	for seed := range uint64(10) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 5))
			l := NewLimiter(Limits{Inflight: 1 + rng.IntN(4), Queue: 1000, Timeout: time.Hour})
			ctx, stop := context.WithCancel(t.Context())
			tenants := []struct {
				name            string
				weight, clients int
				most            int // tokens of a request
			}{{"a", 1, 20 + rng.IntN(20), 100}, {"b", 2, 10 + rng.IntN(10), 1000}, {"c", 4, 60, 50 + rng.IntN(500)}}
			var mu sync.Mutex
			served := make([]float64, len(tenants))
			var wg sync.WaitGroup
			for i, tenant := range tenants {
				for range tenant.clients {
					r := rand.New(rand.NewPCG(rng.Uint64(), 1))
					wg.Go(func() {
						for ctx.Err() == nil {
							tokens := 1 + r.IntN(tenant.most)
							if _, err := l.Enter(ctx, Claim{Tenant: tenant.name, Tokens: tokens, Weight: tenant.weight}); err != nil {
								return
							}
							mu.Lock()
							served[i] += float64(tokens) / float64(tenant.weight)
							mu.Unlock()
							<-time.After(time.Duration(tokens) * time.Millisecond)
							l.Leave()
						}
					})
				}
			}
			for range 100 {
				<-time.After(20 * time.Second)
				synctest.Wait()
				if l.Queue().Waiting() > 0 && l.Inflight() != int(l.limit.Load()) {
					t.Errorf("seed %d: %d wait while %d of %d are in progress", seed, l.Queue().Waiting(), l.Inflight(), int(l.limit.Load()))
				}
			}
			mu.Lock()
			if index := jain(served); index < 0.95 {
				t.Errorf("seed %d: Jain's index of tokens by weight is %.3f: %.0f", seed, index, served)
			}
			mu.Unlock()
			stop()
			wg.Wait()
			if l.Queue().Waiting() != 0 || l.Inflight() != 0 || len(l.queue.order.queues[""].given) != 0 {
				t.Errorf("seed %d: left %d queued, %d in progress, %d tags", seed, l.Queue().Waiting(), l.Inflight(), len(l.queue.order.queues[""].given))
			}
		})
	}
}

// TestNobodyFillsTheQueueForAll: a request that comes to a queue which another tenant has
// filled takes the place of that tenant's newest, up to an equal part of the queue.
func TestNobodyFillsTheQueueForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(Limits{Inflight: 1, Queue: 4, Timeout: time.Hour})
		if !l.TryEnter() {
			t.Fatal("no place")
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		full, in := map[string]int{}, []string{}
		come := func(tenant string) {
			wg.Go(func() {
				_, err := l.Enter(t.Context(), Claim{Tenant: tenant, Tokens: 10})
				mu.Lock()
				defer mu.Unlock()
				if errors.Is(err, ErrFull) {
					full[tenant]++
				} else if err == nil {
					in = append(in, tenant)
					l.Leave()
				}
			})
			synctest.Wait()
		}
		for range 6 {
			come("greedy")
		}
		for range 4 {
			come("late")
		}
		if l.Queue().Waiting() != 4 || full["greedy"] != 4 || full["late"] != 2 || l.Queue().Rejected() != 6 {
			t.Errorf("%d wait, refused %v, %d counted", l.Queue().Waiting(), full, l.Queue().Rejected())
		}
		l.Leave()
		wg.Wait()
		if len(in) != 4 || in[0] != "greedy" || in[1] == in[2] {
			t.Errorf("served in the order %v", in)
		}
	})
}

// TestWaitIsMeasured: the wait that a refused client is sent follows from how fast places
// came free recently; without that nothing is known.
func TestWaitIsMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(Limits{Inflight: 1, Queue: 100, Timeout: time.Hour})
		if _, known := l.Queue().EstimateWait(""); known {
			t.Error("known without any measurement")
		}
		if !l.TryEnter() {
			t.Fatal("no place")
		}
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if _, err := l.Enter(t.Context(), Claim{}); err != nil {
					t.Error(err)
					return
				}
				<-time.After(2 * time.Second)
				l.Leave()
			})
		}
		synctest.Wait()
		l.Leave()
		<-time.After(10*time.Second + time.Millisecond)
		synctest.Wait()
		// Five came free in the ten seconds after the first; fourteen wait.
		if d, known := l.Queue().EstimateWait(""); !known || d < 24*time.Second || d > 32*time.Second || l.Queue().Waiting() != 14 {
			t.Errorf("%v %v with %d waiting", d, known, l.Queue().Waiting())
		}
		wg.Wait()
		<-time.After(lookBack)
		if _, known := l.Queue().EstimateWait(""); known {
			t.Error("known from what was long ago")
		}
	})
}
