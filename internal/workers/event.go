package workers

import "time"

// Severity says how much an Event asks for an operator's attention.
type Severity string

// The severities of an Event.
const (
	Info  Severity = "info"
	Warn  Severity = "warn"
	Error Severity = "error"
)

// Event is something that happened to the fleet, for the operator to read and
// for scripts to filter.
type Event struct {
	At       time.Time `json:"at"`
	Severity Severity  `json:"severity"`
	// Kind is a stable dotted word such as "worker.added" or "health.changed".
	Kind string `json:"kind"`
	// Worker and Rank name what it happened to; empty when it concerns neither.
	Worker string `json:"worker,omitempty"`
	Rank   string `json:"rank,omitempty"`
	// Text is one plain sentence without a final dot.
	Text string `json:"text"`
	// Fields hold the same facts for machines; values are JSON scalars or lists of them.
	Fields map[string]any `json:"fields,omitempty"`
}

// Sink takes events. It is called from many goroutines, sometimes with a lock
// held, so it must be safe for concurrent use, must not block and must not
// change the fleet. A nil Sink drops everything.
type Sink func(Event)

// Emit hands e to the sink, if there is one, and stamps it if nobody did.
func (s Sink) Emit(e Event) {
	if s == nil {
		return
	}
	if e.At.IsZero() {
		e.At = time.Now()
	}
	if e.Severity == "" {
		e.Severity = Info
	}
	s(e)
}
