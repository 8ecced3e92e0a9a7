package soak

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

// Kinds of what is done to the fleet, beside the faults of engines.
const (
	doDrain         = "drain"
	doRemove        = "remove worker"
	doAdd           = "add worker"
	doReload        = "reload"
	doBadReload     = "bad reload"
	doRestartRouter = "restart router"
	doDeadly        = "deadly request"
)

// shows says which events prove that something was seen. It needs one of them,
// of its worker, within its time.
func shows(kind string) []string {
	if of, ok := loopback.Shows[kind]; ok {
		return of
	}
	return map[string][]string{
		doDrain:         {"worker_draining"},
		doRemove:        {"worker_removed"},
		doAdd:           {"worker_added"},
		doReload:        {"config_reloaded"},
		doBadReload:     {"config_refused"},
		doRestartRouter: {"router_draining"},
		doDeadly:        loopback.Shows[loopback.Kill],
	}[kind]
}

// Fault is one thing that was done on purpose.
type Fault struct {
	// From and To are when it began and when its worker was well again.
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
	Kind string    `json:"kind"`
	// Worker is empty for what is done to the router itself.
	Worker string `json:"worker,omitempty"`
	Detail string `json:"detail,omitempty"`
	// Seen is the event by which an operator can find it.
	Seen   string    `json:"seen,omitempty"`
	SeenAt time.Time `json:"seen_at,omitzero"`
	Text   string    `json:"text,omitempty"`
}

// during reports whether it lasted at any time in between.
func (f *Fault) during(from, to time.Time) bool {
	return !f.From.After(to) && (f.To.IsZero() || !f.To.Before(from))
}

// group is engines of which always one is left alone: the alternative that
// every request has.
type group struct {
	model   string
	prefill bool
	engines []*sim.Engine
}

// chaos does things to the fleet.
type chaos struct {
	s      *soak
	groups []*group
	// The spare comes and goes; the replacement takes its slot for a while.
	spare, replacement *sim.Engine

	runs  uint64
	watch watch

	mu     sync.Mutex
	faults []*Fault
	active map[string]*Fault // by worker
	away   []*Fault          // restarts of the router
	deaths map[string]int    // of deadly requests, by worker
	errs   []error
	wg     sync.WaitGroup
}

// noticed reports whether an event shows a fault.
func (c *chaos) noticed(f *Fault) bool {
	for _, kind := range shows(f.Kind) {
		if c.watch.since(kind, f.Worker, f.From) {
			return true
		}
	}
	return false
}

// watch is where the router's log goes: to the file of events, and into a note
// of when each worker last had one of each kind.
type watch struct {
	slog.Handler
	mu   sync.Mutex
	last map[[2]string]time.Time
}

// Handle implements slog.Handler.
func (w *watch) Handle(ctx context.Context, r slog.Record) error {
	var kind, worker string
	r.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "kind":
			kind = a.Value.String()
		case "worker":
			worker = a.Value.String()
		}
		return true
	})
	if kind == "" && r.Level < slog.LevelInfo {
		return nil
	}
	if kind != "" {
		w.mu.Lock()
		w.last[[2]string{kind, worker}] = time.Now()
		w.mu.Unlock()
	}
	return w.Handler.Handle(ctx, r)
}

// quiet is nil when no worker had an event of these kinds since t.
func (w *watch) quiet(t time.Time, kinds ...string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	var errs []error
	for of, at := range w.last {
		if at.After(t) && slices.Contains(kinds, of[0]) {
			errs = append(errs, fmt.Errorf("%s of %s at %s", of[0], of[1], at.Format(time.TimeOnly)))
		}
	}
	return errors.Join(errs...)
}

func (w *watch) since(kind, worker string, t time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last[[2]string{kind, worker}].After(t)
}

// faulty reports whether something was done to a worker in a time.
func (c *chaos) faulty(worker string, from, to time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.faults, func(f *Fault) bool { return f.Worker == worker && f.during(from, to) })
}

// restarting reports whether the router was away at any time in between.
func (c *chaos) restarting(from, to time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.away, func(f *Fault) bool { return f.during(from, to) })
}

// adding reports whether a worker was being added at any time in between.
func (c *chaos) adding(from, to time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.faults, func(f *Fault) bool { return f.Kind == doAdd && f.during(from, to) })
}

func (c *chaos) begin(kind, worker, detail string) *Fault {
	f := &Fault{From: time.Now(), Kind: kind, Worker: worker, Detail: detail}
	c.mu.Lock()
	c.faults = append(c.faults, f)
	if worker != "" {
		c.active[worker] = f
	}
	if kind == doRestartRouter {
		c.away = append(c.away, f)
	}
	c.mu.Unlock()
	return f
}

func (c *chaos) end(f *Fault) {
	c.mu.Lock()
	f.To = time.Now()
	if c.active[f.Worker] == f {
		delete(c.active, f.Worker)
	}
	c.mu.Unlock()
}

func (c *chaos) failed(f *Fault, err error) {
	if err == nil {
		return
	}
	c.mu.Lock()
	c.errs = append(c.errs, fmt.Errorf("%s %s at %s: %w", f.Kind, f.Worker, f.From.Format(time.TimeOnly), err))
	c.mu.Unlock()
}

// run does one thing after the other, several at a time, until ctx ends; then it
// makes everything whole again.
func (c *chaos) run(ctx context.Context) {
	c.runs++
	rng := rand.New(rand.NewPCG(c.s.o.Seed, 0x6368616f73+c.runs))
	nextRestart := time.Now().Add(c.s.o.RouterEvery)
	for ctx.Err() == nil {
		wait.For(ctx, time.Duration((0.5+rng.ExpFloat64())*float64(c.s.o.Gap)))
		if ctx.Err() != nil {
			break
		}
		if time.Now().After(nextRestart) {
			c.wg.Wait() // a restart must find what it left
			c.restartRouter(ctx)
			nextRestart = time.Now().Add(c.s.o.RouterEvery)
			continue
		}
		switch k := rng.IntN(100); {
		case k < 6:
			c.reload(rng.IntN(4) == 0, rng)
		case k < 12:
			c.swapSpare(ctx)
		case k < 20:
			c.reuseSlot(ctx, rng.IntN(2) == 0)
		case k < 23:
			c.wg.Wait() // what dies from here on dies of the request
			c.failed(&Fault{From: time.Now(), Kind: doDeadly}, c.deadly(context.WithoutCancel(ctx), rng.IntN(1<<20)))
		default:
			c.strike(ctx, rng)
		}
	}
	c.wg.Wait()
}

// strike picks a worker that can be missed and does something to it.
func (c *chaos) strike(ctx context.Context, rng *rand.Rand) {
	g := c.groups[rng.IntN(len(c.groups))]
	target := g.engines[rng.IntN(len(g.engines))]
	kind := []string{
		loopback.Kill, loopback.Kill, loopback.Restart, loopback.Restart, loopback.Refuse, loopback.Hang, loopback.Slow, loopback.Errors, loopback.Errors, loopback.Die, loopback.Die,
		loopback.Drop, loopback.Drop, loopback.Reorder, loopback.Reorder, loopback.Corrupt, loopback.Corrupt,
		loopback.Lose, loopback.Replay, doDrain,
	}[rng.IntN(20)]
	hold := time.Duration((1 + rng.Float64()*2) * float64(c.s.o.Hold))
	number, status := rng.Float64(), []int{500, 502, 503, 504}[rng.IntN(4)]
	if !c.spareable(ctx, g, target.Name()) {
		return
	}
	f := c.begin(kind, target.Name(), "")
	c.wg.Go(func() {
		defer c.end(f)
		c.failed(f, c.carry(ctx, f, g, target, hold, number, status))
	})
}

// spareable reports whether another worker of the group is left that the router
// would use and to which nothing is done.
func (c *chaos) spareable(ctx context.Context, g *group, target string) bool {
	usable := map[string]bool{}
	l, err := c.s.rig.Admin.Workers(ctx)
	if err != nil {
		return false
	}
	for _, w := range l.Workers {
		usable[w.Name] = w.Usable
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.active[target] != nil || !usable[target] {
		return false
	}
	if g.model == modelSGLang {
		// Both legs of SGLang hold memory for each other: a decode that hangs
		// fills its prefill's cache with KV that waits. With a fault on either
		// side nobody would be left who is well.
		for _, other := range c.groups {
			for _, e := range other.engines {
				if other.model == g.model && c.active[e.Name()] != nil {
					return false
				}
			}
		}
	}
	for _, e := range g.engines {
		if e.Name() != target && c.active[e.Name()] == nil && usable[e.Name()] {
			return true
		}
	}
	return false
}

func (c *chaos) carry(ctx context.Context, f *Fault, g *group, e *sim.Engine, hold time.Duration, number float64, status int) error {
	always := e.Group().Faults
	set := always
	switch f.Kind {
	case loopback.Kill:
		e.Kill()
	case loopback.Restart:
		if err := e.Restart(); err != nil {
			return err
		}
		hold = 0
	case doDrain:
		if _, err := c.s.rig.Admin.DrainWorker(ctx, e.Name()); err != nil {
			return err
		}
	case loopback.Refuse:
		set.Refuse = true
	case loopback.Hang:
		set.Hang = true
	case loopback.Slow:
		set.Slow = 2000 + 2000*number
	case loopback.Errors:
		set.ErrorRate, set.ErrorStatus = 0.3+0.7*number, status
	case loopback.Die:
		set.DieRate, set.DieAfter = 0.3+0.7*number, int(number*20)%6
		if g.prefill {
			set.DieAfter = 0 // it has one token only
		}
	case loopback.Drop:
		set.DropEvents = 0.2 + 0.6*number
	case loopback.Reorder:
		set.ReorderEvents = 0.2 + 0.6*number
	case loopback.Corrupt:
		set.CorruptEvents = 0.2 + 0.6*number
	case loopback.Lose:
		set.LoseEvents = 0.2 + 0.6*number
	case loopback.Replay: // of what was dropped, else nobody asks for one
		set.DropEvents, set.DropReplay = 0.4, 0.2+0.6*number
	}
	if set != always {
		f.Detail = fmt.Sprintf("%+v", set)
		if err := e.SetFaults(set); err != nil {
			return err
		}
	}
	// It lasts until it is noticed, and requests of our own help with that: a
	// fault that hits nobody need not leave a trace.
	ctx = context.WithoutCancel(ctx)
	for began := time.Now(); time.Since(began) < hold || !c.noticed(f) && time.Since(began) < 4*hold+4*c.s.o.Timeout; {
		if f.Kind != doDrain && f.Kind != loopback.Kill {
			_ = c.poke(ctx, g, e, 2500, 2*c.s.o.Timeout) // that it fails is the purpose
		}
		wait.For(ctx, 100*time.Millisecond)
	}
	switch f.Kind {
	case loopback.Kill:
		if err := e.Restart(); err != nil {
			return err
		}
	case doDrain:
		if _, err := c.s.rig.Admin.ResumeWorker(ctx, e.Name()); err != nil {
			return err
		}
	case loopback.Restart:
	default:
		if err := e.SetFaults(always); err != nil {
			return err
		}
	}
	// It is well again when it answers.
	for end := time.Now().Add(2 * time.Minute); ; {
		err := c.poke(ctx, g, e, 200, 20*time.Second)
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("does not recover: %w", err)
		}
		wait.For(ctx, 250*time.Millisecond)
	}
}

// poke sends a request through the router that must pass one engine. A prefill engine gets it
// only with a decode engine: an aggregated one would answer alone.
func (c *chaos) poke(ctx context.Context, g *group, e *sim.Engine, tokens int, wait time.Duration) error {
	if g.prefill {
		return c.s.pinned(ctx, g.model, c.decode(g.model), e.Name(), tokens, wait)
	}
	return c.s.pinned(ctx, g.model, e.Name(), "", tokens, wait)
}

// decode is a decode engine of a model to which nothing is done, or any if there is none: one after
// the other, since the router may have ejected one for what was done to it before.
func (c *chaos) decode(model string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all, well []string
	for _, g := range c.groups {
		for _, e := range g.engines {
			if g.model != model || e.Group().Role != workers.Decode {
				continue
			}
			if all = append(all, e.Name()); c.active[e.Name()] == nil {
				well = append(well, e.Name())
			}
		}
	}
	if len(well) == 0 {
		well = all
	}
	return well[c.s.pins.Load()%uint64(len(well))]
}

// reload changes the configuration in force, or tries to with one that must be
// refused.
func (c *chaos) reload(broken bool, rng *rand.Rand) {
	cfg := c.s.rig.Config
	if broken {
		f := c.begin(doBadReload, "", "")
		defer c.end(f)
		cfg.Routing.Policy = "whatever"
		if c.s.rig.Router.Settings().Reload(cfg, nil) == nil {
			c.failed(f, errors.New("a configuration that makes no sense was taken"))
		}
		return
	}
	cfg.Routing.Threshold.Tokens = []int{0, 64, 512, 4096}[rng.IntN(4)]
	policies := selector.Policies()
	if cfg.Routing.Policy = string(selector.KV); rng.IntN(2) == 0 { // half of the time what most fleets have
		cfg.Routing.Policy = string(policies[rng.IntN(len(policies))])
	}
	f := c.begin(doReload, "", fmt.Sprintf("policy %s, threshold %d", cfg.Routing.Policy, cfg.Routing.Threshold.Tokens))
	defer c.end(f)
	c.failed(f, c.s.rig.Router.Settings().Reload(cfg, nil))
}

// worker is what the router says of a worker; without a name where it is not in the fleet.
func (s *soak) worker(ctx context.Context, name string) (w admin.Worker, err error) {
	l, err := s.rig.Admin.Workers(ctx)
	if err != nil {
		return w, err
	}
	if i := slices.IndexFunc(l.Workers, func(w admin.Worker) bool { return w.Name == name }); i >= 0 {
		w = l.Workers[i]
	}
	return w, nil
}

// working waits, but not for longer than within, until a worker's account has so
// many requests, or done is closed, after which it need not.
func (c *chaos) working(ctx context.Context, within time.Duration, e *sim.Engine, n int, done <-chan struct{}) error {
	inTime, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	unusable := false // at any time
	return loopback.Wait(inTime, "requests on "+e.Name(), func() error {
		w, err := c.s.worker(ctx, e.Name())
		if err != nil {
			return err
		}
		unusable = unusable || w.Name != "" && !w.Usable
		have := 0
		for _, k := range w.Ranks {
			have += k.ActiveRequests
		}
		select {
		case <-done:
			return nil
		default:
		}
		if have < n {
			err := fmt.Errorf("%s has %d requests on its account, not %d", e.Name(), have, n)
			if unusable {
				err = fmt.Errorf("%w: %w", err, errUnusable)
			}
			return err
		}
		return nil
	})
}

// errUnusable is that the router did not use a worker for a while, for instance because
// a probe was late on a busy machine.
var errUnusable = errors.New("the router did not use it for a while")

// usable waits until the router would send requests to an engine.
func (c *chaos) usable(ctx context.Context, e *sim.Engine) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return loopback.Wait(ctx, e.Name()+" to be usable", func() error {
		w, err := c.s.worker(ctx, e.Name())
		if err == nil && !w.Usable {
			err = errors.New("it is not")
		}
		return err
	})
}

// killed is how often an engine died of a deadly request.
func (c *chaos) killed(worker string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.deaths[worker]
}

// deadly sends a request that every engine dies of, and wants it to reach no third one.
// Other requests wait meanwhile: two engines of a group may be all that it has.
func (c *chaos) deadly(ctx context.Context, no int) error {
	c.s.gate.Lock()
	defer c.s.gate.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	engines := c.s.rig.Sim.Engines()
	was, sent := map[string]int{}, time.Now()
	for _, e := range engines {
		was[e.Name()] = e.Exits()
	}
	status, body, err := c.s.marked(ctx, []string{modelVLLM, modelSGLang}[no%2], deadlyText, no)
	if err == nil && status < 500 {
		err = fmt.Errorf("status %d: %s", status, body)
	}
	// The answer may be there before the last engine is gone.
	var died []*sim.Engine
	same := 0
	errs := []error{err, loopback.Wait(ctx, "the engines that die", func() error {
		before := len(died)
		died = died[:0]
		for _, e := range engines {
			if e.Exits() > was[e.Name()] {
				died = append(died, e)
				if up, _ := e.Running(); up {
					return fmt.Errorf("%s is still there", e.Name())
				}
			}
		}
		if same++; len(died) != before {
			same = 0
		}
		if len(died) == 0 || same < 100 {
			return fmt.Errorf("%d have died so far", len(died))
		}
		return nil
	})}
	if len(died) > attempt.MaxLost {
		errs = append(errs, fmt.Errorf("%d engines died of one request", len(died)))
	}
	for _, e := range died {
		c.mu.Lock()
		if c.deaths == nil {
			c.deaths = map[string]int{}
		}
		c.deaths[e.Name()] += e.Exits() - was[e.Name()]
		c.mu.Unlock()
		f := c.begin(doDeadly, e.Name(), fmt.Sprintf("%d engines died", len(died)))
		c.mu.Lock()
		f.From = sent
		c.mu.Unlock()
		errs = append(errs, e.Restart(), c.usable(ctx, e))
		c.end(f)
	}
	return errors.Join(errs...)
}

// restartRouter stops the router in the midst of everything and restarts it
// with the snapshot that it left.
func (c *chaos) restartRouter(ctx context.Context) {
	f := c.begin(doRestartRouter, "", "")
	defer c.end(f)
	ctx = context.WithoutCancel(ctx)
	c.failed(f, c.s.restart(ctx))
}

// specs are the engines that the router knows from the start: all but some.
func (c *chaos) specs(without ...string) func([]workers.Spec) []workers.Spec {
	return func(in []workers.Spec) (out []workers.Spec) {
		for _, w := range in {
			if !slices.Contains(without, w.Name) {
				out = append(out, w)
			}
		}
		return out
	}
}

// retries of the soak are generous: what is tested is that a request gets
// through when it can.
func configure(o *Options) func(*settings.Config) {
	return func(c *settings.Config) {
		c.Health.Interval, c.Health.Scrape, c.Health.Timeout = 300*time.Millisecond, 500*time.Millisecond, o.Timeout/3
		c.Index.Snapshot = filepath.Join(o.Dir, "index.snapshot")
		c.Routing.AllowHeaders = true
		c.Retry = settings.Retry{Attempts: 6, Budget: 1}
		c.Continue.Mode = settings.ContinueExact
		// Fewer than there are clients, so that some queue, and leave the queue.
		c.Limits.Inflight, c.Limits.Queue, c.Limits.QueueTimeout = clients*3/4, 1000, patience
		c.Timeouts.Body = o.Timeout
		c.Timeouts.Prefill, c.Timeouts.Response, c.Timeouts.Idle = o.Timeout*4/3, o.Timeout, o.Timeout
		c.Receipts, c.Events = 512, 4096
		// Full before the second check, from which on the heap is compared.
		c.Tokens.ApproxTTL, c.Tokens.CacheBytes = 30*time.Second, 4<<20
	}
}
