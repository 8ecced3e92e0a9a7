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
// engine's counters.
//
// An engine counts before it makes the first token, the router sees answers
// when they come, and scrapes come in between. So both sides are compared over
// one window: from one reading of the counters to a later one, and only requests
// that were sent after the first reading and answered before the second. Whatever
// such a request loaded is in the second reading.
//
// There are two comparisons. In the first the tokens that were loaded over the connector
// have not grown at all. The second sees requests that recompute among others that do not: each
// remote prompt is in the growth of what was loaded and of what the engine had in its own
// cache, or else it was computed. Requests that are not compared only add to that growth, so
// that they may hide a recomputed prompt and never make up one.
type Recompute struct {
	o     RecomputeOptions
	mu    sync.Mutex
	ranks map[*workers.Rank]*recomputeRank
}

// recomputeRank is what is known of one rank.
type recomputeRank struct {
	worker string
	// still begins again whenever the tokens loaded have grown, sums after sumsEvery and
	// with each finding.
	still, sums window
	// alarmed is set while the rank is known to recompute, partly where that was found by sums.
	alarmed, partly bool
}

// window begins with a reading.
type window struct {
	// count is the counter as it was read, in the process of that start; NaN while there is
	// no window.
	count, process float64
	newest         float64 // the counter's newest reading
	since          time.Time
	// Answered requests of the window: those that the newest reading covers,
	// those that wait for a reading that does, and those that came meanwhile.
	// Two groups wait because new answers must not keep old ones waiting.
	covered, waiting, young answered
}

// answered sums up requests.
type answered struct {
	// requests are remote ones, and tokens those that were moved for them.
	requests, tokens int
	// uncomputed are the tokens that the engine need not have computed, of remote
	// requests and of others.
	uncomputed int
	last       time.Time // when the newest was answered
}

func (a *answered) add(b answered) {
	a.requests += b.requests
	a.tokens += b.tokens
	a.uncomputed += b.uncomputed
	if b.last.After(a.last) {
		a.last = b.last
	}
}

// open begins a window with a reading of a counter.
func (w *window) open(count float64, l *workers.Load) {
	*w = window{count: count, newest: count, process: l.Process, since: l.At}
}

// shut ends the window until a reading begins one.
func (w *window) shut() { *w = window{count: math.NaN(), process: math.NaN()} }

// goesOn takes the newest reading of the counter, and reports whether it is of the window's
// process.
func (w *window) goesOn(count float64, l *workers.Load) bool {
	before := w.newest
	w.newest = count
	return !math.IsNaN(w.count) && count >= before && (l.Process == w.process || math.IsNaN(l.Process) && math.IsNaN(w.process))
}

// answered adds a request that was sent at a time.
func (w *window) answered(a answered, sent time.Time) {
	// Without a window there is nothing to compare the request with.
	if !math.IsNaN(w.count) && sent.After(w.since) {
		w.young.add(a)
	}
}

// cover finds the requests that a reading covers.
func (w *window) cover(l *workers.Load) {
	if l.Asked.After(w.waiting.last.Add(countingDelay)) {
		w.covered.add(w.waiting)
		w.waiting, w.young = w.young, answered{}
	}
}

// recomputeProof is how many remote prefills without a trace in the engine's
// counters are needed before the watch reports it.
const recomputeProof = 3

// recomputeEnd is how many of them are needed in a window of sums before an alarm ends.
const recomputeEnd = 20

// recomputeShare is the least share of the moved tokens of a window that is reported: how many
// tokens a prompt has may differ a little between router and engine.
const recomputeShare = 1. / 20

// recomputeEvery is how often readings are looked at. A window can begin no
// earlier, so a router that has just started should not wait long.
const recomputeEvery = 250 * time.Millisecond

// sumsEvery is how long sums are compared over one window: longer than answers take, because
// what is in progress at its end hides as much.
const sumsEvery = 5 * time.Minute

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
// at the time given, whose tokens a prefill worker had computed. prompt is how many tokens
// of the prompt the engine need not have computed, those of its own cache included; 0 where
// that is not known.
func (w *Recompute) Answered(k *workers.Rank, tokens, prompt int, sent, now time.Time) {
	w.add(k, answered{1, tokens, prompt, now}, sent)
}

// Cached notes that a rank has answered another request, and how many cached tokens its engine
// reports for it.
func (w *Recompute) Cached(k *workers.Rank, tokens int, sent, now time.Time) {
	w.add(k, answered{uncomputed: tokens, last: now}, sent)
}

func (w *Recompute) add(k *workers.Rank, a answered, sent time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.ranks[k]
	if s == nil {
		return
	}
	s.sums.answered(a, sent)
	if a.requests > 0 {
		s.still.answered(a, sent)
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
			s = &recomputeRank{worker: k.WorkerName}
			s.still.shut()
			s.sums.shut()
			w.ranks[k] = s
		}
		for _, look := range []func(*workers.Rank, *recomputeRank, *workers.Load) (eventlog.Event, bool){w.still, w.sums} {
			if e, ok := look(k, s, k.Load()); ok {
				events = append(events, e)
			}
		}
	}
	maps.DeleteFunc(w.ranks, func(k *workers.Rank, _ *recomputeRank) bool { return !now[k] })
	w.mu.Unlock()
	for _, e := range events {
		w.o.Event(e)
	}
}

// still compares the newest reading of a rank's counter of loaded tokens with its window.
func (w *Recompute) still(k *workers.Rank, s *recomputeRank, l *workers.Load) (eventlog.Event, bool) {
	if l == nil || math.IsNaN(l.ExternalHits) {
		// The engine has no such counter, or is down and may come back with others;
		// receipts say "unproven".
		s.still.shut()
		return eventlog.Event{}, false
	}
	c := &s.still
	same := c.goesOn(l.ExternalHits, l)
	if !same || l.ExternalHits > c.count {
		c.open(l.ExternalHits, l)
		if s.alarmed && same && !s.partly {
			return s.ended(k, k.Label+" loads KV from prefill workers again")
		}
		return eventlog.Event{}, false
	}
	c.cover(l)
	if c.covered.requests < recomputeProof {
		return eventlog.Event{}, false
	}
	found := c.covered
	c.covered = answered{}
	s.sums.shut() // it would count them again
	return w.found(k, s, found.requests, fmt.Sprintf("%s answered %d request(s) whose %d prompt tokens a prefill worker had computed, but its counter of tokens loaded over the connector did not grow from before they were sent until after they were answered: it computes the prompts again, so remote prefill costs time and gains nothing; check --kv-transfer-config on both sides", k.Label, found.requests, found.tokens))
}

// sums compares the newest readings of what a rank's engine loaded and had cached with their
// window.
func (w *Recompute) sums(k *workers.Rank, s *recomputeRank, l *workers.Load) (eventlog.Event, bool) {
	c := &s.sums
	if l == nil || math.IsNaN(l.ExternalHits) || math.IsNaN(l.PrefixHits) {
		c.shut()
		return eventlog.Event{}, false
	}
	count := l.ExternalHits + l.PrefixHits
	if !c.goesOn(count, l) {
		c.open(count, l)
		return eventlog.Event{}, false
	}
	c.cover(l)
	n, missing := c.covered.requests, float64(c.covered.uncomputed)-(count-c.count)
	if moved := float64(c.covered.tokens); n >= recomputeProof && missing >= max(recomputeShare, recomputeProof/float64(n))*moved {
		again := min(int(missing*float64(n)/moved), n)
		c.open(count, l)
		s.partly = true
		return w.found(k, s, again, fmt.Sprintf("%s computed about %.0f prompt tokens again, of %.0f that prefill workers had computed: its counters of tokens loaded over the connector and found in its own cache grew by that much less than the prompts of its requests; look into its log for failed KV loads, and for requests that must compute their prompts (prompt_logprobs)", k.Label, missing, moved))
	}
	if l.At.Sub(c.since) < sumsEvery {
		return eventlog.Event{}, false
	}
	c.open(count, l)
	if s.partly && n >= recomputeEnd {
		return s.ended(k, k.Label+" uses what prefill workers compute again")
	}
	return eventlog.Event{}, false
}

// found reports that a rank recomputed requests, with an event where that is new.
func (w *Recompute) found(k *workers.Rank, s *recomputeRank, requests int, text string) (eventlog.Event, bool) {
	w.o.Found(s.worker, requests)
	was := s.alarmed
	s.alarmed = true
	return eventlog.Event{Kind: "silent_recompute", Severity: eventlog.Error, Worker: s.worker, Rank: k.Label, Text: text}, !was
}

// ended ends the alarm.
func (s *recomputeRank) ended(k *workers.Rank, text string) (eventlog.Event, bool) {
	s.alarmed, s.partly = false, false
	return eventlog.Event{Kind: "silent_recompute_ended", Worker: s.worker, Rank: k.Label, Text: text}, true
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
