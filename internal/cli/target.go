package cli

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/bench/fleet"
	"github.com/dynctl/dynctl/internal/bench/plan"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

// TargetFlags say what a measurement is taken of: a router that runs, engines
// behind a router in this process, or simulated engines behind one.
type TargetFlags struct {
	plan.Target
	Access AccessFlags
	// Profile is that of the parts of Sim that name none; Open makes it part of Sim.
	Profile string
	// Verbose shows the log of a router in this process.
	Verbose bool
}

// Add adds the flags that all commands with a target have.
func (f *TargetFlags) Add(fl *pflag.FlagSet) {
	fl.StringVar(&f.Data, "data", "", "data plane `URL` of that router, when it is not what the router says")
	f.Access.Add(fl)
	f.Access.AddData(fl)
	fl.StringArrayVar(&f.Decode, "decode", nil, "engine that decodes, `URL[,key=value,...]` (repeatable)")
	fl.StringArrayVar(&f.Worker, "worker", nil, "engine that does both, `URL[,key=value,...]` (repeatable)")
	fl.StringVar(&f.Connector, "disagg-connector-type", "", "how KV moves, with --prefill and --decode: "+strings.Join(settings.Lookup("routing.connector").Values, "|"))
	fl.BoolVar(&f.Verbose, "verbose", false, "show the log of the router in this process")
}

// Target is what bench measures and doctor examines: a router, or engines behind a router
// in this process.
type Target struct {
	*fleet.Target
	// What it is in a few words.
	What string
	// Simulated names the simulated fleet and its profiles, a line each; empty for real engines.
	Simulated []string
	close     func() error
}

// Close ends what runs in this process for it.
func (t *Target) Close() error { return t.close() }

// Open reaches or starts the target, which must be closed. defaultSim is the fleet that
// is simulated when nothing is named; without one that is an error of usage.
func (f *TargetFlags) Open(ctx context.Context, stderr io.Writer, defaultSim string) (*Target, error) {
	engines := len(f.Prefill)+len(f.Decode)+len(f.Worker) > 0
	if engines && f.Sim != "" || f.Router != "" && (engines || f.Sim != "") {
		return nil, WithCode(ExitUsage, errors.New("give only one of --router, --sim and engines (--prefill, --decode, --worker)"))
	}
	if !engines && f.Sim == "" && f.Router == "" {
		f.Router = os.Getenv("DYNCTL_ROUTER")
	}
	if f.Profile != "" && (f.Router != "" || engines) {
		return nil, WithCode(ExitUsage, errors.New("--profile is for simulated engines: leave it out, or name a fleet with --sim"))
	}
	if f.Router != "" {
		c, err := f.Access.Client(f.Router)
		if err != nil {
			return nil, err
		}
		conf, err := f.Access.TLS()
		if err != nil {
			c.Close()
			return nil, err
		}
		key, err := f.Access.APIKey()
		if err != nil {
			c.Close()
			return nil, err
		}
		t, err := fleet.New(ctx, c, fleet.Options{URL: strings.TrimRight(f.Data, "/"), TLS: conf, APIKey: key})
		if err != nil {
			c.Close()
			return nil, AdminError(err)
		}
		return &Target{Target: t, What: "router " + f.Router, close: func() error { t.Close(); c.Close(); return nil }}, nil
	}
	if !engines && f.Sim == "" {
		f.Sim = defaultSim
	}
	if f.Sim == "" && !engines {
		return nil, WithCode(ExitUsage, errors.New("name a target: --router URL, --prefill URL --decode URL, or --sim FLEET"))
	}
	if f.Profile != "" {
		f.Sim, f.Profile = sim.WithProfile(f.Sim, f.Profile), ""
	}
	return f.embed(ctx, stderr)
}

// embed starts a router in this process, with loopback listeners of its own.
func (f *TargetFlags) embed(ctx context.Context, stderr io.Writer) (t *Target, err error) {
	config := settings.Default()
	config.Routing.AllowHeaders = true
	// A prefill that fails must show as an error, not as a local prefill.
	config.Routing.PrefillFallback = "error"
	config.Routing.Connector = f.Connector
	config.Prefill, config.Decode, config.Worker = f.Prefill, f.Decode, f.Worker
	log := slog.New(slog.DiscardHandler)
	if f.Verbose {
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
	what := fmt.Sprintf("engines %s", strings.Join(append(append(append([]string{}, f.Prefill...), f.Decode...), f.Worker...), " "))
	var specs []workers.Spec
	var trust *tls.Config
	var simulated []string
	if f.Sim != "" {
		what = "simulated engines " + f.Sim
		parsed, err := sim.ParseFleet(f.Sim)
		if err != nil {
			return nil, WithCode(ExitUsage, fmt.Errorf("--sim %s: %w", f.Sim, err))
		}
		simulated = append([]string{what}, parsed.Notes()...)
		engines, err := sim.Start(life, parsed)
		if err != nil {
			return nil, err
		}
		closers = append(closers, engines.Close)
		specs, trust = engines.Specs("--sim"), engines.ClientTLS()
	}
	v := BuildVersion()
	r, err := router.New(life, router.Options{Config: config, Sim: specs, EngineTLS: trust, Version: v.Version, Revision: v.Revision, Logger: log})
	if err != nil {
		return nil, WithCode(ExitUsage, err)
	}
	closers = append(closers, func() error {
		c, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		return r.Close(c)
	})
	served, err := loopback.Serve(life, r, router.AdminOptions{}, "", "")
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() error {
		c, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer cancel()
		_ = r.Drain().End(c) // what still runs was given up by the client
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
	if err := engineReady(ctx, c, len(specs)+len(f.Prefill)+len(f.Decode)+len(f.Worker)); err != nil {
		return nil, err
	}
	return &Target{Target: ft, What: what, Simulated: simulated, close: closeAll}, nil
}

// engineReady waits until every engine was learned and is usable.
func engineReady(ctx context.Context, c *admin.Client, want int) error {
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
				why = fmt.Sprintf("%s (%s) is not usable: %s", w.Name, w.URL, OrDash(w.Reason))
			}
		}
		// Feeds that come up need a moment more; what stays behind shows later.
		return usable >= want && (feedsConnected(l.Workers) || time.Since(began) > 5*time.Second)
	}) {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return WithCode(ExitUnreachable, fmt.Errorf("the engines were not ready within 30 s: %s", why))
}

// feedsConnected reports whether no event feed is on its way up. One that is verifying
// waits for a batch, which an idle engine does not publish.
func feedsConnected(ws []admin.Worker) bool {
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
