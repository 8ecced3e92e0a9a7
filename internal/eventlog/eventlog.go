// Package eventlog keeps the last things that happened to the fleet and to the
// router: a bounded ring that never blocks a writer and that readers page
// through by sequence number.
package eventlog

import (
	"cmp"
	"strings"
	"sync"
	"time"
)

// Severity orders events for people.
type Severity string

// The severities.
const (
	Info  Severity = "info"
	Warn  Severity = "warn"
	Error Severity = "error"
)

// Event is one thing that happened.
type Event struct {
	// Seq counts events from 1 since the start of the process.
	Seq uint64 `json:"seq"`
	// At is when it happened.
	At time.Time `json:"at"`
	// Kind is a closed set of snake_case words: "worker_added",
	// "health_changed", "feed_gap", "config_reloaded", …
	Kind     string   `json:"kind"`
	Severity Severity `json:"severity"`
	// Worker and Rank name what it is about; empty for the router itself.
	Worker string `json:"worker,omitempty"`
	Rank   string `json:"rank,omitempty"`
	// Text says in plain words what happened and what it means.
	Text string `json:"text"`
	// Request is the decision id of the request that it belongs to, if any.
	Request string `json:"request,omitempty"`
	// Fields hold the same facts for machines.
	Fields map[string]any `json:"fields,omitempty"`
}

// Sink takes events. It is called from many goroutines, sometimes with a lock held,
// so it must be safe for concurrent use, must not block and must not change the
// fleet. A nil Sink drops everything.
type Sink func(Event)

// Emit passes e to the sink, if there is one.
func (s Sink) Emit(e Event) {
	if s != nil {
		s(e)
	}
}

// Log is a ring of events. It is safe for concurrent use.
type Log struct {
	mu     sync.Mutex
	ring   []Event
	next   uint64 // sequence number of the next event, from 1
	signal chan struct{}
	now    func() time.Time
	taps   []func(Event)
}

// New makes a log of the last capacity events (at least 1). now is the clock, nil for
// time.Now.
func New(capacity int, now func() time.Time) *Log {
	if now == nil {
		now = time.Now
	}
	return &Log{ring: make([]Event, max(1, capacity)), next: 1, signal: make(chan struct{}), now: now}
}

// Tap has f called for every event after it was stored, on the writer's goroutine: it must
// return quickly. The maker of the log calls it, before others write to it.
func (l *Log) Tap(f func(Event)) { l.taps = append(l.taps, f) }

// Add stores an event, overwriting the oldest when the ring is full, and
// returns it with Seq and, when it had none, At filled in.
func (l *Log) Add(e Event) Event {
	if e.At.IsZero() {
		e.At = l.now()
	}
	e.Severity = cmp.Or(e.Severity, Info)
	l.mu.Lock()
	e.Seq = l.next
	l.ring[e.Seq%uint64(len(l.ring))] = e
	l.next++
	close(l.signal)
	l.signal = make(chan struct{})
	l.mu.Unlock()
	for _, f := range l.taps {
		f(e)
	}
	return e
}

// Since returns up to limit events with a sequence number greater than after,
// oldest first, the number of the newest event, and how many events between
// after and the first one returned have been overwritten.
func (l *Log) Since(after uint64, limit int) (events []Event, newest, lost uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	events, newest = []Event{}, l.next-1
	first := after + 1
	if newest >= uint64(len(l.ring)) {
		if oldest := newest - uint64(len(l.ring)) + 1; first < oldest {
			lost = oldest - first
			first = oldest
		}
	}
	for s := first; s <= newest && len(events) < limit; s++ {
		events = append(events, l.ring[s%uint64(len(l.ring))])
	}
	return events, newest, lost
}

// Last returns up to limit of the newest events, oldest first.
func (l *Log) Last(limit int) []Event {
	l.mu.Lock()
	newest := l.next - 1
	l.mu.Unlock()
	after := uint64(0)
	if n := uint64(max(0, limit)); newest > n {
		after = newest - n
	}
	events, _, _ := l.Since(after, limit)
	return events
}

// Close wakes who waits, now and later: another log has taken the place of this
// one. Nothing may be added any more.
func (l *Log) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.signal)
}

// Wait returns a channel that is closed when the next event is stored, or the log
// is closed.
func (l *Log) Wait() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.signal
}

// Problems returns the problems that an error lists in lines, so that each can be an event
// of its own. It leaves out a first line that only counts them.
func Problems(err error) []string {
	var list []string
	for line := range strings.Lines(err.Error()) {
		if line = strings.TrimSpace(line); line != "" {
			list = append(list, line)
		}
	}
	if len(list) > 1 && strings.HasSuffix(list[0], ":") {
		list = list[1:]
	}
	if len(list) == 0 {
		return []string{err.Error()}
	}
	return list
}
