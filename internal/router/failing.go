package router

import (
	"fmt"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/eventlog"
	"github.com/dynctl/dynctl/internal/router/selector"
	"github.com/dynctl/dynctl/internal/workers"
)

// failingEvery is how often one worker's failures of one kind become an event;
// every single one is in the receipts and the metrics.
const failingEvery = 10 * time.Second

// maxFailing bounds the memory of what was told.
const maxFailing = 4096

// failings remembers which failures have lately become events, so that a worker
// that is broken for a moment can be found in the event log although it was
// never ejected, and one that is broken for long does not fill it.
type failings struct {
	mu   sync.Mutex
	told map[failing]*toldFailing
}

type failing struct{ worker, phase, reason string }

type toldFailing struct {
	at   time.Time
	more int // since then
}

// note counts a failure. It reports whether to tell it, and how many were kept
// back since the last one told.
func (f *failings) note(k failing, now time.Time) (tell bool, more int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t := f.told[k]; t != nil {
		if now.Sub(t.at) < failingEvery {
			t.more++
			return false, 0
		}
		more, t.at, t.more = t.more, now, 0
		return true, more
	}
	if f.told == nil {
		f.told = map[failing]*toldFailing{}
	}
	if len(f.told) >= maxFailing {
		for k, t := range f.told {
			if now.Sub(t.at) >= failingEvery {
				delete(f.told, k)
			}
		}
		if len(f.told) >= maxFailing {
			return false, 0
		}
	}
	f.told[k] = &toldFailing{at: now}
	return true, 0
}

// failed tells that a worker failed a leg of a request.
func (x *exchange) failed(phase selector.Phase, w *workers.Worker, reason string, err error) {
	tell, more := x.r.failing.note(failing{w.Name, string(phase), reason}, time.Now())
	if !tell {
		return
	}
	text := fmt.Sprintf("%s failed the %s leg of a request: %v", w.Name, phase, err)
	if more > 0 {
		text += fmt.Sprintf(" (and %d more like this since the last one told)", more)
	}
	x.r.event(eventlog.Event{
		Kind: "worker_failing", Severity: eventlog.Warn, Worker: w.Name, Request: x.decision, Text: text,
		Fields: map[string]any{"phase": string(phase), "reason": reason, "more": more},
	})
}
