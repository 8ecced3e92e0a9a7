// Package topcmd is the command top: the screen, its figures as text and JSON, the
// contexts that name routers, and the demonstration.
package topcmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/muesli/termenv"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/page"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/workers/sim/profiles"
)

// topFlags are the flags of top.
type topFlags struct {
	routers                    []string
	access                     cli.AccessFlags
	context                    string
	output, color, theme, view string
	profile                    string
	once, ascii, demo, legend  bool
	reverse                    bool
	watch, rate, timeout       time.Duration
	count                      int
	filter, sort               string
}

// New makes the command.
func New() *cobra.Command {
	var f topFlags
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch ranks, the radix index and every decision",
		Long: `Watch one router, or several replicas, on one screen: traffic, every rank with
its load as the router and as the engine sees it, the radix index, decisions
with their full explanation, and events. What needs attention is said in words.

With --once, --watch or -o json|jsonl the same figures are written without a
terminal; rates are right from the first output. The JSON form is schema
dynctl.top/v1. Press ? on the screen for the keys and columns; --legend writes the
columns. The screen reads; only :drain and :resume change a router, and they ask
first.

Exit codes: 0; 1 when the router refuses, as with a wrong token; 2 for wrong flags,
a missing terminal, or an address that is no admin API; 4 when no router answers.`,
		Example: `  dynctl top
  dynctl top --router http://10.0.0.1:8001 --router http://10.0.0.2:8001 --token-file token
  dynctl top --context prod
  dynctl top --once -o json | jq '.routers[0].attention'
  dynctl top --watch 5s -o jsonl --filter 'role:decode kv>80'
  dynctl top --demo`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runTop(cmd, &f) },
	}
	fl := cmd.Flags()
	fl.StringArrayVar(&f.routers, "router", nil, "admin `URL` of a router (repeatable; environment DYNCTL_ROUTER; default "+cli.DefaultRouter+"); NAME=URL makes a context of it, which :ctx goes to")
	f.access.Add(fl)
	fl.StringVar(&f.context, "context", "", "`NAME` of a context in $DYNCTL_CONTEXTS, or else in ~/.config/dynctl/contexts.yaml")
	fl.BoolVar(&f.once, "once", false, "write the figures once and exit")
	fl.BoolVar(&f.legend, "legend", false, "write what the columns mean, and exit")
	fl.DurationVar(&f.watch, "watch", 0, "write the figures again every `INTERVAL` until interrupted")
	fl.IntVar(&f.count, "count", 0, "end --watch after this many outputs; 0 is never")
	fl.StringVar(&f.filter, "filter", "", "`TERMS` that pick ranks, such as \"role:decode kv>80 !st:ok\"")
	fl.StringVar(&f.sort, "sort", "", "order of ranks; default worst first")
	fl.BoolVar(&f.reverse, "reverse", false, "turn the order of ranks round")
	fl.StringVar(&f.view, "view", "overview", "first view: overview|workers|radix|decisions|events")
	fl.DurationVar(&f.rate, "rate", time.Second, "time between two questions to a router")
	fl.DurationVar(&f.timeout, "timeout", 2*time.Second, "longest wait for an answer; 15s where there is no screen")
	fl.BoolVar(&f.ascii, "ascii", false, "draw with ASCII only")
	fl.StringVar(&f.color, "color", "auto", "auto|always|never; auto obeys NO_COLOR and the terminal")
	fl.StringVar(&f.theme, "theme", theme.Names()[0], "colours: dark|light|mono")
	fl.BoolVar(&f.demo, "demo", false, "show a router with simulated engines under load, all in this process")
	fl.StringVar(&f.profile, "profile", "", "timing of the engines of --demo: a model of a real GPU, see dynctl sim --help")
	cli.OutputFlag(cmd, &f.output, "table", "json", "jsonl")
	for flag, values := range map[string][]string{"view": topViews, "color": {"auto", "always", "never"}, "theme": theme.Names()} {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	_ = cmd.RegisterFlagCompletionFunc("context", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		c, err := readContexts(contextsPath())
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return c.names(), cobra.ShellCompDirectiveNoFileComp
	})
	return cmd
}

// plainTimeout is for what is written without a screen: no user waits for it to
// react, and a router of a thousand ranks under load takes its time to answer.
const plainTimeout = 15 * time.Second

var topViews = []string{"overview", "workers", "radix", "decisions", "events"}

func runTop(cmd *cobra.Command, f *topFlags) (err error) {
	usage := func(format string, a ...any) error { return cli.WithCode(cli.ExitUsage, fmt.Errorf(format, a...)) }
	for _, pair := range [][2]string{{"once", "watch"}, {"router", "context"}, {"demo", "router"}, {"demo", "context"}} {
		if cmd.Flags().Changed(pair[0]) && cmd.Flags().Changed(pair[1]) {
			return usage("--%s and --%s exclude each other", pair[0], pair[1])
		}
	}
	if f.legend {
		_, err := fmt.Fprintln(cmd.OutOrStdout(), strings.Join(page.LegendLines(), "\n"))
		return err
	}
	view := slices.Index(topViews, f.view)
	switch {
	case view < 0:
		return usage("--view %s: not one of %v", f.view, topViews)
	case !slices.Contains([]string{"auto", "always", "never"}, f.color):
		return usage("--color %s: not one of auto, always, never", f.color)
	case !slices.Contains(theme.Names(), f.theme):
		return usage("--theme %s: not one of %v", f.theme, theme.Names())
	case cmd.Flags().Changed("watch") && f.watch < 100*time.Millisecond:
		return usage("--watch %s: less than 100ms", f.watch)
	case f.count < 0 || f.count > 0 && f.watch == 0:
		return usage("--count needs --watch and a number above 0")
	case f.rate < 100*time.Millisecond || f.rate > time.Minute:
		return usage("--rate %s: not between 100ms and 1m", f.rate)
	case f.profile != "" && !f.demo:
		return usage("--profile is for the engines of --demo: leave it out")
	case f.timeout <= 0:
		return usage("--timeout %s: must be above 0", f.timeout)
	}
	plain := f.once || f.watch > 0 || f.output != "table"
	for _, name := range []string{"view", "theme"} {
		if plain && cmd.Flags().Changed(name) {
			return usage("--%s is for the screen: --once, --watch and -o json write all that they have", name)
		}
	}
	if plain && !cmd.Flags().Changed("timeout") {
		f.timeout = plainTimeout
	}
	text := tui.TextOptions{Format: f.output, ASCII: f.ascii, Filter: f.filter, Sort: f.sort, Reverse: f.reverse}
	if err := text.Check(); err != nil && (plain || view < 2) {
		return cli.WithCode(cli.ExitUsage, err)
	}
	o := tui.Options{Rate: f.rate, Timeout: f.timeout, ASCII: f.ascii, Theme: f.theme, View: view, Filter: f.filter, Dir: "."}
	if !plain && (!cli.IsTerminal(cmd.InOrStdin()) || !cli.IsTerminal(cmd.OutOrStdout())) {
		return cli.WithCode(cli.ExitUsage, tui.ErrNoTerminal)
	}
	ctx := cmd.Context()
	if f.demo {
		demo, err := startDemo(ctx, f.profile)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, demo.Close()) }()
		o.Note, f.routers = "DEMO", []string{demo.URL}
		if f.profile != "" {
			o.Note = "DEMO, a model: " + f.profile
		}
		if p, ok := profiles.Find(f.profile); ok && plain { // which has no place for o.Note
			fmt.Fprintln(cmd.ErrOrStderr(), "note:", p.Note())
		}
	}
	given := f.access
	named, err := namedRouters(f.routers)
	if err != nil {
		return cli.WithCode(cli.ExitUsage, err)
	}
	if len(named) > 0 {
		o.Context, f.routers = named[0].Name, named[0].Routers
	} else if o.Context, err = f.resolve(); err != nil {
		return cli.WithCode(cli.ExitUsage, err)
	}
	if o.Clients, err = f.access.Clients(f.routers); err != nil {
		return err
	}
	opened, first := o.Clients, o.Context
	var mu sync.Mutex // a context may be opened while another one is
	defer func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range opened {
			c.Close()
		}
	}()
	o.Contexts = tui.Contexts{
		Names: func() ([]string, error) {
			c, err := allContexts(named)
			if err != nil {
				return nil, err
			}
			return c.names(), nil
		},
		Open: func(name string) ([]*admin.Client, error) {
			c, err := allContexts(named)
			if err != nil {
				return nil, err
			}
			x, err := c.find(name, contextsPath())
			if err != nil {
				return nil, err
			}
			// A token that was given for some routers is not shown to others.
			var access cli.AccessFlags
			if name == first || slices.ContainsFunc(named, func(y routerContext) bool { return y.Name == name }) {
				access = given
			}
			access = x.access(access)
			clients, err := access.Clients(x.Routers)
			mu.Lock()
			opened = append(opened, clients...)
			mu.Unlock()
			return clients, err
		},
	}
	if plain {
		return printTop(ctx, cmd.OutOrStdout(), o, text, f)
	}
	o.Profile = colorProfile(f.color, cmd.OutOrStdout())
	return tui.Run(ctx, o, cmd.InOrStdin(), cmd.OutOrStdout())
}

// resolve finds the routers to ask: flags, then the context, then the
// environment, then the current context, then the default.
func (f *topFlags) resolve() (name string, err error) {
	if len(f.routers) > 0 {
		return "", nil
	}
	if env := os.Getenv("DYNCTL_ROUTER"); env != "" && f.context == "" {
		f.routers = []string{env}
		return "", nil
	}
	path := contextsPath()
	c, err := readContexts(path)
	if err != nil {
		return "", err
	}
	name = cmp.Or(f.context, c.Current)
	if name == "" {
		f.routers = []string{cli.DefaultRouter}
		return "", nil
	}
	x, err := c.find(name, path)
	if err != nil {
		return "", err
	}
	f.routers, f.access = x.Routers, x.access(f.access)
	return name, nil
}

// colorProfile is which colours the terminal has.
func colorProfile(mode string, out io.Writer) termenv.Profile {
	o := termenv.NewOutput(out)
	if mode == "never" || mode == "auto" && (o.EnvNoColor() || os.Getenv("TERM") == "dumb" || os.Getenv("DYNCTL_NO_COLOR") != "") {
		return termenv.Ascii
	}
	if p := o.EnvColorProfile(); p != termenv.Ascii {
		return p
	}
	if mode == "always" {
		return termenv.ANSI256
	}
	return termenv.Ascii
}

// printTop writes views without a terminal.
func printTop(ctx context.Context, w io.Writer, o tui.Options, text tui.TextOptions, f *topFlags) error {
	if file, ok := w.(*os.File); ok {
		if width, _, err := term.GetSize(int(file.Fd())); err == nil {
			text.Width = width
		}
	}
	if f.watch > 0 {
		o.Rate = f.watch
		if text.Format == "json" {
			text.Format = "jsonl" // several documents: one to a line
		}
	}
	c := tui.NewCollector(o)
	var tick *time.Ticker
	if f.watch > 0 {
		tick = time.NewTicker(f.watch)
		defer tick.Stop()
	}
	for n := 1; ; n++ {
		v, err := c.Collect(ctx)
		if err != nil {
			return err
		}
		if n > 1 && text.Format == "table" {
			fmt.Fprintln(w)
		}
		if err := tui.Write(w, &v, text); err != nil {
			return err
		}
		if f.watch == 0 {
			return unreachable(&v)
		}
		if f.count > 0 && n == f.count {
			return unreachable(&v)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// unreachable is an error when no router answered.
func unreachable(v *feed.View) error {
	if v.Fleet.RoutersUp > 0 {
		return nil
	}
	var cause error
	for i := range v.Routers {
		cause = errors.Join(cause, v.Routers[i].Cause)
	}
	var status *admin.StatusError
	if errors.As(cause, &status) {
		return cause // it answers, and refuses
	}
	var coded *cli.ExitError
	if err := cli.AdminError(cause); errors.As(err, &coded) {
		return err
	}
	return cli.WithCode(cli.ExitUnreachable, cause)
}
