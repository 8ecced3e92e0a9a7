package soak

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

// check waits for an idle moment and looks at everything that must hold then.
func (s *soak) check(ctx context.Context, when string) Check {
	s.gate.Lock()
	defer s.gate.Unlock()
	c := Check{When: when, At: time.Now()}
	wrong := func(what string, err error) {
		if err != nil {
			s.violation(what, nil, when+": "+err.Error())
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	// First of all, before anything could heal it. Of an engine to which nothing
	// was done since the last such moment every event has arrived.
	from := time.Now()
	var over error
	c.Over, over = s.overcount(s.rig.Sim.Engines())
	if over != nil {
		s.o.Log("%s, at first: %v", when, over)
	}
	quiet, err := s.untouched(ctx, from)
	wrong("admin API", err)
	wrong("index of an untouched engine holds too much", s.agree(ctx, 5*time.Second, quiet))
	s.looked = from
	wrong("reload", s.rig.Router.Settings().Reload(s.patient(), nil))
	defer func() { wrong("reload", s.rig.Router.Settings().Reload(s.rig.Config, nil)) }()
	if w, err := s.worker(ctx, spareName); err != nil {
		wrong("admin API", err)
	} else if w.Name == "" {
		wrong("spare", s.chaos.addSpare(ctx))
	}
	wrong("fleet", s.whole(ctx, false))
	// A lost event at the very end is known with the next one only, in real
	// fleets as well: give every rank a next one.
	wrong("pinned request", s.visit(ctx, 200, 2))
	if c.Over == 0 {
		from = time.Now()
	}
	wrong("index holds too much", s.agree(ctx, verifyEvery+5*time.Second, s.rig.Sim.Engines()))
	c.Sync = Seconds(time.Since(from))
	wrong("fleet", s.whole(ctx, true))
	// A rank whose lost events had left its engine's replay buffer was built
	// anew without them: what it held before is not known until it is stored
	// again. Fill the caches once with other blocks, and all must be known. Blocks
	// of a transfer that nobody fetched are pinned until its lease ends, and no
	// other block takes their place before.
	for i := 0; i < 3 && IndexDiffers(s.rig) != nil; i++ {
		wrong("pinned blocks", loopback.Wait(ctx, "the end of all transfers", s.unpinned))
		c.Refilled++
		wrong("pinned request", s.visit(ctx, 80_000, 1))
	}
	synced, stop := context.WithTimeout(ctx, 20*time.Second)
	wrong("index", IndexSynced(synced, s.rig))
	stop()
	if when == atTheEnd {
		wrong("clients that left the queue", s.leaveQueue(ctx))
	}
	wrong("ledger", loopback.Wait(ctx, "an empty ledger", s.rig.Router.Balanced))
	wrong("queue", loopback.Wait(ctx, "an empty queue", func() error {
		st, err := s.rig.Admin.Status(ctx)
		if err == nil && st.Traffic.Inflight+st.Traffic.Queued > 0 {
			err = fmt.Errorf("%d requests in progress and %d queued, of nobody", st.Traffic.Inflight, st.Traffic.Queued)
		}
		return err
	}))
	// What no client waits for any more must have ended in the engines too: what
	// was cancelled at once, a decode that waits for its prefill with that wait.
	c.Held = s.left(ctx, wrong)
	for _, e := range s.rig.Sim.Engines() {
		if n := e.Exits() - s.chaos.killed(e.Name()); n > 0 {
			c.Exits += n
			wrong("engine died", fmt.Errorf("%s ended by itself %d time(s), which no fault makes it do", e.Name(), n))
		}
	}
	if s.o.Duration >= time.Minute && (len(s.checked) == 0 || when == atTheEnd) {
		wrong("silence", s.silence(ctx))
	}
	s.checked = append(s.checked, when)
	if l, err := s.rig.Admin.IndexStats(ctx); err == nil {
		c.Index = l.Totals.Memberships
	}
	if when == atTheEnd { // after it the index need not know all of that engine's cache
		wrong("late worker", s.joinLate(ctx))
		wrong("retry", s.chaos.retryAfterReuse(context.WithoutCancel(ctx)))
	}
	s.http.CloseIdleConnections()
	s.rig.Client.CloseIdleConnections()
	c.Usage = usageNow()
	if f, err := os.Create(filepath.Join(s.o.Dir, "heap-"+strings.ReplaceAll(when, " ", "-")+".pprof")); err == nil {
		wrong("heap profile", errors.Join(pprof.WriteHeapProfile(f), f.Close()))
	}
	s.o.Log("check %s: heap %.1f MiB, %d goroutines, %d files, index %d, %d violations so far", when, float64(c.Usage.Heap)/(1<<20), c.Usage.Goroutines, c.Usage.Files, c.Index, len(s.violations))
	return c
}

const atTheEnd = "at the end"

// silence leaves all events out for longer than any heartbeat and its answer
// take, then lets a batch come now and then for as long: no feed may be given
// up by either side.
func (s *soak) silence(ctx context.Context) error {
	from := time.Now()
	wait.For(ctx, 16*time.Second)
	for time.Since(from) < 32*time.Second && ctx.Err() == nil {
		if err := s.visit(ctx, 200, 1); err != nil {
			return err
		}
		wait.For(ctx, time.Second)
	}
	return s.chaos.watch.quiet(from, "feed_disconnected", "feed_gap", "feed_unknown", "feed_stale")
}

// visit sends fresh prompts through every engine.
func (s *soak) visit(ctx context.Context, tokens, times int) error {
	for range times {
		for _, g := range s.chaos.groups {
			for _, e := range g.engines {
				if err := s.chaos.poke(ctx, g, e, tokens, checkTimeout); err != nil {
					return fmt.Errorf("%s: %w", e.Name(), err)
				}
			}
		}
		if err := s.pinned(ctx, modelVLLM, spareName, "", tokens, checkTimeout); err != nil {
			return fmt.Errorf("%s: %w", spareName, err)
		}
	}
	return nil
}

// checkTimeout is how long the router waits for an engine during a check, whose
// prompts are the longest and may be served by one engine only: who is slow has
// done nothing wrong then, and who fails is not asked again.
const checkTimeout = 2 * time.Minute

// patient is the configuration of a check.
func (s *soak) patient() settings.Config {
	c := s.rig.Config
	c.Timeouts.Prefill, c.Timeouts.Response, c.Timeouts.Idle = checkTimeout, checkTimeout, checkTimeout
	return c
}

// leaveQueue takes all places with requests that last, lets others queue behind
// them and leave, and wants the queue empty while no place was given back.
func (s *soak) leaveQueue(ctx context.Context) error {
	const leavers = 5
	e := s.chaos.spare
	slow := e.Group().Faults
	slow.Slow = 1000
	if err := e.SetFaults(slow); err != nil {
		return err
	}
	places := s.rig.Config.Limits.Inflight
	var all sync.WaitGroup
	send := func(ctx context.Context, n int) {
		for range n {
			all.Go(func() { _ = s.pinned(ctx, modelVLLM, e.Name(), "", 4000, checkTimeout) }) // nobody waits for its answer
		}
	}
	waits := func(inflight, queued int) error {
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		return loopback.Wait(ctx, "the queue", func() error {
			st, err := s.rig.Admin.Status(ctx)
			if err == nil && (st.Traffic.Inflight != inflight || st.Traffic.Queued != queued) {
				err = fmt.Errorf("%d requests in progress and %d queued, not %d and %d", st.Traffic.Inflight, st.Traffic.Queued, inflight, queued)
			}
			return err
		})
	}
	stay, end := context.WithCancel(ctx)
	defer end()
	leave, gone := context.WithCancel(ctx)
	defer gone()
	send(stay, places)
	err := waits(places, 0)
	if err == nil {
		send(leave, leavers)
		err = waits(places, leavers)
	}
	gone()
	if err == nil {
		if err = waits(places, 0); err == nil {
			for range leavers {
				s.counts.bump("places in the queue freed by leaving")
			}
		}
	}
	end()
	all.Wait()
	// At this speed they would last for long: only their cancelling ends them.
	cut, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	err = errors.Join(err, loopback.Wait(cut, "the end of cancelled requests in "+e.Name(), func() error {
		_, err := working(e)
		return err
	}))
	return errors.Join(err, e.SetFaults(e.Group().Faults))
}

// joinLate takes a worker whose engine dials in off the fleet, gives the engine
// work all the same, whose events come to a listener that does not know it, and
// adds the worker again. Its neighbour at that listener may hold none of that,
// neither before nor after.
func (s *soak) joinLate(ctx context.Context) error {
	g := s.chaos.groups[len(s.chaos.groups)-1]
	near, late := g.engines[0], g.engines[1]
	apart := func() error {
		cached, err := late.Cached(0)
		if err != nil {
			return err
		}
		own, err := near.Cached(0)
		if err != nil {
			return err
		}
		got, _ := s.rig.Router.Fleet().Blocks(near.Name() + "/dp0")
		if i := slices.IndexFunc(got, func(b uint64) bool { return slices.Contains(cached, b) && !slices.Contains(own, b) }); i >= 0 {
			return fmt.Errorf("the index has block %x of %s, which only %s holds", got[i], near.Name(), late.Name())
		}
		return nil
	}
	if err := s.rig.Admin.RemoveWorker(ctx, late.Name()); err != nil {
		return err
	}
	from := time.Now()
	err := s.fresh(ctx, late.URL(), modelVLLM, "", "", 400, checkTimeout)
	came, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	err = errors.Join(err, loopback.Wait(came, "events of an engine that is no worker", func() error {
		if !s.chaos.watch.since("feed_unrouted", "", from) {
			return errors.New("none was refused")
		}
		return nil
	}), apart())
	err = errors.Join(err, s.chaos.add(ctx, late), s.chaos.usable(ctx, late), s.followed(ctx, late))
	if err != nil {
		return err
	}
	if err := s.chaos.poke(ctx, g, late, 400, checkTimeout); err != nil {
		return err
	}
	return errors.Join(s.whole(ctx, true), s.agree(ctx, 5*time.Second, []*sim.Engine{near, late}), apart())
}

// followed waits until the listener knows an engine: a batch that comes before that is
// refused, and without another one its feed is never trusted.
func (s *soak) followed(ctx context.Context, e *sim.Engine) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return loopback.Wait(ctx, "a feed of "+e.Name(), func() error {
		w, err := s.worker(ctx, e.Name())
		if err == nil && !slices.ContainsFunc(w.Ranks, func(k admin.Rank) bool { return k.Feed.State != "none" }) {
			err = errors.New("there is none")
		}
		return err
	})
}

// verifyEvery is after how long at most a feed asks its engine's replay whether
// it has missed a batch: the default of kvfeed.
const verifyEvery = 30 * time.Second

// untouched are the engines to which nothing was done since the last check and
// whose entries routing may use. After a restart of the router, what it has kept
// of an engine that dials in is not used until that engine's next batch, which
// drops it: nobody can be asked what was published meanwhile.
func (s *soak) untouched(ctx context.Context, now time.Time) ([]*sim.Engine, error) {
	since := s.looked
	if since.IsZero() {
		since = s.began
	}
	l, err := s.rig.Admin.Workers(ctx)
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, w := range l.Workers {
		used[w.Name] = slices.ContainsFunc(w.Ranks, func(k admin.Rank) bool { return k.Feed.Trusted })
	}
	return slices.DeleteFunc(slices.Clone(s.rig.Sim.Engines()), func(e *sim.Engine) bool {
		return !used[e.Name()] || s.chaos.faulty(e.Name(), since, now)
	}), nil
}

// agree waits, but not for longer than within, until the index holds no block of
// these engines that they do not have.
func (s *soak) agree(ctx context.Context, within time.Duration, engines []*sim.Engine) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	return loopback.Wait(ctx, "an index without blocks that no engine has", func() error {
		_, err := s.overcount(engines)
		return err
	})
}

// overcount counts the blocks that the index holds and the engines do not, and
// says whose they are.
func (s *soak) overcount(engines []*sim.Engine) (n int, _ error) {
	var errs []error
	for _, e := range engines {
		cached, err := e.Cached(0)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		slices.Sort(cached)
		got, _ := s.rig.Router.Fleet().Blocks(e.Name() + "/dp0")
		if over := foreign(got, cached); over > 0 {
			n += over
			errs = append(errs, fmt.Errorf("%s: %d of %d blocks are not in the engine's cache of %d", e.Name(), over, len(got), len(cached)))
		}
	}
	return n, errors.Join(errs...)
}

// left waits until no engine works on a request any more and returns how many
// are left when that takes too long.
func (s *soak) left(ctx context.Context, wrong func(string, error)) (n int) {
	ctx, cancel := context.WithTimeout(ctx, bootstrapWait+10*time.Second)
	defer cancel()
	wrong("requests left in engines", loopback.Wait(ctx, "engines without requests", func() (err error) {
		n, err = working(s.rig.Sim.Engines()...)
		return err
	}))
	return n
}

// working counts the requests that engines work on, and says whose they are.
func working(engines ...*sim.Engine) (n int, err error) {
	var errs []error
	for _, e := range engines {
		stats, err := e.Counters()
		if err != nil {
			errs = append(errs, err)
		}
		for dp, k := range stats {
			if k.Running+k.Waiting > 0 {
				n += k.Running + k.Waiting
				errs = append(errs, fmt.Errorf("%s/dp%d: %d requests run and %d wait that nobody has asked for", e.Name(), dp, k.Running, k.Waiting))
			}
		}
	}
	return n, errors.Join(errs...)
}

// unpinned says which engines hold blocks for requests or transfers.
func (s *soak) unpinned() error {
	var errs []error
	for _, e := range s.rig.Sim.Engines() {
		stats, err := e.Counters()
		if err != nil {
			return err
		}
		for _, k := range stats {
			if k.Running+k.Waiting+k.Pinned > 0 {
				errs = append(errs, fmt.Errorf("%s: %d running, %d waiting, %d pinned", e.Name(), k.Running, k.Waiting, k.Pinned))
			}
		}
	}
	return errors.Join(errs...)
}

// whole waits until all workers are usable again: ejections take their time. An
// engine that dials in is known by its first batch, so its feed must be trusted
// only once it was visited.
func (s *soak) whole(ctx context.Context, visited bool) error {
	ready, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	return loopback.Wait(ready, "all workers", func() error {
		l, err := s.rig.Admin.Workers(ready)
		if err != nil {
			return err
		}
		for _, w := range l.Workers {
			if w.Health == "ejected" {
				continue // a penalty may last for minutes; a request of ours ends it below
			}
			if !w.Usable {
				return fmt.Errorf("%s is not usable: %s", w.Name, w.Reason)
			}
			for _, k := range w.Ranks {
				if k.Feed.State != "none" && !k.Feed.Trusted && (visited || !s.rig.DialsIn(w.Name)) {
					return fmt.Errorf("the feed of %s is %s: %s", k.Label, k.Feed.State, k.Feed.Reason)
				}
			}
		}
		return nil
	})
}
