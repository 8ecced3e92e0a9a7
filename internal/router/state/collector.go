package state

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/kvfeed"
	"github.com/dynctl/dynctl/internal/workers"
)

var feedStates = []kvfeed.State{kvfeed.Connecting, kvfeed.Live, kvfeed.InGap, kvfeed.Replaying, kvfeed.Verifying, kvfeed.Stale, kvfeed.Unknown}

var (
	rankLabels = []string{"worker", "dp_rank"}
	descs      = struct {
		inflight, queued, health, draining, tokenizer, active, prefill, blocks, index, capacity, feed, lag, gaps, lost, dropped, orphans, restarts, kinds, refused,
		unreadable, connects, sources, replays, overrun, foreign, disagree, unindexed, bound, unrouted, publishers,
		running, waiting, usage, memberships, distinct, bytes, lookups, guesses, threshold, revision, open, doubles, ready *prometheus.Desc
		bodies, bodyLimit, recordFailed, recordBytes, recorded, unrecorded *prometheus.Desc
	}{
		inflight:    desc("inflight_requests", "Requests in progress."),
		queued:      desc("queued_requests", "Requests that wait for a place in progress."),
		bodies:      desc("body_memory_bytes", "Memory that the bodies of requests take."),
		bodyLimit:   desc("body_memory_limit_bytes", "Memory that the bodies of requests may take."),
		health:      desc("worker_health", "1 for the state that the worker is in.", "worker", "role", "state"),
		draining:    desc("worker_draining", "Whether the worker drains.", "worker"),
		tokenizer:   desc("worker_tokenizer_rests", "Whether the worker's /tokenize failed so often in a row that only trials ask it.", "worker"),
		active:      desc("rank_active_requests", "The router's own count of requests on the rank.", rankLabels...),
		prefill:     desc("rank_prefill_tokens", "Uncached prompt tokens on the rank without a first token yet.", rankLabels...),
		blocks:      desc("rank_decode_blocks", "KV blocks that the rank's requests hold, by the router's account.", rankLabels...),
		index:       desc("rank_index_blocks", "Blocks that the index says the rank holds.", rankLabels...),
		capacity:    desc("rank_capacity_blocks", "Blocks that the rank has room for, in router blocks.", rankLabels...),
		feed:        desc("feed_state", "1 for the state that the rank's KV event feed is in.", "worker", "dp_rank", "state"),
		lag:         desc("feed_lag_seconds", "Receipt minus publication of the newest batch that was not replayed; none where the publisher has no clock.", rankLabels...),
		gaps:        desc("feed_gaps_total", "Gaps in the rank's batch numbers.", rankLabels...),
		dropped:     desc("feed_dropped_total", "Times that the rank's entries in the index were dropped because a connection, a batch or its sense was lost.", rankLabels...),
		lost:        desc("feed_lost_batches_total", "Batches that no replay brought back.", rankLabels...),
		orphans:     desc("feed_orphan_blocks_total", "Blocks whose parent the rank does not hold.", rankLabels...),
		restarts:    desc("feed_restarts_total", "Restarts of the rank's publisher.", rankLabels...),
		refused:     desc("feed_refused_blocks_total", "Blocks of the rank that found no room in the index.", rankLabels...),
		unreadable:  desc("feed_decode_errors_total", "Batches and messages of the rank's publisher that cannot be read.", rankLabels...),
		connects:    desc("feed_connect_errors_total", "Connections to the rank's publisher that failed.", rankLabels...),
		sources:     desc("feed_source_errors_total", "Questions to the worker where the rank publishes that failed.", rankLabels...),
		replays:     desc("feed_replay_errors_total", "Replays of the rank's publisher that failed.", rankLabels...),
		overrun:     desc("feed_overrun_batches_total", "Batches dropped because too many waited for a replay, which is asked for them again.", rankLabels...),
		foreign:     desc("feed_foreign_batches_total", "Batches dropped because a second publisher claims the rank.", rankLabels...),
		disagree:    desc("feed_rank_disagree_batches_total", "Batches that claim another data-parallel rank than that of the socket, which counts.", rankLabels...),
		unindexed:   desc("feed_unindexed_blocks_total", "Blocks of the rank that the index cannot hold: they came without token ids, with more or fewer than fit, or when too many blocks of several parts were held.", rankLabels...),
		bound:       desc("feed_listener_bound", "Whether publishers can dial into the listener.", "endpoint"),
		unrouted:    desc("feed_listener_unrouted_messages_total", "Messages at the listener that belong to no rank, or to several, and were dropped.", "endpoint"),
		publishers:  desc("feed_listener_publishers_total", "Publishers that dialled into the listener, by what came of it: accepted, refused (too many are connected), or failed (the protocol was broken).", "endpoint", "result"),
		kinds:       desc("feed_unknown_cache_kind", "1 for each cache kind of the rank's engine that this version does not know.", "worker", "dp_rank", "kind"),
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

		recordFailed: desc("recording_failed", "Whether the recording of this process has ended with an error."),
		recordBytes:  desc("recording_bytes_total", "Bytes recorded, before compression."),
		recorded:     desc("recording_records_total", "Records that were made."),
		unrecorded:   desc("recording_dropped_total", "Records that were lost because the file could not take them in time."),
	}
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("dynctl_"+name, help, labels, nil)
}

// count is a counter as a metric.
type count struct {
	desc   *prometheus.Desc
	n      uint64
	labels []string // none where the caller has them
}

func listenerCounters(l *kvfeed.ListenerStatus) []count {
	return []count{
		{descs.unrouted, l.Unrouted, []string{l.Endpoint}},
		{descs.publishers, l.Accepted, []string{l.Endpoint, "accepted"}},
		{descs.publishers, l.Refused, []string{l.Endpoint, "refused"}},
		{descs.publishers, l.Failed, []string{l.Endpoint, "failed"}},
	}
}

func feedCounters(f *admin.Feed) []count {
	return []count{
		{desc: descs.gaps, n: f.Gaps},
		{desc: descs.dropped, n: f.Dropped},
		{desc: descs.lost, n: f.Lost},
		{desc: descs.orphans, n: f.Orphans},
		{desc: descs.restarts, n: f.Restarts},
		{desc: descs.refused, n: f.Refused},
		{desc: descs.unreadable, n: f.Errors},
		{desc: descs.connects, n: f.ConnectErrors},
		{desc: descs.sources, n: f.SourceErrors},
		{desc: descs.replays, n: f.ReplayErrors},
		{desc: descs.overrun, n: f.Overrun},
		{desc: descs.foreign, n: f.Foreign},
		{desc: descs.disagree, n: f.RankDisagree},
		{desc: descs.unindexed, n: f.Unindexed},
	}
}

// Describe implements prometheus.Collector: the state is unchecked, since
// its series follow the fleet.
func (s *State) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector with the gauges that are read when the
// page is asked for.
func (s *State) Collect(ch chan<- prometheus.Metric) {
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
	gauge(descs.inflight, float64(s.Gate.Inflight()))
	gauge(descs.queued, float64(s.Gate.Queued()))
	gauge(descs.bodies, float64(s.Bodies.Used()))
	gauge(descs.bodyLimit, float64(s.Bodies.Limit()))
	ix := s.Index.Stats()
	gauge(descs.memberships, float64(ix.Memberships))
	gauge(descs.distinct, float64(ix.Blocks))
	gauge(descs.bytes, float64(ix.Bytes))
	counter(descs.lookups, ix.Lookups)
	gauge(descs.guesses, float64(s.Guesses.Blocks()))
	c := s.Settings()
	gauge(descs.threshold, float64(c.Threshold))
	gauge(descs.revision, float64(c.Revision))
	gauge(descs.open, float64(s.Ledger.Total().Requests))
	counter(descs.doubles, s.Ledger.DoubleReleases())
	ok, _ := s.Ready()
	gauge(descs.ready, flag(ok))
	if rec := s.Recorder(); rec != nil {
		gauge(descs.recordFailed, flag(rec.Error != ""))
		counter(descs.recordBytes, uint64(max(0, rec.Bytes)))
		counter(descs.recorded, rec.Records)
		counter(descs.unrecorded, rec.Dropped)
	}
	for _, l := range s.Feeds.Listeners() {
		gauge(descs.bound, flag(l.Bound != ""), l.Endpoint)
		for _, c := range listenerCounters(&l) {
			counter(c.desc, c.n, c.labels...)
		}
	}
	for _, w := range s.Workers(time.Now()).Workers {
		for _, h := range []workers.Health{workers.Unknown, workers.Healthy, workers.Unhealthy, workers.Ejected, workers.Asleep} {
			gauge(descs.health, flag(h.String() == w.Health), w.Name, w.Role, h.String())
		}
		gauge(descs.draining, flag(w.Draining), w.Name)
		gauge(descs.tokenizer, flag(s.TokenizerRests(w.Name)), w.Name)
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
				if k.Feed.Lag != nil {
					gauge(descs.lag, *k.Feed.Lag, l...)
				}
				for _, c := range feedCounters(&k.Feed) {
					counter(c.desc, c.n, l...)
				}
				for _, kind := range k.Feed.UnknownKinds {
					gauge(descs.kinds, 1, w.Name, l[1], kind)
				}
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
