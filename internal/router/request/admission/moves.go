package admission

import (
	"context"
	"sync"
	"time"
)

// Moves paces streams that continue elsewhere: an engine that dies with two hundred of
// them leaves two hundred prompts together, and the engines that take them have streams of
// their own. On each rank a few have their prompt computed at a time, first come, first served
// ([MoveQueue]). How many wait is bounded as requests in progress are. The zero value is ready.
type Moves struct {
	mu    sync.Mutex
	queue MoveQueue
	ready map[*MoveWaiter]chan struct{} // of those who wait: closed when its ranks take it
}

// Enter returns once all ranks of slots take the move; a rank takes limit of them at a
// time. While it waits it calls beat once per every. The error is that of ctx or of beat,
// and the move has not begun then.
func (m *Moves) Enter(ctx context.Context, slots []uint32, limit int, every time.Duration, beat func() error) error {
	w := &MoveWaiter{Slots: slots, Limit: limit}
	ready := m.wait(w)
	if ready == nil {
		return nil
	}
	timer := time.NewTimer(every)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			m.drop(w)
			return ctx.Err()
		case <-ready:
			return nil
		case <-timer.C:
			if err := beat(); err != nil {
				m.drop(w)
				return err
			}
			timer.Reset(every)
		}
	}
}

// wait begins the move, or puts it into the queue and returns a channel that is closed when
// its ranks take it.
func (m *Moves) wait(w *MoveWaiter) chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.queue.Take(w.Slots, w.Limit) {
		return nil
	}
	if m.ready == nil {
		m.ready = map[*MoveWaiter]chan struct{}{}
	}
	ready := make(chan struct{})
	m.ready[w] = ready
	m.queue.Wait(w)
	m.next() // its limit may be another one than that of those before
	return ready
}

// next wakes those whose ranks take them now; mu is held.
func (m *Moves) next() {
	for w := m.queue.Next(); w != nil; w = m.queue.Next() {
		close(m.ready[w])
		delete(m.ready, w)
	}
}

// drop gives up waiting.
func (m *Moves) drop(w *MoveWaiter) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.ready, w)
	m.queue.Drop(w)
	m.next()
}

// Waiting is how many streams wait to move to a rank.
func (m *Moves) Waiting(slot uint32) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.queue.Waiting(slot)
}

// Try begins the move, if all its ranks take it now.
func (m *Moves) Try(slots []uint32, limit int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.queue.Take(slots, limit)
}

// Free reports whether a rank takes a stream that comes now.
func (m *Moves) Free(slot uint32, limit int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.queue.Free(slot, limit)
}

// Leave ends the move.
func (m *Moves) Leave(slots []uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.queue.Leave(slots)
	m.next()
}
