package admission

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestMovesTakeTurns: no rank has more than its places, beat is called for a stream
// that waits, and each has a turn.
func TestMovesTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m Moves
		var mu sync.Mutex
		on, most, beats := map[uint32]int{}, 0, 0
		add := func(slots []uint32, n int) {
			mu.Lock()
			defer mu.Unlock()
			for _, s := range slots {
				on[s] += n
				most = max(most, on[s])
			}
		}
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				slots := []uint32{uint32(i % 3), uint32(3 + i%2)}
				err := m.Enter(t.Context(), slots, 4, 5*time.Second, func() error { mu.Lock(); defer mu.Unlock(); beats++; return nil })
				if err != nil {
					t.Error(err)
					return
				}
				add(slots, 1)
				<-time.After(time.Second)
				add(slots, -1)
				m.Leave(slots)
			})
		}
		wg.Wait()
		if most != 4 || beats == 0 || !m.queue.Idle() || len(m.ready) != 0 {
			t.Errorf("at most %d at once, %d beats, left %v", most, beats, m.ready)
		}
		if err := m.Enter(t.Context(), []uint32{1}, 1, time.Second, nil); err != nil {
			t.Fatal(err)
		}
		gone := errors.New("gone")
		if err := m.Enter(t.Context(), []uint32{1}, 1, time.Second, func() error {
			if n := m.Waiting(1); n != 1 {
				t.Errorf("%d wait", n)
			}
			return gone
		}); !errors.Is(err, gone) {
			t.Error(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if n := m.Waiting(1); n != 0 {
			t.Errorf("%d still wait", n)
		}
		if err := m.Enter(ctx, []uint32{1}, 1, time.Second, nil); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		m.Leave([]uint32{1})
	})
}
