// Package router is the whole router: it joins the stages of a request (api,
// admission, tokenize, blockhash, kvindex, selector, disagg, ledger, upstream,
// sse) and owns everything that runs beside them (discovery, health, KV event
// feeds, snapshots, the admin API).
//
// A request passes the stages in one direction; only this package knows their
// order. What a stage decides is a value with its reasons, so that the admin
// API, explain and replay show exactly what was done.
package router

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/approx"
	"github.com/dynctl/dynctl/internal/router/cache/follower"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/drain"
	"github.com/dynctl/dynctl/internal/router/effective"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/account"
	"github.com/dynctl/dynctl/internal/router/observe/console"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/state"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/router/placement/outcome"
	"github.com/dynctl/dynctl/internal/router/placement/question"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/models"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/request/stored"
	"github.com/dynctl/dynctl/internal/router/secure"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/discovery"
	"github.com/dynctl/dynctl/internal/workers/health"
	"github.com/dynctl/dynctl/internal/workers/kube"
)

// Options make a Router.
type Options struct {
	// Config is validated by New.
	Config settings.Config
	// Origin says where each key of the config came from; may be nil.
	Origin map[string]string
	// Sim are the simulated engines that run in this process; may be nil.
	Sim []workers.Spec
	// EngineTLS is how https engines are spoken to instead of as the config says; nil
	// for that.
	EngineTLS *tls.Config
	// Version and Revision of the binary, for status and metrics.
	Version, Revision string
	Logger            *slog.Logger
	// Observer sees every KV batch, decision and outcome, for a recorder; the
	// zero value sees nothing.
	Observer Observer
	// Recording is what this process records; nil for nothing.
	Recording watch.Recording
	// Reloaded is called with every new configuration that is in force, before the
	// event; may be nil.
	Reloaded func(old, now *settings.Config)
}

// Observer gets what a recording needs. Its functions may be nil; they are called on
// hot paths, must not block and must not keep what they are given.
type Observer struct {
	// Batch is a change of a rank's entries in the index.
	Batch func(o kvfeed.Observation)
	// Decision is a decision that asked the index at a time.
	Decision func(asked time.Time, d *trace.Decision)
	// Outcome is a finished receipt.
	Outcome func(r *receipt.Receipt)
}

// Router is the router. Make it with New, run it with Run.
type Router struct {
	log      *slog.Logger
	opts     Options
	started  time.Time
	settings *effective.InForce
	hop      api.Hop

	registry       *workers.Registry
	index          *kvindex.Index
	predicted      *approx.Index
	feeds          *kvfeed.Manager
	ledger         *ledger.Ledger
	receipts       *receipt.Ring
	events         *eventlog.Log
	metrics        *telemetry.Metrics
	tracer         *telemetry.Tracer
	gate           *admission.Gate
	ranks          *admission.Line   // for a rank that is under its limits
	bodies         *admission.Memory // of the requests' bodies
	legs           *admission.Memory // requests to workers in progress
	client         *upstream.Client
	monitor        *health.Monitor
	outliers       *health.Outliers
	repeats        attempt.Repeats
	requests       context.Context // ends when the router stops waiting for requests
	cancelRequests context.CancelFunc
	modelLists     models.Cache
	tokens         *prompt.Stage
	words          *prompt.Words // nil unless asked for
	budget         attempt.Budget
	moves          admission.Moves
	stored         *stored.Responses
	traffic        traffic.Traffic
	compute        *watch.Recompute
	slow           *watch.Slow
	causes         *watch.Causes
	costs          *outcome.Teacher
	sinks          account.Sinks
	asker          *question.Asker
	failures       watch.Failures
	fleet          *follower.Follower
	state          *state.State
	secure         *secure.Secure
	file           *discovery.File // nil unless there is a file of workers
	kube           *kube.Source    // nil unless pods are looked for
	drain          *drain.Drain
}

// New makes a router from a config. It opens no sockets.
func New(ctx context.Context, o Options) (*Router, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if err := o.Config.Validate(); err != nil {
		return nil, err
	}
	r := &Router{log: o.Logger, opts: o, started: time.Now(), hop: api.NewHop()}
	s, err := effective.New(o.Config, o.Origin, 1)
	if err != nil {
		return nil, err
	}
	r.settings = effective.NewInForce(s, effective.Options{
		Prepare: r.prepare, Follow: r.follow, Event: r.event, Result: func(result string) { r.metrics.Reload(result) }, Replaced: o.Reloaded,
	})
	r.metrics = telemetry.New(o.Version, o.Revision, func(worker string) bool {
		_, ok := r.registry.Snapshot().Worker(worker)
		return ok
	})
	r.events = eventlog.New(o.Config.Events, nil, func(e eventlog.Event) {
		r.metrics.Event(e.Kind, string(e.Severity))
		eventlog.Print(r.log, &e, time.Since(r.started) < introduction)
	})
	r.registry = workers.NewRegistry(r.event)
	r.ledger = ledger.New()
	r.receipts = receipt.NewRing(receipt.Options{Capacity: o.Config.Receipts})
	r.gate = admission.New(admission.Limits{}) // prepare and follow set the limits
	r.drain = drain.New(r.gate, func() (leave, drain time.Duration) {
		t := &r.settings.Load().Timeouts
		return t.Leave, t.Drain
	}, r.event)
	r.ranks = admission.NewLine(0, 0, lookInterval)
	r.ledger.OnEase(r.ranks.Wake)
	r.bodies = admission.NewMemory(o.Config.Limits.BodyMemory, func(full bool) { r.event(watch.BodyMemory(full, r.bodies.Limit())) })
	r.legs = admission.NewMemory(admission.LegLimit(o.Config.Limits.Legs), func(full bool) { r.event(watch.Legs(full, r.legs.Limit())) })
	r.stored = stored.New(1 << 16)
	r.index = kvindex.New(kvindex.Options{MaxBlocks: int64(o.Config.Index.MaxBlocks)})
	r.predicted = approx.New(approx.Options{TTL: o.Config.Tokens.ApproxTTL})
	r.compute = watch.NewRecompute(watch.RecomputeOptions{
		Ranks: func() []*workers.Rank { return r.registry.Snapshot().Ranks }, Found: r.sinks.Recomputed, Event: r.event,
	})
	r.costs = outcome.New(outcome.Options{
		Objective: o.Config.Routing.Aim(), Event: r.event,
		Fleet: r.registry.Snapshot, Ledger: r.ledger, BlockOf: func(w *workers.Worker) int { return r.settings.Load().BlockOf(w) },
	})
	r.slow = watch.NewSlow(watch.SlowOptions{
		Fleet: r.registry.Snapshot, Factor: func() float64 { return r.settings.Load().Health.SlowFactor },
		Waiting: func(k *workers.Rank) int { return r.ledger.Load(k).PrefillTokens }, Event: r.event, Found: r.costs.SlowRanks,
	})
	r.causes = watch.NewCauses(watch.CausesOptions{
		Fleet: r.registry.Snapshot, Failures: &r.failures, Feeds: func() map[uint32]watch.Feed { return watch.Feeds(r.feeds.Status()) }, Event: r.event,
		Requests: func(k *workers.Rank) uint64 { n, _ := r.fleet.Counts(k); return n },
		Answers:  func(k *workers.Rank) (uint64, int) { return r.slow.Meter(k).Answers() },
		Mute: func(k *workers.Rank, heard time.Time, why string) {
			r.feeds.Mute(kvindex.Rank(k.Slot), heard, why)
		},
		Held: func(k *workers.Rank) int64 {
			x, _ := r.index.RankStats(kvindex.Rank(k.Slot))
			return x.Blocks
		},
		BlockOf: func(w *workers.Worker) int { return r.settings.Load().BlockOf(w) },
	})
	if r.tracer, err = telemetry.NewTracer(ctx, o.Config.Trace.Endpoint, o.Config.Trace.Sample, o.Version); err != nil {
		return nil, err
	}
	if r.secure, err = secure.New(secure.Options{
		Config: &o.Config, SimTLS: o.EngineTLS, Metrics: r.metrics, Event: r.event,
		Connections: func(a netip.Addr) int { return r.settings.Load().ConnectionsOf(a) },
	}); err != nil {
		return nil, err
	}
	if err := r.buildClients(&o.Config); err != nil {
		return nil, err
	}
	if r.tokens, err = prompt.New(prompt.Options{
		TLS: r.secure.EngineTLS(), Header: r.hopHeader(),
		Mode: o.Config.Tokens.Tokenizer, Path: o.Config.Tokens.Path, Registry: r.registry, Event: r.event, DialTimeout: o.Config.Timeouts.Dial,
		CacheBytes: o.Config.Tokens.CacheBytes,
	}); err != nil {
		return nil, err
	}
	r.words = prompt.NewWords(r.tokens, o.Config.Index.Preview)
	r.asker = question.New(question.Sources{
		Index: r.index, Predicted: r.predicted, Feeds: r.feeds, Fleet: r.fleet, Ledger: r.ledger, Learners: r.costs.Learners, Prompts: r.tokens, Words: r.words, Last: r.outliers.Last,
		Now: func() (*effective.Settings, *workers.Snapshot) { return r.settings.Load(), r.registry.Snapshot() },
	}, o.Config.Routing.Seed)
	r.sinks = account.Sinks{
		Metrics: r.metrics, Traffic: &r.traffic, Failures: &r.failures, Slow: r.slow, Recompute: r.compute, Ranks: r.fleet, Event: r.event,
		Untrusted: func(slot uint32) bool { return r.feeds.Untrusted(kvindex.Rank(slot)) },
		Decision:  o.Observer.Decision, Outcome: o.Observer.Outcome,
	}
	specs, err := o.Config.Specs()
	if err != nil {
		return nil, err
	}
	if err := r.prepare(s, s, specs); err != nil {
		return nil, err
	}
	r.follow(s)
	if path := o.Config.WorkersFile; path != "" {
		r.file = discovery.NewFile(r.registry, discovery.FileOptions{Path: path, Source: workers.SourceFile}, r.event)
	}
	if k := &o.Config.Kubernetes; k.On() {
		if r.kube, err = kube.New(r.registry, kube.Options{
			Selector: k.Selector, Prefill: k.PrefillSelector, Decode: k.DecodeSelector, Pool: k.Pool, Discovery: k.Discovery, Namespaces: k.Namespaces, Kubeconfig: k.Kubeconfig,
			Port: k.Port, Scheme: k.Scheme, Worker: k.Worker, RevisionLabel: k.RevisionLabel, UserAgent: "dynctl/" + o.Version,
		}, r.event); err != nil {
			return nil, err
		}
	}
	facts := &console.Facts{
		InForce: r.settings, Fleet: r.fleet, Rests: &r.moves, Slow: r.slow, Causes: r.causes, Compute: r.compute, Learners: r.costs.Learners,
		Tokens: r.tokens, Bodies: r.bodies, Legs: r.legs, Secure: r.secure, Ending: r.drain, Pods: r.kube, Recording: o.Recording,
	}
	r.state = &state.State{
		Router: facts, Version: o.Version, Started: r.started, Registry: r.registry, Index: r.index, Predicted: r.predicted,
		Feeds: r.feeds, Ledger: r.ledger, Gate: r.gate, Ranks: r.ranks, Bodies: r.bodies, Legs: r.legs, Addresses: r.secure.Addresses(), Traffic: &r.traffic,
	}
	r.metrics.Collect(r.state)
	if len(o.Sim) > 0 {
		if _, err := r.registry.Apply(workers.SourceSim, o.Sim); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// Run runs everything beside the requests until ctx ends: discovery, health,
// feeds, snapshots. It joins all of it before it returns.
func (r *Router) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return r.fleet.Run(ctx) })
	g.Go(func() error { return r.monitor.Run(ctx) })
	g.Go(func() error { return r.outliers.Run(ctx) })
	if r.file != nil {
		g.Go(func() error { return r.file.Run(ctx) })
	}
	g.Go(func() error { return r.secure.Run(ctx) })
	if r.kube != nil {
		g.Go(func() error { return r.kube.Run(ctx) })
	}
	g.Go(func() error { return r.traffic.Run(ctx) })
	g.Go(func() error { return r.tokens.Run(ctx) })
	g.Go(func() error { return r.compute.Run(ctx) })
	g.Go(func() error { return r.slow.Run(ctx) })
	g.Go(func() error { return r.costs.Run(ctx) })
	g.Go(func() error { return r.causes.Run(ctx) })
	if r.opts.Recording != nil {
		g.Go(func() error { return watch.Record(ctx, r.opts.Recording, r.event) })
	}
	r.event(eventlog.Event{Kind: "router_started", Text: fmt.Sprintf("the router started with %d worker(s)", len(r.registry.Snapshot().Workers))})
	return g.Wait()
}

// Close frees what New took. Run must have returned.
func (r *Router) Close(ctx context.Context) error {
	r.cancelRequests()
	r.bodies.Close()
	r.legs.Close()
	r.client.Close()
	r.tokens.Close()
	return errors.Join(r.index.Close(), r.predicted.Close(), r.tracer.Close(ctx))
}

// Drain is the end of the router's requests.
func (r *Router) Drain() *drain.Drain { return r.drain }

// Fleet keeps the index and the feeds in step with the workers.
func (r *Router) Fleet() *follower.Follower { return r.fleet }

// RereadWorkers has the file of workers read again, with the key files that it names. An
// event says how it went.
func (r *Router) RereadWorkers() {
	if r.file != nil {
		_ = r.file.Reread()
	}
}

// Settings are those in force, by which they are replaced.
func (r *Router) Settings() *effective.InForce { return r.settings }

// prepare applies new settings to whatever may refuse them.
func (r *Router) prepare(old, now *effective.Settings, listed []workers.Spec) error {
	if err := r.registry.SetNames(now.Names()); err != nil {
		return err
	}
	if _, err := r.registry.ApplyWithRoles(workers.SourceFlag, listed, now.Routing.RoleLabels()); err != nil {
		return errors.Join(err, r.registry.SetNames(old.Names()))
	}
	r.gate.SetLimits(admission.Limits{Inflight: now.Limits.Inflight, Queue: now.Limits.Queue, Timeout: now.Limits.QueueTimeout})
	r.bodies.SetLimit(now.Limits.BodyMemory)
	r.legs.SetLimit(admission.LegLimit(now.Limits.Legs))
	return nil
}

// follow applies settings that are in force to the rest.
func (r *Router) follow(now *effective.Settings) {
	r.ranks.SetLimits(now.Limits.Queue, now.Limits.QueueTimeout)
	r.costs.Aim(now.Routing.Aim())
}

// event adds to the event log.
func (r *Router) event(e eventlog.Event) { r.events.Add(e) }
