package router

import (
	"context"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/decide"
	"github.com/dynctl/dynctl/internal/router/upstream"
)

// heartbeat is how often a stream that waits for its turn to go on elsewhere gets a
// comment, for clients and proxies that give silent ones up.
const heartbeat = 5 * time.Second

// moves paces streams that go on elsewhere: an engine that dies with two hundred of
// them leaves two hundred prompts at once, and whoever takes them has streams of its
// own. On each rank a few have their prompt computed at a time. Who waits is bounded as
// requests in progress are. The zero value is ready.
type moves struct {
	mu    sync.Mutex
	on    map[uint32]int // by slot of the rank
	freed chan struct{}  // closed when a place comes free; nil while nobody waits
}

// enter takes a place on all ranks at once, of which each has so many. While it waits
// it calls beat again and again.
func (m *moves) enter(ctx context.Context, slots []uint32, limit int, every time.Duration, beat func() error) error {
	var timer *time.Timer
	for {
		freed := m.try(slots, limit)
		if freed == nil {
			return nil
		}
		if timer == nil {
			timer = time.NewTimer(every)
			defer timer.Stop()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-freed:
		case <-timer.C:
			if err := beat(); err != nil {
				return err
			}
			timer.Reset(every)
		}
	}
}

// try takes the places, or tells what to wait for.
func (m *moves) try(slots []uint32, limit int) (freed chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range slots {
		if m.on[s] >= limit {
			if m.freed == nil {
				m.freed = make(chan struct{})
			}
			return m.freed
		}
	}
	if m.on == nil {
		m.on = map[uint32]int{}
	}
	for _, s := range slots {
		m.on[s]++
	}
	return nil
}

// leave gives the places back.
func (m *moves) leave(slots []uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range slots {
		if m.on[s]--; m.on[s] == 0 {
			delete(m.on, s)
		}
	}
	if m.freed != nil {
		close(m.freed)
		m.freed = nil
	}
}

// enterMove waits until the ranks of the plan may have the rest of a stream.
func (x *exchange) enterMove() error {
	p, in := &x.d.run.Plan, &x.d.run.In
	slots := append(x.cont.places[:0], in.DecodePeers[p.DecodeIndex].Rank.Slot)
	if p.Path == decide.Remote {
		slots = append(slots, in.PrefillPeers[p.PrefillIndex].Rank.Slot)
	}
	out := upstream.NewWriter(x.w, x.d.settings.Timeouts.Write)
	began := time.Now()
	err := x.r.moves.enter(x.ctx, slots, x.d.settings.Continue.AtOnce, heartbeat, func() error {
		_, err := out.Write([]byte(": the rest is waiting for its turn on another engine\n\n"))
		return err
	})
	if err == nil {
		x.cont.places = slots
	}
	x.r.metrics.Stage("move", time.Since(began))
	return err
}

// leaveMove gives the places back, with the first token of the rest or when it has
// failed.
func (x *exchange) leaveMove() {
	if c := x.cont; c != nil && len(c.places) > 0 {
		x.r.moves.leave(c.places)
		c.places = c.places[:0]
	}
}
