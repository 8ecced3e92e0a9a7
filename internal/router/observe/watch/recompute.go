// Package watch notices what goes wrong in a fleet although requests are
// answered: KV that is moved and not used, and workers that fail now and then.
package watch

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// Recompute finds decode engines that answer correctly but do not use the
// KV that a prefill worker computed for them. The answer of such a request
// looks like any other; only the engine's own counters show it. For every decode
// rank it compares the remote prefills that ended there with the growth of the
// engine's counter of tokens loaded over a connector.
//
// An engine counts before it makes the first token, the router sees answers
// when they come, and scrapes come in between. So both sides are compared over
// one window: from one reading of the counter to a later one that is the same,
// and only requests that were sent after the first reading and answered before
// the second. Whatever such a request loaded is in the second reading.
type Recompute struct {
	o     RecomputeOptions
	mu    sync.Mutex
	ranks map[*workers.Rank]*recomputeRank
}

// recomputeRank is the window of one rank.
type recomputeRank struct {
	worker string
	// hits is the counter as it was read at the window's start and ever since,
	// in the process of that start; NaN while there is no window.
	hits, process float64
	since         time.Time
	// Answered requests of the window: those that the newest reading covers,
	// those that wait for a reading that does, and those that came meanwhile.
	// Two groups wait because new answers must not keep old ones waiting.
	covered, waiting, young answered
	// alarmed is set while the rank is known to recompute.
	alarmed bool
}

// answered sums up requests.
type answered struct {
	requests, tokens int
	last             time.Time // when the newest was answered
}

func (a *answered) add(b answered) {
	a.requests += b.requests
	a.tokens += b.tokens
	if b.last.After(a.last) {
		a.last = b.last
	}
}

// recomputeProof is how many remote prefills without a trace in the engine's
// counters are needed before the watch reports it.
const recomputeProof = 3

// recomputeEvery is how often readings are looked at. A window can begin no
// earlier, so a router that has just started should not wait long.
const recomputeEvery = 250 * time.Millisecond

// countingDelay is how much later than a first token the engine's counters may
// show what was loaded for it.
const countingDelay = 500 * time.Millisecond

// RecomputeOptions are what the watch needs.
type RecomputeOptions struct {
	// Ranks are the fleet's ranks of now.
	Ranks func() []*workers.Rank
	// Found counts requests that a worker has computed again.
	Found func(worker string, requests int)
	Event func(eventlog.Event)
}

// NewRecompute makes a watch; Run does its work.
func NewRecompute(o RecomputeOptions) *Recompute {
	return &Recompute{o: o, ranks: map[*workers.Rank]*recomputeRank{}}
}

// Answered notes that a decode rank has begun to answer a request, sent to it
// at the time given, whose tokens a prefill worker had computed.
func (w *Recompute) Answered(k *workers.Rank, tokens int, sent, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	// Without a window there is nothing to compare the request with.
	if s := w.ranks[k]; s != nil && !math.IsNaN(s.hits) && sent.After(s.since) {
		s.young.add(answered{1, tokens, now})
	}
}

// Run compares until ctx ends.
func (w *Recompute) Run(ctx context.Context) error {
	for range wait.Every(ctx, recomputeEvery) {
		w.compare()
	}
	return nil
}

func (w *Recompute) compare() {
	live := w.o.Ranks()
	now := make(map[*workers.Rank]bool, len(live))
	var events []eventlog.Event
	w.mu.Lock()
	for _, k := range live {
		now[k] = true
		s := w.ranks[k]
		if s == nil {
			s = &recomputeRank{worker: k.WorkerName, hits: math.NaN(), process: math.NaN()}
			w.ranks[k] = s
		}
		if e, ok := w.look(k, s); ok {
			events = append(events, e)
		}
	}
	maps.DeleteFunc(w.ranks, func(k *workers.Rank, _ *recomputeRank) bool { return !now[k] })
	w.mu.Unlock()
	for _, e := range events {
		w.o.Event(e)
	}
}

// look compares the newest reading of a rank's counter with its window.
func (w *Recompute) look(k *workers.Rank, s *recomputeRank) (eventlog.Event, bool) {
	l := k.Load()
	if l == nil || math.IsNaN(l.ExternalHits) {
		// The engine has no such counter, or is down and may come back with others;
		// receipts say "unproven".
		s.hits = math.NaN()
		return eventlog.Event{}, false
	}
	known := !math.IsNaN(s.hits)
	restarted := known && (l.ExternalHits < s.hits || l.Process != s.process && !(math.IsNaN(l.Process) && math.IsNaN(s.process)))
	grew := known && !restarted && l.ExternalHits > s.hits
	if !known || restarted || grew {
		s.open(l)
		if s.alarmed && grew {
			s.alarmed = false
			return eventlog.Event{
				Kind: "silent_recompute_ended", Worker: s.worker, Rank: k.Label,
				Text: fmt.Sprintf("%s loads KV from prefill workers again", k.Label),
			}, true
		}
		return eventlog.Event{}, false
	}
	if l.Asked.After(s.waiting.last.Add(countingDelay)) {
		s.covered.add(s.waiting)
		s.waiting, s.young = s.young, answered{}
	}
	if s.covered.requests < recomputeProof {
		return eventlog.Event{}, false
	}
	found := s.covered
	s.covered = answered{}
	w.o.Found(s.worker, found.requests)
	if s.alarmed {
		return eventlog.Event{}, false
	}
	s.alarmed = true
	return eventlog.Event{
		Kind: "silent_recompute", Severity: eventlog.Error, Worker: s.worker, Rank: k.Label,
		Text: fmt.Sprintf("%s answered %d request(s) whose %d prompt tokens a prefill worker had computed, but its counter of tokens loaded over the connector did not grow from before they were sent until after they were answered: it computes the prompts again, so remote prefill costs time and gains nothing; check --kv-transfer-config on both sides", k.Label, found.requests, found.tokens),
	}, true
}

// open begins a window with a reading of the counter.
func (s *recomputeRank) open(l *workers.Load) {
	s.hits, s.process, s.since = l.ExternalHits, l.Process, l.At
	s.covered, s.waiting, s.young = answered{}, answered{}, answered{}
}

// Alarms are the labels of the ranks that are known to recompute.
func (w *Recompute) Alarms() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for k, s := range w.ranks {
		if s.alarmed {
			out = append(out, k.Label)
		}
	}
	slices.Sort(out)
	return out
}
