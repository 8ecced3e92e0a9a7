package router

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

// recomputeWatch finds decode engines that answer correctly but do not use the
// KV that a prefill worker computed for them. The answer of such a request
// looks like any other; only the engine's own counters tell. For every decode
// rank it compares the remote prefills that ended there with the growth of the
// engine's counter of tokens loaded over a connector.
type recomputeWatch struct {
	r *Router

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

func (w *recomputeWatch) init(r *Router) {
	w.r, w.ranks = r, map[*workers.Rank]*recomputeRank{}
}

// ended notes that a request with tokens computed by a prefill worker ended
// well on a decode rank.
func (w *recomputeWatch) ended(k *workers.Rank, tokens int, now time.Time) {
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

// run compares until ctx ends.
func (w *recomputeWatch) run(ctx context.Context) error {
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

func (w *recomputeWatch) compare() {
	var events []eventlog.Event
	w.mu.Lock()
	live := w.r.registry.Snapshot().Ranks
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
			w.r.traffic.recomputes.Add(uint64(s.open))
			for range s.open {
				w.r.metrics.SilentRecompute(s.worker)
			}
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
		w.r.event(e)
	}
}

// alarms are the labels of the ranks that are known to recompute.
func (w *recomputeWatch) alarms() []string {
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

// countsTransfers reports whether engines count tokens that came over the
// plan's connector among the cached tokens of usage.
func countsTransfers(p *disagg.Plan) bool { return p.Connector == workers.ConnectorSharedStorage }
