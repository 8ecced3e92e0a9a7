package tui

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"golang.org/x/term"

	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/wait"
)

// ErrNoTerminal says that the screen needs a terminal.
var ErrNoTerminal = errors.New("the screen needs a terminal on standard input and output; use --once, --watch or -o json")

// terminal is the output file with writes that do not interleave.
type terminal struct {
	*os.File
	mu sync.Mutex
}

// Write implements io.Writer.
func (t *terminal) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.File.Write(b)
}

// Run shows the screen until it is left or ctx ends. The terminal is restored
// whatever happens.
func Run(ctx context.Context, o Options, in io.Reader, out io.Writer) error {
	inFile, ok1 := in.(*os.File)
	outFile, ok2 := out.(*os.File)
	if !ok1 || !ok2 || !term.IsTerminal(int(inFile.Fd())) || !term.IsTerminal(int(outFile.Fd())) {
		return ErrNoTerminal
	}
	t := &terminal{File: outFile}
	o.Out = t
	return runProgram(ctx, o, tea.WithInput(inFile), tea.WithOutput(t))
}

// runProgram runs the model with a program that the options complete.
func runProgram(ctx context.Context, o Options, options ...tea.ProgramOption) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the questions that are on their way
	// Signals end ctx. bubbletea's own handler of signals would wait for ever to
	// hand its message to a program that the end of ctx has stopped already.
	p := tea.NewProgram(newApp(ctx, o), append([]tea.ProgramOption{tea.WithContext(ctx), tea.WithoutSignalHandler(), tea.WithAltScreen(), tea.WithFPS(60)}, options...)...)
	_, err := p.Run()
	switch {
	case errors.Is(err, tea.ErrProgramPanic):
		return fmt.Errorf("the screen failed, the router continues: %w", err)
	case ctx.Err() != nil && errors.Is(err, tea.ErrProgramKilled):
		return context.Cause(ctx)
	}
	return err
}

// Collector makes views without a terminal: what --once and --watch print.
type Collector struct {
	replicas []*replica
	interval time.Duration
}

// NewCollector asks the routers of o.
func NewCollector(o Options) *Collector {
	c := &Collector{interval: o.Rate}
	for _, client := range o.Clients {
		c.replicas = append(c.replicas, &replica{poller: &feed.Poller{Client: client, Timeout: o.Timeout}, builder: feed.NewBuilder(client.URL())})
	}
	return c
}

// firstGap is the time between the answers that the first rates are made of.
// Those of engines' counters need two of their pages, which the router reads
// about once a second: firstWait is the longest wait for them.
const (
	firstGap  = 500 * time.Millisecond
	firstWait = 3 * time.Second
)

// Collect asks every router once and sums up. The first time it asks until the
// rates are there, at least twice and for firstWait at most.
func (c *Collector) Collect(ctx context.Context) (feed.View, error) {
	first := slices.ContainsFunc(c.replicas, func(r *replica) bool { return r.view == nil })
	c.ask(ctx)
	for began := time.Now(); first && c.wanting() && time.Since(began) < firstWait && wait.For(ctx, firstGap); {
		c.ask(ctx)
	}
	if ctx.Err() != nil {
		return feed.View{}, ctx.Err()
	}
	return sumOf(c.replicas, time.Now()), nil
}

// wanting reports whether a router answers whose rates are not there yet.
func (c *Collector) wanting() bool {
	return slices.ContainsFunc(c.replicas, func(r *replica) bool { return r.view.Link == feed.Live && !r.builder.Rated() })
}

func (c *Collector) ask(ctx context.Context) {
	var wg sync.WaitGroup
	for _, r := range c.replicas {
		wg.Go(func() {
			s := r.poller.Poll(ctx, r.builder.LastEvent())
			r.view = r.builder.Add(s, c.interval)
			r.view.Cause = s.Err
		})
	}
	wg.Wait()
}
