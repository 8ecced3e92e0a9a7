package virtualsoak

import (
	"context"
	"iter"
	"time"
)

// task is what a goroutine of the router is here: a coroutine. Exactly one runs at a time,
// and only while the world stands still, so that a seed repeats.
type task struct {
	q     *request // that it works for
	next  func() (struct{}, bool)
	stop  func()
	yield func(struct{}) bool
	ctx   context.Context //nolint:containedctx // with which it waits; nil while it does not
	woken bool
	// done is what the task waits for, if that is the end of another; beside says that it
	// runs a prefill leg beside its decode leg.
	done   <-chan struct{}
	beside bool
}

// abandoned ends a task that waits for what never comes.
type abandoned struct{}

// start begins a task for a request. It runs when the others wait.
func (s *stage) start(q *request, f func()) {
	t := &task{q: q}
	t.next, t.stop = iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			if p := recover(); p != nil && p != (abandoned{}) {
				panic(p)
			}
		}()
		t.yield = yield
		f()
	})
	s.tasks = append(s.tasks, t)
	s.wake(t)
}

// wake has a task that waits look again.
func (s *stage) wake(t *task) {
	if t != nil && !t.woken {
		t.woken = true
		s.ready = append(s.ready, t)
	}
}

// block has the running task wait until it is woken or ctx ends.
func (s *stage) block(ctx context.Context) {
	t := s.running
	t.ctx = ctx
	if !t.yield(struct{}{}) {
		panic(abandoned{})
	}
	t.ctx = nil
}

// pause has the running task wait for a time.
func (s *stage) pause(ctx context.Context, d time.Duration) {
	t, until := s.running, s.w.Now()+d
	s.w.At(until, func() { s.wake(t) })
	for s.w.Now() < until && ctx.Err() == nil {
		s.block(ctx)
	}
}

// settle runs tasks until each of them waits, and looks at what must hold then.
func (s *stage) settle() {
	ran := false
	for {
		s.turn()
		if len(s.ready) == 0 {
			for _, t := range s.tasks {
				if t.ctx != nil && (t.ctx.Err() != nil || t.joined()) {
					s.wake(t)
				}
			}
		}
		if len(s.ready) == 0 {
			break
		}
		t := s.ready[0]
		s.ready = s.ready[1:]
		s.run(t)
		ran = true
	}
	s.ready = nil
	if ran && len(s.out.Violations) == 0 {
		s.step()
		s.accounts()
		s.moved()
		if s.settings.Bounded {
			s.idle()
		}
	}
}

// run lets a task go on until it waits or ends.
func (s *stage) run(t *task) {
	// The clock of the router's own code is that of the bubble that the seed runs in.
	if d := s.w.Now() - s.slept; d > 0 {
		<-time.After(d)
		s.slept = s.w.Now()
	}
	t.woken = false
	before := s.running
	s.running = t
	_, more := t.next()
	s.running = before
	if !more {
		for i := range s.tasks {
			if s.tasks[i] == t {
				s.tasks = append(s.tasks[:i], s.tasks[i+1:]...)
				break
			}
		}
	}
}

// abandon ends whatever is under way.
func (s *stage) abandon() {
	s.closing = true
	for _, q := range s.inOrder() {
		q.cancel()
	}
	for range 3 {
		s.settle()
	}
	for _, t := range s.tasks {
		t.stop()
	}
}
