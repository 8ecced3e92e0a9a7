package commands

import (
	"fmt"
	"io"
	"sync"
)

// maxAccessLines is how much of the access log may wait to be written, in bytes.
const maxAccessLines = 4 << 20

// accessLines passes lines on to a writer in another goroutine, so that requests do not wait
// where nobody reads the log. Beyond 4 MiB that wait it drops lines and writes how many.
type accessLines struct {
	to io.Writer

	mu      sync.Mutex
	wake    sync.Cond
	waiting []byte
	dropped int
	closed  bool
	done    chan struct{}
}

func newAccessLines(to io.Writer) *accessLines {
	l := &accessLines{to: to, done: make(chan struct{})}
	l.wake.L = &l.mu
	go l.run()
	return l
}

// Write takes one line. It never fails.
func (l *accessLines) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting)+len(line) > maxAccessLines {
		l.dropped++
		return len(line), nil
	}
	l.waiting = append(l.waiting, line...)
	l.wake.Signal()
	return len(line), nil
}

// run writes what waits until the end.
func (l *accessLines) run() {
	defer close(l.done)
	var spare []byte
	for {
		l.mu.Lock()
		for len(l.waiting) == 0 && !l.closed {
			l.wake.Wait()
		}
		lines, dropped := l.waiting, l.dropped
		l.waiting, l.dropped = spare[:0], 0
		l.mu.Unlock()
		if len(lines) == 0 {
			return
		}
		_, _ = l.to.Write(lines) // where the log cannot be written there is nowhere to report it
		if dropped > 0 {
			_, _ = fmt.Fprintf(l.to, "{\"msg\":\"access log: lines were dropped because they were not read in time\",\"dropped\":%d}\n", dropped)
		}
		spare = lines
	}
}

// Close writes what waits, and ends.
func (l *accessLines) Close() {
	l.mu.Lock()
	l.closed = true
	l.wake.Signal()
	l.mu.Unlock()
	<-l.done
}
