// Package router is the whole router: it makes its parts, in phases that return what they made,
// and owns everything that runs beside requests (discovery, health, KV event feeds, snapshots).
//
// What a stage decides is a value with its reasons, so that the admin API, explain and replay
// show exactly what was done.
package router

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/follower"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/control"
	"github.com/dynctl/dynctl/internal/router/door"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/router/placement/siblings"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
)

// Options make a Router.
type Options struct {
	// Config is validated by New.
	Config settings.Config
	// Origin says where each key of the config came from; may be nil.
	Origin map[string]string
	// ReplicaName is this router's name among others; empty makes one ([ReplicaName]).
	ReplicaName string
	// Sim are the simulated engines that run in this process; may be nil.
	Sim []workers.Spec
	// EngineTLS is how https engines are spoken to instead of as the config says; nil
	// for that.
	EngineTLS *tls.Config
	// Version and Revision of the binary, for status and metrics.
	Version, Revision string
	Logger            *slog.Logger
	// AccessLog gets a record of each request that has ended; nil for none. It must not block.
	AccessLog *slog.Logger
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
	// Decision is a decision that queried the index at a time.
	Decision func(queried time.Time, d *trace.Decision)
	// Outcome is a finished receipt.
	Outcome func(r *receipt.Receipt)
}

// Router is the router. Make it with New, run it with Run. It consists of parts; each is
// made by one function of setup.go from those before it, and has all its fields then.
type Router struct {
	opts Options
	hop  api.Hop
	*base
	*entry
	*others
	*engines
	*observing
	*deciding
	*served
	*sources
	*applied
	door *door.Door
}

// New makes a router from a config. It opens no sockets.
func New(ctx context.Context, o Options) (*Router, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if err := o.Config.Validate(); err != nil {
		return nil, err
	}
	first, err := effective.New(o.Config, o.Origin, 1)
	if err != nil {
		return nil, err
	}
	r := &Router{opts: o, hop: api.NewHop()}
	if r.base, err = newBase(ctx, &o, first); err != nil {
		return nil, err
	}
	r.entry = newEntry(&o.Config, r.base)
	if r.others, err = newOthers(&o, r.base, r.entry); err != nil {
		return nil, err
	}
	if r.engines, err = newEngines(&o, r.hop, r.base, r.entry, r.others); err != nil {
		return nil, err
	}
	r.observing = newObserving(&o, r.base, r.entry, r.others, r.engines)
	if r.deciding, err = newDeciding(&o.Config, r.hop, r.base, r.entry, r.engines, r.observing, r.others); err != nil {
		return nil, err
	}
	r.served = newServed(r.base, r.entry, r.engines, r.observing, r.others, r.deciding)
	if r.sources, err = newSources(&o, r.base); err != nil {
		return nil, err
	}
	r.applied = newApplied(r)
	r.door = newDoor(r)
	specs, err := o.Config.Specs()
	if err != nil {
		return nil, err
	}
	if err := r.prepare(first, first, specs); err != nil {
		return nil, err
	}
	r.applyInForce(first)
	if len(o.Sim) > 0 {
		if _, err := r.registry.Apply(workers.SourceSim, o.Sim); err != nil {
			return nil, err
		}
	}
	r.metrics.Collect(r.state)
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
	if r.siblings != nil {
		g.Go(func() error { return r.share(ctx) })
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
func (r *Router) Drain() *control.Drain { return r.drain }

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
func (r *Router) Settings() *effective.Reloader { return r.reload }

// prepare applies new settings to whatever may refuse them.
func (r *Router) prepare(old, now *effective.Settings, listed []workers.Spec) error {
	if err := r.registry.SetNames(now.Names()); err != nil {
		return err
	}
	if _, err := r.registry.ApplyWithRoles(workers.SourceFlag, listed, now.Routing.RoleLabels()); err != nil {
		return errors.Join(err, r.registry.SetNames(old.Names()))
	}
	r.limiter.SetLimits(admission.Limits{Inflight: now.Limits.Inflight, Queue: now.Limits.Queue, Timeout: now.Limits.QueueTimeout})
	r.bodies.SetLimit(now.Limits.BodyMemory)
	r.legs.SetLimit(admission.LegLimit(now.Limits.Legs))
	return nil
}

// applyInForce applies settings that are in force to what cannot refuse them.
func (r *Router) applyInForce(now *effective.Settings) {
	r.rankQueue.SetLimits(now.Limits.Queue, now.Limits.QueueTimeout)
	r.costs.Aim(now.Routing.Aim())
	if r.siblings != nil {
		r.siblings.SetSettings(siblings.Digest(sections(&now.Config)))
	}
}
