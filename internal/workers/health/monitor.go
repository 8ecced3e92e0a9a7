// Package health finds out what workers are and how they do: it asks each one
// for its models, block size, ranks and event sources, probes it, scrapes its
// load, and ejects those that fail the requests they are given.
//
// Everything that an engine may lack is optional, and what is not reported stays
// unknown rather than zero. The formats were read from vLLM 0.32 (captures) and
// from the sources of SGLang 0.5.
package health

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// relearnEvery is how often a healthy worker is asked again what it is.
const relearnEvery = time.Minute

// Options are the settings of a Monitor. Zero values stand for the defaults.
type Options struct {
	Interval    time.Duration // between probes of one worker: 1 s
	Timeout     time.Duration // of one request to a worker: 2 s
	Down        int           // failed probes in a row that make a worker unhealthy: 2
	Up          int           // good probes in a row that make it healthy: 1
	Scrape      time.Duration // between scrapes of the load: 1 s
	Concurrency int           // requests at the same time, for probes and for scrapes: 256
	// Transport sends the requests; nil for one of the monitor's own, which
	// speaks to https workers by TLS.
	Transport http.RoundTripper
	TLS       func() *tls.Config
	// Header is what every request to a worker carries.
	Header http.Header
	// Slept is called with a worker that was found asleep: its cache is gone. It may be nil.
	Slept func(w *workers.Worker)
}

func (o *Options) defaults() {
	if o.Slept == nil {
		o.Slept = func(*workers.Worker) {}
	}
	o.Interval = cmp.Or(max(o.Interval, 0), time.Second)
	o.Timeout = cmp.Or(max(o.Timeout, 0), 2*time.Second)
	o.Scrape = cmp.Or(max(o.Scrape, 0), time.Second)
	o.Down = cmp.Or(max(o.Down, 0), 2)
	o.Up = cmp.Or(max(o.Up, 0), 1)
	o.Concurrency = cmp.Or(max(o.Concurrency, 0), 256)
}

// Monitor watches every worker of a registry: its probes write the worker's
// condition, its scrapes the load of the ranks, and what the worker reports of
// itself goes to Registry.Update.
type Monitor struct {
	reg     *workers.Registry
	opts    Options
	sink    eventlog.Sink
	ask     *probeClient
	probes  chan struct{} // semaphores
	scrapes chan struct{}
}

// NewMonitor makes a monitor; it does nothing before Run.
func NewMonitor(reg *workers.Registry, opts Options, sink eventlog.Sink) *Monitor {
	opts.defaults()
	return &Monitor{
		reg: reg, opts: opts, sink: sink,
		ask:     newProbeClient(opts.Transport, opts.TLS, opts.Timeout, opts.Header),
		probes:  make(chan struct{}, opts.Concurrency),
		scrapes: make(chan struct{}, opts.Concurrency),
	}
}

// Run watches the workers until ctx ends, and returns nil when all of its
// goroutines have ended.
func (m *Monitor) Run(ctx context.Context) error {
	changed, cancel := m.reg.Subscribe()
	defer cancel()
	watches := map[*workers.State]*watch{}
	var wg sync.WaitGroup
	defer m.ask.close()
	defer wg.Wait()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
		snap := m.reg.Snapshot()
		live := make(map[*workers.State]bool, len(snap.Workers))
		for _, w := range snap.Workers {
			live[w.State] = true
			if h := watches[w.State]; h != nil {
				h.worker.Store(w)
				continue
			}
			h := &watch{m: m, relearn: make(chan struct{}, 1)}
			h.worker.Store(w)
			var own context.Context
			own, h.stop = context.WithCancel(ctx)
			watches[w.State] = h
			wg.Go(func() { h.probeLoop(own) })
			wg.Go(func() { h.scrapeLoop(own) })
		}
		for state, h := range watches {
			if !live[state] {
				h.stop()
				delete(watches, state)
			}
		}
	}
}

// watch is one worker's part of the monitor. A probe loop and a scrape loop
// share it.
type watch struct {
	m       *Monitor
	stop    context.CancelFunc
	worker  atomic.Pointer[workers.Worker] // the newest description
	relearn chan struct{}                  // one token: ask again soon

	mu     sync.Mutex
	good   int // probes in a row
	bad    int
	asleep bool
	// learnAt is when a healthy worker is asked again what it is.
	learnAt  time.Time
	learnGap time.Duration
	notes    string // as last reported

	// Only the probe loop uses these.
	sleepPath bool
	// Only the scrape loop uses these.
	misses   int
	silent   bool // reported that no load is known
	noLoads  bool // /v1/loads is not there
	started  float64
	lastHits map[*workers.Rank]float64
}

// pause waits about d; jitter keeps a thousand workers from being asked at the
// same moment. It reports false when ctx has ended.
func pause(ctx context.Context, d time.Duration) bool {
	return wait.For(ctx, d-d/10+rand.N(d/5+1))
}

func enter(ctx context.Context, sem chan struct{}) bool {
	select {
	case sem <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (h *watch) probeLoop(ctx context.Context) {
	for {
		if !enter(ctx, h.m.probes) {
			return
		}
		silent := h.probe(ctx)
		<-h.m.probes
		// A worker that does not answer always has a probe waiting, so that it is seen as
		// soon as it continues.
		if !silent && !pause(ctx, h.m.opts.Interval) || ctx.Err() != nil {
			return
		}
	}
}

// probe asks once and draws the consequences. It reports whether the worker took the
// connection and gave no answer in time.
func (h *watch) probe(ctx context.Context) (silent bool) {
	w, sent := h.worker.Load(), time.Now()
	err := h.m.ask.alive(ctx, w)
	if ctx.Err() != nil {
		return false
	}
	if err != nil {
		e, late := errors.AsType[*silence](err)
		if late && w.State.Life().Last().After(sent) {
			h.busy(w)
		} else {
			h.failed(w, err, late && e.connected)
		}
		return late && e.connected
	}
	w.State.SetAnswered(sent)
	h.mu.Lock()
	h.good++
	h.bad = 0
	was := w.State.Probed().Health
	up := was == workers.Healthy || was == workers.Asleep
	due := !up && h.good >= h.m.opts.Up
	if up {
		select {
		case <-h.relearn:
			due = true
		default:
			due = !time.Now().Before(h.learnAt)
		}
	}
	h.mu.Unlock()
	if due {
		h.learn(ctx, w, !up)
	} else if up && h.sleepPath {
		h.askSleep(ctx, w)
	}
	if ctx.Err() == nil && (up || due) {
		h.fold(w, "", false, false)
	}
	return false
}

// busy takes an unanswered probe of a worker that has shown another sign of life meanwhile:
// it counts neither for nor against it, and ends a condition that came from silence alone.
func (h *watch) busy(w *workers.Worker) {
	h.mu.Lock()
	h.good, h.bad = 0, 0
	silent := w.State.Probed().Silent
	if silent {
		h.learnAt = time.Time{} // asked what it is at the next good probe
	}
	h.mu.Unlock()
	if silent {
		h.fold(w, "", false, false)
	}
}

// alive asks GET /health; where an engine has none, /v1/models does.
func (a *probeClient) alive(ctx context.Context, w *workers.Worker) error {
	err := a.get(ctx, w, "/health", nil)
	if e, ok := errors.AsType[*statusError](err); ok && (e.status == http.StatusNotFound || e.status == http.StatusMethodNotAllowed) {
		return a.get(ctx, w, "/v1/models", nil)
	}
	return err
}

func (h *watch) failed(w *workers.Worker, err error, silent bool) {
	h.mu.Lock()
	h.bad++
	h.good = 0
	was := w.State.Probed().Health
	down := h.bad >= h.m.opts.Down || was == workers.Unknown
	h.mu.Unlock()
	if !down {
		return
	}
	if was != workers.Unhealthy {
		for _, r := range h.worker.Load().Ranks {
			r.SetLoad(nil)
		}
	}
	h.fold(w, err.Error(), silent, false)
}

// fold writes the condition that follows from what is known; failure is the
// reason why the worker is down, empty when it is up; silent is [workers.Condition.Silent].
// With ifUp a worker that is not up stays as it is.
func (h *watch) fold(w *workers.Worker, failure string, silent, ifUp bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	old := w.State.Probed()
	if ifUp && old.Health != workers.Healthy && old.Health != workers.Asleep {
		return
	}
	c := workers.Condition{Health: workers.Healthy, Since: time.Now()}
	switch {
	case failure != "":
		c.Health, c.Reason, c.Silent = workers.Unhealthy, failure, silent
	case h.asleep:
		c.Health, c.Reason = workers.Asleep, "the engine sleeps"
	}
	if c.Health == old.Health {
		if c.Reason != old.Reason || c.Silent != old.Silent {
			if c.Silent == old.Silent { // else signs of life are those after now
				c.Since = old.Since
			}
			w.State.SetCondition(c)
		}
		return
	}
	w.State.SetCondition(c)
	e := eventlog.Event{
		At: c.Since, Severity: eventlog.Info, Kind: "health_changed", Worker: w.Name,
		Text:   fmt.Sprintf("worker %s is %s", w.Name, c.Health),
		Fields: map[string]any{"from": old.Health.String(), "to": c.Health.String(), "reason": c.Reason},
	}
	if c.Reason != "" {
		e.Text += ": " + c.Reason
	}
	if c.Health == workers.Unhealthy {
		e.Severity = eventlog.Error
	} else if old.Health == workers.Unhealthy && !old.Since.IsZero() {
		e.Text += fmt.Sprintf(" after %s", c.Since.Sub(old.Since).Round(time.Millisecond))
	}
	h.m.sink.Emit(e)
	if c.Health == workers.Asleep {
		h.m.opts.Slept(w)
	}
}

// learn asks the worker what it is and updates the registry; fresh says that it
// was down before, so that the pages that failed are asked again soon.
func (h *watch) learn(ctx context.Context, w *workers.Worker, fresh bool) {
	ans := h.m.ask.learn(ctx, w)
	if ctx.Err() != nil {
		return
	}
	// A contradiction and its end are events of the registry; a worker that is
	// gone is stopped by Run.
	if _, err := h.m.reg.Update(w, ans.learned); err == nil || !errors.Is(err, workers.ErrGone) {
		if now, ok := h.m.reg.Snapshot().Worker(w.Name); ok && now.State == w.State {
			h.worker.Store(now)
			w = now
		}
	}
	for i, l := range ans.loads {
		if l != nil && i < len(w.Ranks) {
			w.Ranks[i].SetLoad(l)
		}
	}
	h.sleepPath = ans.sleepPath
	h.mu.Lock()
	h.asleep = ans.asleep
	switch {
	case !ans.retry:
		h.learnGap = relearnEvery
	case fresh || h.learnGap == 0:
		h.learnGap = h.m.opts.Interval
	default:
		h.learnGap = min(2*h.learnGap, relearnEvery)
	}
	h.learnAt = time.Now().Add(h.learnGap)
	notes := strings.Join(ans.notes, "; ")
	news := notes != h.notes
	h.notes = notes
	h.mu.Unlock()
	if news && notes != "" {
		h.m.sink.Emit(eventlog.Event{
			Severity: eventlog.Warn, Kind: "worker_inconsistent", Worker: w.Name,
			Text: fmt.Sprintf("worker %s: %s", w.Name, notes), Fields: map[string]any{"notes": ans.notes},
		})
	}
}

func (h *watch) askSleep(ctx context.Context, w *workers.Worker) {
	err := h.m.ask.get(ctx, w, "/is_sleeping", func(b []byte) error {
		asleep, err := parseSleeping(b)
		if err == nil {
			h.mu.Lock()
			h.asleep = asleep
			h.mu.Unlock()
		}
		return err
	})
	if notThere(err) {
		h.sleepPath = false
	}
}

func (h *watch) scrapeLoop(ctx context.Context) {
	h.started = math.NaN()
	for {
		if !pause(ctx, h.m.opts.Scrape) {
			return
		}
		w := h.worker.Load()
		if p := w.State.Probed().Health; p != workers.Healthy && p != workers.Asleep {
			h.lastHits, h.started, h.misses = nil, math.NaN(), 0
			continue
		}
		if !enter(ctx, h.m.scrapes) {
			return
		}
		h.scrape(ctx, w)
		<-h.m.scrapes
	}
}

func (h *watch) scrape(ctx context.Context, w *workers.Worker) {
	var loads []*workers.Load
	var err error
	read := false
	asked := time.Now()
	if w.WireEngine() == workers.SGLang && !h.noLoads {
		err = h.m.ask.get(ctx, w, "/v1/loads", func(b []byte) (err error) {
			loads, err = parseLoads(b, len(w.Ranks), time.Now())
			return err
		})
		read = err == nil
		h.noLoads = notThere(err)
	}
	if !read {
		err = h.m.ask.get(ctx, w, "/metrics", func(b []byte) error {
			p := parsePage(b)
			loads = p.loads(len(w.Ranks), asked, time.Now())
			h.observe(w, p, loads)
			return nil
		})
	}
	if ctx.Err() != nil {
		return
	}
	known := false
	for i, r := range w.Ranks {
		if i < len(loads) && loads[i] != nil {
			r.SetLoad(loads[i])
			known = true
		}
	}
	if known {
		h.misses = 0
		if h.silent {
			h.silent = false
			h.m.sink.Emit(eventlog.Event{Kind: "load_reported", Worker: w.Name, Text: fmt.Sprintf("worker %s reports its load again", w.Name)})
		}
		return
	}
	const patience = 3
	if h.misses++; h.misses < patience {
		return
	}
	for _, r := range w.Ranks {
		r.SetLoad(nil)
	}
	if !h.silent {
		h.silent = true
		why := "no series that is known"
		if err != nil {
			why = err.Error()
		}
		h.m.sink.Emit(eventlog.Event{
			Severity: eventlog.Warn, Kind: "load_unknown", Worker: w.Name,
			Text: fmt.Sprintf("worker %s reports no load: %s", w.Name, why), Fields: map[string]any{"reason": why},
		})
	}
}

// observe takes from a page what concerns the worker as a whole: sleep, and
// the signs of a restart that no probe saw.
func (h *watch) observe(w *workers.Worker, p *page, loads []*workers.Load) {
	if p.sleepKnown {
		h.mu.Lock()
		h.asleep = p.asleep
		h.mu.Unlock()
		h.fold(w, "", false, true)
	}
	restarted := !math.IsNaN(h.started) && !math.IsNaN(p.started) && math.Abs(h.started-p.started) > 0.5
	if !math.IsNaN(p.started) {
		h.started = p.started
	}
	if h.lastHits == nil {
		h.lastHits = map[*workers.Rank]float64{}
	}
	for i, l := range loads {
		if l == nil || math.IsNaN(l.PrefixQueries) {
			continue
		}
		r := w.Ranks[i]
		if last, ok := h.lastHits[r]; ok && l.PrefixQueries < last {
			restarted = true
		}
		h.lastHits[r] = l.PrefixQueries
	}
	if restarted {
		wait.Poke(h.relearn) // asked what it is at the next probe
		h.m.sink.Emit(eventlog.Event{
			Severity: eventlog.Warn, Kind: "worker_restarted", Worker: w.Name,
			Text: fmt.Sprintf("worker %s has restarted unnoticed by the probes: its counters started over", w.Name),
		})
	}
}

// Answers asks a worker for a sign of life immediately and reports whether it came within
// the time of a probe.
func (m *Monitor) Answers(ctx context.Context, w *workers.Worker) bool {
	return m.ask.alive(ctx, w) == nil
}

// Models asks a worker which models it serves, and updates the registry.
func (m *Monitor) Models(ctx context.Context, w *workers.Worker) {
	l := &learner{a: m.ask, w: w}
	l.learned.From = map[workers.Field]string{}
	if l.models(ctx); l.learned.Models != nil {
		_, _ = m.reg.Update(w, l.learned) // a contradiction is an event of the registry
	}
}

// Learn immediately queries what a worker is and updates the registry, as Run does every now
// and then. It is for those who have seen that what they know of the worker no longer holds,
// such as an event port after a restart.
func (m *Monitor) Learn(ctx context.Context, w *workers.Worker) error {
	ans := m.ask.learn(ctx, w)
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("ask worker %s: %w", w.Name, err)
	}
	_, err := m.reg.Update(w, ans.learned)
	if err == nil && ans.retry {
		err = fmt.Errorf("worker %s did not answer all questions: %s", w.Name, strings.Join(ans.notes, "; "))
	}
	return err
}
