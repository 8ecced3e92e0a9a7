package feed

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
)

// The windows of rates and of troubles.
const (
	rateWindow    = 10 * time.Second
	troubleWindow = time.Minute
	spacing       = 900 * time.Millisecond // between two points that are kept
	maxSamples    = 80                     // points that spacing leaves in the longer window, and some more
	maxEvents     = 1000
)

// Sample is one answer of a router, or the reason why there is none.
type Sample struct {
	Snapshot *admin.Snapshot
	// Prefixes are the most used runs below the root of the index, when they
	// were asked for; PrefixesAsked says that they were.
	Prefixes      []admin.IndexNode
	PrefixesAsked bool
	Err           error
	At            time.Time     // when the answer was there, by this machine's clock
	Took          time.Duration // of the question
}

// point is what is kept of a sample for rates.
type point struct {
	at      time.Time // the router's clock
	started time.Time
	traffic admin.Traffic
	index   admin.IndexTotals
	cpu     float64
	ranks   map[string]rankPoint
}

type rankPoint struct {
	requests, failures, events, blocks, gaps, lost, dropped, restarts uint64
	indexed                                                           int64
	queries, hits, external                                           float64 // NaN unknown
	loadAt                                                            time.Time
}

// Builder makes the views of one router out of successive samples. It is not
// safe for concurrent use.
type Builder struct {
	url    string
	router Router
	last   time.Time // of the newest answer, by this machine's clock
	points []point
	order  map[string]int // places of ranks in the last view
	// load is the ranks' pressure, smoothed, as of pressed; sorted is when the ranks
	// were last ordered by it.
	load            map[string]float64
	pressed, sorted time.Time
	hot             hotWatch
	cold            coldWatch
	seen            map[string]time.Time // attention lines and since when
	events          []admin.Event

	// History of figures for graphs, by rank label.
	history map[string]*Series
	total   *Series
}

// NewBuilder is a builder for the router at url.
func NewBuilder(url string) *Builder {
	r := Router{URL: url, Link: Waiting}
	unknown(&r)
	return &Builder{
		url: url, router: r,
		order: map[string]int{}, seen: map[string]time.Time{}, history: map[string]*Series{}, total: NewSeries(),
	}
}

// LastEvent is the sequence number of the newest event that is known, for the
// next question.
func (b *Builder) LastEvent() uint64 {
	if len(b.events) == 0 {
		return 0
	}
	return b.events[len(b.events)-1].Seq
}

// Events are the events that were seen, oldest first, at most 1,000. The
// result must not be changed.
func (b *Builder) Events() []admin.Event { return b.events }

// History is the series of a rank; nil when the rank is not known. The label
// "" is the router's own.
func (b *Builder) History(label string) *Series {
	if label == "" {
		return b.total
	}
	return b.history[label]
}

// Add takes in a sample and makes the router's view.
func (b *Builder) Add(s Sample, interval time.Duration) *Router {
	if s.Err != nil || s.Snapshot == nil {
		b.router.Error = sentence(s.Err)
		b.router.Link = Down
		return b.finish(s.At, interval)
	}
	snap := s.Snapshot
	if len(b.points) > 0 && !b.points[len(b.points)-1].started.Equal(snap.Status.Started) {
		// Another process: its counters and events start from the beginning.
		b.points, b.events, b.hot = nil, nil, hotWatch{}
		b.cold.restart(&snap.Status)
	}
	if n := len(b.points); n > 0 && snap.Status.Replay != nil && snap.Status.Now.Before(b.points[n-1].at) {
		// The recording was taken back: what was seen comes later now.
		b.points, b.events, b.hot = nil, nil, hotWatch{}
	}
	b.last = s.At
	b.router.Error = ""
	b.router.AnswerMS = Num(float64(s.Took.Microseconds()) / 1000)
	b.remember(snap)
	b.cold.add(snap, b.points)
	if s.PrefixesAsked {
		b.hot.add(s.Prefixes, snap.Status.Now)
	}
	b.addEvents(snap.Events)
	b.describe(&snap.Status)
	b.fillTraffic(snap)
	b.fillFleet(snap)
	b.router.Decisions = b.router.Decisions[:0:0]
	for _, raw := range snap.Decisions {
		if d, ok := ParseDecision(raw); ok {
			b.router.Decisions = append(b.router.Decisions, d)
		}
	}
	b.record()
	return b.finish(s.At, interval)
}

// Rated reports whether there are two answers, and two pages of every engine that
// has counters, so that every rate that can be known is.
func (b *Builder) Rated() bool {
	if len(b.points) < 2 {
		return false
	}
	first := b.points[0].ranks
	for label, now := range b.points[len(b.points)-1].ranks {
		was, ok := first[label]
		if ok && !math.IsNaN(now.queries) && !math.IsNaN(was.queries) && !now.loadAt.After(was.loadAt) {
			return false
		}
	}
	return true
}

// Tick makes the view again without a new sample, since ages pass.
func (b *Builder) Tick(now time.Time, interval time.Duration) *Router { return b.finish(now, interval) }

// finish judges the link and the attention, and copies the router.
func (b *Builder) finish(now time.Time, interval time.Duration) *Router {
	r := b.router
	if !b.last.IsZero() {
		age := now.Sub(b.last)
		r.AgeSeconds = Num(math.Max(0, math.Round(age.Seconds()*10)/10))
		switch {
		case r.Link == Down && r.Error != "":
		case age < max(2*time.Second, 2*interval):
			r.Link = Live
		case age < max(10*time.Second, 5*interval):
			r.Link = Lag
		default:
			r.Link = Stale
		}
	}
	r.Attention = b.attention(&r, now)
	return &r
}

// describe takes over what the router says of itself.
func (b *Builder) describe(st *admin.Status) {
	r := &b.router
	r.Link = Live
	r.Name, r.Version, r.Schema, r.State, r.Reasons = st.Name, st.Version, st.Schema, st.State, st.Reasons
	r.Queues, r.Replay = st.Queues, st.Replay
	if r.Reasons == nil {
		r.Reasons = []string{}
	}
	r.UptimeSeconds = Num(math.Max(0, st.Now.Sub(st.Started).Seconds()))
	r.Models, r.Policy, r.ThresholdTokens, r.ThresholdOn = st.Models, st.Policy, Num(st.ThresholdTokens), st.ThresholdOn
	r.ThresholdAuto, r.Costs = st.ThresholdAuto, st.Costs
	if r.Models == nil {
		r.Models = []string{}
	}
	r.Tokenizer, r.BlockSize, r.ConfigRevision, r.Workers = st.Tokenizer, st.BlockSizeTokens, st.ConfigRevision, st.Workers
	r.Process = Process{CPU: Unknown, HeapBytes: Num(st.Runtime.HeapBytes), RSSBytes: Num(st.Runtime.RSSBytes), Goroutines: Num(st.Runtime.Goroutines), OpenFiles: Num(st.Runtime.OpenFiles)}
}

// remember keeps the counters of a snapshot.
func (b *Builder) remember(snap *admin.Snapshot) {
	p := point{
		at: snap.Status.Now, started: snap.Status.Started, traffic: snap.Status.Traffic, index: snap.Status.Index,
		cpu: snap.Status.Runtime.CPUSeconds, ranks: make(map[string]rankPoint, snap.Status.Workers.Ranks),
	}
	for i := range snap.Workers {
		for j := range snap.Workers[i].Ranks {
			k := &snap.Workers[i].Ranks[j]
			q := rankPoint{
				requests: k.Requests, failures: k.Failures, events: k.Feed.Events, blocks: k.Feed.Blocks, gaps: k.Feed.Gaps, lost: k.Feed.Lost, dropped: k.Feed.Dropped,
				restarts: k.Feed.Restarts, indexed: k.IndexBlocks, queries: math.NaN(), hits: math.NaN(), external: math.NaN(),
			}
			if e := k.Engine; e != nil {
				q.queries, q.hits, q.external, q.loadAt = value(e.PrefixQueries), value(e.PrefixHits), value(e.ExternalHits), e.At
			}
			p.ranks[k.Label] = q
		}
	}
	if n := len(b.points); n > 0 && !p.at.After(b.points[n-1].at) {
		b.points[n-1] = p // the same moment, or a clock that was set back
		if n > 1 && !p.at.After(b.points[n-2].at) {
			b.points = []point{p}
		}
		return
	}
	if n := len(b.points); n > 1 && b.points[n-1].at.Sub(b.points[n-2].at) < spacing {
		b.points[n-1] = p // at fast rates the newest point moves
	} else {
		b.points = append(b.points, p)
	}
	for len(b.points) > 2 && p.at.Sub(b.points[1].at) >= troubleWindow {
		b.points = slices.Delete(b.points, 0, 1)
	}
}

func value(f *float64) float64 {
	if f == nil {
		return math.NaN()
	}
	return *f
}

// since is the newest point that is at least d old, the oldest one if none is.
func (b *Builder) since(d time.Duration) *point {
	now := b.points[len(b.points)-1].at
	for i := len(b.points) - 2; i >= 0; i-- {
		if now.Sub(b.points[i].at) >= d {
			return &b.points[i]
		}
	}
	return &b.points[0]
}

// grew is how much a counter grew; one that went back has started from 0.
func grew(from, to uint64) float64 {
	if to < from {
		return float64(to)
	}
	return float64(to - from)
}

// share is part of whole, unknown when there was nothing.
func share(part, whole float64) Num {
	if whole <= 0 {
		return Unknown
	}
	return Num(part / whole)
}

func (b *Builder) fillTraffic(snap *admin.Snapshot) {
	st := &snap.Status
	t := &st.Traffic
	r := &b.router
	r.Traffic = Traffic{
		Requests: Num(t.Requests), Inflight: Num(t.Inflight), Queued: Num(t.Queued),
		ActiveRequests: Num(st.Ledger.Requests), ActivePrefill: Num(st.Ledger.PrefillTokens), ActiveDecode: Num(st.Ledger.DecodeBlocks), OpenReservations: Num(st.Ledger.Reservations),
	}
	v := &r.Traffic
	v.TTFTP50, v.TTFTP90, v.TTFTP99 = quantiles(t.TTFT)
	v.ITLP50, v.ITLP90, v.ITLP99 = quantiles(t.ITL)
	v.E2EP50, _, v.E2EP99 = quantiles(t.E2E)
	v.OverheadP50, _, v.OverheadP99 = quantiles(t.Overhead)
	x := &st.Index
	r.Index = Index{Blocks: Num(x.Blocks), Memberships: Num(x.Memberships), MaxBlocks: Num(x.MaxBlocks), Nodes: Num(x.Nodes), Bytes: Num(x.Bytes), Untrusted: Num(x.UntrustedRank)}
	r.Index.HottestShare, r.Index.HottestPrefix = b.hot.share(), b.hot.name()

	now, was, old := &b.points[len(b.points)-1], b.since(rateWindow), b.since(troubleWindow)
	seconds := now.at.Sub(was.at).Seconds()
	r.RateWindow, r.TroubleWindow = Unknown, Unknown
	rate := func(from, to uint64) Num {
		if seconds <= 0 {
			return Unknown
		}
		return Num(grew(from, to) / seconds)
	}
	if seconds > 0 {
		r.RateWindow, r.TroubleWindow = Num(seconds), Num(now.at.Sub(old.at).Seconds())
		r.Process.CPU = Num(math.Max(0, now.cpu-was.cpu) / seconds)
	}
	a := &was.traffic
	v.RequestRate, v.CompletedRate, v.FailedRate = rate(a.Requests, t.Requests), rate(a.Completed, t.Completed), rate(a.Failed, t.Failed)
	v.CancelledRate, v.RejectedRate = rate(a.Cancelled, t.Cancelled), rate(a.Rejected, t.Rejected)
	v.PromptRate, v.CompletionRate = rate(a.PromptTokens, t.PromptTokens), rate(a.CompletionTokens, t.CompletionTokens)
	if v.CompletionRate == 0 && v.CompletedRate > 0 {
		// Requests end but engines report no usage: clients did not ask for it.
		v.PromptRate, v.CompletionRate = Unknown, Unknown
	}
	local, remote := grew(a.Local, t.Local), grew(a.Remote, t.Remote)
	v.LocalShare, v.RemoteShare = share(local, local+remote), share(remote, local+remote)
	prompt := grew(a.PromptTokens, t.PromptTokens)
	v.HitShare, v.PredictedShare = share(grew(a.CachedTokens, t.CachedTokens), prompt), share(grew(a.PredictedTokens, t.PredictedTokens), prompt)
	r.Index.StoredRate, r.Index.RemovedRate, r.Index.LookupRate = rate(was.index.Stored, x.Stored), rate(was.index.Removed, x.Removed), rate(was.index.Lookups, x.Lookups)

	o := &old.traffic
	requests := grew(o.Requests, t.Requests)
	v.Failed, v.Fallbacks, v.Retries, v.Recomputes = Num(grew(o.Failed, t.Failed)), Num(grew(o.Fallbacks, t.Fallbacks)), Num(grew(o.Retries, t.Retries)), Num(grew(o.Recomputes, t.Recomputes))
	v.FallbackShare = share(float64(v.Fallbacks), grew(o.Remote, t.Remote)+float64(v.Fallbacks))
	v.RetryShare = share(float64(v.Retries), requests)
	r.Index.Refused, r.Index.Orphaned = Num(grew(old.index.Refused, x.Refused)), Num(grew(old.index.Orphaned, x.Orphaned))
	if seconds <= 0 {
		for _, n := range []*Num{&v.LocalShare, &v.RemoteShare, &v.HitShare, &v.PredictedShare, &v.Failed, &v.Fallbacks, &v.Retries, &v.Recomputes, &v.FallbackShare, &v.RetryShare, &r.Index.Refused, &r.Index.Orphaned} {
			*n = Unknown
		}
	}
}

func quantiles(q *admin.Quantiles) (p50, p90, p99 Num) {
	if q == nil {
		return Unknown, Unknown, Unknown
	}
	return Num(q.P50), Num(q.P90), Num(q.P99)
}

// fillFleet describes workers and ranks, worst ranks first.
func (b *Builder) fillFleet(snap *admin.Snapshot) {
	now, was, old := &b.points[len(b.points)-1], b.since(rateWindow), b.since(troubleWindow)
	r := &b.router
	r.WorkerList = make([]Worker, 0, len(snap.Workers))
	r.Ranks = make([]Rank, 0, snap.Status.Workers.Ranks)
	events, gaps := 0.0, 0.0
	for i := range snap.Workers {
		w := &snap.Workers[i]
		r.WorkerList = append(r.WorkerList, Worker{
			Name: w.Name, URL: w.URL, Engine: w.Engine, Version: w.Version, Role: w.Role, Connector: w.Connector,
			Models: orEmpty(w.Models), DP: w.DP, BlockSize: w.BlockSizeTokens, KVBlocks: w.KVBlocks, Source: w.Source, Health: w.Health, Reason: w.Reason,
			Draining: w.Draining, Usable: w.Usable, Conflict: w.Conflict, Troubles: w.Troubles,
		})
		for j := range w.Ranks {
			k := rankView(w, &w.Ranks[j], now, was, old)
			if k.Feed.EventRate.Known() {
				events += k.Feed.EventRate.F()
			}
			if k.Feed.RecentGaps.Known() {
				gaps += k.Feed.RecentGaps.F()
			}
			r.Ranks = append(r.Ranks, k)
		}
	}
	r.Index.EventRate, r.Index.Gaps = Unknown, Unknown
	if r.RateWindow.Known() {
		r.Index.EventRate, r.Index.Gaps = Num(events), Num(gaps)
	}
	r.Traffic.EnginePromptRate, r.Traffic.EngineHitShare = engineFlow(r.Ranks)
	judgeRanks(r.Ranks, r.WorkerList, &b.cold)
	b.sort(r.Ranks)
}

// engineFlow adds up the engines' own counters. Every request's prompt passes
// through one rank that decodes, so those are counted and prefill ranks not.
func engineFlow(ranks []Rank) (rate, hits Num) {
	rate, hits = Unknown, Unknown
	flow, found := 0.0, 0.0
	for i := range ranks {
		k := &ranks[i]
		if k.Role == "prefill" || !k.PromptRate.Known() {
			continue
		}
		rate = 0
		flow += k.PromptRate.F()
		if k.HitShare.Known() {
			found += k.PromptRate.F() * k.HitShare.F()
		}
	}
	if rate.Known() {
		rate, hits = Num(flow), share(found, flow)
	}
	return rate, hits
}

func moved(m *admin.Moves) Moves {
	if m == nil {
		return Moves{Unknown, Unknown, Unknown}
	}
	return Moves{Num(m.Away), Num(m.Onto), whole(m.Waiting)}
}

func rankView(w *admin.Worker, k *admin.Rank, now, was, old *point) Rank {
	v := Rank{
		Label: k.Label, Worker: k.Worker, DP: k.DP, Role: k.Role, Usable: k.Usable, Health: k.Health, Reason: k.Reason,
		Running: Unknown, Waiting: Unknown, KVUsage: Unknown, EngineUsed: Unknown, HitShare: Unknown, LifeHit: Unknown, PromptRate: Unknown,
		ExternalHit: Unknown, LoadAge: Unknown, RequestRate: Unknown, Failures: Unknown, RequestDiff: Unknown, BlockDiff: Unknown,
		Active: k.ActiveRequests, PrefillTokens: k.PrefillTokens, DecodeBlocks: k.DecodeBlocks, IndexBlocks: k.IndexBlocks, Capacity: k.CapacityBlock, IndexRoom: max(k.IndexRoom, k.CapacityBlock), Moves: moved(k.Moves), // a recording has the latter only
		Feed: Feed{
			State: k.Feed.State, Trusted: k.Feed.Trusted, Reason: k.Feed.Reason, Endpoint: k.Feed.Endpoint, Replay: k.Feed.Replay, LastSeq: k.Feed.LastSeq,
			AgeSeconds: Unknown, SinceSeconds: Unknown, EventRate: Unknown, BlockRate: Unknown, RecentGaps: Unknown, RecentLost: Unknown, RecentDropped: Unknown,
			Gaps: k.Feed.Gaps, Replayed: k.Feed.Replayed, Lost: k.Feed.Lost, Dropped: k.Feed.Dropped, Restarts: k.Feed.Restarts, Errors: k.Feed.Errors, Orphans: k.Feed.Orphans,
			Tiers: k.Feed.Tiers, TiersReported: k.Feed.TiersReported, CacheGroups: k.Feed.CacheGroups, CopiesDisbelieved: k.Feed.CopiesDisbelieved, HashDiffers: k.Feed.HashDiffers,
		},
	}
	v.TTFT, v.ITL, v.OutputRate, v.SlowTimes = Num(value(k.TTFT)), Num(value(k.ITL)), Num(value(k.OutputRate)), Unknown
	v.SpeedJudged = k.SpeedJudged
	if k.Slow != nil {
		v.SlowAt, v.SlowTimes, v.slowAlways = k.Slow.Figure, Num(k.Slow.Times), k.Slow.Always
	}
	if len(w.Models) > 0 {
		v.Model = w.Models[0]
	}
	if !k.Feed.LastAt.IsZero() {
		v.Feed.AgeSeconds = Num(math.Max(0, now.at.Sub(k.Feed.LastAt).Seconds()))
	}
	if !k.Feed.Since.IsZero() {
		v.Feed.SinceSeconds = Num(math.Max(0, now.at.Sub(k.Feed.Since).Seconds()))
	}
	if e := k.Engine; e != nil {
		v.Running, v.Waiting, v.KVUsage = whole(e.Running), whole(e.Waiting), Num(value(e.KVUsage))
		v.LifeHit = share(value(e.PrefixHits), value(e.PrefixQueries))
		if !e.At.IsZero() {
			v.LoadAge = Num(math.Max(0, now.at.Sub(e.At).Seconds()))
		}
		if v.KVUsage.Known() && k.CapacityBlock > 0 {
			v.EngineUsed = Num(math.Round(v.KVUsage.F() * float64(k.CapacityBlock)))
			v.BlockDiff = v.EngineUsed - Num(k.DecodeBlocks)
		}
		if v.Running.Known() && v.Waiting.Known() {
			v.RequestDiff = v.Running + v.Waiting - Num(k.ActiveRequests)
		}
	}
	p := now.ranks[k.Label]
	if q, ok := was.ranks[k.Label]; ok && now != was {
		seconds := now.at.Sub(was.at).Seconds()
		v.RequestRate = Num(grew(q.requests, p.requests) / seconds)
		v.Feed.EventRate, v.Feed.BlockRate = Num(grew(q.events, p.events)/seconds), Num(grew(q.blocks, p.blocks)/seconds)
		// The engine's counters were read at moments of their own.
		if d := p.loadAt.Sub(q.loadAt).Seconds(); d > 0 && p.queries >= q.queries && p.hits >= q.hits {
			v.HitShare = share(p.hits-q.hits, p.queries-q.queries)
			v.PromptRate = Num((p.queries - q.queries) / d)
			if p.external >= q.external {
				v.ExternalHit = Num((p.external - q.external) / d)
			}
		}
	}
	if q, ok := old.ranks[k.Label]; ok && now != old {
		v.Failures, v.Feed.RecentGaps, v.Feed.RecentLost = Num(grew(q.failures, p.failures)), Num(grew(q.gaps, p.gaps)), Num(grew(q.lost, p.lost))
		v.Feed.RecentDropped = Num(grew(q.dropped, p.dropped))
	}
	return v
}

func whole(n *int) Num {
	if n == nil {
		return Unknown
	}
	return Num(*n)
}

func orEmpty(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

// calm is how long ranks keep their places: rows that jump at every refresh cannot
// be read, and rows that never move show nothing. loadHalf is after which time a
// rank's pressure of before counts half.
const (
	calm     = 4 * time.Second
	loadHalf = 2 * time.Second
)

// sort orders ranks worst first: at once where one has become worse or better, and
// every few seconds by their load.
func (b *Builder) sort(ranks []Rank) {
	now := b.points[len(b.points)-1].at
	keep := 0.0
	if took := now.Sub(b.pressed); !b.pressed.IsZero() && took > 0 {
		keep = math.Exp2(-took.Seconds() / loadHalf.Seconds())
	}
	b.pressed = now
	load := make(map[string]float64, len(ranks))
	fresh := now.Sub(b.sorted) >= calm || now.Before(b.sorted)
	for i := range ranks {
		k := &ranks[i]
		was, ok := b.load[k.Label]
		if load[k.Label] = k.Pressure; ok {
			load[k.Label] += keep * (was - k.Pressure)
		}
		if _, ok := b.order[k.Label]; !ok {
			fresh = true
		}
	}
	b.load = load
	if fresh {
		b.sorted = now
	}
	slices.SortFunc(ranks, func(x, y Rank) int {
		if x.Severity != y.Severity {
			return int(y.Severity - x.Severity)
		}
		if !fresh {
			return b.order[x.Label] - b.order[y.Label]
		}
		return cmp.Or(cmp.Compare(load[y.Label], load[x.Label]), strings.Compare(x.Label, y.Label))
	})
	clear(b.order)
	for i := range ranks {
		b.order[ranks[i].Label] = i
	}
}

func (b *Builder) addEvents(events []admin.Event) {
	last := b.LastEvent()
	for _, e := range events {
		if e.Seq > last {
			b.events = append(b.events, e)
			last = e.Seq
		}
	}
	if n := len(b.events); n > maxEvents {
		b.events = slices.Clone(b.events[n-maxEvents:])
	}
	b.router.Events = b.events[max(0, len(b.events)-50):]
}

// Decisions reads lists of brief receipts that have much in common, one after the
// other: what stood in the list before is not read again. It is safe for concurrent
// use; the zero value is ready.
type Decisions struct {
	mu    sync.Mutex
	known map[string]Decision // by the receipt's bytes; of the last list
}

// Parse reads receipts, without those that are none.
func (p *Decisions) Parse(list []json.RawMessage) []Decision {
	p.mu.Lock()
	defer p.mu.Unlock()
	out, next := make([]Decision, 0, len(list)), make(map[string]Decision, len(list))
	for _, raw := range list {
		d, ok := p.known[string(raw)]
		if !ok {
			if d, ok = ParseDecision(raw); !ok {
				continue
			}
		}
		next[string(raw)] = d
		out = append(out, d)
	}
	p.known = next
	return out
}

// ParseDecision reads a receipt, whole or brief.
func ParseDecision(raw json.RawMessage) (Decision, bool) {
	var r receipt.Receipt
	if json.Unmarshal(raw, &r) != nil || r.ID == "" {
		return Decision{}, false
	}
	d := Decision{
		ID: r.ID, Request: r.RequestID, At: r.Time, Live: r.Live, Model: r.Model, Path: r.Path, Reason: r.Reason, ReasonText: r.ReasonText,
		ISL: r.Inputs.ISL, EffISL: r.EffISL, Predicted: r.Predicted.CachedTokens, Cached: known(float64(r.Outcome.CachedTokens)),
		Decode: r.Decode.Chosen, Prefill: r.Prefill.Chosen, RunnerUp: r.Decode.RunnerUp, Margin: Unknown, Eligible: r.Decode.Eligible,
		TTFT: known(r.Outcome.TTFTMS), E2E: known(r.Outcome.E2EMS), Tokens: known(float64(r.Outcome.CompletionTokens)),
		Status: r.Outcome.Status, Legs: len(r.Legs), Error: r.Outcome.Error, Recompute: r.Outcome.SilentRecompute, Cancelled: r.Outcome.Cancelled,
	}
	if r.Decode.RunnerUp != "" {
		d.Margin = Num(r.Decode.MarginBlocks)
	}
	if r.Path == "local" {
		d.Prefill = ""
	}
	return d, true
}

func known(v float64) Num {
	if v < 0 {
		return Unknown
	}
	return Num(v)
}

// Sum adds routers up.
func Sum(at time.Time, routers []Router) View {
	v := View{Schema: Schema, At: at, Routers: routers, Fleet: Fleet{Routers: len(routers)}}
	f := &v.Fleet
	unknown(f)
	add := func(to *Num, n Num) {
		if n.Known() {
			if !to.Known() {
				*to = 0
			}
			*to += n
		}
	}
	workers := map[string]bool{}
	for i := range routers {
		r := &routers[i]
		for _, a := range r.Attention {
			switch a.Severity {
			case Error:
				f.Errors++
			case Warn:
				f.Warnings++
			}
		}
		if r.Link == Down || r.Link == Waiting {
			continue
		}
		f.RoutersUp++
		for _, w := range r.WorkerList {
			if !workers[w.URL] {
				workers[w.URL] = true
				f.Workers++
				f.Ranks += w.DP
			}
		}
		add(&f.Requests, r.Traffic.RequestRate)
		add(&f.PromptTokensPerSecond, r.Traffic.PromptRate)
		add(&f.CompletionTokensPerSecond, r.Traffic.CompletionRate)
		add(&f.Inflight, r.Traffic.Inflight)
		add(&f.Queued, r.Traffic.Queued)
	}
	return v
}
