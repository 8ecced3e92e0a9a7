package commands

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/settings/load"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

// newServeCmd makes the command serve: a router from its settings to the end of its last
// request.
func newServeCmd() *cobra.Command {
	var path string
	var record recordFlags
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the router",
		Long: `Run the router: an OpenAI-compatible endpoint in front of a fleet of engines.

Settings come from flags, then environment (DYNCTL_ROUTING_THRESHOLD, …), then
the file given by --config, then defaults. SIGHUP reads them again and applies
them whole or not at all; SIGTERM and ctrl-c finish running streams, a second
one ends them.`,
		Example: `  dynctl serve --sim 2p2d
  dynctl serve --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 --routing-threshold 2048
  dynctl serve --worker http://10.0.0.1:8000,dp=2 --worker http://10.0.0.2:8000,dp=2
  dynctl serve --config dynctl.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := cli.LoadConfig(path, cmd.Flags())
			if err != nil {
				return err
			}
			return serve(cmd.Context(), l, cmd.Flags(), &record, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cli.SettingFlags(cmd)
	record.Add(cmd, "record")
	cmd.Flags().BoolVar(&record.Tokens, "record-tokens", false, "record prompts as token ids, too, not only as block hashes")
	cmd.Flags().StringVar(&path, "config", os.Getenv("DYNCTL_CONFIG"), "configuration `FILE` (YAML or JSON)")
	cli.GroupFlags(cmd, "listen", "admin-listen", "prefill", "decode", "worker", "workers-file", "sim", "config", "policy", "routing-threshold")
	return cmd
}

// serve runs a router until the context ends, the admin API drains it or a
// listener fails.
func serve(ctx context.Context, l *load.Loaded, flags *pflag.FlagSet, record *recordFlags, stdout, stderr io.Writer) (err error) {
	log, level := cli.NewLevelLogger(l.Config.Log, stderr)
	telemetry.LogErrors(log)
	collector, stopCollector := context.WithCancel(ctx)
	var tuning sync.WaitGroup
	tuning.Go(func() { tuneCollector(collector) })
	defer func() { stopCollector(); tuning.Wait() }()
	for _, w := range l.Warnings {
		log.Warn(w)
	}
	data, err := cli.Listen("--listen", l.Config.Listen)
	if err != nil {
		return err
	}
	defer data.Close()
	admin, err := cli.Listen("--admin-listen", l.Config.AdminListen)
	if err != nil {
		return err
	}
	defer admin.Close()
	var specs []workers.Spec
	var control http.Handler
	var trust *tls.Config
	if l.Config.Sim != "" {
		fleet, err := sim.ParseFleet(l.Config.Sim)
		if err != nil {
			return cli.WithCode(cli.ExitUsage, fmt.Errorf("--sim %s: %w", l.Config.Sim, err))
		}
		for _, note := range fleet.Notes() {
			log.Warn(note)
		}
		engines, err := sim.Start(ctx, fleet)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, engines.Close()) }()
		specs, control, trust = engines.Specs("--sim"), engines.Control(), engines.ClientTLS()
	}
	name, err := router.ReplicaName(&l.Config.Replicas)
	if err != nil {
		return err
	}
	tap := newTap("serve", name)
	tap.Tokens = record.Tokens
	v := cli.BuildVersion()
	options := router.Options{
		Config: l.Config, Origin: l.Origin, ReplicaName: name, Sim: specs, EngineTLS: trust, Version: v.Version, Revision: v.Revision, Logger: log,
		Observer: recordingObserver(tap),
		Reloaded: func(old, now *settings.Config) {
			_ = level.UnmarshalText([]byte(now.Log.Level)) // validated with the config
			for _, change := range configChanges(old, now) {
				log.Info(change)
			}
		},
	}
	if format := l.Config.Log.Access; format != "off" {
		lines := newAccessLines(stdout)
		defer lines.Close()
		options.AccessLog = cli.NewLogger(settings.Log{Level: "info", Format: format}, lines)
	}
	if record.Path != "" {
		var file *recording
		if file, err = startRecording(tap, record, log); err != nil {
			return err
		}
		options.Recording = file
		defer func() { err = errors.Join(err, file.Stop()) }()
	}
	r, err := router.New(ctx, options)
	if err != nil {
		return cli.WithCode(cli.ExitUsage, err)
	}
	adminHandler, err := r.AdminHandler(router.AdminOptions{
		TokenFile: l.Config.AdminTokenFile, Name: data.Addr().String(), AdminName: admin.Addr().String(), Sim: control, Stream: tap,
	})
	if err != nil {
		return cli.WithCode(cli.ExitUsage, err)
	}
	scheme, adminScheme := r.Secure().Schemes()
	url, adminURL := scheme+"://"+data.Addr().String(), adminScheme+"://"+admin.Addr().String()
	log.Info(fmt.Sprintf("dynctl %s routes on %s, admin API and /metrics on %s", v.Version, url, adminURL))
	if c := l.Config; len(c.Worker)+len(c.Prefill)+len(c.Decode)+len(specs) == 0 && c.WorkersFile == "" && !c.Kubernetes.On() {
		log.Warn("there are no workers: name them with --worker, --prefill, --decode or --workers-file, find pods with --kube-selector or --kube-pool, add them with dynctl workers add, or try --sim 2p2d")
	}

	// The router outlives the listeners: requests in progress need its feeds
	// and probes until the drain is over.
	runCtx, stopRun := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRun()
	var g errgroup.Group
	g.Go(func() error { defer stopRun(); return r.Run(runCtx) })
	g.Go(func() error { introduce(runCtx, log, r, adminURL); return nil })
	if l.Config.Log.Format != "json" && (cli.IsTerminal(stderr) || l.Config.Sim != "") {
		g.Go(func() error {
			greet(runCtx, stderr, r, scheme+"://"+here(data.Addr()), adminScheme+"://"+here(admin.Addr()), l.Config.Keys.File != "" && l.Config.Keys.Required)
			return nil
		})
	}
	quiet := slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	dataServer, adminServer := r.DataServer(quiet), router.NewServer(adminHandler, r.Secure().ServerLog("admin", quiet))
	failed := make(chan error, 2)
	serveOn := func(s *http.Server, ln net.Listener) {
		if err := s.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			failed <- fmt.Errorf("listener %s: %w", ln.Addr(), err)
		}
	}
	g.Go(func() error { serveOn(dataServer, r.Secure().DataListener(data)); return nil })
	g.Go(func() error { serveOn(adminServer, r.Secure().AdminListener(admin)); return nil })

	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	var cause error
loop:
	for {
		select {
		case <-hup:
			if n, err := cli.LoadConfig(l.Path, flags); err != nil {
				r.Settings().Refused(err)
			} else {
				_ = r.Settings().Reload(n.Config, n.Origin) // an event says how it went
			}
			r.RereadWorkers()
		case <-ctx.Done():
			break loop
		case <-r.Drain().Begun():
			break loop
		case <-runCtx.Done():
			break loop
		case cause = <-failed:
			break loop
		}
	}

	// A second signal ends the drain at once.
	signals, stopSignals := signal.NotifyContext(context.WithoutCancel(ctx), os.Interrupt, syscall.SIGTERM)
	defer stopSignals()
	// Clients that keep their connections must make new ones, which a Service brings to
	// another router. Those that ask meanwhile learn it with their answer; then idle
	// connections are closed, the others after their answer.
	r.Drain().Leave(signals)
	dataServer.SetKeepAlivesEnabled(false)
	drained := r.Drain().End(signals)
	if drained != nil {
		// What still runs gets an error in its own stream, and ends.
		log.Warn("streams are cut: " + drained.Error())
		r.CancelRequests()
		if cause == nil {
			cause = cli.WithCode(cli.ExitRuntime, drained)
			if signals.Err() != nil {
				cause = cli.WithCode(cli.ExitInterrupted, drained)
			}
		}
	}
	endCtx, cancelEnd := context.WithTimeout(context.WithoutCancel(ctx), CutGrace)
	defer cancelEnd()
	if err := dataServer.Shutdown(endCtx); err != nil {
		_ = dataServer.Close()
	}
	_ = adminServer.Close()
	r.CancelRequests()
	stopRun()
	cause = errors.Join(cause, g.Wait())
	if err := r.Balanced(); err != nil {
		log.Error("the ledger is not zero after the drain", "err", err)
		cause = errors.Join(cause, err)
	}
	closeCtx, cancelClose := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancelClose()
	cause = errors.Join(cause, r.Close(closeCtx))
	if cause == nil {
		log.Info("stopped", "drained", drained == nil)
	}
	return cause
}

// configChanges says what a reload changed, from what to what.
func configChanges(old, now *settings.Config) (changes []string) {
	for _, r := range settings.Changed(old, now) {
		changes = append(changes, fmt.Sprintf("%s: %v -> %v", r.Key, r.Shown(old), r.Shown(now)))
	}
	return changes
}

// CutGrace is how long the last bytes of answers may take once no request is
// in progress any more.
const CutGrace = 2 * time.Second

// greetWait is how long the greeting waits for a worker.
const greetWait = 5 * time.Second

// introduce says in one line what the fleet is made of, once all of it is ready or
// has had the time for that.
func introduce(ctx context.Context, log *slog.Logger, r *router.Router, adminURL string) {
	ctx, cancel := context.WithTimeout(ctx, greetWait)
	defer cancel()
	n := r.Counts()
	wait.Until(ctx, 50*time.Millisecond, func() bool {
		n = r.Counts()
		return n.Total > 0 && n.Usable == n.Total
	})
	if n.Total == 0 {
		return // that there are none has been said
	}
	log.Info(fmt.Sprintf("%d of %s ready (%s; %s; models: %s); see them with dynctl top%s", n.Usable, cli.Plural(n.Total, "worker"), byRole(n.Prefill, n.Decode, n.Aggregated, n.Either), cli.Plural(n.Ranks, "rank"), cli.OrDash(strings.Join(r.Models(), ", ")), routerFlag(adminURL)))
}

// byRole is how many workers there are of each role.
func byRole(prefill, decode, aggregated, either int) string {
	var roles []string
	for _, x := range []struct {
		n    int
		role workers.Role
	}{{prefill, workers.Prefill}, {decode, workers.Decode}, {aggregated, workers.Aggregated}, {either, workers.Either}} {
		if x.n > 0 {
			roles = append(roles, fmt.Sprintf("%d %s", x.n, x.role))
		}
	}
	return strings.Join(roles, ", ")
}

// here is an address that the router listens on, as clients on this machine call it.
func here(a net.Addr) string {
	if t, ok := a.(*net.TCPAddr); ok && t.IP.IsUnspecified() {
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(t.Port))
	}
	return a.String()
}

// greet gives a new user a command to paste, once it will work; keyed says that it needs an
// API key.
func greet(ctx context.Context, w io.Writer, r *router.Router, url, adminURL string, keyed bool) {
	ctx, cancel := context.WithTimeout(ctx, greetWait)
	defer cancel()
	var models []string
	if !wait.Until(ctx, 20*time.Millisecond, func() bool {
		if ok, _ := r.Ready(); ok {
			models = r.Models()
		}
		return len(models) > 0
	}) {
		return // the log says what the workers are up to
	}
	// The body is within single quotes of a shell.
	model, _ := json.Marshal(models[0]) // a string is always JSON
	key := ""
	if keyed {
		key = " -H 'Authorization: Bearer KEY'"
	}
	quoted := strings.ReplaceAll(string(model), "'", `\u0027`)
	printable.Fprintf(w, `
Try it:

  curl -i %s/v1/chat/completions%s -H 'Content-Type: application/json' \
    -d '{"model": %s, "stream": true, "max_tokens": 32, "messages": [{"role": "user", "content": "Why did the router choose this engine? %s"}]}'

Then, with the X-Dynctl-Decision header of the answer:

  dynctl explain%s ID
  dynctl workers list%s

See all of it live:

  dynctl top%s

`, url, key, quoted, "Please explain in detail, with every candidate and its cost.", routerFlag(adminURL), routerFlag(adminURL), routerFlag(adminURL))
}

// routerFlag names the router for other commands where it is not the default.
func routerFlag(url string) string {
	if url != cli.DefaultRouter {
		return " --router " + url
	}
	return ""
}
