package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/follower"
	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
	"github.com/dynctl/dynctl/internal/router/effective"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/console"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/secure"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
)

// buildClients makes everything that talks to workers.
func (r *Router) buildClients(c *settings.Config) error {
	r.requests, r.cancelRequests = context.WithCancel(context.Background())
	r.client = upstream.New(upstream.Options{DialTimeout: c.Timeouts.Dial, TLS: r.secure.EngineTLS()})
	r.monitor = health.NewMonitor(r.registry, health.Options{Interval: c.Health.Interval, Timeout: c.Health.Timeout, Scrape: c.Health.Scrape, TLS: r.secure.EngineTLS(), Header: r.hopHeader()}, r.event)
	r.outliers = health.NewOutliers(r.registry, health.OutlierOptions{}, r.event)
	feeds := kvfeed.Options{
		BlockSize: cmp.Or(c.Tokens.BlockSize, effective.DefaultBlock), StaleAfter: c.Index.StaleAfter,
		Events: r.event, Logger: r.log, Observer: r.opts.Observer.Batch,
	}
	var err error
	r.fleet, err = follower.New(follower.Options{
		Registry: r.registry, Index: r.index, Predicted: r.predicted, Ledger: r.ledger, Feeds: feeds, Snapshot: c.Index.Snapshot,
		BlockOf: func(w *workers.Worker) int { return r.settings.Load().BlockOf(w) },
		Learn:   r.monitor.Learn, Gone: r.metrics.ForgetWorker, Event: r.event,
	})
	if err != nil {
		return err
	}
	r.feeds = r.fleet.Feeds()
	return nil
}

// AdminOptions set up the admin API.
type AdminOptions = console.Options

// AdminHandler is the admin API, the metrics page and the probes.
func (r *Router) AdminHandler(o AdminOptions) (http.Handler, error) {
	c := &console.Router{
		State: r.state, InForce: r.settings, Registry: r.registry, Index: r.index, Words: r.words, Kept: r.receipts, Log: r.events,
		Secure: r.secure, Ending: r.drain, DryRun: r.dryRun, Metrics: r.metrics.Handler(), Probe: http.HandlerFunc(r.probe),
	}
	return c.Handler(o)
}

// hopHeader is what requests carry that follow from no client's.
func (r *Router) hopHeader() http.Header { return http.Header{api.HeaderHop: {string(r.hop)}} }

// probe answers probes. One of this router's own means that it is its own worker.
func (r *Router) probe(w http.ResponseWriter, req *http.Request) {
	if r.hop.Passed(req.Header) {
		api.WriteError(w, req, api.Looped())
		return
	}
	r.state.ServeProbe(w, req)
}

// Secure is the router's certificates and keys, and what its listeners make of them.
func (r *Router) Secure() *secure.Secure { return r.secure }

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

// routerKey is the key of a context under which the router that cancels it is
// found.
type routerKey struct{}

// BaseContext is for [net/http.Server.BaseContext]: requests that descend from
// it end with the router by themselves. Without it each request pays for a
// context of its own.
func (r *Router) BaseContext(net.Listener) context.Context {
	return context.WithValue(r.requests, routerKey{}, r)
}

// NewServer is a server for the data plane or the admin API. It closes connections on
// which no request comes. Bodies and answers have their own bounds in the handlers, since
// a stream may take as long as it needs.
func NewServer(h http.Handler, errors *log.Logger) *http.Server {
	return &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10, ErrorLog: errors}
}

// CancelRequests ends every request that still runs.
func (r *Router) CancelRequests() { r.cancelRequests() }
