package replay

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/router/receipt"
	"github.com/dynctl/dynctl/internal/router/trace"
)

// Handler serves the part of the admin API that a screen reads, as of the
// stage's time, and POST /admin/v1/replay?do=pause|play|toggle|step|back&n=.
func (s *Stage) Handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, h := range map[string]func(*http.Request) (any, error){
		"GET /admin/v1/status": func(*http.Request) (any, error) { return s.status(), nil },
		"GET /admin/v1/workers": func(*http.Request) (any, error) {
			return admin.WorkerList{Schema: admin.Schema, Now: s.at(), Workers: s.workers()}, nil
		},
		"GET /admin/v1/ranks":          s.rankList,
		"GET /admin/v1/snapshot":       s.snapshot,
		"GET /admin/v1/decisions":      s.decisions,
		"GET /admin/v1/decisions/{id}": s.oneDecision,
		"GET /admin/v1/events":         s.eventList,
		"GET /admin/v1/index/stats":    s.indexStats,
		"GET /admin/v1/index/children": s.children,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, q *http.Request) {
			s.mu.Lock()
			v, err := h(q)
			s.mu.Unlock()
			answer(w, v, err)
		})
	}
	mux.HandleFunc("POST /admin/v1/replay", func(w http.ResponseWriter, q *http.Request) {
		if q.Header.Get("Origin") != "" {
			http.Error(w, "no changes from web pages", http.StatusForbidden)
			return
		}
		n, err := number(q, "n", 1)
		if err == nil {
			err = s.Control(q.URL.Query().Get("do"), n)
		}
		s.mu.Lock()
		v := map[string]any{"records": s.played, "t_us": s.now.Microseconds(), "paused": s.paused, "ended": s.ended}
		s.mu.Unlock()
		answer(w, v, err)
	})
	return mux
}

var errNotFound = errors.New("not found")

func answer(w http.ResponseWriter, v any, err error) {
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		status := http.StatusBadRequest
		if errors.Is(err, errNotFound) {
			status = http.StatusNotFound
		}
		w.WriteHeader(status)
		v = map[string]any{"error": map[string]any{"message": err.Error(), "type": "invalid_request_error", "code": nil, "param": nil}}
	}
	_ = json.NewEncoder(w).Encode(v) // the client may be gone
}

func number(q *http.Request, key string, def int) (int, error) {
	text := q.URL.Query().Get(key)
	if text == "" {
		return def, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > 1<<20 {
		return 0, fmt.Errorf("%s=%q is not a number of 0 to %d", key, text, 1<<20)
	}
	return n, nil
}

// The functions below are called with mu held.

func (s *Stage) at() time.Time { return s.start.Add(s.now) }

func (s *Stage) status() admin.Status {
	st := admin.Status{
		Schema: admin.Schema, Version: s.r.Header().Version, Name: s.r.Name(), Now: s.at(), Started: s.start, State: "ready", Reasons: []string{},
		Policy: s.policy, PrefillPolicy: s.policy, DecodePolicy: s.policy, ThresholdTokens: s.thresh, ThresholdOn: s.on, Tokenizer: "recorded",
		BlockSizeTokens: s.o.BlockSize, Models: []string{}, Traffic: s.traffic,
	}
	switch {
	case s.ended:
		st.Reasons = append(st.Reasons, "the recording ends here")
	case s.paused:
		st.Reasons = append(st.Reasons, fmt.Sprintf("paused after %d records", s.played))
	}
	st.Traffic.Inflight = len(s.inflight)
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
			if !k.Feed.Trusted {
				st.Index.UntrustedRank++
			}
			st.Ledger.Requests += k.ActiveRequests
			st.Ledger.PrefillTokens += k.PrefillTokens
			st.Ledger.DecodeBlocks += k.DecodeBlocks
		}
	}
	untrusted := st.Index.UntrustedRank
	st.Index = s.totals()
	st.Index.UntrustedRank = untrusted
	return st
}

func (s *Stage) totals() admin.IndexTotals {
	x := s.p.index.Stats()
	t := admin.IndexTotals{
		Blocks: x.Blocks, Memberships: x.Memberships, Nodes: x.Nodes, Bytes: x.Bytes, MaxBlocks: x.MaxBlocks, Lookups: s.total,
		Stored: x.Stored, Removed: x.Removed, Orphaned: x.Orphaned, Refused: x.Refused,
	}
	if s.traffic.PromptTokens > 0 {
		t.HitShare = float64(s.traffic.PredictedTokens) / float64(s.traffic.PromptTokens)
	}
	return t
}

// workers are the ranks of the trace by their workers, in the order of names.
func (s *Stage) workers() []admin.Worker {
	byName := map[string]*admin.Worker{}
	var names []string
	for label, k := range s.ranks {
		name, dp, _ := trace.SplitRank(label)
		w := byName[name]
		if w == nil {
			w = &admin.Worker{
				Name: name, Engine: k.engine, Role: k.role, Connector: k.connector, Models: []string{}, BlockSizeTokens: k.block,
				Source: "trace", Health: "healthy", Usable: true, Ranks: []admin.Rank{},
			}
			byName[name] = w
			names = append(names, name)
		}
		w.DP++
		r := admin.Rank{
			Label: label, Worker: name, DP: dp, Slot: k.c.Slot, Role: k.role, Health: "healthy", Usable: k.c.Excluded == "", Reason: k.c.Excluded,
			ActiveRequests: k.c.Requests, PrefillTokens: int64(k.c.Prefill), DecodeBlocks: int64(k.c.Decode), Requests: k.requests, CapacityBlock: int64(k.c.KVBlocks),
			Feed: admin.Feed{State: "none"},
		}
		if k.c.HasLoad {
			usage := k.c.KVUsage
			r.Engine = &admin.EngineLoad{Running: &k.c.Running, Waiting: &k.c.Waiting, At: s.at()}
			if usage >= 0 {
				r.Engine.KVUsage = &usage
			}
		}
		if pr := s.p.ranks[label]; pr != nil && pr.fed {
			stats, _ := s.p.index.RankStats(pr.slot)
			r.IndexBlocks = stats.Blocks
			r.Feed = admin.Feed{
				State: "live", Trusted: !pr.trustTold || pr.trust, LastSeq: k.lastSeq, LastAt: s.start.Add(k.lastAt), Batches: k.batches,
				Blocks: stats.Stored + stats.Removed, Orphans: stats.Orphaned, Restarts: k.clears,
			}
			if !r.Feed.Trusted {
				r.Feed.State, r.Feed.Reason = "unknown", k.reason
			}
		}
		w.Ranks = append(w.Ranks, r)
	}
	slices.Sort(names)
	out := make([]admin.Worker, 0, len(names))
	for _, n := range names {
		slices.SortFunc(byName[n].Ranks, func(a, b admin.Rank) int { return a.DP - b.DP })
		out = append(out, *byName[n])
	}
	return out
}

func (s *Stage) rankList(*http.Request) (any, error) {
	l := admin.RankList{Schema: admin.Schema, Now: s.at(), Ranks: []admin.Rank{}}
	for _, w := range s.workers() {
		l.Ranks = append(l.Ranks, w.Ranks...)
	}
	return l, nil
}

// newest are the newest receipts as JSON; brief ones have no candidates.
func (s *Stage) newest(limit int, brief bool) ([]json.RawMessage, error) {
	out := []json.RawMessage{}
	for i := len(s.receipts) - 1; i >= 0 && len(out) < limit; i-- {
		r := s.receipts[i]
		if brief {
			c := *r
			c.Decode.Candidates, c.Prefill.Candidates = []receipt.Candidate{}, []receipt.Candidate{}
			r = &c
		}
		raw, err := json.Marshal(r)
		if err != nil {
			return nil, err
		}
		out = append(out, raw)
	}
	return out, nil
}

func (s *Stage) snapshot(q *http.Request) (any, error) {
	decisions, err := number(q, "decisions", 20)
	if err != nil {
		return nil, err
	}
	out := admin.Snapshot{Schema: admin.Schema, Status: s.status(), Workers: s.workers()}
	if out.Decisions, err = s.newest(decisions, q.URL.Query().Get("brief") == "true"); err != nil {
		return nil, err
	}
	out.Events, err = s.since(q)
	return out, err
}

func (s *Stage) decisions(q *http.Request) (any, error) {
	limit, err := number(q, "limit", 100)
	if err != nil {
		return nil, err
	}
	list, err := s.newest(limit, q.URL.Query().Get("brief") == "true")
	return admin.DecisionList{Schema: admin.Schema, Now: s.at(), Decisions: list, Total: s.total}, err
}

func (s *Stage) oneDecision(q *http.Request) (any, error) {
	if r := s.byID[q.PathValue("id")]; r != nil {
		return r, nil
	}
	for _, r := range s.receipts {
		if r.RequestID == q.PathValue("id") {
			return r, nil
		}
	}
	return nil, fmt.Errorf("decision: %w up to here in the recording", errNotFound)
}

func (s *Stage) since(q *http.Request) ([]admin.Event, error) {
	after, err := number(q, "after", 0)
	if err != nil {
		return nil, err
	}
	limit, err := number(q, "events", 100)
	if err != nil {
		return nil, err
	}
	out := []admin.Event{}
	for _, e := range s.events {
		if e.Seq > uint64(after) || s.eventSeq < uint64(after) { // it was taken back
			out = append(out, e)
		}
	}
	return out[max(0, len(out)-limit):], nil
}

func (s *Stage) eventList(q *http.Request) (any, error) {
	list, err := s.since(q)
	return admin.EventList{Schema: admin.Schema, Now: s.at(), Events: list, Newest: s.eventSeq}, err
}

func (s *Stage) indexStats(*http.Request) (any, error) {
	out := admin.IndexStats{Schema: admin.Schema, Now: s.at(), Totals: s.totals(), Ranks: []admin.IndexRank{}}
	for _, k := range s.p.index.Ranks() {
		out.Ranks = append(out.Ranks, admin.IndexRank{
			Label: k.Name, Slot: uint32(k.Rank), Blocks: k.Blocks, Stored: k.Stored, Removed: k.Removed,
			Orphaned: k.Orphaned, Refused: k.Refused, Lost: k.Lost,
		})
	}
	return out, nil
}

func (s *Stage) children(q *http.Request) (any, error) {
	limit, err := number(q, "limit", 100)
	if err != nil {
		return nil, err
	}
	depth, err := number(q, "min_depth", 0)
	if err != nil {
		return nil, err
	}
	v := q.URL.Query()
	o := kvindex.BrowseOptions{Limit: min(max(limit, 1), 1000), MinDepth: depth, Sort: kvindex.SortBy(v.Get("sort"))}
	if name := v.Get("rank"); name != "" {
		r := s.p.ranks[name]
		if r == nil {
			return nil, fmt.Errorf("rank %.64q: %w", name, errNotFound)
		}
		o.Rank = &r.slot
	}
	node := kvindex.Root
	if text := v.Get("node"); text != "" {
		n, err := strconv.ParseUint(text, 16, 64)
		if err != nil {
			return nil, fmt.Errorf("node=%.32q is not an id that this API gave", text)
		}
		node = kvindex.NodeID(n)
	}
	b, err := s.p.index.Children(node, o)
	if errors.Is(err, kvindex.ErrUnknownNode) {
		return nil, fmt.Errorf("node: %w: its blocks were evicted", errNotFound)
	}
	if err != nil {
		return nil, err
	}
	convert := func(c kvindex.Child) admin.IndexNode {
		n := admin.IndexNode{
			ID: strconv.FormatUint(uint64(c.ID), 16), OffsetBlocks: c.Offset, DepthBlocks: c.Depth, LengthBlocks: c.Length,
			Local: fmt.Sprintf("%016x", c.Local), Children: c.Children, Blocks: c.Blocks, Exact: c.Exact, Ranks: c.Ranks, Longest: c.Longest, Hits: c.Hits, RankLabels: []string{},
		}
		for _, k := range c.Mask {
			if int(k) < len(s.p.list) {
				n.RankLabels = append(n.RankLabels, s.p.list[k].name)
			}
		}
		return n
	}
	out := admin.IndexChildren{Schema: admin.Schema, Now: s.at(), Children: []admin.IndexNode{}, Total: b.Total, Partial: b.Partial}
	if node != kvindex.Root {
		n := convert(b.Node)
		out.Node = &n
	}
	for _, c := range b.Children {
		out.Children = append(out.Children, convert(c))
	}
	return out, nil
}

// Where is the stage's place in words.
func (s *Stage) Where() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	parts := []string{fmt.Sprintf("%d records", s.played), s.now.Round(time.Millisecond).String()}
	if s.paused {
		parts = append(parts, "paused")
	}
	if s.ended {
		parts = append(parts, "at the end")
	}
	return strings.Join(parts, ", ")
}
