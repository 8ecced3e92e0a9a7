package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"runtime/debug"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/approx"
	"github.com/dynctl/dynctl/internal/router/cache/follower"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/control"
	"github.com/dynctl/dynctl/internal/router/door"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
	"github.com/dynctl/dynctl/internal/router/observe/outcome"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/outputs"
	"github.com/dynctl/dynctl/internal/router/placement/routing"
	"github.com/dynctl/dynctl/internal/router/placement/siblings"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/media"
	"github.com/dynctl/dynctl/internal/router/request/models"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/request/stored"
	"github.com/dynctl/dynctl/internal/router/serving"
	"github.com/dynctl/dynctl/internal/router/serving/resumed"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/discovery"
	"github.com/dynctl/dynctl/internal/workers/health"
	"github.com/dynctl/dynctl/internal/workers/kube"
)

// base is what every other part uses: the settings in force, the fleet, and where things
// are reported.
type base struct {
	log      *slog.Logger
	started  time.Time
	settings *effective.InForce
	registry *workers.Registry
	events   *eventlog.Log
	metrics  *telemetry.Metrics
	tracer   *telemetry.Tracer
	secure   *control.Secure
}

func newBase(ctx context.Context, o *Options, first *effective.Settings) (*base, error) {
	b := &base{log: o.Logger, started: time.Now(), settings: effective.NewInForce(first), events: eventlog.New(o.Config.Events, nil)}
	b.registry = workers.NewRegistry(b.event)
	b.metrics = telemetry.New(o.Version, o.Revision, func(worker string) bool {
		_, ok := b.registry.Snapshot().Worker(worker)
		return ok
	})
	b.events.Tap(func(e eventlog.Event) {
		b.metrics.Event(e.Kind, string(e.Severity))
		eventlog.Print(b.log, &e, time.Since(b.started) < introduction)
	})
	var err error
	if b.tracer, err = telemetry.NewTracer(ctx, &o.Config.Trace, o.Version); err != nil {
		return nil, err
	}
	b.secure, err = control.NewSecure(control.SecureOptions{
		Config: &o.Config, SimTLS: o.EngineTLS, Metrics: b.metrics, Event: b.event,
		Connections: func(a netip.Addr) int { return b.settings.Load().ConnectionsOf(a) },
	})
	return b, err
}

// event adds to the event log.
func (b *base) event(e eventlog.Event) { b.events.Add(e) }

func (b *base) blockOf(w *workers.Worker) int { return b.settings.Load().BlockOf(w) }

// entry is what lets requests in and bounds them.
type entry struct {
	limiter   *admission.Limiter
	rankQueue *admission.Queue  // for a rank that is under its limits
	bodies    *admission.Memory // of the requests' bodies
	legs      *admission.Memory // requests to workers in progress
	ledger    *ledger.Ledger
	drain     *control.Drain
	budget    attempt.Budget
	moves     admission.Moves
}

func newEntry(c *settings.Config, b *base) *entry {
	e := &entry{
		limiter: admission.NewLimiter(admission.Limits{}), rankQueue: admission.NewQueue(0, 0, lookInterval), // prepare and applyInForce set the limits
		bodies: admission.NewMemory(c.Limits.BodyMemory, func(full bool, limit int64) { b.event(watch.BodyMemory(full, limit)) }),
		legs:   admission.NewMemory(admission.LegLimit(c.Limits.Legs), func(full bool, limit int64) { b.event(watch.Legs(full, limit)) }),
		ledger: ledger.New(),
	}
	e.ledger.OnEase(e.rankQueue.Wake)
	e.drain = control.NewDrain(e.limiter, func() (leave, drain time.Duration) {
		t := &b.settings.Load().Timeouts
		return t.Leave, t.Drain
	}, b.event)
	return e
}

// others is how the router shares load with the other routers of its fleet.
type others struct {
	siblings *siblings.Siblings // nil unless it does
	stored   *stored.Responses
}

func newOthers(o *Options, b *base, in *entry) (*others, error) {
	s := &others{stored: stored.New(1 << 16)}
	if !o.Config.Replicas.On() {
		return s, nil
	}
	self, err := identity(o, b.started)
	if err != nil {
		return nil, err
	}
	s.siblings = siblings.New(siblings.Options{Self: self, Fleet: b.registry.Snapshot, Ledger: in.ledger, Event: b.event, Clock: time.Now, Learned: s.stored.Learn, Rates: b.secure.Keys()})
	s.stored.Tap(s.siblings.Keeps)
	return s, nil
}

// engines is what talks to workers, and what is known of their caches and health.
type engines struct {
	requests       context.Context // ends when the router stops waiting for requests
	cancelRequests context.CancelFunc
	client         *upstream.Client
	monitor        *health.Monitor
	outliers       *health.Outliers
	rereads        models.Cache // when models were read again because of a request
	repeats        attempt.Repeats
	index          *kvindex.Index
	predicted      *approx.Index
	fleet          *follower.Follower
	feeds          *kvfeed.Manager
}

// placeholder is what stands for media in the prompts of a worker's engine.
func (e *engines) placeholder(w *workers.Worker) (token uint32, ok bool) {
	for _, k := range w.Ranks {
		if token, ok = e.feeds.Placeholder(kvindex.Rank(k.Slot)); ok {
			return token, true
		}
	}
	return 0, false
}

func newEngines(o *Options, hop api.Hop, b *base, in *entry, s *others) (*engines, error) {
	c := &o.Config
	e := &engines{
		client: upstream.New(upstream.Options{DialTimeout: c.Timeouts.Dial, TLS: b.secure.EngineTLS()}),
		outliers: health.NewOutliers(b.registry, health.OutlierOptions{Answering: func(w *workers.Worker) bool {
			return slices.ContainsFunc(w.Ranks, func(k *workers.Rank) bool { return in.ledger.Load(k).Answering > 0 })
		}, Hinted: s.siblings.Ejected}, b.event),
		index:     kvindex.New(kvindex.Options{MaxBlocks: int64(c.Index.MaxBlocks)}),
		predicted: approx.New(approx.Options{TTL: c.Tokens.ApproxTTL}),
	}
	e.monitor = health.NewMonitor(b.registry, health.Options{
		Interval: c.Health.Interval, Timeout: c.Health.Timeout, Scrape: c.Health.Scrape, TLS: b.secure.EngineTLS(), Header: hop.Header(),
		Slept: func(w *workers.Worker) {
			for _, k := range w.Ranks {
				e.fleet.Distrust(k, "the engine sleeps, which empties its cache")
			}
		},
	}, b.event)
	e.requests, e.cancelRequests = context.WithCancel(context.Background())
	options := follower.Options{
		Registry: b.registry, Index: e.index, Predicted: e.predicted, Ledger: in.ledger, Snapshot: c.Index.Snapshot,
		Feeds: kvfeed.Options{
			BlockSize: cmp.Or(c.Tokens.BlockSize, effective.DefaultBlock), StaleAfter: c.Index.StaleAfter,
			Events: b.event, Logger: b.log, Observer: o.Observer.Batch,
		},
		BlockOf: b.blockOf, Learn: e.monitor.Learn, Gone: b.metrics.ForgetWorker, Event: b.event,
	}
	if s.siblings != nil {
		options.Sibling = s.siblings.Copy
	}
	var err error
	if e.fleet, err = follower.New(options); err != nil {
		return nil, err
	}
	if s.siblings != nil {
		s.siblings.Offer(e.fleet.Copy)
	}
	e.feeds = e.fleet.Feeds()
	return e, nil
}

// observing is what learns from requests: what they came to, what goes wrong, what they cost.
type observing struct {
	receipts *receipt.Ring
	traffic  traffic.Traffic
	failures watch.Failures
	compute  *watch.Recompute
	slow     *watch.Slow
	causes   *watch.Causes
	costs    *outcome.Collector
	lengths  *outputs.Lengths
	media    *media.Table
	// untrusted reports whether the index may be wrong about the rank with a slot.
	untrusted func(slot uint32) bool
	stream    *lifecycle.Stream
}

func newObserving(o *Options, b *base, in *entry, s *others, e *engines) *observing {
	l := &observing{receipts: receipt.NewRing(receipt.Options{Capacity: o.Config.Receipts}), lengths: outputs.New(), media: media.NewTable()}
	l.compute = watch.NewRecompute(watch.RecomputeOptions{
		Ranks: func() []*workers.Rank { return b.registry.Snapshot().Ranks }, Event: b.event,
		Found: func(worker string, requests int) {
			l.traffic.Recomputes.Add(uint64(requests))
			for range requests {
				b.metrics.SilentRecompute(worker)
			}
		},
	})
	l.costs = outcome.New(outcome.Options{Objective: o.Config.Routing.Aim(), Fleet: b.registry.Snapshot, Ledger: in.ledger, Siblings: s.siblings, Event: func(e eventlog.Event) {
		// What is learned and decides nothing is no news.
		if d := &b.settings.Load().Decisions; d.Priced() && (e.Kind != "costs_known" || d.Rule.Auto) && (e.Kind != "times_known" || d.Timed()) {
			b.event(e)
		}
	}, Decisions: func() *decide.Options { return &b.settings.Load().Decisions }})
	l.slow = watch.NewSlow(watch.SlowOptions{
		Fleet: b.registry.Snapshot, Factor: func() float64 { return b.settings.Load().Health.SlowFactor },
		Load: func(k *workers.Rank) (waiting, answering int) {
			l := in.ledger.Load(k)
			return l.PrefillTokens, l.Answering
		}, Event: b.event,
	})
	l.causes = watch.NewCauses(watch.CausesOptions{
		Fleet: b.registry.Snapshot, Failures: &l.failures, Feeds: func() map[uint32]watch.Feed { return watch.Feeds(e.feeds.Status()) }, Event: b.event,
		Requests: func(k *workers.Rank) uint64 { n, _ := e.fleet.Counts(k); return n },
		Answers:  func(k *workers.Rank) (uint64, int) { return l.slow.Meter(k).Answers() },
		Mute: func(k *workers.Rank, heard time.Time, why string) {
			e.feeds.Mute(kvindex.Rank(k.Slot), heard, why)
		},
		Held: func(k *workers.Rank) int64 {
			x, _ := e.index.RankStats(kvindex.Rank(k.Slot))
			return x.Blocks
		},
		BlockOf: b.blockOf,
	})
	l.untrusted = func(slot uint32) bool { return e.feeds.Untrusted(kvindex.Rank(slot)) }
	l.stream = (&lifecycle.Consumers{
		Slow: l.slow, Untrusted: l.untrusted, Ranks: e.fleet, Traffic: &l.traffic, Metrics: b.metrics, Recompute: l.compute,
		Contradictions: watch.NewContradictions(watch.ContradictionsOptions{
			Removed: func(k *workers.Rank) (uint64, bool) {
				x, ok := e.index.RankStats(kvindex.Rank(k.Slot))
				return x.Removed, ok && e.fleet.Fed(k) && !e.feeds.Untrusted(kvindex.Rank(k.Slot))
			},
			Distrust: e.fleet.Distrust,
		}),
		Failures: &l.failures, Event: b.event, Costs: l.costs, Lengths: l.lengths, Media: l.media, AccessLog: o.AccessLog, Decision: o.Observer.Decision, Outcome: o.Observer.Outcome,
	}).Stream()
	return l
}

// deciding is what reads prompts and decides.
type deciding struct {
	tokens  *prompt.Stage
	decider *routing.Decider
}

func newDeciding(c *settings.Config, hop api.Hop, b *base, in *entry, e *engines, l *observing, s *others) (*deciding, error) {
	tokens, err := prompt.New(prompt.Options{
		TLS: b.secure.EngineTLS(), Header: hop.Header(),
		Mode: c.Tokens.Tokenizer, Path: c.Tokens.Path, Registry: b.registry, Event: b.event, DialTimeout: c.Timeouts.Dial,
		CacheBytes: c.Tokens.CacheBytes, Media: l.media, Placeholder: e.placeholder,
	})
	if err != nil {
		return nil, err
	}
	a := &deciding{tokens: tokens}
	a.decider = routing.New(routing.Sources{
		Index: e.index, Predicted: e.predicted, Feeds: e.feeds, Fleet: e.fleet, Ledger: in.ledger, Learners: l.costs.Learners, Answers: l.lengths, Media: l.media, Prompts: tokens, Readmit: e.outliers.Last, Siblings: s.siblings,
		Now: func() (*effective.Settings, *workers.Snapshot) { return b.settings.Load(), b.registry.Snapshot() },
	}, c.Routing.Seed)
	return a, nil
}

// served is what answers calls.
type served struct {
	answers  serving.Engine
	panicked func(*serving.Call, any)
}

func newServed(b *base, in *entry, e *engines, l *observing, s *others, a *deciding) *served {
	panicked := func(c *serving.Call, p any) {
		if e, ok := l.failures.Panicked(fmt.Sprintf("a request ended with an internal error: %v", p), time.Now()); ok {
			e.Request = c.Record.Live.ID()
			b.event(e)
		}
		b.log.Error("panic", "request", c.ID, "panic", p, "stack", string(debug.Stack()))
	}
	return &served{panicked: panicked, answers: resumed.New(resumed.Parts{
		Decider: a.decider, Fleet: b.registry.Snapshot, Queue: in.rankQueue, DoorQueue: in.limiter.Queue(),
		Legs: &serving.Legs{
			Transport: serving.HTTP(e.client), Open: in.legs, Ledger: in.ledger, Outliers: e.outliers, Answers: e.monitor.Answers,
			Reread:  func(ctx context.Context) { e.rereadModels(ctx, b.registry.Snapshot()) },
			Silence: 2 * b.settings.Load().Health.Timeout, Budget: &in.budget,
			Repeats: &e.repeats, Stored: s.stored, Panicked: panicked,
		},
		Budget: &in.budget, Outliers: e.outliers, Failures: &l.failures, Tokens: a.tokens, Bodies: in.bodies, Moves: &in.moves,
	})}
}

// introduction is for how long after the start a model that no worker serves may be that
// of a worker which has not answered yet.
const introduction = 10 * time.Second

// starting reports whether workers may not have answered yet at a time because the router had
// just begun.
func (b *base) starting(at time.Time) bool { return at.Sub(b.started) < introduction }

// rereadModels asks the fleet's usable workers which models they serve. Requests that come
// meanwhile wait for the same answers, and for a few seconds no worker is asked again.
func (e *engines) rereadModels(ctx context.Context, fleet *workers.Snapshot) {
	_, _ = e.rereads.Get(ctx, 0, func() *models.List { // the error is that of ctx
		models.EachUsable(ctx, fleet.Workers, e.monitor.Models)
		return new(models.List)
	})
}

// sources are where workers come from, other than the settings.
type sources struct {
	file *discovery.File // nil unless there is a file of workers
	kube *kube.Source    // nil unless pods are looked for
}

func newSources(o *Options, b *base) (*sources, error) {
	s := &sources{}
	if path := o.Config.WorkersFile; path != "" {
		s.file = discovery.NewFile(b.registry, discovery.FileOptions{Path: path, Source: workers.SourceFile}, b.event)
	}
	var err error
	if k := &o.Config.Kubernetes; k.On() {
		s.kube, err = kube.New(b.registry, *k, kube.Options{UserAgent: "dynctl/" + o.Version}, b.event)
	}
	return s, err
}

// applied is what describes the other parts, and changes their settings.
type applied struct {
	state  *control.State
	reload *effective.Reloader
}

func newApplied(r *Router) *applied {
	return &applied{
		reload: effective.NewReloader(r.settings, effective.Options{
			Prepare: r.prepare, Follow: r.applyInForce, Event: r.event, Result: r.metrics.Reload, Replaced: r.opts.Reloaded,
		}),
		state: &control.State{
			Stages: &control.Facts{
				InForce: r.settings, Fleet: r.fleet, Rests: &r.moves, Slow: r.slow, Causes: r.causes, Compute: r.compute, Learners: r.costs,
				Tokens: r.tokens, Bodies: r.bodies, Legs: r.legs, Secure: r.secure, Ending: r.drain, Pods: r.kube, Siblings: r.siblings, Recording: r.opts.Recording,
			},
			Version: r.opts.Version, Started: r.started, Registry: r.registry, Index: r.index, Predicted: r.predicted,
			Feeds: r.feeds, Ledger: r.ledger, Limiter: r.limiter, RankQueue: r.rankQueue, Bodies: r.bodies, Legs: r.legs, Addresses: r.secure.Addresses(), Traffic: &r.traffic,
		},
	}
}

// newDoor makes the data plane.
func newDoor(r *Router) *door.Door {
	return door.New(door.Parts{
		Log: r.log, Event: r.event, Tracer: r.tracer, Settings: r.settings, Registry: r.registry, Secure: r.secure,
		Requests: r.requests, Hop: r.hop, Starting: r.starting, Probe: r.probe, Panicked: r.panicked,
		Drain: r.drain, Limiter: r.limiter, RankQueue: r.rankQueue, Bodies: r.bodies, Budget: &r.budget,
		Decider: r.decider, Media: r.media, Reread: r.rereadModels, Stored: r.stored, Client: r.client,
		Failures: &r.failures, Receipts: r.receipts, Stream: r.stream, Untrusted: r.untrusted,
		Answers: r.answers,
	})
}

// ServeHTTP is the data plane. Probes are answered here, too, because load
// balancers ask the port that they send to.
func (r *Router) ServeHTTP(w http.ResponseWriter, req *http.Request) { r.door.ServeHTTP(w, req) }

// AdminOptions set up the admin API.
type AdminOptions = control.Options

// AdminHandler is the admin API, the metrics page and the probes.
func (r *Router) AdminHandler(o AdminOptions) (http.Handler, error) {
	c := &control.Router{
		State: r.state, InForce: r.reload, Registry: r.registry, Index: r.index, Kept: r.receipts, Log: r.events,
		Secure: r.secure, Ending: r.drain,
		Engines: control.NewEngines(control.EnginesOptions{Client: r.client, Forget: r.fleet.Distrust, Models: r.monitor.Models, Event: r.event}),
		Ordered: r.siblings.Order,
		DryRun:  r.door.DryRun, Metrics: r.metrics.Handler(), Probe: http.HandlerFunc(r.probe),
	}
	return c.Handler(o)
}

// lookInterval is how often requests that wait for a rank look at the fleet while no request
// ends: that an engine's metrics change or grow stale, or a worker comes, wakes none of them.
const lookInterval = 50 * time.Millisecond

// probe answers probes. One of this router's own means that it is its own worker.
func (r *Router) probe(w http.ResponseWriter, req *http.Request) {
	if r.hop.Passed(req.Header) {
		api.WriteError(w, req, api.Looped())
		return
	}
	r.state.ServeProbe(w, req)
}

// Secure is the router's certificates and keys, and what its listeners make of them.
func (r *Router) Secure() *control.Secure { return r.secure }

// Ready reports whether requests can be served, and why not.
func (r *Router) Ready() (bool, string) { return r.state.Ready() }

// Counts are how many workers there are, by role, and how many can be used.
func (r *Router) Counts() admin.WorkerCounts { return r.state.Status(time.Now()).Workers }

// Models are the models that the fleet serves, by the names that clients may
// use.
func (r *Router) Models() []string { return r.registry.Snapshot().Models() }

// Balanced is nil when no request is on the ledger, and no leg in progress.
func (r *Router) Balanced() error {
	if n := r.legs.Used(); n != 0 {
		return errors.Join(fmt.Errorf("%d legs are in progress", n), r.ledger.Balanced())
	}
	return r.ledger.Balanced()
}

// DataServer is a server for the data plane. Its requests end with the router.
func (r *Router) DataServer(errors *log.Logger) *http.Server {
	s := NewServer(r, r.secure.ServerLog("data", errors))
	s.IdleTimeout = r.opts.Config.Timeouts.ClientIdle
	s.BaseContext = func(net.Listener) context.Context { return r.door.Context() }
	s.ConnContext, s.ConnState = admission.FramingContext, admission.FramingState
	return s
}

// NewServer is a server for the admin API, and what other servers are made of. It closes connections on
// which no request comes. Bodies and answers have their own bounds in the handlers, since
// a stream may take as long as it needs.
func NewServer(h http.Handler, errors *log.Logger) *http.Server {
	return &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10, ErrorLog: errors}
}

// CancelRequests ends every request that still runs.
func (r *Router) CancelRequests() { r.cancelRequests() }
