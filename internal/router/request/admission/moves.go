package admission

import (
	"context"
	"sync"
	"time"
)

// Moves paces streams that go on elsewhere: an engine that dies with two hundred of
// them leaves two hundred prompts at once, and the engines that take them have streams of
// their own. On each rank a few have their prompt computed at a time, first come, first served
// ([Places]). How many wait is bounded as requests in progress are. The zero value is ready.
type Moves struct {
	mu     sync.Mutex
	places Places
	turn   map[*Wish]chan struct{} // of those who wait: closed when it has its places
}

// Enter takes a place on each rank of slots, all at once; a rank has limit of them. While
// it waits it calls beat once per every. The error is that of ctx or of
// beat, and no place is taken then.
func (m *Moves) Enter(ctx context.Context, slots []uint32, limit int, every time.Duration, beat func() error) error {
	w := &Wish{Slots: slots, Limit: limit}
	turn := m.wait(w)
	if turn == nil {
		return nil
	}
	timer := time.NewTimer(every)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			m.drop(w)
			return ctx.Err()
		case <-turn:
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

// wait takes the places, or stands in line for them and returns what is closed when it
// has them.
func (m *Moves) wait(w *Wish) chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.places.Take(w.Slots, w.Limit) {
		return nil
	}
	if m.turn == nil {
		m.turn = map[*Wish]chan struct{}{}
	}
	turn := make(chan struct{})
	m.turn[w] = turn
	m.places.Wait(w)
	m.next() // its limit may be another one than that of those before
	return turn
}

// next wakes those that have their places now; mu is held.
func (m *Moves) next() {
	for w := m.places.Next(); w != nil; w = m.places.Next() {
		close(m.turn[w])
		delete(m.turn, w)
	}
}

// drop gives up waiting.
func (m *Moves) drop(w *Wish) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.turn, w)
	m.places.Drop(w)
	m.next()
}

// Waiting is how many streams wait for a place on a rank.
func (m *Moves) Waiting(slot uint32) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.places.Waiting(slot)
}

// Try takes the places, if they are free now.
func (m *Moves) Try(slots []uint32, limit int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.places.Take(slots, limit)
}

// Free reports whether a stream that comes now gets a place on a rank.
func (m *Moves) Free(slot uint32, limit int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.places.Free(slot, limit)
}

// Leave gives the places back.
func (m *Moves) Leave(slots []uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.places.Leave(slots)
	m.next()
}
