package soak

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

func (c *chaos) addSpare(ctx context.Context) error { return c.add(ctx, c.spare) }

func (c *chaos) add(ctx context.Context, e *sim.Engine) error {
	w := e.Worker()
	spec := w.URL.String() + ",name=" + e.Name()
	if c.s.rig.DialsIn(e.Name()) { // no engine says whom it dials
		spec += ",events=bind:" + w.Events[0].Endpoint + ",topic=" + w.Events[0].Topic
	}
	_, err := c.s.rig.Admin.AddWorker(context.WithoutCancel(ctx), admin.AddWorker{Role: string(w.Role), Spec: spec})
	return err
}

// swapSpare removes the spare worker after a drain, or adds it again.
func (c *chaos) swapSpare(ctx context.Context) {
	name := c.spare.Name()
	w, err := c.s.worker(ctx, name)
	if err != nil {
		return
	}
	if w.Name == "" {
		f := c.begin(doAdd, name, "")
		defer c.end(f)
		c.failed(f, c.addSpare(ctx))
		return
	}
	f := c.begin(doDrain, name, "before it is removed")
	_, err = c.s.rig.Admin.DrainWorker(ctx, name)
	c.failed(f, err)
	wait.For(ctx, c.s.o.Hold/2)
	c.end(f)
	f = c.begin(doRemove, name, "")
	defer c.end(f)
	c.failed(f, c.s.rig.Admin.RemoveWorker(context.WithoutCancel(ctx), name))
}

// reuseSlot removes the spare while requests hang on it, lets another worker
// take its slot, and only then lets those requests end, one way or the other:
// the other's account must not notice.
func (c *chaos) reuseSlot(ctx context.Context, kill bool) {
	ctx = context.WithoutCancel(ctx)
	if w, err := c.s.worker(ctx, c.spare.Name()); err != nil || !w.Usable {
		return
	}
	out := c.begin(doRemove, c.spare.Name(), "while requests hang on it")
	defer c.end(out)
	always := c.spare.Group().Faults
	hung := always
	hung.Hang = true
	c.failed(out, c.spare.SetFaults(hung))
	var old sync.WaitGroup
	// What becomes of these is not judged: who pins a request to a worker that
	// goes away gets an error.
	for range 3 {
		old.Go(func() { _ = c.s.pinned(ctx, modelVLLM, c.spare.Name(), "", 400, 4*c.s.o.Timeout) })
	}
	defer old.Wait()
	_ = c.working(ctx, c.s.o.Timeout, c.spare, 3, nil) // whatever has arrived by then
	slot := c.slot(ctx, c.spare)
	c.failed(out, c.s.rig.Admin.RemoveWorker(ctx, c.spare.Name()))

	done, began, back := c.takeSlot(ctx, slot, c.s.o.Timeout)
	same := c.slot(ctx, c.replacement) == slot
	if kill {
		c.spare.Kill()
		c.failed(out, c.spare.Restart())
	}
	c.failed(out, c.spare.SetFaults(always))
	old.Wait()
	// Nothing but the two requests has happened to it since they were counted,
	// or it serves others as well.
	if began == nil {
		err := c.working(ctx, c.s.o.Timeout, c.replacement, 2, done)
		select {
		case <-done: // too late to judge
		default:
			if err != nil {
				c.s.violation("account", nil, "after requests of a worker that is gone had ended: "+err.Error())
			}
			if same {
				c.s.counts.bump("slots used again under hanging requests")
			}
		}
	}
	back()
}

// takeSlot lets the replacement take the slot that the spare has left, and gives
// it two requests that hang. done is closed when one of them ends, began is nil
// when both arrived within that time before; back puts the spare back.
func (c *chaos) takeSlot(ctx context.Context, slot int, within time.Duration) (done <-chan struct{}, began error, back func()) {
	in := c.begin(doAdd, c.replacement.Name(), "into a slot that requests still hang on")
	hung := c.replacement.Group().Faults
	hung.HangRate = 1
	c.failed(in, c.replacement.SetFaults(hung))
	c.failed(in, c.addInto(ctx, c.replacement, slot))
	c.failed(in, c.usable(ctx, c.replacement))
	var now sync.WaitGroup
	var once sync.Once
	ended := make(chan struct{})
	live, cancel := context.WithCancel(ctx)
	for range 2 {
		now.Go(func() {
			_ = c.s.pinned(live, modelVLLM, c.replacement.Name(), "", 4000, checkTimeout)
			once.Do(func() { close(ended) })
		})
	}
	began = c.working(ctx, within, c.replacement, 2, ended)
	return ended, began, func() {
		cancel()
		now.Wait()
		c.failed(in, c.replacement.SetFaults(c.replacement.Group().Faults))
		f := c.begin(doRemove, c.replacement.Name(), "")
		c.failed(f, c.s.rig.Admin.RemoveWorker(ctx, c.replacement.Name()))
		c.end(f)
		c.end(in)
		f = c.begin(doAdd, c.spare.Name(), "")
		c.failed(f, c.addInto(ctx, c.spare, slot))
		c.failed(f, c.usable(ctx, c.spare))
		c.end(f)
	}
}

// addInto adds a worker to the fleet, again until it has a slot. That is free only
// when everybody has let go of who had it, a moment after that one was removed.
// Where a smaller one is free, it stays there.
func (c *chaos) addInto(ctx context.Context, e *sim.Engine, slot int) error {
	for end := time.Now().Add(idleWait); ; {
		if err := c.add(ctx, e); err != nil {
			return err
		}
		if c.slot(ctx, e) <= slot {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("slot %d is not free for %s", slot, e.Name())
		}
		if err := c.s.rig.Admin.RemoveWorker(ctx, e.Name()); err != nil {
			return err
		}
		wait.For(ctx, 5*time.Millisecond)
	}
}

// slot is that of a worker's first rank, -1 when it is not in the fleet.
func (c *chaos) slot(ctx context.Context, e *sim.Engine) int {
	w, err := c.s.worker(ctx, e.Name())
	if err != nil || len(w.Ranks) == 0 {
		return -1
	}
	return int(w.Ranks[0].Slot)
}

// idleWait is how long at most a step may take that nothing is in the way of.
const idleWait = 20 * time.Second

// retryAfterReuse lets a request hang on one worker while another one, which it
// might have had instead, leaves, and a third takes that one's slot. Then the
// first dies: the retry must go to the third, whose account must hold it beside
// its own. It wants an idle moment, since nobody else may be asked.
func (c *chaos) retryAfterReuse(ctx context.Context) error {
	first := c.s.rig.Sim.Named("decode-0")
	var others []string
	for _, g := range c.groups {
		for _, e := range g.engines {
			if g.model == modelVLLM && !g.prefill && e != first {
				others = append(others, e.Name())
			}
		}
	}
	var errs []error
	failed := func(err error) { errs = append(errs, err) }
	for _, name := range append(others, c.spare.Name()) {
		_, err := c.s.rig.Admin.DrainWorker(ctx, name)
		failed(err)
	}
	always := first.Group().Faults
	hung := always
	hung.HangRate = 1
	failed(first.SetFaults(hung))
	one, cancel := context.WithCancel(ctx)
	var hangs sync.WaitGroup
	// Not remote: a prefill that ends with its first token would begin another attempt
	// too early. Where it goes is judged, not how it ends.
	ended := make(chan error, 1)
	hangs.Go(func() { ended <- c.s.pinned(one, modelVLLM, "", onPath("local"), 400, checkTimeout) })
	failed(c.working(ctx, idleWait, first, 1, nil))
	_, err := c.s.rig.Admin.ResumeWorker(ctx, c.spare.Name())
	failed(err)
	out := c.begin(doRemove, c.spare.Name(), "while a request that might have had it hangs elsewhere")
	slot := c.slot(ctx, c.spare)
	failed(c.s.rig.Admin.RemoveWorker(ctx, c.spare.Name()))
	c.end(out)
	_, began, back := c.takeSlot(ctx, slot, idleWait)
	failed(began)
	same := c.slot(ctx, c.replacement) == slot
	f := c.begin(loopback.Kill, first.Name(), "while a request hangs on it")
	first.Kill()
	if err := c.working(ctx, idleWait, c.replacement, 3, nil); errors.Is(err, errUnusable) {
		c.s.o.Log("%s is not usable: nothing is known of retries", c.replacement.Name())
	} else if err != nil {
		how := "it is under way"
		select {
		case e := <-ended:
			how = fmt.Sprintf("it has ended: %v", e)
		default:
		}
		failed(fmt.Errorf("a request of %s, which died, is not beside the two that it had: %w; %s", first.Name(), err, how))
	} else if same {
		c.s.counts.bump("retries that found who took a slot")
	}
	cancel()
	hangs.Wait()
	back()
	failed(errors.Join(first.Restart(), first.SetFaults(always)))
	c.end(f)
	for _, name := range others {
		_, err := c.s.rig.Admin.ResumeWorker(ctx, name)
		failed(err)
	}
	return errors.Join(errs...)
}
