package benchcmd

import (
	"context"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/dynctl/dynctl/internal/printable"
)

// runControl is what a person, or a signal, asks of a run under way: to pause
// before the next cell, to skip the present cell, to end.
type runControl struct {
	cancel context.CancelFunc // ends the run at once

	mu     sync.Mutex // guards the following
	say    func(format string, a ...any)
	asked  int           // how often its end was asked for
	ending chan struct{} // closed by the first
	resume chan struct{} // closed when a pause is over; nil without one
	skip   context.CancelFunc
	cut    bool // the present cell is being skipped
}

// newRunControl makes the first interrupt end the run after the present cell
// and the second one at once. end must be called.
func newRunControl(interrupted context.Context, stderr io.Writer) (run context.Context, c *runControl, end func()) {
	run, cancel := context.WithCancel(context.WithoutCancel(interrupted))
	c = &runControl{
		cancel: cancel, ending: make(chan struct{}),
		say: func(format string, a ...any) { printable.Fprintf(stderr, format+"\n", a...) },
	}
	over, joined := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(joined)
		select {
		case <-interrupted.Done():
		case <-over:
			return
		}
		// From here on signals are ours: the next one ends it.
		signals := make(chan os.Signal, 2)
		signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
		defer signal.Stop(signals)
		c.stop()
		select {
		case <-signals:
			c.stop()
		case <-over:
		}
	}()
	return run, c, func() { close(over); <-joined; cancel() }
}

// speak makes messages go another way.
func (c *runControl) speak(say func(format string, a ...any)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.say = say
}

// print is called without the lock, because what it calls may ask for the state.
func (c *runControl) print(format string, a ...any) {
	c.mu.Lock()
	say := c.say
	c.mu.Unlock()
	say(format, a...)
}

// stop ends the run after the present cell, the second time at once.
func (c *runControl) stop() {
	c.mu.Lock()
	c.asked++
	n := c.asked
	if n == 1 {
		close(c.ending)
		c.unpause()
	}
	c.mu.Unlock()
	if n > 1 {
		c.cancel()
		return
	}
	c.print("end     after the present cell, with what is done kept; once more ends it immediately")
}

// stopped reports whether the run should end.
func (c *runControl) stopped() bool {
	select {
	case <-c.ending:
		return true
	default:
		return false
	}
}

// unpause needs the lock.
func (c *runControl) unpause() {
	if c.resume != nil {
		close(c.resume)
		c.resume = nil
	}
}

// press handles a key.
func (c *runControl) press(key byte) {
	switch key {
	case 'q', 'Q':
		c.stop()
	case 'p', 'P', ' ':
		c.mu.Lock()
		text := ""
		switch {
		case c.asked > 0:
		case c.resume != nil:
			c.unpause()
			text = "continue"
		default:
			c.resume = make(chan struct{})
			if text = "pause   after the present cell, until p is pressed again"; c.skip == nil {
				text = "pause   until p is pressed again"
			}
		}
		c.mu.Unlock()
		if text != "" {
			c.print("%s", text)
		}
	case 's', 'S':
		c.mu.Lock()
		none := c.skip == nil
		if !none && !c.cut {
			c.cut = true
			c.skip()
		}
		c.mu.Unlock()
		if none { // a moment between two cells, or a pause
			c.print("skip    nothing: no cell is under way")
		}
	}
}

// enter waits while the run is paused and gives the context of one cell.
func (c *runControl) enter(run context.Context) (context.Context, func()) {
	for {
		c.mu.Lock()
		paused := c.resume
		if paused == nil {
			break // with the lock
		}
		c.mu.Unlock()
		select {
		case <-paused:
		case <-run.Done():
			return run, func() {}
		}
	}
	defer c.mu.Unlock()
	cell, cancel := context.WithCancel(run)
	c.skip, c.cut = cancel, false
	return cell, func() {
		c.mu.Lock()
		c.skip, c.cut = nil, false
		c.mu.Unlock()
		cancel()
	}
}

// hint is the line of the live region that says what can be pressed.
func (c *runControl) hint() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.asked > 0:
		return "ending after this cell | q again: end now"
	case c.cut:
		return "skipping this cell"
	case c.resume != nil && c.skip == nil:
		return "PAUSED | p continue | q end and keep what is done"
	case c.resume != nil:
		return "pausing after this cell | p continue | s skip it | q end"
	}
	return "p pause | s skip this cell | q end and keep what is done (twice: now)"
}
