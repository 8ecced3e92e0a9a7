// Package telemetry is what the router reports to machines: Prometheus
// metrics with bounded labels, and OpenTelemetry spans when a collector is
// configured.
package telemetry

import (
	"net/http"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// maxLabelValues bounds the distinct values of a label that clients can
// choose (the model), or that a file of keys has (the tenant); further ones are counted as "other".
const maxLabelValues = 256

// Metrics holds the router's counters and histograms. All names begin with
// "dynctl_". Gauges that can be read from the router's state are collected at
// scrape time by what Collect was given.
type Metrics struct {
	registry *prometheus.Registry

	requests   *counters   // endpoint, model, path, code
	duration   *histograms // model, path
	ttft       *histograms // model, path
	itl        *histograms // model
	stage      *histograms // stage
	decisions  *counters   // path, reason
	fallbacks  *counters   // reason
	oddParams  *counters   // worker
	legs       *counters   // leg, worker, outcome
	legTime    *histograms // leg, worker
	legTTFB    *histograms // leg, worker
	retries    *counters   // leg, reason
	aborts     *counters   // reason
	recompute  *counters   // worker
	events     *counters   // kind, severity
	tokens     *counters   // model, tenant, kind, source
	tokenize   *counters   // source
	predicted  *counters   // kind: predicted, actual
	reloads    *counters   // result
	keys       *counters   // result
	certs      *counters   // of, result
	handshakes *counters   // of
	excluded   *counters   // phase, reason
	rejections *counters   // reason
	faulty     *counters
	continued  *counters // worker, reason
	refused    *counters // why
	unkept     *counters

	// Of fixed labels, resolved at the start.
	stages                        map[string]prometheus.Observer
	cachedPredicted, cachedActual prometheus.Counter

	models, tenants bounded

	making    sync.Mutex                         // orders the making of series with their end
	ofWorkers []interface{ drop(worker string) } // all families that have the label worker
}

type (
	counters   = family[prometheus.Counter]
	histograms = family[prometheus.Observer]
)

type bounded struct {
	mu   sync.Mutex
	seen map[string]struct{}
}

func (b *bounded) value(v string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.seen[v]; ok {
		return v
	}
	if len(b.seen) >= maxLabelValues {
		return "other"
	}
	if b.seen == nil {
		b.seen = map[string]struct{}{}
	}
	b.seen[v] = struct{}{}
	return v
}

var (
	latencyBuckets = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}
	itlBuckets     = []float64{.001, .0025, .005, .01, .02, .03, .05, .075, .1, .2, .5, 1, 5}
	stageBuckets   = []float64{1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2, .1, 1}
)

// New makes the metrics with a registry of their own. The build info is that of this binary.
// here reports whether a worker is in the fleet: what is counted of one that has left has no
// series. It must know of a worker's end before ForgetWorker is called; nil stands for a fleet
// that no worker leaves.
func New(version, revision string, here func(worker string) bool) *Metrics {
	reg := prometheus.NewRegistry()
	m := &Metrics{registry: reg}
	counter := func(name, help string, labels ...string) *counters {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dynctl_" + name, Help: help}, labels)
		reg.MustRegister(c)
		return enrol(m, here, labels, &counters{vec: c.MetricVec, with: c.WithLabelValues})
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *histograms {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "dynctl_" + name, Help: help, Buckets: buckets}, labels)
		reg.MustRegister(h)
		return enrol(m, here, labels, &histograms{vec: h.MetricVec, with: h.WithLabelValues})
	}
	m.requests = counter("requests_total", "Requests answered, by the path that was taken and the status that the client saw (499: the client left).", "endpoint", "model", "path", "code")
	m.duration = histogram("request_duration_seconds", "Time from the request's first byte to the answer's last.", latencyBuckets, "model", "path")
	m.ttft = histogram("ttft_seconds", "Time from the request's first byte to the first token sent on to the client.", latencyBuckets, "model", "path")
	m.itl = histogram("itl_seconds", "Mean gap between streamed events of one answer.", itlBuckets, "model")
	m.stage = histogram("stage_seconds", "Time that the router itself spent in one stage of a request; queue is that of requests that waited for a slot in progress, move that of streams that waited to continue elsewhere, held that of decode legs until the request of their prefill leg was written.", stageBuckets, "stage")
	m.decisions = counter("decisions_total", "Routing decisions by path and reason.", "path", "reason")
	m.oddParams = counter("transfer_params_unexpected_total", "Remote prefills whose transfer parameters were used although a part of them was unexpected.", "worker")
	m.fallbacks = counter("prefill_fallbacks_total", "Requests that should have been prefilled remotely and were prefilled by the decode rank.", "reason")
	m.legs = counter("legs_total", "HTTP calls to workers by outcome: ok, canceled (the client left or did not read), or how they failed.", "leg", "worker", "outcome")
	m.legTime = histogram("leg_duration_seconds", "Time of one HTTP call to a worker.", latencyBuckets, "leg", "worker")
	m.legTTFB = histogram("leg_first_byte_seconds", "Time to the first byte of a worker's answer.", latencyBuckets, "leg", "worker")
	m.retries = counter("retries_total", "Attempts beyond the first, by the failure that caused them.", "leg", "reason")
	m.aborts = counter("aborts_total", "Requests that ended early, by who ended them.", "reason")
	m.recompute = counter("silent_recompute_total", "Remote prefills whose KV the decode worker probably computed again.", "worker")
	m.events = counter("events_total", "Events of the event log.", "kind", "severity")
	m.tokens = counter("tokens_total", "Prompt, cached and completion tokens by the tenant of the key; source is engine for its usage, or router where the engine reported none and the router counted (of a stream its events with content).", "model", "tenant", "kind", "source")
	m.tokenize = counter("tokenize_total", "Prompts by the source of their tokens.", "source")
	m.predicted = counter("cached_tokens_total", "Prompt tokens expected from, and reported by, prefix caches.", "kind")
	m.reloads = counter("config_reloads_total", "Reloads of the configuration.", "result")
	m.keys = counter("api_key_reloads_total", "Reloads of the file of API keys: ok, or refused (the previous keys stay in force).", "result")
	m.certs = counter("certificate_reloads_total", "Reloads of certificate files, of the data plane, the admin API or engines: ok, or refused (the previous certificate stays in force).", "of", "result")
	m.handshakes = counter("tls_handshake_failures_total", "Connections to the data plane or the admin API that ended before TLS was agreed upon; the debug log shows why.", "of")
	m.excluded = counter("candidates_excluded_total", "Ranks left out of a choice.", "phase", "reason")
	m.faulty = counter("requests_broke_engines_total", "Failed requests that, alone or with others of the same bytes, broke two engines; not counted against those engines.")
	m.continued = counter("streams_continued_total", "Streams that another engine continued, by the worker that broke off and how.", "worker", "reason")
	m.refused = counter("streams_not_continued_total", "Streams that broke off with continue.mode=exact and were not continued, by reason.", "why")
	m.unkept = counter("streams_without_memory_total", "Streams that continued where they were and could not have been continued elsewhere, because limits.body_memory was used up.")
	m.rejections = counter("rejections_total", "Requests refused before routing, by reason: path, connections (limits.client_connections), key (none, a wrong one, or one for something else), rate or tokens (of a key), body, body_memory, request, model, overload, legs (limits.legs), loop (it came back), or draining (this router stops).", "reason")
	m.stages = map[string]prometheus.Observer{}
	for _, s := range []string{"read", "parse", "queue", "tokenize", "hash", "overlap", "plan", "move", "held"} {
		m.stages[s] = m.stage.of(s)
	}
	m.cachedPredicted, m.cachedActual = m.predicted.of("predicted"), m.predicted.of("actual")
	info := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "dynctl_build_info", Help: "The version that runs; the value is 1."}, []string{"version", "revision", "go"})
	info.WithLabelValues(version, revision, runtime.Version()).Set(1)
	reg.MustRegister(info, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Collect adds the gauges of a collector to the page.
func (m *Metrics) Collect(c prometheus.Collector) { m.registry.MustRegister(c) }

// Handler serves the metrics page.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{EnableOpenMetrics: true, MaxRequestsInFlight: 4, Timeout: 10 * time.Second})
}

// enrol makes a family known to what all of them share.
func enrol[T any](m *Metrics, here func(worker string) bool, labels []string, f *family[T]) *family[T] {
	f.worker, f.making, f.here, f.forget = slices.Index(labels, "worker"), &m.making, here, m.ForgetWorker
	if f.worker >= 0 {
		m.ofWorkers = append(m.ofWorkers, f)
	}
	return f
}

// Request counts a finished request and its time. path is "local", "remote"
// or "none"; code is the client's status.
func (m *Metrics) Request(endpoint, model, path, code string, took time.Duration) {
	model = m.models.value(model)
	m.requests.of(endpoint, model, path, code).Inc()
	m.duration.of(model, path).Observe(took.Seconds())
}

// FirstToken records a time to first token.
func (m *Metrics) FirstToken(model, path string, ttft time.Duration) {
	m.ttft.of(m.models.value(model), path).Observe(ttft.Seconds())
}

// InterToken records the mean gap between the streamed events of an answer.
func (m *Metrics) InterToken(model string, gap time.Duration) {
	m.itl.of(m.models.value(model)).Observe(gap.Seconds())
}

// Stage records the router's own time in a stage: "read", "parse", "tokenize",
// "hash", "overlap", "plan".
func (m *Metrics) Stage(stage string, took time.Duration) {
	if o := m.stages[stage]; o != nil {
		o.Observe(took.Seconds())
	}
}

// Decision counts a decision.
func (m *Metrics) Decision(path, reason string) { m.decisions.of(path, reason).Inc() }

// RequestFaulty counts a failed request on which several engines broke.
func (m *Metrics) RequestFaulty() { m.faulty.of().Inc() }

// Continued counts a stream that continues elsewhere, because a worker broke off.
func (m *Metrics) Continued(worker, reason string) { m.continued.of(worker, reason).Inc() }

// NotContinued counts a stream that broke off and was not continued.
func (m *Metrics) NotContinued(why string) { m.refused.of(why).Inc() }

// StreamWithoutMemory counts a stream that could not be continued, because too little of it is
// kept.
func (m *Metrics) StreamWithoutMemory() { m.unkept.of().Inc() }

// Fallback counts a wanted remote prefill that became a local one.
func (m *Metrics) Fallback(reason string) { m.fallbacks.of(reason).Inc() }

// OddParams counts transfer parameters that were used although they are not as
// expected.
func (m *Metrics) OddParams(worker string) { m.oddParams.of(worker).Inc() }

// Leg counts a finished leg; firstByte 0 means that none came.
func (m *Metrics) Leg(leg, worker, outcome string, took, firstByte time.Duration) {
	m.legs.of(leg, worker, outcome).Inc()
	m.legTime.of(leg, worker).Observe(took.Seconds())
	if firstByte > 0 {
		m.legTTFB.of(leg, worker).Observe(firstByte.Seconds())
	}
}

// ForgetWorker drops the series of a worker that has left the fleet.
func (m *Metrics) ForgetWorker(worker string) {
	m.making.Lock()
	defer m.making.Unlock()
	for _, f := range m.ofWorkers {
		f.drop(worker)
	}
}

// Retry counts an attempt beyond the first.
func (m *Metrics) Retry(leg, reason string) { m.retries.of(leg, reason).Inc() }

// Abort counts a request that ended early.
func (m *Metrics) Abort(reason string) { m.aborts.of(reason).Inc() }

// SilentRecompute counts a remote prefill whose KV was not used.
func (m *Metrics) SilentRecompute(worker string) { m.recompute.of(worker).Inc() }

// Event counts an event.
func (m *Metrics) Event(kind, severity string) { m.events.of(kind, severity).Inc() }

// Tokens adds n tokens of a kind ("prompt", "cached" or "completion") of one request, and
// nothing where n is unknown, -1. tenant is empty for a request without a key. source is who
// counted them, "engine" or "router".
func (m *Metrics) Tokens(model, tenant, kind, source string, n int) {
	if n > 0 {
		m.tokens.of(m.models.value(model), m.tenants.value(tenant), kind, source).Add(float64(n))
	}
}

// Tokenized counts a prompt by the source of its tokens.
func (m *Metrics) Tokenized(source string) { m.tokenize.of(source).Inc() }

// Cached adds predicted and actual cached tokens of one request.
func (m *Metrics) Cached(predicted, actual int) {
	m.cachedPredicted.Add(float64(max(0, predicted)))
	m.cachedActual.Add(float64(max(0, actual)))
}

// Keys counts a reading of a changed file of API keys, "ok" or "refused".
func (m *Metrics) Keys(result string) { m.keys.of(result).Inc() }

// Handshake counts a connection whose handshake of TLS failed.
func (m *Metrics) Handshake(of string) { m.handshakes.of(of).Inc() }

// Certificate counts a reading of changed certificate files, "ok" or "refused".
func (m *Metrics) Certificate(of, result string) { m.certs.of(of, result).Inc() }

// Reload counts a reload: "ok" or "refused".
func (m *Metrics) Reload(result string) { m.reloads.of(result).Inc() }

// Excluded counts a rank left out of a choice.
func (m *Metrics) Excluded(phase, reason string) { m.excluded.of(phase, reason).Inc() }

// Rejected counts a request refused before routing.
func (m *Metrics) Rejected(reason string) { m.rejections.of(reason).Inc() }
