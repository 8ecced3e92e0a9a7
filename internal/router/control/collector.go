package control

import (
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/cause"
	"github.com/dynctl/dynctl/internal/workers"
)

// A metric is one figure of a subject: the router, a rank, a rank's feed.
type metric[S any] struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	// read is NaN where the subject has no such figure.
	read func(S) float64
}

const (
	gauge   = prometheus.GaugeValue
	counter = prometheus.CounterValue
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("dynctl_"+name, help, labels, nil)
}

var rankLabels = []string{"worker", "dp_rank"}

var routerMetrics = []metric[*State]{
	{desc("inflight_requests", "Requests in progress."), gauge, func(s *State) float64 { return float64(s.Limiter.Inflight()) }},
	{desc("queued_requests", "Requests that wait for a slot in progress, or for a rank."), gauge, func(s *State) float64 { return float64(s.queued()) }},
	{desc("body_memory_bytes", "Memory that the bodies of requests take, and what is kept of streams that may be continued."), gauge, func(s *State) float64 { return float64(s.Bodies.Used()) }},
	{desc("body_memory_limit_bytes", "Limit of the memory of request bodies and kept streams (limits.body_memory)."), gauge, func(s *State) float64 { return float64(s.Bodies.Limit()) }},
	{desc("legs_in_progress", "Requests to workers in progress: the legs of clients' requests."), gauge, func(s *State) float64 { return float64(s.Legs.Used()) }},
	{desc("legs_limit", "Requests to workers that may be in progress."), gauge, func(s *State) float64 { return float64(s.Legs.Limit()) }},
	{desc("approx_blocks", "(block, rank) pairs of approximate routing."), gauge, func(s *State) float64 { return float64(s.Predicted.Blocks()) }},
	{desc("ledger_open_requests", "Reservations in the ledger."), gauge, func(s *State) float64 { return float64(s.Ledger.Total().Requests) }},
	{desc("ledger_double_releases_total", "Reservations released twice: each is a defect of the router."), counter, func(s *State) float64 { return float64(s.Ledger.DoubleReleases()) }},
	{desc("client_connections_refused_total", "Connections refused because their address has limits.client_connections."), counter, func(s *State) float64 { return float64(s.Addresses.Refused()) }},
	{desc("routing_costs_refused_total", "Times that nothing was learned of a request's choice, a leg or its answer, because costs are learned of 64 models already."), counter, func(s *State) float64 { return float64(s.CostsRefused()) }},
	{desc("api_keys", "API keys in force; none without a file of them."), gauge, func(s *State) float64 { n := s.Keys(); return known(&n, n >= 0) }},
	{desc("ready", "Whether requests can be served."), gauge, func(s *State) float64 { ok, _ := s.Ready(); return flag(ok) }},
}

var settingMetrics = []metric[Configured]{
	{desc("routing_threshold_tokens", "The fixed threshold in force; none with a threshold that is auto."), gauge, func(c Configured) float64 { n := float64(c.Threshold); return known(&n, !c.Auto) }},
	{desc("config_revision", "The configuration in force."), gauge, func(c Configured) float64 { return float64(c.Revision) }},
}

var indexMetrics = []metric[kvindex.Stats]{
	{desc("index_memberships", "(block, rank) pairs in the index."), gauge, func(x kvindex.Stats) float64 { return float64(x.Memberships) }},
	{desc("index_blocks", "Distinct blocks in the index."), gauge, func(x kvindex.Stats) float64 { return float64(x.Blocks) }},
	{desc("index_bytes", "Memory of the index."), gauge, func(x kvindex.Stats) float64 { return float64(x.Bytes) }},
	{desc("index_lookups_total", "Lookups of cached prefixes in the index."), counter, func(x kvindex.Stats) float64 { return float64(x.Lookups) }},
}

var recorderMetrics = []metric[*admin.Recorder]{
	{desc("recording_failed", "Whether the recording of this process has ended with an error."), gauge, func(r *admin.Recorder) float64 { return flag(r.Error != "") }},
	{desc("recording_bytes_total", "Bytes recorded, before compression."), counter, func(r *admin.Recorder) float64 { return float64(max(0, r.Bytes)) }},
	{desc("recording_records_total", "Records that were made."), counter, func(r *admin.Recorder) float64 { return float64(r.Records) }},
	{desc("recording_dropped_total", "Records that were lost because the file could not take them in time."), counter, func(r *admin.Recorder) float64 { return float64(r.Dropped) }},
}

var kubernetesMetrics = []metric[*admin.Kubernetes]{
	{desc("kubernetes_connected", "Whether the API server answers all watches; while it does not, the workers stay as they were."), gauge, func(k *admin.Kubernetes) float64 { return flag(k.Connected) }},
	{desc("kubernetes_watch_failures_total", "Requests to the API server that failed or were refused."), counter, func(k *admin.Kubernetes) float64 { return float64(k.Failures) }},
	{desc("kubernetes_pods", "Pods, or Services, that the selectors find."), gauge, func(k *admin.Kubernetes) float64 { return float64(k.Pods) }},
	{desc("kubernetes_waiting_pods", "Pods without an address yet, or Services without a pod."), gauge, func(k *admin.Kubernetes) float64 { return float64(k.Waiting) }},
	{desc("kubernetes_left_out_pods", "Pods, or Services, that the selectors find and that are no workers; the status shows why."), gauge, func(k *admin.Kubernetes) float64 { return float64(k.LeftOutCount) }},
}

var replicasMetrics = []metric[*admin.Replicas]{
	{desc("replicas_live", "Other routers that share their load with this one."), gauge, func(r *admin.Replicas) float64 { return float64(r.Live) }},
	{desc("replicas_ignored_ranks", "Ranks whose load from other routers is ignored, because their engines report no request."), gauge, func(r *admin.Replicas) float64 { return float64(len(r.Ignored)) }},
	{desc("replicas_send_failures_total", "Messages to other routers that the transport did not take."), counter, func(r *admin.Replicas) float64 { return float64(r.Failed) }},
}

var replicaMetrics = []metric[*admin.Replica]{
	{desc("replica_up", "Whether the other router's load counts: it was heard in the last second.", "replica"), gauge, func(r *admin.Replica) float64 { return flag(r.State == "live") }},
	{desc("replica_silent_seconds", "Time since the newest message of the other router.", "replica"), gauge, func(r *admin.Replica) float64 { return r.SilentMS / 1000 }},
	{desc("replica_settings_differ", "Whether the other router has other settings.", "replica"), gauge, func(r *admin.Replica) float64 { return flag(r.Differs != "") }},
	{desc("replica_gaps_total", "Gaps in the other router's messages since its start.", "replica"), counter, func(r *admin.Replica) float64 { return float64(r.Gaps) }},
}

// strayMetrics are those of messages that brought no load, by the value of their label.
var strayMetrics = map[string][]metric[*admin.Replicas]{
	"other_fleet":      {{stray, counter, func(r *admin.Replicas) float64 { return float64(r.OtherFleet) }}},
	"same_name":        {{stray, counter, func(r *admin.Replicas) float64 { return float64(r.SameName) }}},
	"refused":          {{stray, counter, func(r *admin.Replicas) float64 { return float64(r.Refused) }}},
	"repeated":         {{stray, counter, func(r *admin.Replicas) float64 { return float64(r.Repeated) }}},
	"earlier_process":  {{stray, counter, func(r *admin.Replicas) float64 { return float64(r.Earlier) }}},
	"too_many_routers": {{stray, counter, func(r *admin.Replicas) float64 { return float64(r.TooMany) }}},
}

// copiedMetrics are those of the ranks with which the index began, by the value of their label.
var copiedMetrics = map[string][]metric[*admin.IndexCopied]{
	"copied":  {{copied, counter, func(c *admin.IndexCopied) float64 { return float64(c.Ranks) }}},
	"missing": {{copied, counter, func(c *admin.IndexCopied) float64 { return float64(c.Missing) }}},
	"refused": {{copied, counter, func(c *admin.IndexCopied) float64 { return float64(c.Refused) }}},
}

var copied = desc("replicas_index_ranks_total", "Ranks of the index at the start, by whether their blocks were copied from another router.", "result")

var stray = desc("replicas_ignored_messages_total", "Messages of other routers that were ignored, by reason.", "reason")

var listenerMetrics = []metric[*kvfeed.ListenerStatus]{
	{desc("feed_listener_bound", "Whether publishers can connect to the listener.", "endpoint"), gauge, func(l *kvfeed.ListenerStatus) float64 { return flag(l.Bound != "") }},
	{desc("feed_listener_unrouted_messages_total", "Messages at the listener that belong to no rank, or to several, and were dropped.", "endpoint"), counter, func(l *kvfeed.ListenerStatus) float64 { return float64(l.Unrouted) }},
}

// publisherMetrics are those of a listener by the value of their last label.
var publisherMetrics = map[string][]metric[*kvfeed.ListenerStatus]{
	"accepted": {{publishers, counter, func(l *kvfeed.ListenerStatus) float64 { return float64(l.Accepted) }}},
	"refused":  {{publishers, counter, func(l *kvfeed.ListenerStatus) float64 { return float64(l.Refused) }}},
	"failed":   {{publishers, counter, func(l *kvfeed.ListenerStatus) float64 { return float64(l.Failed) }}},
}

var rankMetrics = []metric[*admin.Rank]{
	{desc("rank_active_requests", "The router's own count of requests on the rank.", rankLabels...), gauge, func(k *admin.Rank) float64 { return float64(k.ActiveRequests) }},
	{desc("rank_prefill_tokens", "Uncached prompt tokens on the rank without a first token yet.", rankLabels...), gauge, func(k *admin.Rank) float64 { return float64(k.PrefillTokens) }},
	{desc("rank_decode_blocks", "KV blocks that the rank's requests hold, as the router counts them.", rankLabels...), gauge, func(k *admin.Rank) float64 { return float64(k.DecodeBlocks) }},
	{desc("rank_streams_waiting_to_move", "Streams whose engine broke off and whose rest waits for a slot on the rank (continue.per_rank).", rankLabels...), gauge, func(k *admin.Rank) float64 { return float64(*k.Moves.Waiting) }},
	{desc("rank_index_blocks", "Blocks of the rank in the index.", rankLabels...), gauge, func(k *admin.Rank) float64 { return float64(k.IndexBlocks) }},
	{desc("rank_ttft_seconds", "Median time to the first token of the rank's legs in the last seconds, as the router measured it.", rankLabels...), gauge, func(k *admin.Rank) float64 { return seconds(k.TTFT) }},
	{desc("rank_itl_seconds", "Median time between tokens of the rank in the last seconds, as the router measured it.", rankLabels...), gauge, func(k *admin.Rank) float64 { return seconds(k.ITL) }},
	{desc("rank_output_tokens_per_second", "Tokens that came from the rank in the last seconds, as the router counted them.", rankLabels...), gauge, func(k *admin.Rank) float64 { return known(k.OutputRate, k.OutputRate != nil) }},
	{desc("rank_slow", "Whether the rank is slow against its peers; none while too little is known of it or of them.", rankLabels...), gauge, func(k *admin.Rank) float64 {
		slow := flag(k.Slow != nil)
		return known(&slow, k.SpeedKnown)
	}},
	{desc("rank_capacity_blocks", "Blocks that the rank has room for, in router blocks.", rankLabels...), gauge, func(k *admin.Rank) float64 { return known(&k.CapacityBlock, k.CapacityBlock > 0) }},
}

var engineMetrics = []metric[*admin.EngineLoad]{
	{desc("engine_running_requests", "Running requests, as the engine reports them.", rankLabels...), gauge, func(e *admin.EngineLoad) float64 { return known(e.Running, e.Running != nil) }},
	{desc("engine_waiting_requests", "Waiting requests, as the engine reports them.", rankLabels...), gauge, func(e *admin.EngineLoad) float64 { return known(e.Waiting, e.Waiting != nil) }},
	{desc("engine_kv_usage_ratio", "Used share of the KV cache, as the engine reports it.", rankLabels...), gauge, func(e *admin.EngineLoad) float64 { return known(e.KVUsage, e.KVUsage != nil) }},
}

var feedMetrics = []metric[*admin.Feed]{
	{desc("feed_lag_seconds", "Receipt minus publication of the newest batch that was not replayed; none where the publisher has no clock.", rankLabels...), gauge, func(f *admin.Feed) float64 { return known(f.Lag, f.Lag != nil) }},
	{desc("feed_gaps_total", "Gaps in the rank's batch numbers.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.Gaps) }},
	{desc("feed_dropped_total", "Times that the rank's entries in the index were dropped because a connection or a batch was lost, or a batch made no sense.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.Dropped) }},
	{desc("feed_lost_batches_total", "Batches that no replay brought back.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.Lost) }},
	{desc("feed_orphan_blocks_total", "Blocks whose parent the rank does not hold.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.Orphans) }},
	{desc("feed_restarts_total", "Restarts of the rank's publisher.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.Restarts) }},
	{desc("feed_refused_blocks_total", "Blocks of the rank that found no room in the index.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.Refused) }},
	{desc("feed_decode_errors_total", "Batches and messages of the rank's publisher that cannot be read.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.Errors) }},
	{desc("feed_connect_errors_total", "Connections to the rank's publisher that failed.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.ConnectErrors) }},
	{desc("feed_source_errors_total", "Failed requests to the worker for the address where the rank publishes.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.SourceErrors) }},
	{desc("feed_replay_errors_total", "Replays of the rank's publisher that failed.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.ReplayErrors) }},
	{desc("feed_overrun_batches_total", "Batches dropped because too many waited for a replay, which is requested again.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.Overrun) }},
	{desc("feed_foreign_batches_total", "Batches dropped because a second publisher claims the rank.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.Foreign) }},
	{desc("feed_rank_disagree_batches_total", "Batches that claim another data-parallel rank than that of the socket, which counts.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.RankDisagree) }},
	{desc("feed_copies_implausible", "Whether the router stopped counting copies of the rank's blocks, because its events add up to more copies than its cache can hold.", rankLabels...), gauge, func(f *admin.Feed) float64 { return flag(f.CopiesImplausible) }},
	{desc("feed_hash_differs", "Whether the rank's engine names its blocks differently from the worker's kv_hash and kv_hash_seed.", rankLabels...), gauge, func(f *admin.Feed) float64 { return flag(f.HashDiffers) }},
	{desc("feed_unindexed_blocks_total", "Blocks of the rank that the index cannot hold: they came without token ids, with more or fewer than fit, or when too many blocks of several parts were held.", rankLabels...), counter, func(f *admin.Feed) float64 { return float64(f.Unindexed) }},
}

// Metrics of which a subject has several, or that the router knows of it.
var (
	publishers   = desc("feed_listener_publishers_total", "Publishers that connected to the listener, by result: accepted, refused (too many are connected), or failed (the protocol was broken).", "endpoint", "result")
	health       = desc("worker_health", "1 for the state that the worker is in.", "worker", "role", "state")
	queue        = desc("queue_requests", "Requests that wait for a rank or a worker of the model, or with no model for a slot in progress, by priority; none while no request waits.", "model", "priority")
	timesKnown   = desc("routing_times_known", "With policy kv, whether it compares ranks by time for requests of the model; while the times are unknown, or keep changing, it compares blocks.", "model")
	costsKnown   = desc("routing_costs_known", "With a threshold that is auto, whether costs choose the path for requests of the model; while the costs are unknown, or keep changing, the threshold does.", "model")
	crossing     = desc("routing_crossing_tokens", "With a threshold that is auto, from how many uncached tokens on prompts are cheaper on a prefill rank, by the answers that run on the decode rank and nothing that waits: as learned, and the low and high end of its interval; +Inf beyond all prompts, none while too little is known of a path.", "model", "running", "bound")
	modelActive  = desc("model_active_requests", "Requests in engines that decode, by the model that they serve (its first name), as the router counts them.", "model")
	expires      = desc("certificate_expires_timestamp_seconds", "When the certificate in force ends, of the data plane, the admin API, or the one shown to engines.", "of")
	trouble      = desc("worker_trouble", "Whether a worker that answers has this trouble: failing (a part of its requests), mute (computes, and publishes no KV events), small_cache (against its peers).", "worker", "cause")
	draining     = desc("worker_draining", "Whether the worker drains.", "worker")
	tokenizer    = desc("worker_tokenizer_circuit_open", "Whether the router sends only trials to the worker's /tokenize, because it failed several times in a row.", "worker")
	feedState    = desc("feed_state", "1 for the state that the rank's KV event feed is in.", "worker", "dp_rank", "state")
	tierBlocks   = desc("feed_tier_blocks", "Blocks that the router counts for the rank in a tier outside its device: cpu, disk, remote. Where its events have named any, and the model is not hybrid.", "worker", "dp_rank", "tier")
	cacheGroup   = desc("feed_cache_group", "1 for each cache group of a rank whose events name several.", "worker", "dp_rank", "group", "kind")
	unknownKinds = desc("feed_unknown_cache_kind", "1 for each cache kind of the rank's engine that this version does not know.", "worker", "dp_rank", "kind")
)

var (
	feedStates   = []kvfeed.State{kvfeed.Connecting, kvfeed.Live, kvfeed.InGap, kvfeed.Replaying, kvfeed.Verifying, kvfeed.Stale, kvfeed.Mute, kvfeed.Unknown}
	healthStates = []workers.Health{workers.Unknown, workers.Healthy, workers.Unhealthy, workers.Ejected, workers.Asleep}
)

func flag(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// seconds is a figure in seconds of one in ms that may be unknown.
func seconds(ms *float64) float64 { return known(ms, ms != nil) / 1000 }

func known[N int | int64 | float64](n *N, is bool) float64 {
	if !is {
		return math.NaN()
	}
	return float64(*n)
}

// Describe implements prometheus.Collector: the state is unchecked, since
// its series follow the fleet.
func (s *State) Describe(chan<- *prometheus.Desc) {}

// collect reads what the metrics of one kind of subject say of one.
func collect[S any](ch chan<- prometheus.Metric, list []metric[S], of S, labels ...string) {
	for _, m := range list {
		if v := m.read(of); !math.IsNaN(v) {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, v, labels...)
		}
	}
}

// Collect implements prometheus.Collector with what is read with the page.
func (s *State) Collect(ch chan<- prometheus.Metric) {
	mark := func(d *prometheus.Desc, is bool, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, gauge, flag(is), labels...)
	}
	collect(ch, routerMetrics, s)
	collect(ch, settingMetrics, s.Settings())
	for _, c := range s.Costs() {
		mark(timesKnown, c.TimesKnown, c.Model)
		mark(costsKnown, c.PathsKnown, c.Model)
		for i := range c.Crossings {
			x := &c.Crossings[i]
			if x.Unknown() {
				continue
			}
			for _, at := range []struct {
				name   string
				tokens *int
			}{{"low", x.Low}, {"learned", x.Tokens}, {"high", x.High}} {
				n := math.Inf(1)
				if at.tokens != nil {
					n = float64(*at.tokens)
				}
				ch <- prometheus.MustNewConstMetric(crossing, gauge, n, c.Model, strconv.Itoa(x.Running), at.name)
			}
		}
	}
	collect(ch, indexMetrics, s.Index.Stats())
	if rec := s.Recorder(); rec != nil {
		collect(ch, recorderMetrics, rec)
	}
	for _, q := range s.queues(time.Now()) {
		for band, n := range map[string]int{"high": q.High, "normal": q.Normal, "low": q.Low} {
			ch <- prometheus.MustNewConstMetric(queue, gauge, float64(n), q.Model, band)
		}
	}
	for _, c := range s.Certificates() {
		ch <- prometheus.MustNewConstMetric(expires, gauge, float64(c.Expires.Unix()), c.Of)
	}
	if k := s.Kubernetes(); k != nil {
		collect(ch, kubernetesMetrics, k)
	}
	if r := s.Replicas(); r != nil {
		collect(ch, replicasMetrics, r)
		if c := r.IndexCopied; c != nil {
			for result, list := range copiedMetrics {
				collect(ch, list, c, result)
			}
		}
		for reason, list := range strayMetrics {
			collect(ch, list, r, reason)
		}
		for i := range r.Routers {
			collect(ch, replicaMetrics, &r.Routers[i], r.Routers[i].Name)
		}
	}
	for _, l := range s.Feeds.Listeners() {
		collect(ch, listenerMetrics, &l, l.Endpoint)
		for result, list := range publisherMetrics {
			collect(ch, list, &l, l.Endpoint, result)
		}
	}
	active := map[string]int{}
	defer func() {
		for model, n := range active {
			ch <- prometheus.MustNewConstMetric(modelActive, gauge, float64(n), model)
		}
	}()
	for _, w := range s.Workers(time.Now()).Workers {
		if len(w.Models) > 0 && w.Role != string(workers.Prefill) {
			for i := range w.Ranks {
				active[w.Models[0]] += w.Ranks[i].ActiveRequests
			}
		}
		for _, h := range healthStates {
			mark(health, h.String() == w.Health, w.Name, w.Role, h.String())
		}
		mark(draining, w.Draining, w.Name)
		for _, c := range cause.Kinds() {
			mark(trouble, slices.ContainsFunc(w.Troubles, func(t admin.Trouble) bool { return t.Cause == string(c) }), w.Name, string(c))
		}
		mark(tokenizer, s.TokenizerRests(w.Name), w.Name)
		for i := range w.Ranks {
			k, dp := &w.Ranks[i], strconv.Itoa(w.Ranks[i].DP)
			collect(ch, rankMetrics, k, w.Name, dp)
			if k.Feed.State != "none" {
				for _, st := range feedStates {
					mark(feedState, string(st) == k.Feed.State, w.Name, dp, string(st))
				}
				collect(ch, feedMetrics, &k.Feed, w.Name, dp)
				if k.Feed.TiersReported {
					for tier, n := range map[string]uint32{"cpu": k.Feed.Tiers.CPU, "disk": k.Feed.Tiers.Disk, "remote": k.Feed.Tiers.Remote} {
						ch <- prometheus.MustNewConstMetric(tierBlocks, gauge, float64(n), w.Name, dp, tier)
					}
				}
				for _, g := range k.Feed.CacheGroups {
					mark(cacheGroup, true, w.Name, dp, strconv.Itoa(int(g.Group)), g.Kind)
				}
				for _, kind := range k.Feed.UnknownKinds {
					mark(unknownKinds, true, w.Name, dp, kind)
				}
			}
			if k.Engine != nil {
				collect(ch, engineMetrics, k.Engine, w.Name, dp)
			}
		}
	}
}
