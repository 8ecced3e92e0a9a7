package watch

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

// failureEvery is how often one worker's failures of one kind become an event;
// every single one is in the receipts and the metrics.
const failureEvery = 10 * time.Second

// maxFailures bounds how many kinds of failures are remembered.
const maxFailures = 4096

// Failures remembers which failures have lately become events. A worker that is broken for a
// moment is then in the event log although it was never ejected, and one that is broken for long
// does not fill it. The zero value is ready.
type Failures struct {
	mu     sync.Mutex
	lately map[failure]*lastEvent
	// broke counts each worker's failures by reason.
	broke map[string]map[string]uint64
}

type failure struct{ worker, phase, reason string }

type lastEvent struct {
	at   time.Time
	more int // failures since then
}

// note counts a failure. It reports whether it becomes an event, and how many did not
// since the last one that did.
func (f *Failures) note(k failure, now time.Time) (report bool, more int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t := f.lately[k]; t != nil {
		if now.Sub(t.at) < failureEvery {
			t.more++
			return false, 0
		}
		more, t.at, t.more = t.more, now, 0
		return true, more
	}
	if f.lately == nil {
		f.lately = map[failure]*lastEvent{}
	}
	if len(f.lately) >= maxFailures {
		for k, t := range f.lately {
			if now.Sub(t.at) >= failureEvery {
				delete(f.lately, k)
			}
		}
		if len(f.lately) >= maxFailures {
			return false, 0
		}
	}
	f.lately[k] = &lastEvent{at: now}
	return true, 0
}

// OddParams is the event that transfer parameters were used although they are not as
// expected; ok is false when this worker had one a moment ago.
func (f *Failures) OddParams(w *workers.Worker, what string, now time.Time) (e eventlog.Event, ok bool) {
	return f.event(failure{w.Name, "prefill", "unexpected_params"}, now, eventlog.Event{
		Kind: "prefill_unexpected_params", Worker: w.Name, Fields: map[string]any{},
		Text: fmt.Sprintf("the transfer parameters of %s are not as expected and were used (transfer_check=report): %s", w.Name, what),
	})
}

// Hybrid is the event that KV of several cache groups moves over NIXL; ok is false when
// this worker had one a moment ago.
func (f *Failures) Hybrid(w *workers.Worker, groups int, now time.Time) (e eventlog.Event, ok bool) {
	return f.event(failure{w.Name, "prefill", "hybrid"}, now, eventlog.Event{
		Kind: "hybrid_over_nixl", Severity: eventlog.Warn, Worker: w.Name, Fields: map[string]any{"cache_groups": groups},
		Text: fmt.Sprintf("%s moves KV of %d cache groups over NIXL: %s", w.Name, groups, workers.HybridDefect),
	})
}

// RequestFaulty is the event that a request failed on which several engines broke; ok is false
// when there was one a moment ago.
func (f *Failures) RequestFaulty(text string, now time.Time) (e eventlog.Event, ok bool) {
	return f.event(failure{reason: "request"}, now, eventlog.Event{Kind: "request_broke_engines", Text: text, Fields: map[string]any{}})
}

// Panicked is the event that a request ended with an internal error; ok is false when
// there was one a moment ago.
func (f *Failures) Panicked(text string, now time.Time) (e eventlog.Event, ok bool) {
	return f.event(failure{reason: "panic"}, now, eventlog.Event{Kind: "panic", Severity: eventlog.Error, Text: text, Fields: map[string]any{}})
}

// Looped is the event that a request came back to this router from an address; ok is false
// when one did a moment ago.
func (f *Failures) Looped(from string, now time.Time) (e eventlog.Event, ok bool) {
	return f.event(failure{reason: "loop"}, now, eventlog.Event{
		Kind: "request_looped", Severity: eventlog.Error, Fields: map[string]any{"from": from},
		Text: fmt.Sprintf("a request that this router had sent to a worker came back from %s and was refused with 508: that worker is this router, or a router that has this one among its workers; take one out of the other's workers", from),
	})
}

// Failed counts that a worker failed a leg of a request, and is its event; ok is false
// when there was one like it a moment ago. The reason is one of a closed set.
func (f *Failures) Failed(w *workers.Worker, phase, reason string, err error, now time.Time) (e eventlog.Event, ok bool) {
	f.count(w.Name, reason)
	return f.event(failure{w.Name, phase, reason}, now, eventlog.Event{
		Kind: "worker_failing", Worker: w.Name, Fields: map[string]any{"phase": phase, "reason": reason},
		Text: fmt.Sprintf("%s failed the %s leg of a request: %v", w.Name, phase, err),
	})
}

// Continued is the event that a stream continues elsewhere because its worker broke off
// after that many tokens; ok is false when there was one like it a moment ago.
func (f *Failures) Continued(worker, reason string, tokens int, now time.Time) (e eventlog.Event, ok bool) {
	return f.event(failure{worker, "continued", reason}, now, eventlog.Event{
		Kind: "stream_continued", Worker: worker, Fields: map[string]any{"reason": reason, "tokens": tokens},
		Text: fmt.Sprintf("%s broke off in the middle of a stream (%s); another engine continues it after %d tokens", worker, reason, tokens),
	})
}

// NotContinued is the event that a stream that broke off does not continue elsewhere; why is
// one of a closed set. ok is false when there was one like it a moment ago.
func (f *Failures) NotContinued(why, text string, now time.Time) (e eventlog.Event, ok bool) {
	return f.event(failure{reason: "not continued: " + why}, now, eventlog.Event{
		Kind: "stream_not_continued", Text: "a stream broke off and was not continued elsewhere: " + text, Fields: map[string]any{"why": why},
	})
}

// count counts a failure of a worker.
func (f *Failures) count(worker, reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.broke == nil {
		f.broke = map[string]map[string]uint64{}
	}
	r := f.broke[worker]
	if r == nil {
		if len(f.broke) >= maxFailures {
			return
		}
		r = map[string]uint64{}
		f.broke[worker] = r
	}
	r[reason]++
}

// event completes the event of a failure with how many like it were left out since the
// last one. It reports false if this one is to be left out, too.
func (f *Failures) event(k failure, now time.Time, e eventlog.Event) (eventlog.Event, bool) {
	report, more := f.note(k, now)
	e.Severity, e.Fields["more"] = cmp.Or(e.Severity, eventlog.Warn), more
	if more > 0 {
		e.Text += fmt.Sprintf(" (and %d more like this since the last event)", more)
	}
	return e, report
}
