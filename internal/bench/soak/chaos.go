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

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/routertest"
	"github.com/dynctl/dynctl/internal/settings"
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
)

// shows says which events prove that something was seen. It needs one of them,
// of its worker, within its time.
func shows(kind string) []string {
	if of, ok := routertest.Shows[kind]; ok {
		return of
	}
	return map[string][]string{
		doDrain:         {"worker_draining"},
		doRemove:        {"worker_removed"},
		doAdd:           {"worker_added"},
		doReload:        {"config_reloaded"},
		doBadReload:     {"config_refused"},
		doRestartRouter: {"router_draining"},
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
	errs   []error
	wg     sync.WaitGroup
}

// felt reports whether an event tells of a fault.
func (c *chaos) felt(f *Fault) bool {
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
	for i := len(c.faults) - 1; i >= 0; i-- {
		f := c.faults[i]
		if f.Worker == worker && !f.From.After(to) && (f.To.IsZero() || !f.To.Before(from)) {
			return true
		}
	}
	return false
}

// restarting reports whether the router was away at any time in between.
func (c *chaos) restarting(from, to time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.away {
		if !f.From.After(to) && (f.To.IsZero() || !f.To.Before(from)) {
			return true
		}
	}
	return false
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
		pause(ctx, time.Duration((0.5+rng.ExpFloat64())*float64(c.s.o.Gap)))
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
		routertest.Kill, routertest.Kill, routertest.Restart, routertest.Restart, routertest.Refuse, routertest.Hang, routertest.Slow, routertest.Errors, routertest.Errors, routertest.Die, routertest.Die,
		routertest.Drop, routertest.Drop, routertest.Reorder, routertest.Reorder, routertest.Corrupt, routertest.Corrupt,
		routertest.Lose, routertest.Replay, doDrain,
	}[rng.IntN(20)]
	hold := time.Duration((1 + rng.Float64()*2) * float64(c.s.o.Hold))
	number, status := rng.Float64(), []int{500, 502, 503, 504}[rng.IntN(4)]
	if !c.spareable(ctx, g, target.Name()) {
		return
	}
	f := c.begin(kind, target.Name(), "")
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		defer c.end(f)
		c.failed(f, c.carry(ctx, f, g, target, hold, number, status))
	}()
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
	case routertest.Kill:
		e.Kill()
	case routertest.Restart:
		if err := e.Restart(); err != nil {
			return err
		}
		hold = 0
	case doDrain:
		if _, err := c.s.rig.Admin.DrainWorker(ctx, e.Name()); err != nil {
			return err
		}
	case routertest.Refuse:
		set.Refuse = true
	case routertest.Hang:
		set.Hang = true
	case routertest.Slow:
		set.Slow = 2000 + 2000*number
	case routertest.Errors:
		set.ErrorRate, set.ErrorStatus = 0.3+0.7*number, status
	case routertest.Die:
		set.DieRate, set.DieAfter = 0.3+0.7*number, int(number*20)%6
		if g.prefill {
			set.DieAfter = 0 // it has one token only
		}
	case routertest.Drop:
		set.DropEvents = 0.2 + 0.6*number
	case routertest.Reorder:
		set.ReorderEvents = 0.2 + 0.6*number
	case routertest.Corrupt:
		set.CorruptEvents = 0.2 + 0.6*number
	case routertest.Lose:
		set.LoseEvents = 0.2 + 0.6*number
	case routertest.Replay: // of what was dropped, else nobody asks for one
		set.DropEvents, set.DropReplay = 0.4, 0.2+0.6*number
	}
	if set != always {
		f.Detail = fmt.Sprintf("%+v", set)
		if err := e.SetFaults(set); err != nil {
			return err
		}
	}
	// It lasts until it is felt, and requests of our own help with that: a
	// fault that hits nobody need not leave a trace.
	ctx = context.WithoutCancel(ctx)
	for began := time.Now(); time.Since(began) < hold || !c.felt(f) && time.Since(began) < 4*hold+4*c.s.o.Timeout; {
		if f.Kind != doDrain && f.Kind != routertest.Kill {
			_ = c.poke(ctx, g, e, 2500, 2*c.s.o.Timeout) // that it fails is the purpose
		}
		pause(ctx, 100*time.Millisecond)
	}
	switch f.Kind {
	case routertest.Kill:
		if err := e.Restart(); err != nil {
			return err
		}
	case doDrain:
		if _, err := c.s.rig.Admin.ResumeWorker(ctx, e.Name()); err != nil {
			return err
		}
	case routertest.Restart:
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
		pause(ctx, 250*time.Millisecond)
	}
}

// poke sends a request through the router that must pass one engine.
func (c *chaos) poke(ctx context.Context, g *group, e *sim.Engine, tokens int, wait time.Duration) error {
	if g.prefill {
		return c.s.pinned(ctx, g.model, "", e.Name(), tokens, wait)
	}
	return c.s.pinned(ctx, g.model, e.Name(), "", tokens, wait)
}

// reload changes the configuration in force, or tries to with one that must be
// refused.
func (c *chaos) reload(broken bool, rng *rand.Rand) {
	cfg := c.s.rig.Config
	if broken {
		f := c.begin(doBadReload, "", "")
		defer c.end(f)
		cfg.Routing.Policy = "whatever"
		if c.s.rig.Router.Reload(cfg, nil) == nil {
			c.failed(f, errors.New("a configuration that makes no sense was taken"))
		}
		return
	}
	cfg.Routing.Threshold.Tokens = []int{0, 64, 512, 4096}[rng.IntN(4)]
	cfg.Routing.Policy = []string{"kv", "kv", "kv", "least_loaded", "round_robin", "power_of_two"}[rng.IntN(6)]
	f := c.begin(doReload, "", fmt.Sprintf("policy %s, threshold %d", cfg.Routing.Policy, cfg.Routing.Threshold.Tokens))
	defer c.end(f)
	c.failed(f, c.s.rig.Router.Reload(cfg, nil))
}

// swapSpare removes the spare worker after a drain, or adds it again.
func (c *chaos) swapSpare(ctx context.Context) {
	l, err := c.s.rig.Admin.Workers(ctx)
	if err != nil {
		return
	}
	name := c.spare.Name()
	there := false
	for _, w := range l.Workers {
		there = there || w.Name == name
	}
	if !there {
		f := c.begin(doAdd, name, "")
		defer c.end(f)
		c.failed(f, c.addSpare(ctx))
		return
	}
	f := c.begin(doDrain, name, "before it is removed")
	_, err = c.s.rig.Admin.DrainWorker(ctx, name)
	c.failed(f, err)
	pause(ctx, c.s.o.Hold/2)
	c.end(f)
	f = c.begin(doRemove, name, "")
	defer c.end(f)
	c.failed(f, c.s.rig.Admin.RemoveWorker(context.WithoutCancel(ctx), name))
}

// reuseSlot removes the spare while requests hang on it, lets another worker
// take its slot, and only then lets those requests end, one way or the other:
// the other's account must not notice.
func (c *chaos) reuseSlot(ctx context.Context, kill bool) {
	ctx = context.WithoutCancel(ctx)
	l, err := c.s.rig.Admin.Workers(ctx)
	if err != nil {
		return
	}
	if !slices.ContainsFunc(l.Workers, func(w admin.Worker) bool { return w.Name == c.spare.Name() && w.Usable }) {
		return
	}
	out := c.begin(doRemove, c.spare.Name(), "while requests hang on it")
	defer c.end(out)
	always := c.spare.Group().Faults
	hung := always
	hung.Hang = true
	c.failed(out, c.spare.SetFaults(hung))
	var old sync.WaitGroup
	// What becomes of these is not judged: who pins a request to a worker that
	// goes away gets an error.
	for range 3 {
		old.Go(func() { _ = c.s.pinned(ctx, modelVLLM, c.spare.Name(), "", 400, 4*c.s.o.Timeout) })
	}
	defer old.Wait()
	_ = c.working(ctx, c.s.o.Timeout, c.spare, 3, nil) // whatever has arrived by then
	slot := c.slot(ctx, c.spare)
	c.failed(out, c.s.rig.Admin.RemoveWorker(ctx, c.spare.Name()))

	done, began, back := c.takeSlot(ctx, slot, c.s.o.Timeout)
	same := c.slot(ctx, c.replacement) == slot
	if kill {
		c.spare.Kill()
		c.failed(out, c.spare.Restart())
	}
	c.failed(out, c.spare.SetFaults(always))
	old.Wait()
	// Nothing but the two requests has happened to it since they were counted,
	// or it serves others as well.
	if began == nil {
		err := c.working(ctx, c.s.o.Timeout, c.replacement, 2, done)
		select {
		case <-done: // too late to tell
		default:
			if err != nil {
				c.s.violation("account", nil, "after requests of a worker that is gone had ended: "+err.Error())
			}
			if same {
				c.s.counts.bump("slots used again under hanging requests")
			}
		}
	}
	back()
}

// takeSlot lets the replacement take the slot that the spare has left, and gives
// it two requests that hang. done is closed when one of them ends, began is nil
// when both arrived within that time before; back puts the spare back.
func (c *chaos) takeSlot(ctx context.Context, slot int, within time.Duration) (done <-chan struct{}, began error, back func()) {
	in := c.begin(doAdd, c.replacement.Name(), "into a slot that requests still hang on")
	hung := c.replacement.Group().Faults
	hung.HangRate = 1
	c.failed(in, c.replacement.SetFaults(hung))
	c.failed(in, c.addInto(ctx, c.replacement, slot))
	c.failed(in, c.usable(ctx, c.replacement))
	var now sync.WaitGroup
	var once sync.Once
	ended := make(chan struct{})
	live, cancel := context.WithCancel(ctx)
	for range 2 {
		now.Go(func() {
			_ = c.s.pinned(live, modelVLLM, c.replacement.Name(), "", 4000, checkTimeout)
			once.Do(func() { close(ended) })
		})
	}
	began = c.working(ctx, within, c.replacement, 2, ended)
	return ended, began, func() {
		cancel()
		now.Wait()
		c.failed(in, c.replacement.SetFaults(c.replacement.Group().Faults))
		f := c.begin(doRemove, c.replacement.Name(), "")
		c.failed(f, c.s.rig.Admin.RemoveWorker(ctx, c.replacement.Name()))
		c.end(f)
		c.end(in)
		f = c.begin(doAdd, c.spare.Name(), "")
		c.failed(f, c.addInto(ctx, c.spare, slot))
		c.failed(f, c.usable(ctx, c.spare))
		c.end(f)
	}
}

// addInto adds a worker to the fleet, again until it has a slot. That is free only
// when everybody has let go of who had it, a moment after that one was removed.
// Where a smaller one is free, it stays there.
func (c *chaos) addInto(ctx context.Context, e *sim.Engine, slot int) error {
	for end := time.Now().Add(idleWait); ; {
		if err := c.add(ctx, e); err != nil {
			return err
		}
		if c.slot(ctx, e) <= slot {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("slot %d is not free for %s", slot, e.Name())
		}
		if err := c.s.rig.Admin.RemoveWorker(ctx, e.Name()); err != nil {
			return err
		}
		pause(ctx, 5*time.Millisecond)
	}
}

// slot is that of a worker's first rank, -1 when it is not in the fleet.
func (c *chaos) slot(ctx context.Context, e *sim.Engine) int {
	l, err := c.s.rig.Admin.Workers(ctx)
	if err != nil {
		return -1
	}
	for _, w := range l.Workers {
		if w.Name == e.Name() && len(w.Ranks) > 0 {
			return int(w.Ranks[0].Slot)
		}
	}
	return -1
}

// idleWait is how long at most a step may take that nothing is in the way of.
const idleWait = 20 * time.Second

// retryAfterReuse lets a request hang on one worker while another one, which it
// might have had instead, leaves, and a third takes that one's slot. Then the
// first dies: the retry must go to the third, whose account must hold it beside
// its own. It wants an idle moment, since nobody else may be asked.
func (c *chaos) retryAfterReuse(ctx context.Context) error {
	first := c.s.rig.Sim.Named("decode-0")
	var others []string
	for _, g := range c.groups {
		for _, e := range g.engines {
			if g.model == modelVLLM && !g.prefill && e != first {
				others = append(others, e.Name())
			}
		}
	}
	var errs []error
	failed := func(err error) { errs = append(errs, err) }
	for _, name := range append(others, c.spare.Name()) {
		_, err := c.s.rig.Admin.DrainWorker(ctx, name)
		failed(err)
	}
	always := first.Group().Faults
	hung := always
	hung.HangRate = 1
	failed(first.SetFaults(hung))
	one, cancel := context.WithCancel(ctx)
	var hangs sync.WaitGroup
	// Not remote: a prefill that ends with its first token would begin another attempt
	// too early. Where it goes is judged, not how it ends.
	ended := make(chan error, 1)
	hangs.Go(func() { ended <- c.s.pinned(one, modelVLLM, "", onPath("local"), 400, checkTimeout) })
	failed(c.working(ctx, idleWait, first, 1, nil))
	_, err := c.s.rig.Admin.ResumeWorker(ctx, c.spare.Name())
	failed(err)
	out := c.begin(doRemove, c.spare.Name(), "while a request that might have had it hangs elsewhere")
	slot := c.slot(ctx, c.spare)
	failed(c.s.rig.Admin.RemoveWorker(ctx, c.spare.Name()))
	c.end(out)
	_, began, back := c.takeSlot(ctx, slot, idleWait)
	failed(began)
	same := c.slot(ctx, c.replacement) == slot
	f := c.begin(routertest.Kill, first.Name(), "while a request hangs on it")
	first.Kill()
	if err := c.working(ctx, idleWait, c.replacement, 3, nil); errors.Is(err, errUnusable) {
		c.s.o.Log("%s is not usable: nothing is known of retries", c.replacement.Name())
	} else if err != nil {
		how := "it is under way"
		select {
		case e := <-ended:
			how = fmt.Sprintf("it has ended: %v", e)
		default:
		}
		failed(fmt.Errorf("a request of %s, which died, is not beside the two that it had: %w; %s", first.Name(), err, how))
	} else if same {
		c.s.counts.bump("retries that found who took a slot")
	}
	cancel()
	hangs.Wait()
	back()
	failed(errors.Join(first.Restart(), first.SetFaults(always)))
	c.end(f)
	for _, name := range others {
		_, err := c.s.rig.Admin.ResumeWorker(ctx, name)
		failed(err)
	}
	return errors.Join(errs...)
}

// working waits, but not for longer than within, until a worker's account has so
// many requests, or done is closed, after which it need not.
func (c *chaos) working(ctx context.Context, within time.Duration, e *sim.Engine, n int, done <-chan struct{}) error {
	wait, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	unusable := false // at any time
	return routertest.Wait(wait, "requests on "+e.Name(), func() error {
		l, err := c.s.rig.Admin.Workers(ctx)
		if err != nil {
			return err
		}
		have := 0
		for _, w := range l.Workers {
			if w.Name == e.Name() {
				unusable = unusable || !w.Usable
				for _, k := range w.Ranks {
					have += k.ActiveRequests
				}
			}
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

// errUnusable is that the router had no use for a worker for a while, as a probe
// that was late on a busy machine may have told it.
var errUnusable = errors.New("the router did not use it for a while")

// usable waits until the router would send requests to an engine.
func (c *chaos) usable(ctx context.Context, e *sim.Engine) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return routertest.Wait(ctx, e.Name()+" to be usable", func() error {
		l, err := c.s.rig.Admin.Workers(ctx)
		if err != nil {
			return err
		}
		for _, w := range l.Workers {
			if w.Name == e.Name() && w.Usable {
				return nil
			}
		}
		return errors.New("it is not")
	})
}

// restartRouter stops the router in the midst of everything and starts it anew
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
		c.Limits.Inflight, c.Limits.Queue, c.Limits.QueueTimeout = max(2, o.Clients*3/4), 1000, patience
		c.Timeouts.Body = o.Timeout
		c.Timeouts.Prefill, c.Timeouts.Response, c.Timeouts.Idle = o.Timeout*4/3, o.Timeout, o.Timeout
		c.Receipts, c.Events = 512, 4096
		// Full before the second check, from which on the heap is compared.
		c.Tokens.ApproxTTL, c.Tokens.CacheBytes = 30*time.Second, 4<<20
	}
}
