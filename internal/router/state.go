package router

import (
	"math"
	"os"
	"runtime"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/kvfeed"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/workers"
)

// status is the router at one glance.
func (r *Router) status(now time.Time) admin.Status {
	s := r.settings.Load()
	snap := r.registry.Snapshot()
	feeds := r.feedStatus()
	st := admin.Status{
		Schema: admin.Schema, Version: r.opts.Version, Name: r.name, Now: now, Started: r.started,
		ConfigRevision: s.revision, FleetRevision: snap.Revision, Listen: r.name, Models: slices.Clone(snap.Models()),
		Policy: s.Routing.Policy, PrefillPolicy: string(s.routing.prefill), DecodePolicy: string(s.routing.decode),
		ThresholdTokens: s.Routing.Threshold, ThresholdOn: s.Routing.ThresholdOn, PrefillFallback: s.Routing.PrefillFallback,
		Tokenizer: s.Tokens.Tokenizer, Runtime: runtimeFigures(),
	}
	untrusted := 0
	for _, w := range snap.Workers {
		st.Workers.Total++
		switch w.Role {
		case workers.Prefill:
			st.Workers.Prefill++
		case workers.Decode:
			st.Workers.Decode++
		default:
			st.Workers.Aggregated++
		}
		if ok, _ := w.State.Usable(); ok {
			st.Workers.Usable++
		}
		st.Workers.Ranks += len(w.Ranks)
		if st.BlockSizeTokens == 0 {
			st.BlockSizeTokens = s.blockOf(w)
		}
		for _, k := range w.Ranks {
			if f, ok := feeds[k.Slot]; ok && !f.Trusted {
				untrusted++
			}
		}
	}
	st.Traffic = r.traffic.Figures()
	st.Traffic.Inflight, st.Traffic.Queued = r.gate.Inflight(), r.gate.Queued()
	st.Index = r.indexTotals(untrusted)
	l := r.ledger.Total()
	st.Ledger = admin.LedgerTotals{Requests: l.Requests, PrefillTokens: int64(l.PrefillTokens), DecodeBlocks: int64(l.DecodeBlocks), Reservations: int64(l.Requests)}
	st.State, st.Reasons = r.condition(snap, untrusted)
	return st
}

func (r *Router) indexTotals(untrusted int) admin.IndexTotals {
	s := r.index.Stats()
	t := admin.IndexTotals{
		Blocks: s.Blocks, Memberships: s.Memberships, Nodes: s.Nodes, Bytes: s.Bytes, MaxBlocks: s.MaxBlocks,
		Lookups: s.Lookups, Stored: s.Stored, Removed: s.Removed, Orphaned: s.Orphaned, Refused: s.Refused, UntrustedRank: untrusted,
	}
	t.HitShare = r.traffic.HitShare()
	return t
}

// condition sums the router's state up in a word, with the reasons when it is
// not "ready".
func (r *Router) condition(snap *workers.Snapshot, untrusted int) (state string, reasons []string) {
	reasons = []string{}
	decode, prefill, wantPrefill := 0, 0, false
	for _, w := range snap.Workers {
		ok, why := w.State.Usable()
		if !ok {
			c := w.State.Condition()
			if c.Reason != "" && !w.State.Draining() {
				why = c.Reason
			}
			reasons = append(reasons, "worker "+w.Name+" is not usable: "+why)
		}
		wantPrefill = wantPrefill || w.Role.CanPrefill()
		if ok && w.Role.CanDecode() {
			decode++
		}
		if ok && w.Role.CanPrefill() {
			prefill++
		}
	}
	if untrusted > 0 {
		reasons = append(reasons, strconv.Itoa(untrusted)+" rank(s) are routed without cache knowledge because their KV events are not trusted now")
	}
	reasons = append(reasons, r.tokens.state()...)
	for _, label := range r.compute.Alarms() {
		reasons = append(reasons, label+" computes remotely prefilled prompts again")
	}
	switch {
	case r.draining.Load():
		return "draining", append(reasons, "the router drains")
	case decode == 0:
		if time.Since(r.started) < 10*time.Second {
			return "starting", append(reasons, "no worker that can decode is ready yet")
		}
		return "degraded", append(reasons, "no worker that can decode is usable")
	case wantPrefill && prefill == 0:
		return "degraded", append(reasons, "no prefill worker is usable")
	case len(reasons) > 0:
		return "degraded", reasons
	}
	return "ready", reasons
}

// ready reports whether requests can be served, for /readyz.
func (r *Router) ready() (bool, string) {
	if r.draining.Load() {
		return false, "draining"
	}
	for _, w := range r.registry.Snapshot().Workers {
		if ok, _ := w.State.Usable(); ok && w.Role.CanDecode() {
			return true, ""
		}
	}
	return false, "no worker that can decode is usable"
}

func (r *Router) feedStatus() map[uint32]kvfeed.Status {
	out := map[uint32]kvfeed.Status{}
	for _, s := range r.feeds.Status() {
		out[uint32(s.Rank)] = s
	}
	return out
}

// workerList describes the fleet.
func (r *Router) workerList() []admin.Worker {
	snap := r.registry.Snapshot()
	feeds := r.feedStatus()
	s := r.settings.Load()
	out := make([]admin.Worker, 0, len(snap.Workers))
	for _, w := range snap.Workers {
		c := w.State.Condition()
		usable, why := w.State.Usable()
		a := admin.Worker{
			Name: w.Name, URL: w.URL.String(), Engine: string(w.Engine), Version: w.Version, Role: string(w.Role), Connector: string(w.Connector),
			Models: nonNil(w.Models), LoRAs: w.LoRAs, Labels: w.Labels, DP: len(w.Ranks), BlockSizeTokens: w.BlockSize, MaxModelLen: w.MaxModelLen,
			KVBlocks: w.KVBlocks, Source: w.Source, Origin: w.Origin, Health: c.Health.String(), Reason: c.Reason, Since: c.Since,
			Draining: w.State.Draining(), Usable: usable, Conflict: w.Conflict, Ranks: make([]admin.Rank, 0, len(w.Ranks)),
		}
		for _, k := range w.Ranks {
			l := r.ledger.Load(k)
			requests, failures := r.fleet.Counts(k)
			rank := admin.Rank{
				Label: k.Label, Worker: w.Name, DP: k.DP, Slot: k.Slot, Role: string(w.Role), Health: a.Health, Usable: usable, Reason: why,
				ActiveRequests: l.Requests, PrefillTokens: int64(l.PrefillTokens), DecodeBlocks: int64(l.DecodeBlocks),
				Requests: requests, Failures: failures, IndexBlocks: int64(r.residentBlocks(k)), Feed: admin.Feed{State: "none"}, Engine: engineLoad(k.Load()),
			}
			if w.KVBlocks > 0 && w.BlockSize > 0 {
				rank.CapacityBlock = int64(w.KVBlocks) * int64(w.BlockSize) / int64(s.blockOf(w))
			}
			if f, ok := feeds[k.Slot]; ok {
				rank.Feed = admin.Feed{
					State: string(f.State), Trusted: f.Trusted, Reason: f.Reason, Since: f.Since, Endpoint: f.Endpoint,
					LastSeq: uint64(max(0, f.LastSeq)), LastAt: f.LastEvent, Batches: f.Batches, Events: f.Events, Blocks: f.Stored + f.Removed,
					Gaps: f.Gaps, Replayed: f.ReplayedBatches, Restarts: f.Restarts, Errors: f.Unreadable + f.Malformed, Orphans: f.Orphans, Lost: f.Lost, Lag: f.LagSeconds,
				}
			}
			a.Ranks = append(a.Ranks, rank)
		}
		out = append(out, a)
	}
	return out
}

func nonNil(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

func engineLoad(l *workers.Load) *admin.EngineLoad {
	if l == nil {
		return nil
	}
	count := func(n int) *int {
		if n < 0 {
			return nil
		}
		return &n
	}
	figure := func(f float64) *float64 {
		if math.IsNaN(f) || math.IsInf(f, 0) {
			return nil
		}
		return &f
	}
	return &admin.EngineLoad{
		Running: count(l.Running), Waiting: count(l.Waiting), KVUsage: figure(l.KVUsage),
		PrefixQueries: figure(l.PrefixQueries), PrefixHits: figure(l.PrefixHits), ExternalHits: figure(l.ExternalHits), At: l.At,
	}
}

// runtimeFigures reads the process's own figures.
func runtimeFigures() admin.Runtime {
	samples := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/sched/goroutines:goroutines"}}
	metrics.Read(samples)
	f := admin.Runtime{HeapBytes: samples[0].Value.Uint64(), Goroutines: int(samples[1].Value.Uint64()), CPUSeconds: cpuSeconds()}
	if runtime.GOOS == "linux" {
		if raw, err := os.ReadFile("/proc/self/statm"); err == nil {
			if fields := strings.Fields(string(raw)); len(fields) > 1 {
				pages, _ := strconv.ParseUint(fields[1], 10, 64)
				f.RSSBytes = pages * uint64(os.Getpagesize())
			}
		}
		if list, err := os.ReadDir("/proc/self/fd"); err == nil {
			f.OpenFiles = len(list)
		}
	}
	return f
}

// cpuSeconds is the processor time that the process has used.
func cpuSeconds() float64 {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return float64(u.Utime.Sec+u.Stime.Sec) + float64(u.Utime.Usec+u.Stime.Usec)/1e6
}

var feedStates = []kvfeed.State{kvfeed.Connecting, kvfeed.Live, kvfeed.InGap, kvfeed.Replaying, kvfeed.Stale, kvfeed.Unknown}

// stateCollector gives Prometheus the gauges that are read from the router's
// state when the page is asked for.
type stateCollector struct{ r *Router }

var (
	rankLabels = []string{"worker", "dp_rank"}
	descs      = struct {
		inflight, queued, health, draining, active, prefill, blocks, index, capacity, feed, lag, gaps, lost, orphans, restarts,
		running, waiting, usage, memberships, distinct, bytes, lookups, guesses, threshold, revision, open, doubles, ready *prometheus.Desc
	}{
		inflight:    desc("inflight_requests", "Requests in progress."),
		queued:      desc("queued_requests", "Requests that wait for a place in progress."),
		health:      desc("worker_health", "1 for the state that the worker is in.", "worker", "role", "state"),
		draining:    desc("worker_draining", "Whether the worker drains.", "worker"),
		active:      desc("rank_active_requests", "The router's own count of requests on the rank.", rankLabels...),
		prefill:     desc("rank_prefill_tokens", "Uncached prompt tokens on the rank without a first token yet.", rankLabels...),
		blocks:      desc("rank_decode_blocks", "KV blocks that the rank's requests hold, by the router's account.", rankLabels...),
		index:       desc("rank_index_blocks", "Blocks that the index says the rank holds.", rankLabels...),
		capacity:    desc("rank_capacity_blocks", "Blocks that the rank has room for, in router blocks.", rankLabels...),
		feed:        desc("feed_state", "1 for the state that the rank's KV event feed is in.", "worker", "dp_rank", "state"),
		lag:         desc("feed_lag_seconds", "Receipt minus publication of the newest batch.", rankLabels...),
		gaps:        desc("feed_gaps_total", "Gaps in the rank's batch numbers.", rankLabels...),
		lost:        desc("feed_lost_batches_total", "Batches that no replay brought back.", rankLabels...),
		orphans:     desc("feed_orphan_blocks_total", "Blocks whose parent the rank does not hold.", rankLabels...),
		restarts:    desc("feed_restarts_total", "Restarts of the rank's publisher.", rankLabels...),
		running:     desc("engine_running_requests", "Running requests as the engine says.", rankLabels...),
		waiting:     desc("engine_waiting_requests", "Waiting requests as the engine says.", rankLabels...),
		usage:       desc("engine_kv_usage_ratio", "Used share of the KV cache as the engine says.", rankLabels...),
		memberships: desc("index_memberships", "(block, rank) pairs in the index."),
		distinct:    desc("index_blocks", "Distinct blocks in the index."),
		bytes:       desc("index_bytes", "Memory of the index."),
		lookups:     desc("index_lookups_total", "Overlap questions put to the index."),
		guesses:     desc("approx_blocks", "(block, rank) pairs of approximate routing."),
		threshold:   desc("routing_threshold_tokens", "The threshold in force."),
		revision:    desc("config_revision", "The configuration in force."),
		open:        desc("ledger_open_requests", "Reservations in the ledger."),
		doubles:     desc("ledger_double_releases_total", "Reservations released twice: each is a defect of the router."),
		ready:       desc("ready", "Whether requests can be served."),
	}
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("dynctl_"+name, help, labels, nil)
}

// Describe implements prometheus.Collector: the collector is unchecked, since
// its series follow the fleet.
func (c *stateCollector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c *stateCollector) Collect(ch chan<- prometheus.Metric) {
	r := c.r
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	flag := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	gauge(descs.inflight, float64(r.gate.Inflight()))
	gauge(descs.queued, float64(r.gate.Queued()))
	ix := r.index.Stats()
	gauge(descs.memberships, float64(ix.Memberships))
	gauge(descs.distinct, float64(ix.Blocks))
	gauge(descs.bytes, float64(ix.Bytes))
	counter(descs.lookups, ix.Lookups)
	gauge(descs.guesses, float64(r.guesses.Blocks()))
	s := r.settings.Load()
	gauge(descs.threshold, float64(s.Routing.Threshold))
	gauge(descs.revision, float64(s.revision))
	gauge(descs.open, float64(r.ledger.Total().Requests))
	counter(descs.doubles, r.ledger.DoubleReleases())
	ok, _ := r.ready()
	gauge(descs.ready, flag(ok))
	for _, w := range r.workerList() {
		for _, h := range []workers.Health{workers.Unknown, workers.Healthy, workers.Unhealthy, workers.Ejected, workers.Asleep} {
			gauge(descs.health, flag(h.String() == w.Health), w.Name, w.Role, h.String())
		}
		gauge(descs.draining, flag(w.Draining), w.Name)
		for i := range w.Ranks {
			k := &w.Ranks[i]
			l := []string{w.Name, strconv.Itoa(k.DP)}
			gauge(descs.active, float64(k.ActiveRequests), l...)
			gauge(descs.prefill, float64(k.PrefillTokens), l...)
			gauge(descs.blocks, float64(k.DecodeBlocks), l...)
			gauge(descs.index, float64(k.IndexBlocks), l...)
			if k.CapacityBlock > 0 {
				gauge(descs.capacity, float64(k.CapacityBlock), l...)
			}
			if k.Feed.State != "none" {
				for _, st := range feedStates {
					gauge(descs.feed, flag(string(st) == k.Feed.State), w.Name, l[1], string(st))
				}
				if k.Feed.Batches > 0 {
					gauge(descs.lag, k.Feed.Lag, l...)
				}
				counter(descs.gaps, k.Feed.Gaps, l...)
				counter(descs.lost, k.Feed.Lost, l...)
				counter(descs.orphans, k.Feed.Orphans, l...)
				counter(descs.restarts, k.Feed.Restarts, l...)
			}
			if e := k.Engine; e != nil {
				for _, g := range []struct {
					d *prometheus.Desc
					v *int
				}{{descs.running, e.Running}, {descs.waiting, e.Waiting}} {
					if g.v != nil {
						gauge(g.d, float64(*g.v), l...)
					}
				}
				if e.KVUsage != nil {
					gauge(descs.usage, *e.KVUsage, l...)
				}
			}
		}
	}
}

// IndexedBlocks are the sequence hashes of the blocks that the index holds of
// the rank with a label, in no order: what an audit compares with the engine's
// own cache. ok is false for a rank that has no place in the index.
func (r *Router) IndexedBlocks(label string) (seqs []uint64, ok bool) {
	for _, k := range r.registry.Snapshot().Ranks {
		if k.Label != label {
			continue
		}
		err := r.index.RankBlocks(kvindex.Rank(k.Slot), func(seq, _ uint64) bool {
			seqs = append(seqs, seq)
			return true
		})
		return seqs, err == nil
	}
	return nil, false
}
