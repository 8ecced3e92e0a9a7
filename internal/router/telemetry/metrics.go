// Package telemetry is what the router tells machines of itself: Prometheus
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
// choose (the model); further ones are counted as "other".
const maxLabelValues = 256

// Metrics holds the router's counters and histograms. All names begin with
// "dynctl_". Gauges that can be read from the router's state are collected at
// scrape time by what Collect was given.
type Metrics struct {
	registry *prometheus.Registry

	requests   *prometheus.CounterVec   // endpoint, model, path, code
	duration   *prometheus.HistogramVec // model, path
	ttft       *prometheus.HistogramVec // model, path
	itl        *prometheus.HistogramVec // model
	stage      *prometheus.HistogramVec // stage
	decisions  *prometheus.CounterVec   // path, reason
	fallbacks  *prometheus.CounterVec   // reason
	oddParams  *prometheus.CounterVec   // worker
	legs       *prometheus.CounterVec   // leg, worker, outcome
	legTime    *prometheus.HistogramVec // leg, worker
	legTTFB    *prometheus.HistogramVec // leg, worker
	retries    *prometheus.CounterVec   // leg, reason
	aborts     *prometheus.CounterVec   // reason
	recompute  *prometheus.CounterVec   // worker
	events     *prometheus.CounterVec   // kind, severity
	tokens     *prometheus.CounterVec   // model, kind
	tokenize   *prometheus.CounterVec   // source
	predicted  *prometheus.CounterVec   // kind: predicted, actual
	reloads    *prometheus.CounterVec   // result
	keys       *prometheus.CounterVec   // result
	certs      *prometheus.CounterVec   // of, result
	handshakes *prometheus.CounterVec   // of
	excluded   *prometheus.CounterVec   // phase, reason
	rejections *prometheus.CounterVec   // reason
	blamed     *prometheus.CounterVec
	continued  *prometheus.CounterVec // worker, reason
	refused    *prometheus.CounterVec // why

	// Of fixed labels, resolved at the start.
	stages            map[string]prometheus.Observer
	foretold, counted prometheus.Counter

	models bounded
	handle sync.Map   // series -> its counter or histogram
	making sync.Mutex // orders the making of series with their end

	here      func(worker string) bool
	ofWorkers map[*prometheus.MetricVec]int // all that have the label worker, and its place
}

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

// New makes the metrics with a registry of their own. The build info is that
// of this binary. here tells whether a worker is in the fleet: what is counted of
// one that has left has no series. It must know of a worker's end before
// ForgetWorker is called; nil stands for a fleet that nobody leaves.
func New(version, revision string, here func(worker string) bool) *Metrics {
	reg := prometheus.NewRegistry()
	ofWorkers := map[*prometheus.MetricVec]int{}
	keep := func(v *prometheus.MetricVec, labels []string) {
		if i := slices.Index(labels, "worker"); i >= 0 {
			ofWorkers[v] = i
		}
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dynctl_" + name, Help: help}, labels)
		reg.MustRegister(c)
		keep(c.MetricVec, labels)
		return c
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "dynctl_" + name, Help: help, Buckets: buckets}, labels)
		reg.MustRegister(h)
		keep(h.MetricVec, labels)
		return h
	}
	m := &Metrics{
		registry:   reg,
		requests:   counter("requests_total", "Requests answered, by the path that was taken and the status that the client saw (499: the client left).", "endpoint", "model", "path", "code"),
		duration:   histogram("request_duration_seconds", "Time from the request's first byte to the answer's last.", latencyBuckets, "model", "path"),
		ttft:       histogram("ttft_seconds", "Time from the request's first byte to the first token sent on to the client.", latencyBuckets, "model", "path"),
		itl:        histogram("itl_seconds", "Mean gap between streamed events of one answer.", itlBuckets, "model"),
		stage:      histogram("stage_seconds", "Time that the router itself spent in one stage of a request; queue is that of requests that waited for a place in progress, move that of streams that waited for their turn to go on elsewhere.", stageBuckets, "stage"),
		decisions:  counter("decisions_total", "Routing decisions by path and reason.", "path", "reason"),
		oddParams:  counter("transfer_params_odd_total", "Remote prefills whose transfer parameters were used although a part of them is not as expected.", "worker"),
		fallbacks:  counter("prefill_fallbacks_total", "Requests that should have been prefilled remotely and were prefilled by the decode rank.", "reason"),
		legs:       counter("legs_total", "HTTP calls to workers by outcome: ok, canceled (the client left or did not read), or how they failed.", "leg", "worker", "outcome"),
		legTime:    histogram("leg_duration_seconds", "Time of one HTTP call to a worker.", latencyBuckets, "leg", "worker"),
		legTTFB:    histogram("leg_first_byte_seconds", "Time to the first byte of a worker's answer.", latencyBuckets, "leg", "worker"),
		retries:    counter("retries_total", "Attempts beyond the first, by the failure that caused them.", "leg", "reason"),
		aborts:     counter("aborts_total", "Requests that ended early, by who ended them.", "reason"),
		recompute:  counter("silent_recompute_total", "Remote prefills whose KV the decode worker seems not to have used.", "worker"),
		events:     counter("events_total", "Events of the event log.", "kind", "severity"),
		tokens:     counter("tokens_total", "Tokens that engines reported in usage.", "model", "kind"),
		tokenize:   counter("tokenize_total", "Prompts by the source of their tokens.", "source"),
		predicted:  counter("cached_tokens_total", "Prompt tokens expected from, and reported by, prefix caches.", "kind"),
		reloads:    counter("config_reloads_total", "Reloads of the configuration.", "result"),
		keys:       counter("api_key_reloads_total", "Readings of a changed file of API keys: ok, or refused (the keys of before stay in force).", "result"),
		certs:      counter("certificate_reloads_total", "Readings of changed certificate files, of the data plane, the admin API or engines: ok, or refused (the certificate of before stays in force).", "of", "result"),
		handshakes: counter("tls_handshake_failures_total", "Connections to the data plane or the admin API that ended before TLS was agreed upon; the debug log says why.", "of"),
		excluded:   counter("candidates_excluded_total", "Ranks left out of a choice.", "phase", "reason"),
		blamed:     counter("requests_blamed_total", "Failed requests on which two engines broke, and so did that of the one more try; they count against no engine."),
		continued:  counter("streams_continued_total", "Streams whose rest another engine was asked for, by the worker that broke off and how.", "worker", "reason"),
		refused:    counter("streams_not_continued_total", "Streams that broke off with continue.mode=exact and were not continued, by why.", "why"),
		rejections: counter("rejections_total", "Requests refused before routing, by reason: path, key (none, a wrong one, or one for something else), rate (of a key), body, body_memory, request, model, overload, or draining (this router stops).", "reason"),
	}
	m.here, m.ofWorkers = here, ofWorkers
	m.stages = map[string]prometheus.Observer{}
	for _, s := range []string{"read", "parse", "queue", "tokenize", "hash", "overlap", "plan", "move"} {
		m.stages[s] = m.stage.WithLabelValues(s)
	}
	m.foretold, m.counted = m.predicted.WithLabelValues("predicted"), m.predicted.WithLabelValues("actual")
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

// series is one of a metric, by the values of its labels.
type series struct {
	of     *prometheus.MetricVec
	labels [4]string
	n      int
}

func (m *Metrics) count(v *prometheus.CounterVec, labels ...string) prometheus.Counter {
	return resolved(m, v.MetricVec, labels, v.WithLabelValues)
}

func (m *Metrics) time(v *prometheus.HistogramVec, took time.Duration, labels ...string) {
	resolved(m, v.MetricVec, labels, v.WithLabelValues).Observe(took.Seconds())
}

// resolved looks a series up by its labels once.
func resolved[T any](m *Metrics, of *prometheus.MetricVec, labels []string, resolve func(...string) T) T {
	k := series{of: of}
	k.n = copy(k.labels[:], labels)
	if h, ok := m.handle.Load(k); ok {
		return h.(T)
	}
	h := m.add(k, func() any { return resolve(slices.Clone(k.labels[:k.n])...) }).(T)
	// A request may end after its worker has left, and would bring back for good
	// what was forgotten.
	if i, ok := m.ofWorkers[of]; ok && m.here != nil && !m.here(k.labels[i]) {
		m.ForgetWorker(k.labels[i])
	}
	return h
}

func (m *Metrics) add(k series, resolve func() any) any {
	m.making.Lock()
	defer m.making.Unlock()
	if h, ok := m.handle.Load(k); ok {
		return h
	}
	h := resolve()
	m.handle.Store(k, h)
	return h
}

// Request counts a finished request and its time. path is "local", "remote"
// or "none"; code is the client's status.
func (m *Metrics) Request(endpoint, model, path, code string, took time.Duration) {
	model = m.models.value(model)
	m.count(m.requests, endpoint, model, path, code).Inc()
	m.time(m.duration, took, model, path)
}

// FirstToken records a time to first token.
func (m *Metrics) FirstToken(model, path string, ttft time.Duration) {
	m.time(m.ttft, ttft, m.models.value(model), path)
}

// InterToken records the mean gap between the streamed events of an answer.
func (m *Metrics) InterToken(model string, gap time.Duration) {
	m.time(m.itl, gap, m.models.value(model))
}

// Stage records the router's own time in a stage: "read", "parse", "tokenize",
// "hash", "overlap", "plan".
func (m *Metrics) Stage(stage string, took time.Duration) {
	if o := m.stages[stage]; o != nil {
		o.Observe(took.Seconds())
	}
}

// Decision counts a decision.
func (m *Metrics) Decision(path, reason string) { m.count(m.decisions, path, reason).Inc() }

// Blamed counts a failed request on which several engines broke.
func (m *Metrics) Blamed() { m.blamed.WithLabelValues().Inc() }

// Continued counts a stream that goes on elsewhere, because a worker broke off.
func (m *Metrics) Continued(worker, reason string) { m.count(m.continued, worker, reason).Inc() }

// NotContinued counts a stream that broke off and was not continued.
func (m *Metrics) NotContinued(why string) { m.refused.WithLabelValues(why).Inc() }

// Fallback counts a wanted remote prefill that became a local one.
func (m *Metrics) Fallback(reason string) { m.fallbacks.WithLabelValues(reason).Inc() }

// OddParams counts transfer parameters that were used although they are not as
// expected.
func (m *Metrics) OddParams(worker string) { m.count(m.oddParams, worker).Inc() }

// Leg counts a finished leg; firstByte 0 means that none came.
func (m *Metrics) Leg(leg, worker, outcome string, took, firstByte time.Duration) {
	m.count(m.legs, leg, worker, outcome).Inc()
	m.time(m.legTime, took, leg, worker)
	if firstByte > 0 {
		m.time(m.legTTFB, firstByte, leg, worker)
	}
}

// ForgetWorker drops the series of a worker that has left the fleet.
func (m *Metrics) ForgetWorker(worker string) {
	m.making.Lock()
	defer m.making.Unlock()
	m.handle.Range(func(k, _ any) bool {
		s := k.(series)
		if i, ok := m.ofWorkers[s.of]; ok && s.labels[i] == worker {
			m.handle.Delete(k)
		}
		return true
	})
	for v := range m.ofWorkers {
		v.DeletePartialMatch(prometheus.Labels{"worker": worker})
	}
}

// Retry counts an attempt beyond the first.
func (m *Metrics) Retry(leg, reason string) { m.retries.WithLabelValues(leg, reason).Inc() }

// Abort counts a request that ended early.
func (m *Metrics) Abort(reason string) { m.aborts.WithLabelValues(reason).Inc() }

// SilentRecompute counts a remote prefill whose KV was not used.
func (m *Metrics) SilentRecompute(worker string) { m.count(m.recompute, worker).Inc() }

// Event counts an event.
func (m *Metrics) Event(kind, severity string) { m.events.WithLabelValues(kind, severity).Inc() }

// Usage adds what an engine reported of one request, in tokens.
func (m *Metrics) Usage(model string, prompt, cachedTokens, completion int) {
	model = m.models.value(model)
	add := func(kind string, n int) {
		if n > 0 {
			m.count(m.tokens, model, kind).Add(float64(n))
		}
	}
	add("prompt", prompt)
	add("cached", cachedTokens)
	add("completion", completion)
}

// Tokenized counts a prompt by the source of its tokens.
func (m *Metrics) Tokenized(source string) { m.count(m.tokenize, source).Inc() }

// Cached adds predicted and actual cached tokens of one request.
func (m *Metrics) Cached(predicted, actual int) {
	m.foretold.Add(float64(max(0, predicted)))
	m.counted.Add(float64(max(0, actual)))
}

// Keys counts a reading of a changed file of API keys, "ok" or "refused".
func (m *Metrics) Keys(result string) { m.keys.WithLabelValues(result).Inc() }

// Handshake counts a connection whose handshake of TLS failed.
func (m *Metrics) Handshake(of string) { m.handshakes.WithLabelValues(of).Inc() }

// Certificate counts a reading of changed certificate files, "ok" or "refused".
func (m *Metrics) Certificate(of, result string) { m.certs.WithLabelValues(of, result).Inc() }

// Reload counts a reload: "ok" or "refused".
func (m *Metrics) Reload(result string) { m.reloads.WithLabelValues(result).Inc() }

// Excluded counts a rank left out of a choice.
func (m *Metrics) Excluded(phase, reason string) { m.count(m.excluded, phase, reason).Inc() }

// Rejected counts a request refused before routing.
func (m *Metrics) Rejected(reason string) { m.rejections.WithLabelValues(reason).Inc() }
