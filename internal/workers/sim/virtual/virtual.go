// Package virtual runs simulated ranks under a virtual clock: no sockets, no
// goroutines, no waiting. The ranks are the very ones that run in real time
// behind package sim's sockets.
//
// A World holds ranks and timed calls and lets them happen in the order of
// their times; ties go to calls before ranks, and to the older or lower one.
// Two worlds with the same calls do the same. A World is used by one
// goroutine.
package virtual

import (
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// Time is a point on the world's clock, which starts at 0.
type Time = engine.Time

// ErrDown is the end of every request on a rank that is killed.
var ErrDown = errors.New("engine is down")

const never = Time(math.MaxInt64)

// World is a set of ranks and their clock.
type World struct {
	// Patience is how long a pull from an unknown engine takes to fail; 0
	// means 5 s.
	Patience time.Duration

	now   Time
	ranks []*Rank
	order rankHeap
	calls engine.Agenda
	byID  map[string]*Rank
}

// NewWorld returns an empty world.
func NewWorld() *World { return &World{byID: make(map[string]*Rank)} }

// Now is the world's time.
func (w *World) Now() Time { return w.now }

// Ranks are the ranks in the order in which they were added.
func (w *World) Ranks() []*Rank { return w.ranks }

// Rank is one rank of the world, over its restarts.
type Rank struct {
	world *World
	index int
	place int // in the heap
	next  Time
	cfg   engine.Config
	core  *engine.Rank // nil while down
	id    string       // engine id of the incarnation
	gen   int
	sinks map[string]func(engine.Output)
	why   string
}

// Add makes a rank. Its Network and Exit are the world's.
func (w *World) Add(cfg engine.Config) (*Rank, error) {
	r := &Rank{world: w, index: len(w.ranks), next: never, sinks: make(map[string]func(engine.Output))}
	if err := r.boot(cfg); err != nil {
		return nil, err
	}
	w.ranks = append(w.ranks, r)
	heap.Push(&w.order, r)
	return r, nil
}

func (r *Rank) boot(cfg engine.Config) error {
	cfg.Network = network{r}
	exit := cfg.Exit
	cfg.Exit = func(now Time, reason string) {
		// Called from within the rank: its end must wait until it returns.
		r.world.At(r.world.now, func() { r.Kill(reason) })
		if exit != nil {
			exit(now, reason)
		}
	}
	core, err := engine.New(cfg)
	if err != nil {
		return err
	}
	core.Advance(r.world.now)
	r.cfg, r.core, r.why = cfg, core, ""
	r.id = fmt.Sprintf("engine-%d-%d", r.index, r.gen)
	r.gen++
	r.world.byID[r.id] = r
	return nil
}

// EngineID names the rank's present incarnation in Pull.EngineID.
func (r *Rank) EngineID() string { return r.id }

// Core is the rank's model, nil while it is down. After a call that changes it,
// Touch must be called.
func (r *Rank) Core() *engine.Rank { return r.core }

// Submit starts a request now. Its sink gets ErrDown if the rank is killed.
func (r *Rank) Submit(q engine.Request) error {
	if r.core == nil {
		return fmt.Errorf("%w: %s", ErrDown, r.why)
	}
	sink := q.Sink
	q.Sink = func(o engine.Output) {
		if o.Finish != engine.Running {
			delete(r.sinks, q.ID)
		}
		if sink != nil {
			sink(o)
		}
	}
	if _, taken := r.sinks[q.ID]; taken {
		return fmt.Errorf("request id %q is in use", q.ID)
	}
	r.sinks[q.ID] = q.Sink
	if err := r.core.Submit(r.world.now, q); err != nil {
		delete(r.sinks, q.ID)
		return err
	}
	r.Touch()
	return nil
}

// Abort gives a request up.
func (r *Rank) Abort(id string) {
	if r.core != nil {
		r.core.Abort(r.world.now, id)
		r.Touch()
	}
}

// Pull is what a decode needs to fetch the KV that a request of this rank has
// pinned: the Pinned of its last output.
func (r *Rank) Pull(request string, pinned []int) *engine.Pull {
	return &engine.Pull{EngineID: r.id, RequestID: request, Host: "virtual", Port: 1, Blocks: pinned}
}

// Kill ends the rank's process: its requests fail, its cache is gone.
func (r *Rank) Kill(reason string) {
	if r.core == nil {
		return
	}
	r.core, r.why = nil, reason
	delete(r.world.byID, r.id)
	sinks := r.sinks
	r.sinks = make(map[string]func(engine.Output))
	r.Touch()
	for _, id := range slices.Sorted(maps.Keys(sinks)) { // the order of a map is not deterministic
		sinks[id](engine.Output{At: r.world.now, Finish: engine.FinishError, Err: fmt.Errorf("%w: %s", ErrDown, reason)})
	}
}

// Restart kills the rank if it runs and starts it again with an empty cache.
// nameSeed makes the names of its blocks.
func (r *Rank) Restart(nameSeed uint64) error {
	r.Kill("restarted")
	cfg := r.cfg
	cfg.NameSeed = nameSeed
	cfg.Exit = nil
	if err := r.boot(cfg); err != nil {
		return err
	}
	r.Touch()
	return nil
}

// Touch makes the world look again at when the rank will next do something.
func (r *Rank) Touch() {
	r.next = never
	if r.core != nil {
		if at, ok := r.core.Next(); ok {
			r.next = at
		}
	}
	if r.place >= 0 && r.place < len(r.world.order) && r.world.order[r.place] == r {
		heap.Fix(&r.world.order, r.place)
	}
}

// network is how the ranks of a world reach each other.
type network struct{ r *Rank }

// Pull reads the remote blocks; the time that it takes is the core's own matter.
func (n network) Pull(_ Time, q engine.PullRequest) { n.r.pull(q) }

// Note informs a prefill of a pinned request.
func (n network) Note(_ Time, p engine.Pull, note engine.Note) { n.r.note(p, note) }

// At has f called at a time, or now if that has passed.
func (w *World) At(t Time, f func()) {
	w.calls.Add(max(t, w.now), f)
}

// Next is when something will happen, and false if nothing will.
func (w *World) Next() (Time, bool) {
	at, ok := w.calls.Next()
	if !ok {
		at = never
	}
	if len(w.order) > 0 {
		at = min(at, w.order[0].next)
	}
	return at, at != never
}

// Step lets the next thing happen; false means that nothing will any more.
func (w *World) Step() bool {
	at, ok := w.Next()
	if !ok {
		return false
	}
	w.now = max(w.now, at)
	if call, due := w.calls.Next(); due && call <= at {
		w.calls.Do()
		return true
	}
	r := w.order[0]
	r.core.Advance(w.now)
	r.Touch()
	return true
}

// Run lets everything happen that does until a time, and stops the clock there.
func (w *World) Run(until Time) {
	for {
		at, ok := w.Next()
		if !ok || at > until {
			break
		}
		w.Step()
	}
	w.now = max(w.now, until)
}

// Drain lets everything happen until nothing does any more, or a number of
// steps is over, which it reports as an error.
func (w *World) Drain(steps int) error {
	for range steps {
		if !w.Step() {
			return nil
		}
	}
	return fmt.Errorf("still busy after %d steps at %v", steps, w.now)
}

func (r *Rank) pull(q engine.PullRequest) {
	w := r.world
	core := r.core
	// The answer must not come from within the call.
	deliver := func(after time.Duration, err error) {
		w.At(w.now+after, func() {
			if r.core != core || core == nil {
				return
			}
			remote := w.byID[q.Pull.EngineID]
			if err == nil && (remote == nil || remote.core == nil) {
				err = fmt.Errorf("engine %s is gone", q.Pull.EngineID)
			}
			if err != nil {
				core.PullDone(w.now, q.Request, nil, err)
				r.Touch()
				return
			}
			ids := q.Blocks
			contents, err := remote.core.Read(w.now, ids)
			if err == nil {
				remote.core.Noted(w.now, q.Pull.RequestID, engine.NoteDone)
			}
			remote.Touch()
			if r.core != core { // the read let the engine die
				return
			}
			core.PullDone(w.now, q.Request, contents, err)
			r.Touch()
		})
	}
	switch {
	case q.Pull.Bootstrap:
		deliver(0, errors.New("a virtual world has no bootstrap server"))
	case w.byID[q.Pull.EngineID] == nil && q.Pull.Port == 0:
		patience := cmp.Or(max(w.Patience, 0), 5*time.Second)
		deliver(patience, errors.New("nothing answers"))
	default:
		deliver(0, nil)
	}
}

func (r *Rank) note(p engine.Pull, n engine.Note) {
	w := r.world
	w.At(w.now, func() {
		if remote := w.byID[p.EngineID]; remote != nil && remote.core != nil {
			remote.core.Noted(w.now, p.RequestID, n)
			remote.Touch()
		}
	})
}

type rankHeap []*Rank

func (h rankHeap) Len() int { return len(h) }
func (h rankHeap) Less(i, j int) bool {
	return h[i].next < h[j].next || h[i].next == h[j].next && h[i].index < h[j].index
}

func (h rankHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}

// Push is for package heap.
func (h *rankHeap) Push(x any) {
	r := x.(*Rank)
	r.place = len(*h)
	*h = append(*h, r)
}

// Pop is for package heap.
func (h *rankHeap) Pop() any {
	last := len(*h) - 1
	r := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return r
}
