package admission

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestWaitersTryWhatTheyNeed: a waiter with needs of its own tries although others wait
// before it, what there is none of is tried once for each change, and a higher band comes
// first.
func TestWaitersTryWhatTheyNeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue(100, time.Hour, 0)
		var mu sync.Mutex
		free, tries, in := map[string]int{}, map[string]int{}, []string{}
		var wg sync.WaitGroup
		come := func(name, needs string, c Claim) {
			wg.Go(func() {
				if _, err := q.Enter(t.Context(), c, func() (string, bool) {
					mu.Lock()
					defer mu.Unlock()
					if tries[needs]++; free[needs] == 0 {
						return needs, false
					}
					free[needs]--
					in = append(in, name)
					return "", true
				}); err != nil {
					t.Error(name, err)
				}
			})
			synctest.Wait()
		}
		give := func(needs string, n int) {
			mu.Lock()
			free[needs] += n
			mu.Unlock()
			q.Wake()
			synctest.Wait()
		}
		for _, name := range []string{"x1", "x2", "x3"} {
			come(name, "x", Claim{Queue: "m"})
		}
		come("low", "x", Claim{Queue: "m", Band: Low})
		come("high", "x", Claim{Queue: "m", Band: High})
		come("other", "y", Claim{Queue: "m", Band: Low})
		come("model", "x", Claim{Queue: "n"}) // of another model: its own x
		if tries["x"] != 6 || tries["y"] != 1 || q.Waiting() != 7 {
			t.Errorf("%v tries, %d wait", tries, q.Waiting())
		}
		give("y", 1)
		// One of each queue asks for x again, not all.
		if tries["x"] != 8 || !slices.Equal(in, []string{"other"}) {
			t.Errorf("%v tries, %v got in", tries, in)
		}
		give("x", 2)
		give("x", 4)
		if want := []string{"other", "high", "x1", "x2", "x3", "model", "low"}; !slices.Equal(in, want) {
			t.Errorf("%v got in, want %v", in, want)
		}
		wg.Wait()
	})
}

// TestLineLetsEverybodyIn: however requests come, try, give up and come back, none is
// left waiting while there is what it needs, and each is let in or has left.
func TestLineLetsEverybodyIn(t *testing.T) {
	for seed := range uint64(300) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 9))
			q := NewQueue(3+rng.IntN(20), time.Duration(1+rng.IntN(3))*time.Second, 0)
			places := []int{rng.IntN(3), 1 + rng.IntN(3)} // of two kinds
			var mu sync.Mutex
			waits := []int{0, 0}
			var wg sync.WaitGroup
			for range 80 {
				kind, work, patience := rng.IntN(2), time.Duration(rng.IntN(300))*time.Millisecond+time.Microsecond, time.Duration(rng.IntN(2000))*time.Millisecond
				c := Claim{Queue: []string{"m", "n"}[rng.IntN(2)], Band: Band(rng.IntN(3)) - 1, Tenant: string(rune('a' + rng.IntN(4))), Tokens: rng.IntN(1000), Weight: rng.IntN(3)}
				if rng.IntN(4) == 0 {
					c.Patience = time.Duration(1+rng.IntN(500)) * time.Millisecond
				}
				panics := rng.IntN(40) == 0
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					defer func() {
						if p := recover(); p != nil && p != "planned" {
							panic(p)
						}
					}()
					mu.Lock()
					waits[kind]++
					mu.Unlock()
					_, err := func() (Waited, error) {
						defer func() {
							mu.Lock()
							waits[kind]--
							mu.Unlock()
						}()
						return q.Enter(ctx, c, func() (string, bool) {
							mu.Lock()
							defer mu.Unlock()
							if panics {
								panic("planned")
							}
							if places[kind] == 0 {
								return string(rune('0' + kind)), false
							}
							places[kind]--
							return "", true
						})
					}()
					if err != nil {
						return
					}
					<-time.After(work)
					mu.Lock()
					places[kind]++
					mu.Unlock()
					q.Wake()
				})
				<-time.After(time.Duration(rng.IntN(60)) * time.Millisecond)
				synctest.Wait()
				mu.Lock()
				for k := range places {
					if places[k] > 0 && waits[k] > 0 {
						t.Errorf("seed %d: %d wait for one of %d places", seed, waits[k], places[k])
					}
				}
				mu.Unlock()
			}
			wg.Wait()
			if q.Waiting() != 0 || q.waiting.Load() != 0 || q.trying != nil || len(q.States()) != 0 {
				t.Errorf("seed %d: left %d waiting, %+v", seed, q.Waiting(), q.States())
			}
		})
	}
}

// TestNobodyIsRefusedWhileAnotherLooks: with no room to wait, a request that comes
// while another tries for a place tries after it.
func TestNobodyIsRefusedWhileAnotherLooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue(0, time.Second, 0)
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				waited, err := q.Enter(t.Context(), Claim{Queue: "m", Patience: time.Nanosecond}, func() (string, bool) {
					<-time.After(time.Millisecond)
					return "", true
				})
				if err != nil || waited.For != 0 {
					t.Errorf("%v %+v", err, waited)
				}
			})
		}
		wg.Wait()
		if n := q.Rejected(); n != 0 {
			t.Errorf("%d were refused", n)
		}
	})
}

// TestLineTry: a request that does not wait gets a place only where no other tries or
// waits for one, and keeps no other from trying.
func TestLineTry(t *testing.T) {
	q := NewQueue(4, time.Minute, 0)
	asked := 0
	got := func() bool { asked++; return true }
	if !q.Try(got) || q.Try(func() bool { asked++; return false }) || asked != 2 {
		t.Fatalf("asked %d times", asked)
	}
	inside := true
	if _, err := q.Enter(t.Context(), Claim{}, func() (string, bool) { inside = q.Try(got); return "", true }); err != nil || inside {
		t.Fatalf("%v, while another looks: %v", err, inside)
	}
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue(4, time.Minute, 0)
		ctx, leave := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := q.Enter(ctx, Claim{}, func() (string, bool) { return "x", false })
			done <- err
		}()
		synctest.Wait()
		if q.Waiting() != 1 || q.Try(got) {
			t.Error("it went ahead of one that waits")
		}
		leave()
		if err := <-done; !errors.Is(err, context.Canceled) || q.Waiting() != 0 || !q.Try(got) || asked != 3 {
			t.Errorf("%v, %d wait, asked %d times", err, q.Waiting(), asked)
		}
	})
}
