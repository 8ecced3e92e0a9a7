// Package loopback is a router with its engines on real loopback sockets in
// one process: the stand on which tests, endurance runs and measurements put the
// whole router, with the engines' own counters beside it.
package loopback

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/watch"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
)

// Options make a Rig.
type Options struct {
	// Fleet is the simulated engines ("2p2d:dp=2"); empty for none.
	Fleet string
	// Specs changes what is configured of the engines; nil leaves it.
	Specs func([]workers.Spec) []workers.Spec
	// Configure changes the configuration, which is the default one with fast
	// probes; nil leaves it.
	Configure func(*settings.Config)
	// Admin is passed on to the admin API.
	Admin    router.AdminOptions
	Observer router.Observer
	// Recording is passed on to the router.
	Recording watch.Recording
	// TLS is how the rig's clients speak to a router with certificates; nil for
	// one without.
	TLS    *tls.Config
	Logger *slog.Logger
}

// Rig is a running router in front of simulated engines.
type Rig struct {
	// Sim is the engines, nil without a fleet.
	Sim *sim.Running
	// Router is the present router; StartRouter replaces it.
	Router *router.Router
	// URL is the base of the data plane, AdminURL that of the admin API. They
	// stay the same when the router is restarted.
	URL, AdminURL string
	// Admin talks to the admin API. It is nil when that asks for a token.
	Admin *admin.Client
	// Client sends requests to the data plane.
	Client *http.Client
	// Config is what the router was started with.
	Config settings.Config

	o      Options
	served *Served
}

// FastConfig is the default configuration with probes that are fast enough to
// wait for.
func FastConfig() settings.Config {
	c := settings.Default()
	c.Listen, c.AdminListen = "127.0.0.1:0", "127.0.0.1:0"
	c.Health.Interval, c.Health.Scrape = 50*time.Millisecond, 50*time.Millisecond
	c.Routing.Seed = 1
	return c
}

// Start starts the engines and a router in front of them. Close ends both.
func Start(ctx context.Context, o Options) (*Rig, error) {
	g := &Rig{o: o, Config: FastConfig()}
	if o.Fleet != "" {
		f, err := sim.ParseFleet(o.Fleet)
		if err != nil {
			return nil, err
		}
		if g.Sim, err = sim.Start(ctx, f); err != nil {
			return nil, err
		}
	}
	if o.Configure != nil {
		o.Configure(&g.Config)
	}
	g.Client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true, TLSClientConfig: o.TLS},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	if err := g.StartRouter(ctx); err != nil {
		return nil, errors.Join(err, g.Close(ctx))
	}
	return g, nil
}

// StartRouter starts a router on the addresses of the one before.
func (g *Rig) StartRouter(ctx context.Context) error {
	var specs []workers.Spec
	if g.Sim != nil {
		specs = g.Sim.Specs("rig")
	}
	if g.o.Specs != nil {
		specs = g.o.Specs(specs)
	}
	var trust *tls.Config
	if g.Sim != nil {
		trust = g.Sim.ClientTLS()
	}
	r, err := router.New(ctx, router.Options{Config: g.Config, Sim: specs, EngineTLS: trust, Version: "in-process", Logger: g.o.Logger, Observer: g.o.Observer, Recording: g.o.Recording})
	if err != nil {
		return err
	}
	served, err := Serve(ctx, r, g.o.Admin, g.URL, g.AdminURL)
	if err != nil {
		return errors.Join(err, r.Close(ctx))
	}
	if g.Admin == nil {
		if g.Admin, err = admin.NewClient(served.AdminURL, admin.Options{TokenFile: g.o.Admin.TokenFile, TLS: g.o.TLS}); err != nil {
			return errors.Join(err, served.Close(), r.Close(ctx))
		}
	}
	g.Router, g.served, g.URL, g.AdminURL = r, served, served.URL, served.AdminURL
	return nil
}

// Served is a router that runs on loopback listeners of its own.
type Served struct {
	URL, AdminURL string

	router     *router.Router
	data, ctrl *http.Server
	stop       context.CancelFunc
	run        errgroup.Group
}

// Serve runs a router on the addresses of two URLs, or on free ports for "".
func Serve(ctx context.Context, r *router.Router, o router.AdminOptions, url, adminURL string) (*Served, error) {
	data, err := listen(ctx, url)
	if err != nil {
		return nil, err
	}
	ctrl, err := listen(ctx, adminURL)
	if err != nil {
		return nil, errors.Join(err, data.Close())
	}
	o.Name, o.AdminName = data.Addr().String(), ctrl.Addr().String()
	h, err := r.AdminHandler(o)
	if err != nil {
		return nil, errors.Join(err, data.Close(), ctrl.Close())
	}
	quiet := slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	scheme, adminScheme := r.Secure().Schemes()
	s := &Served{URL: scheme + "://" + o.Name, AdminURL: adminScheme + "://" + o.AdminName, router: r, data: r.DataServer(quiet), ctrl: router.NewServer(h, r.Secure().ServerLog("admin", quiet))}
	ctx, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	s.run.Go(func() error { return r.Run(ctx) })
	s.run.Go(func() error { return unlessClosed(s.data.Serve(r.Secure().DataListener(data))) })
	s.run.Go(func() error { return unlessClosed(s.ctrl.Serve(r.Secure().AdminListener(ctrl))) })
	return s, nil
}

func unlessClosed(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends what still runs and returns the router's error.
func (s *Served) Close() error {
	_ = s.data.Close()
	_ = s.ctrl.Close()
	s.router.CancelRequests()
	s.stop()
	return s.run.Wait()
}

func listen(ctx context.Context, url string) (net.Listener, error) {
	_, addr, _ := strings.Cut(url, "://")
	return sockets.Listen(ctx, cmp.Or(addr, "127.0.0.1:0"))
}

// StopRouter drains the router for as long as ctx lasts, stops it as serve
// does, and reports what is left on its ledger.
func (g *Rig) StopRouter(ctx context.Context) error {
	if g.Router == nil {
		return nil
	}
	err := g.Router.Drain().End(ctx)
	_ = g.served.data.Shutdown(ctx) // Close ends what does not end by itself
	err = errors.Join(err, g.served.Close(), g.Router.Balanced(), g.Router.Close(context.WithoutCancel(ctx)))
	g.Router = nil
	return err
}

// Close stops the router, then the engines.
func (g *Rig) Close(ctx context.Context) error {
	if g.Admin != nil {
		g.Admin.Close()
	}
	if g.Client != nil {
		g.Client.CloseIdleConnections()
	}
	err := g.StopRouter(ctx)
	if g.Client != nil {
		g.Client.CloseIdleConnections()
	}
	if g.Sim != nil {
		err = errors.Join(err, g.Sim.Close())
	}
	return err
}

// Wait waits until the condition holds, asking every few milliseconds. The
// error of a wait that ends with ctx has the condition's last words.
func Wait(ctx context.Context, what string, cond func() error) error {
	var err error
	if wait.Until(ctx, 5*time.Millisecond, func() bool { err = cond(); return err == nil }) {
		return nil
	}
	return fmt.Errorf("waited in vain for %s: %w (%w)", what, err, ctx.Err())
}

// Post sends v as JSON to a path of the data plane, with headers as names and values, and
// reads the answer to its end.
func (g *Rig) Post(ctx context.Context, path string, v any, headers ...string) (status int, header http.Header, answer []byte, err error) {
	body, err := json.Marshal(v)
	if err != nil {
		return 0, nil, nil, err
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, g.URL+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, nil, err
	}
	q.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		q.Header.Set(headers[i], headers[i+1])
	}
	resp, err := g.Client.Do(q)
	if err != nil {
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, answer, err
}

// Ready waits until every worker is usable and every feed is trusted.
func (g *Rig) Ready(ctx context.Context) error {
	return Wait(ctx, "the fleet", func() error {
		snap, err := g.Admin.Workers(ctx)
		if err != nil {
			return err
		}
		for _, w := range snap.Workers {
			if !w.Usable {
				return fmt.Errorf("%s is not usable: %s", w.Name, w.Reason)
			}
			for _, k := range w.Ranks {
				if k.Feed.State != "none" && !k.Feed.Trusted && !g.DialsIn(w.Name) {
					return fmt.Errorf("the feed of %s is %s: %s", k.Label, k.Feed.State, k.Feed.Reason)
				}
				if k.Engine == nil {
					return fmt.Errorf("%s has not reported its load", k.Label)
				}
			}
			if e := g.engine(w.Name); e != nil {
				for _, k := range w.Ranks {
					// The router has sent its subscription when its connection is up, and an
					// engine has no memory of events that nobody had subscribed to.
					if pub, err := e.Publisher(k.DP); err == nil && pub != nil && (k.Feed.State == "none" || pub.Subscribers() == 0) {
						return fmt.Errorf("the events of %s are not followed yet", k.Label)
					}
				}
			}
		}
		return nil
	})
}

// DialsIn says that an engine's publisher dials the router: the router does not know of it
// before its first batch.
func (g *Rig) DialsIn(name string) bool {
	e := g.engine(name)
	return e != nil && len(e.Group().Dial) > 0
}

func (g *Rig) engine(name string) *sim.Engine {
	if g.Sim == nil {
		return nil
	}
	return g.Sim.Named(name)
}
