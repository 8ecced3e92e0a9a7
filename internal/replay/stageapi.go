package replay

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/adminserver"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// Handler is the admin API as of the stage's time, to be read, and
// POST /admin/v1/replay?do=pause|play|toggle|step|back|faster|slower|seek&n=&to=.
func (s *Stage) Handler(a adminserver.Access) http.Handler {
	return adminserver.New(a, s, nil, map[string]http.Handler{"POST /admin/v1/replay": adminserver.JSON(s.control)})
}

// maxSteps bounds the records of one step.
const maxSteps = 1 << 20

func (s *Stage) control(q *http.Request) (any, error) {
	n, err := adminserver.Number(q, "n", 1, 0, maxSteps)
	if err != nil {
		return nil, err
	}
	v := q.URL.Query()
	if do := v.Get("do"); do == "seek" {
		if err := s.Seek(v.Get("to")); err != nil {
			return nil, api.BadRequest("to", "%v", err)
		}
	} else if err := s.Control(do, n); err != nil {
		return nil, api.BadRequest("do", "%v", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.position(), nil
}

// position is where the stage stands. The caller holds mu.
func (s *Stage) position() *admin.Replay {
	r := &admin.Replay{Records: s.played, AtUS: s.now.Microseconds(), Speed: s.speed, Paused: s.paused, Ended: s.ended, Seeking: s.seeking}
	if s.total != nil {
		r.TotalUS = new(s.total.Microseconds())
	}
	return r
}

// Now is the time of the recording.
func (s *Stage) Now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at()
}

// Status is the router's of then, as far as it was recorded.
func (s *Stage) Status() admin.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := admin.Status{
		Schema: admin.Schema, Version: s.r.Header().Version, Name: s.r.Name(), Now: s.at(), Started: s.start, State: "ready", Reasons: []string{},
		PrefillPolicy: string(s.prefill), DecodePolicy: string(s.decode), ThresholdTokens: s.thresh, ThresholdAuto: s.auto, ThresholdOn: s.on, Tokenizer: "recorded",
		BlockSizeTokens: s.block, Models: []string{}, Traffic: s.traffic, Index: s.totals(), Replay: s.position(),
	}
	if s.prefill == s.decode { // else the one that was set is in no record
		st.Policy = string(s.decode)
	}
	switch {
	case s.ended:
		st.Reasons = append(st.Reasons, "the recording ends here")
	case s.paused:
		st.Reasons = append(st.Reasons, fmt.Sprintf("paused after %d records", s.played))
	}
	st.Traffic.Inflight = len(s.running)
	times := s.times.Figures()
	st.Traffic.TTFT, st.Traffic.E2E = times.TTFT, times.E2E
	for _, w := range s.workers() {
		st.Workers.Total++
		st.Workers.Usable++
		st.Workers.Ranks += len(w.Ranks)
		switch w.Role {
		case "prefill":
			st.Workers.Prefill++
		case "decode":
			st.Workers.Decode++
		default:
			st.Workers.Aggregated++
		}
		for _, k := range w.Ranks {
			st.Ledger.Requests += k.ActiveRequests
			st.Ledger.PrefillTokens += k.PrefillTokens
			st.Ledger.DecodeBlocks += k.DecodeBlocks
		}
	}
	return st
}

// Workers are the ranks of the recording by their workers.
func (s *Stage) Workers() admin.WorkerList {
	s.mu.Lock()
	defer s.mu.Unlock()
	return admin.WorkerList{Schema: admin.Schema, Now: s.at(), Workers: s.workers()}
}

// Receipts are those of the decisions so far; going back replaces the ring.
func (s *Stage) Receipts() *receipt.Ring {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.receipts
}

// Events are those so far; going back replaces and closes the log.
func (s *Stage) Events() *eventlog.Log {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events
}

// IndexStats are the index and each rank's part in it.
func (s *Stage) IndexStats() admin.IndexStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := admin.IndexStats{Schema: admin.Schema, Now: s.at(), Totals: s.totals(), Ranks: []admin.IndexRank{}}
	for _, k := range s.p.index.Ranks() {
		out.Ranks = append(out.Ranks, adminserver.IndexRank(&k))
	}
	return out
}

// IndexChildren lists children of a node of the index.
func (s *Stage) IndexChildren(q adminserver.IndexQuery) (admin.IndexChildren, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	labels := map[kvindex.Rank]string{}
	for _, r := range s.p.list {
		labels[r.slot] = r.name
	}
	return adminserver.IndexChildren(s.p.index, labels, q)
}

// The functions below are called with mu held.

func (s *Stage) at() time.Time { return s.start.Add(s.now) }

func (s *Stage) totals() admin.IndexTotals {
	t := adminserver.IndexTotals(s.p.index)
	t.Lookups = s.traffic.Requests
	for _, r := range s.p.list {
		if r.fed && !r.trusted() {
			t.UntrustedRank++
		}
	}
	if s.traffic.PromptTokens > 0 {
		t.HitShare = new(float64(s.traffic.PredictedTokens) / float64(s.traffic.PromptTokens))
	}
	return t
}

// workers are the ranks of the trace by their workers, in the order of names.
func (s *Stage) workers() []admin.Worker {
	byName := map[string]*admin.Worker{}
	for label, k := range s.ranks {
		name, dp, _ := trace.SplitRank(label)
		w := byName[name]
		if w == nil {
			w = &admin.Worker{
				Name: name, Engine: k.engine, Role: k.role, Connector: k.connector, Models: []string{}, BlockSizeTokens: k.block,
				Source: "trace", Health: "healthy", Usable: true, Ranks: []admin.Rank{},
			}
			byName[name] = w
		}
		w.DP++
		r := admin.Rank{
			Label: label, Worker: name, DP: dp, Slot: k.c.Slot, Role: k.role, Health: "healthy", Usable: k.c.KeptOut == "", Reason: k.c.KeptOut,
			ActiveRequests: k.c.ActiveRequests, PrefillTokens: int64(k.c.PrefillTokens), DecodeBlocks: int64(k.c.DecodeBlocks), Requests: k.requests, CapacityBlock: int64(k.c.KVBlocks),
			Feed: admin.Feed{State: "none"},
		}
		if s.outcomes {
			r.Moves = &admin.Moves{Away: k.away, Onto: k.onto}
		}
		if k.c.HasLoad {
			c := k.c // the answer outlives the lock
			r.Engine = &admin.EngineLoad{Running: &c.Running, Waiting: &c.Waiting, At: s.at()}
			if c.KVUsage >= 0 {
				r.Engine.KVUsage = &c.KVUsage
			}
		}
		if pr := s.p.ranks[label]; pr != nil && pr.fed {
			stats, _ := s.p.index.RankStats(pr.slot)
			r.IndexBlocks = stats.Blocks
			r.Feed = admin.Feed{
				State: "live", Trusted: pr.trusted(), Batches: k.batches,
				Blocks: stats.Stored + stats.Removed, Orphans: stats.Orphaned, Restarts: k.clears,
			}
			if st := pr.stream; st != nil {
				r.Feed.CacheGroups, r.Feed.UnknownKinds = adminserver.CacheGroups(st.CacheGroups()), slices.Clone(st.UnknownKinds())
				r.Feed.HashDiffers = st.HashDiffers()
				r.Feed.TiersReported, r.Feed.Tiers, r.Feed.CopiesImplausible = st.TiersReported(), st.Tiers(), st.CopiesImplausible()
			}
			if k.batches > 0 {
				r.Feed.LastSeq, r.Feed.LastAt = new(k.lastSeq), s.start.Add(k.lastAt)
			}
			if !r.Feed.Trusted {
				r.Feed.State, r.Feed.Reason = "unknown", k.reason
			}
		}
		w.Ranks = append(w.Ranks, r)
	}
	out := make([]admin.Worker, 0, len(byName))
	for _, n := range slices.Sorted(maps.Keys(byName)) {
		slices.SortFunc(byName[n].Ranks, func(a, b admin.Rank) int { return a.DP - b.DP })
		out = append(out, *byName[n])
	}
	return out
}
