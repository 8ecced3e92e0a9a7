// Package watch notices what goes wrong in a fleet although requests are
// answered: KV that is moved and not used, and workers that fail now and then.
package watch

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

// Recompute finds decode engines that answer correctly but do not use the
// KV that a prefill worker computed for them. The answer of such a request
// looks like any other; only the engine's own counters tell. For every decode
// rank it compares the remote prefills that ended there with the growth of the
// engine's counter of tokens loaded over a connector.
type Recompute struct {
	o     RecomputeOptions
	mu    sync.Mutex
	ranks map[*workers.Rank]*recomputeRank
}

type recomputeRank struct {
	worker string
	// open remote requests since the counter last grew, and when the newest
	// of them ended.
	open   int
	tokens int
	last   time.Time
	// hits is the counter as last seen; NaN before the first scrape.
	hits float64
	// alarmed is set while the rank is known to recompute.
	alarmed bool
}

// recomputeProof is how many remote prefills without a trace in the engine's
// counters are needed before the watch speaks up.
const recomputeProof = 3

// RecomputeOptions are what the watch needs.
type RecomputeOptions struct {
	// Ranks are the fleet's ranks of now.
	Ranks func() []*workers.Rank
	// Found is told how many more requests a worker has computed again.
	Found func(worker string, requests int)
	Event func(eventlog.Event)
}

// NewRecompute makes a watch; Run does its work.
func NewRecompute(o RecomputeOptions) *Recompute {
	return &Recompute{o: o, ranks: map[*workers.Rank]*recomputeRank{}}
}

// Ended notes that a request with tokens computed by a prefill worker ended
// well on a decode rank.
func (w *Recompute) Ended(k *workers.Rank, tokens int, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.ranks[k]
	if s == nil {
		s = &recomputeRank{worker: k.WorkerName, hits: math.NaN()}
		w.ranks[k] = s
	}
	s.open++
	s.tokens += tokens
	s.last = now
}

// Run compares until ctx ends.
func (w *Recompute) Run(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			w.compare()
		}
	}
}

func (w *Recompute) compare() {
	var events []eventlog.Event
	w.mu.Lock()
	live := w.o.Ranks()
	for k, s := range w.ranks {
		if !slices.Contains(live, k) {
			delete(w.ranks, k)
			continue
		}
		l := k.Load()
		if l == nil || math.IsNaN(l.ExternalHits) {
			continue // the engine does not tell; receipts say "unproven"
		}
		grew := !math.IsNaN(s.hits) && l.ExternalHits > s.hits || math.IsNaN(s.hits) && l.ExternalHits > 0
		// A restart sets the counter back; what was open before proves nothing.
		restarted := l.ExternalHits < s.hits
		s.hits = l.ExternalHits
		switch {
		case grew || restarted:
			s.open, s.tokens = 0, 0
			if s.alarmed && grew {
				s.alarmed = false
				events = append(events, eventlog.Event{
					Kind: "silent_recompute_ended", Worker: s.worker, Rank: k.Label,
					Text: fmt.Sprintf("%s loads KV from prefill workers again", k.Label),
				})
			}
		case s.open >= recomputeProof && l.At.After(s.last.Add(500*time.Millisecond)):
			w.o.Found(s.worker, s.open)
			if !s.alarmed {
				s.alarmed = true
				events = append(events, eventlog.Event{
					Kind: "silent_recompute", Severity: eventlog.Error, Worker: s.worker, Rank: k.Label,
					Text: fmt.Sprintf("%s answered %d request(s) whose %d prompt tokens a prefill worker had computed, but its counter of tokens loaded over the connector did not grow: it computes the prompts again, so remote prefill costs time and gains nothing; check --kv-transfer-config on both sides", k.Label, s.open, s.tokens),
				})
			}
			s.open, s.tokens = 0, 0
		}
	}
	w.mu.Unlock()
	for _, e := range events {
		w.o.Event(e)
	}
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
