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

// Sample is one answer of a router, or the reason why it is missing.
type Sample struct {
	Snapshot *admin.Snapshot
	// Prefixes are the most used runs below the root of the index, when they were requested;
	// PrefixesAsked says that they were.
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
	decisions       Decisions

	// History of figures for graphs, by rank label.
	history map[string]*Series
	total   *Series
}

// NewBuilder is a builder for the router at url.
func NewBuilder(url string) *Builder {
	r := Router{URL: url, Link: Waiting}
	unknown(&r)
	return &Builder{
		router: r, order: map[string]int{}, seen: map[string]time.Time{}, history: map[string]*Series{}, total: NewSeries(),
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
	b.derive(&snap.Status)
	b.fillFleet(snap)
	b.router.Decisions = b.decisions.Parse(snap.Decisions)
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
	r.Link, r.Status = Live, *st
	r.Reasons, r.Models = orEmpty(st.Reasons), orEmpty(st.Models)
	r.UptimeSeconds = Num(math.Max(0, st.Now.Sub(st.Started).Seconds()))
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
				q.queries, q.hits, q.external, q.loadAt = Figure(e.PrefixQueries).F(), Figure(e.PrefixHits).F(), Figure(e.ExternalHits).F(), e.At
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

// derive makes rates, shares and recent counts of the answers that are kept.
func (b *Builder) derive(st *admin.Status) {
	t, x, v := &st.Traffic, &st.Index, &b.router.Derived
	v.HottestShare, v.HottestPrefix = b.hot.share(), b.hot.name()

	now, was, old := &b.points[len(b.points)-1], b.since(rateWindow), b.since(troubleWindow)
	seconds := now.at.Sub(was.at).Seconds()
	v.RateWindow, v.TroubleWindow, v.CPU = Unknown, Unknown, Unknown
	rate := func(from, to uint64) Num {
		if seconds <= 0 {
			return Unknown
		}
		return Num(grew(from, to) / seconds)
	}
	if seconds > 0 {
		v.RateWindow, v.TroubleWindow = Num(seconds), Num(now.at.Sub(old.at).Seconds())
		v.CPU = Num(math.Max(0, now.cpu-was.cpu) / seconds)
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
	v.StoredRate, v.RemovedRate, v.LookupRate = rate(was.index.Stored, x.Stored), rate(was.index.Removed, x.Removed), rate(was.index.Lookups, x.Lookups)

	o := &old.traffic
	requests := grew(o.Requests, t.Requests)
	v.RecentFailed, v.RecentFallbacks, v.RecentRetries, v.RecentRecomputes = Num(grew(o.Failed, t.Failed)), Num(grew(o.Fallbacks, t.Fallbacks)), Num(grew(o.Retries, t.Retries)), Num(grew(o.Recomputes, t.Recomputes))
	v.FallbackShare = share(float64(v.RecentFallbacks), grew(o.Remote, t.Remote)+float64(v.RecentFallbacks))
	v.RetryShare = share(float64(v.RecentRetries), requests)
	v.RecentRefused, v.RecentOrphaned = Num(grew(old.index.Refused, x.Refused)), Num(grew(old.index.Orphaned, x.Orphaned))
	if seconds <= 0 {
		for _, n := range []*Num{&v.LocalShare, &v.RemoteShare, &v.HitShare, &v.PredictedShare, &v.RecentFailed, &v.RecentFallbacks, &v.RecentRetries, &v.RecentRecomputes, &v.FallbackShare, &v.RetryShare, &v.RecentRefused, &v.RecentOrphaned} {
			*n = Unknown
		}
	}
}

// fillFleet describes workers and ranks, worst ranks first.
func (b *Builder) fillFleet(snap *admin.Snapshot) {
	now, was, old := &b.points[len(b.points)-1], b.since(rateWindow), b.since(troubleWindow)
	r := &b.router
	r.WorkerList = make([]admin.Worker, 0, len(snap.Workers))
	r.Ranks = make([]Rank, 0, snap.Status.Workers.Ranks)
	events, gaps := 0.0, 0.0
	for i := range snap.Workers {
		w := &snap.Workers[i]
		own := *w
		own.Models, own.Ranks = orEmpty(w.Models), nil
		r.WorkerList = append(r.WorkerList, own)
		for j := range w.Ranks {
			k := rankView(w, &w.Ranks[j], now, was, old)
			if k.EventRate.Known() {
				events += k.EventRate.F()
			}
			if k.RecentGaps.Known() {
				gaps += k.RecentGaps.F()
			}
			r.Ranks = append(r.Ranks, k)
		}
	}
	r.EventRate, r.RecentGaps = Unknown, Unknown
	if r.RateWindow.Known() {
		r.EventRate, r.RecentGaps = Num(events), Num(gaps)
	}
	if out := outputRate(r.Ranks); out.Known() {
		r.CompletionRate = out
	}
	r.EnginePromptRate, r.EngineHitShare = engineFlow(r.Ranks)
	judgeRanks(r.Ranks, r.WorkerList, &b.cold)
	b.sort(r.Ranks)
}

// outputRate adds up the tokens that the router counted of each rank that decodes, which
// does not depend on usage that clients request; unknown where it counted none yet.
func outputRate(ranks []Rank) Num {
	sum := Unknown
	for i := range ranks {
		if k := &ranks[i]; k.Role != "prefill" && k.OutputRate != nil {
			if !sum.Known() {
				sum = 0
			}
			sum += Num(*k.OutputRate)
		}
	}
	return sum
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

func rankView(w *admin.Worker, k *admin.Rank, now, was, old *point) Rank {
	v := Rank{Rank: *k}
	unknown(&v.RankDerived)
	if len(w.Models) > 0 {
		v.Model = w.Models[0]
	}
	age := func(since time.Time) Num {
		if since.IsZero() {
			return Unknown
		}
		return Num(math.Max(0, now.at.Sub(since).Seconds()))
	}
	v.FeedAge, v.FeedFor = age(k.Feed.LastAt), age(k.Feed.Since)
	if e := k.Engine; e != nil {
		v.LifeHit = share(Figure(e.PrefixHits).F(), Figure(e.PrefixQueries).F())
		v.LoadAge = age(e.At)
		if v.KVUsage().Known() && k.CapacityBlock > 0 {
			v.EngineUsed = Num(math.Round(v.KVUsage().F() * float64(k.CapacityBlock)))
			v.BlockDiff = v.EngineUsed - Num(k.DecodeBlocks)
		}
		if v.Running().Known() && v.Waiting().Known() {
			v.RequestDiff = v.Running() + v.Waiting() - Num(k.ActiveRequests)
		}
	}
	p := now.ranks[k.Label]
	if q, ok := was.ranks[k.Label]; ok && now != was {
		seconds := now.at.Sub(was.at).Seconds()
		v.RequestRate = Num(grew(q.requests, p.requests) / seconds)
		v.EventRate, v.BlockRate = Num(grew(q.events, p.events)/seconds), Num(grew(q.blocks, p.blocks)/seconds)
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
		v.RecentFailures, v.RecentGaps, v.RecentLost = Num(grew(q.failures, p.failures)), Num(grew(q.gaps, p.gaps)), Num(grew(q.lost, p.lost))
		v.RecentDropped = Num(grew(q.dropped, p.dropped))
	}
	return v
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
	r := new(receipt.Receipt)
	if json.Unmarshal(raw, r) != nil || r.ID == "" {
		return Decision{}, false
	}
	return Decision{r, raw}, true
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
		add(&f.Requests, r.RequestRate)
		add(&f.PromptTokensPerSecond, r.PromptRate)
		add(&f.CompletionTokensPerSecond, r.CompletionRate)
		add(&f.Inflight, Reported(r, r.Traffic.Inflight))
		add(&f.Queued, Reported(r, r.Traffic.Queued))
	}
	return v
}
