package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/routertest"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

// targetFlags say what a measurement is taken of: a router that runs, engines
// behind a router in this process, or simulated engines behind one.
type targetFlags struct {
	router, data    string
	access          accessFlags
	prefill, decode []string
	worker          []string
	sim, connector  string
	model           string
	verbose         bool
}

// target is what the flags led to.
type target struct {
	*fleet.Target
	// what it is in a few words, and how to give it again on a command line.
	what  string
	close func() error
}

// open reaches or starts the target. defaultSim is what runs when nothing is
// named.
func (f *targetFlags) open(ctx context.Context, stderr io.Writer, defaultSim string) (*target, error) {
	engines := len(f.prefill)+len(f.decode)+len(f.worker) > 0
	if engines && f.sim != "" || f.router != "" && (engines || f.sim != "") {
		return nil, withCode(exitUsage, errors.New("give only one of --router, --sim and engines (--prefill, --decode, --worker)"))
	}
	if f.router != "" {
		c, err := f.access.client(f.router)
		if err != nil {
			return nil, err
		}
		conf, err := f.access.tls()
		if err != nil {
			c.Close()
			return nil, err
		}
		key, err := f.access.apiKey()
		if err != nil {
			c.Close()
			return nil, err
		}
		t, err := fleet.New(ctx, c, fleet.Options{URL: strings.TrimRight(f.data, "/"), TLS: conf, APIKey: key})
		if err != nil {
			c.Close()
			return nil, adminError(err)
		}
		return &target{Target: t, what: "router " + f.router, close: func() error { t.Close(); c.Close(); return nil }}, nil
	}
	if !engines && f.sim == "" {
		f.sim = defaultSim
	}
	if f.sim == "" && !engines {
		return nil, withCode(exitUsage, errors.New("name a target: --router URL, --prefill URL --decode URL, or --sim FLEET"))
	}
	return f.embed(ctx, stderr)
}

// embed starts a router in this process, with loopback listeners of its own.
func (f *targetFlags) embed(ctx context.Context, stderr io.Writer) (t *target, err error) {
	config := settings.Default()
	config.Routing.AllowHeaders = true
	// A prefill that fails must show as an error, not as a local prefill.
	config.Routing.PrefillFallback = "error"
	config.Routing.Connector = f.connector
	config.Prefill, config.Decode, config.Worker = f.prefill, f.decode, f.worker
	log := slog.New(slog.DiscardHandler)
	if f.verbose {
		log = slog.New(slog.NewTextHandler(stderr, nil))
	}
	var closers []func() error
	closeAll := func() error {
		var errs []error
		for i := len(closers) - 1; i >= 0; i-- {
			errs = append(errs, closers[i]())
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, closeAll())
		}
	}()
	// What runs here outlives an interrupt: the run ends first, in order.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	closers = append(closers, func() error { end(); return nil })
	what := fmt.Sprintf("engines %s", strings.Join(append(append(append([]string{}, f.prefill...), f.decode...), f.worker...), " "))
	var specs []workers.Spec
	var trust *tls.Config
	if f.sim != "" {
		what = "simulated engines " + f.sim
		parsed, err := sim.ParseFleet(f.sim)
		if err != nil {
			return nil, withCode(exitUsage, fmt.Errorf("--sim %s: %w", f.sim, err))
		}
		engines, err := sim.Start(life, parsed)
		if err != nil {
			return nil, err
		}
		closers = append(closers, engines.Close)
		specs, trust = engines.Specs("--sim"), engines.ClientTLS()
	}
	v := buildVersion()
	r, err := router.New(life, router.Options{Config: config, Sim: specs, EngineTLS: trust, Version: v.Version, Revision: v.Revision, Logger: log})
	if err != nil {
		return nil, withCode(exitUsage, err)
	}
	closers = append(closers, func() error {
		c, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		return r.Close(c)
	})
	served, err := routertest.Serve(life, r, router.AdminOptions{}, "", "")
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() error {
		c, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer cancel()
		_ = r.Drain(c) // what still runs was given up by the client
		return served.Close()
	})
	c, err := admin.NewClient(served.AdminURL, admin.Options{})
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() error { c.Close(); return nil })
	ft, err := fleet.New(ctx, c, fleet.Options{URL: served.URL})
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() error { ft.Close(); return nil })
	if err := ready(ctx, c, len(specs)+len(f.prefill)+len(f.decode)+len(f.worker)); err != nil {
		return nil, err
	}
	return &target{Target: ft, what: what, close: closeAll}, nil
}

// ready waits until every engine was learned and is usable.
func ready(ctx context.Context, c *admin.Client, want int) error {
	ctx2, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	why := "the router does not answer"
	began := time.Now()
	if wait.Until(ctx2, 50*time.Millisecond, func() bool {
		l, err := c.Workers(ctx2)
		if err != nil {
			return false
		}
		usable := 0
		for _, w := range l.Workers {
			if w.Usable && len(w.Models) > 0 {
				usable++
			} else {
				why = fmt.Sprintf("%s (%s) is not usable: %s", w.Name, w.URL, orDash(w.Reason))
			}
		}
		// Feeds that come up need a moment more; what stays behind shows later.
		return usable >= want && (settled(l.Workers) || time.Since(began) > 5*time.Second)
	}) {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return withCode(exitUnreachable, errors.New(why))
}

// settled reports whether no event feed is on its way up. One that is verifying
// waits for a batch, which an idle engine does not publish.
func settled(ws []admin.Worker) bool {
	for _, w := range ws {
		for _, r := range w.Ranks {
			switch r.Feed.State {
			case "connecting", "replaying", "gap":
				return false
			}
		}
	}
	return true
}
