// Package virtualsoak is the endurance test under a virtual clock: the router's request
// path and simulated engines, a schedule of requests and faults for every seed, and the same
// history whenever a seed is run again. Package soak is the same with real sockets in real
// time.
package virtualsoak

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/rig/virtualsoak/reference"
	"github.com/dynctl/dynctl/internal/router/cache/approx"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/cache/kvstream"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/ledger"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/health"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// plant is a bug put in on purpose, to prove that it would be found.
type plant uint8

const (
	nothing plant = iota
	// skipRelease forgets to release a reservation now and then.
	skipRelease
	// applyTwice applies a batch of events again that was applied long before.
	applyTwice
	// applyEarly applies a batch although the one before it is missing.
	applyEarly
	// reuseTransfer gives a decode leg the transfer parameters of an earlier
	// request.
	reuseTransfer
	// giveUpFallBack gives a request up when nobody is left who could prefill.
	giveUpFallBack
	// endFirst ends the feeds before the last snapshot is written, so that none
	// of them has a position any more.
	endFirst
	// positionsFirst notes where the feeds stand some time before what the ranks
	// hold is copied.
	positionsFirst
	// positionsJustBefore is positionsFirst with hardly any time between.
	positionsJustBefore
	// keepOut never lets a worker come back that was kept out of a request.
	keepOut
	// forgetFailed does not keep a worker out of the further tries of a request
	// that it has failed.
	forgetFailed
	// displace takes a rank that has left the fleet for the newest of its slot,
	// so that a late reservation on it takes the account out of the books that
	// is there now.
	displace
	// leaveEjected does not bring an ejected worker back for a request that has
	// no other.
	leaveEjected
	// numbersOnly goes on with a publisher whose numbers fit, without a look at
	// whether the last batch is still the same.
	numbersOnly
	// forgetEase does not notify those that wait in line that a rank has room again.
	forgetEase
	// seamTwice goes on with a stream from one token before what the client has.
	seamTwice
	// wholeLimit asks for as many tokens of the rest of a stream as of all of it.
	wholeLimit
	// aheadOfText goes on with a stream after all ids that were sent, though the text
	// of the last ones may not be a whole character.
	aheadOfText
	// forgetRefusal takes a stream for one that can be gone on with, whatever its request says.
	forgetRefusal
	// keepPlace does not give back the place on a rank of the rest of a stream now and then.
	keepPlace
	// oneTooMany lets one rest more be computed at a time than a rank may have.
	oneTooMany
	// forgetNext does not notify those who wait for such a place that one came free.
	forgetNext
	// keepOutside does not hear of blocks that leave the host's memory.
	keepOutside
	// forgetLost tries a request again however many engines have died of it.
	forgetLost
	// blameEngines counts it against engines that a request breaks each of them.
	blameEngines
	// resendElsewhere sends a request to another engine after its connection was closed as
	// idle.
	resendElsewhere
	// loseEvent does not count a leg that begins now and then, doubleEvent counts it twice.
	loseEvent
	doubleEvent
	// keepLeg does not close the answer of a leg now and then.
	keepLeg
	// firstGroupOnly does not hear of blocks that cache groups but the first lose.
	firstGroupOnly
)

// Outcome is what one seed has done. Two runs of a seed give equal Outcomes.
type Outcome struct {
	Seed uint64
	// Requests end as Completed, Left (by their client), Cut (after the first token, by a
	// fault or a restart of the router) or Hopeless (no worker was well, or its attempts or
	// the budget for retries were used up).
	Requests, Completed, Left, Cut, Hopeless int
	Attempts, Remote, Fallbacks              int
	Faults, Batches, Gaps, Resyncs           int
	Reused, Restarts                         int // of the router, with a snapshot
	// Ejections of workers, ends of them because a request had no other worker (Readmitted),
	// requests that a worker which is on trial was given to after another had been (Refused),
	// and failures that were taken back (Excused).
	Ejections, Readmitted, Refused, Excused int
	// Continued is how often a stream whose engine died continued elsewhere, Closed how often
	// one was ended by the router because its last token had come.
	Continued, Closed int
	// Moved is how often a stream continued elsewhere because its worker was drained.
	Moved int
	// Stopped is how often the router ended one for a stop string that no engine saw, CutFor
	// why those that were cut did not continue.
	Stopped int
	CutFor  map[string]int
	// MovesWaited is how often the rest of a stream waited for a place on a rank.
	MovesWaited int
	// Outside are blocks that prompts were found to have outside a device, at all looks.
	Outside int
	// Waited are requests that waited for a rank that was under its limit.
	Waited int
	// Died are engines that died of a request, HandedOver prefills whose KV went to another
	// decode rank because the first had no room.
	Died, HandedOver int
	Checks           int // of the index against the events
	// Steps is the number of things that happened, Digest a digest of them all.
	Steps  int
	Digest uint64
	// Violations are what must not happen; the run ends with the first one.
	Violations []string
	// History is what happened, if it was requested.
	History []string
}

// cutFor counts a request that is cut, by its cause.
func (o *Outcome) cutFor(why string) {
	if o.CutFor == nil {
		o.CutFor = map[string]int{}
	}
	o.CutFor[why]++
}

// Err is nil when nothing happened that must not.
func (o *Outcome) Err() error {
	if len(o.Violations) == 0 {
		return nil
	}
	return fmt.Errorf("seed %d: %s", o.Seed, o.Violations[0])
}

// tokenizer is the simulator's, which takes long to build.
var tokenizer = sync.OnceValue(vocab.New)

// stage is one run.
type stage struct {
	out       *Outcome
	plant     plant
	keep      bool // history
	rng       *rand.Rand
	w         *virtual.World
	group     sim.Group
	ref       *reference.Engine
	nodes     []*node // the fleet, those that left included
	registry  *workers.Registry
	limits    health.OutlierOptions
	began     time.Time     // of the world, by the bubble's clock
	slept     time.Duration // how far that clock is
	due       time.Duration // when the outliers' next step is to be taken, if after now
	judge     bool          // they may have been told something since the last one
	index     *kvindex.Index
	approx    *approx.Index
	ledger    *ledger.Ledger
	router    *router
	queue     rankQueue
	moves     moves
	settings  *effective.Settings
	budget    attempt.Budget // of retries
	byHost    map[string]*node
	transfers map[string]*transfer // whose legs are sent at once, by their names
	// The router's goroutines: all, those that may go on, and the one that does.
	tasks, ready []*task
	running      *task
	open         map[*request]bool
	started      int
	total        int
	used         map[string]string // transfers by the request that used them
	old          *engine.Pull      // for reuseTransfer
	prompts      [][]uint32
	hashed       []hashed // those, once they are
	digest       uint64
	buf          []byte
	closing      bool                         // what is under way is abandoned
	away         bool                         // the router is being restarted
	file         []byte                       // the latest snapshot of the index
	promises     map[string]*kept             // what it should be good for, by worker
	going        *node                        // leaves once a request has chosen it
	doomed       int                          // prefills whose engine restarts before their KV is pulled
	early        map[*feed]*kvstream.Position // for positionsFirst
	script       *script                      // instead of what is drawn; nil for none
}

const (
	schedule = 3 * time.Second // in which everything begins
	quiet    = 4 * time.Second // after which all of it is over
	maxSteps = 200_000
	// probeEvery is the time between two probes of health.
	probeEvery = 20 * time.Millisecond
)

// play runs one seed under a virtual clock: a schedule of requests and faults
// over the router's own request path (package serving, with all that it decides,
// sends, and learns by), its own stages for events of caches, and simulated engines. One
// thing happens at a time. It runs in a bubble of testing/synctest, whose clock is the
// world's. What the router does with sockets is modelled here; see docs/lab/soak.md.
func play(seed uint64, p plant, history bool) *Outcome {
	s := newStage(seed, p, history)
	defer s.close()
	s.plot()
	s.crowd()
	for s.out.Steps < maxSteps && len(s.out.Violations) == 0 {
		at, ok := s.w.Next()
		if !ok || at > schedule+quiet {
			break
		}
		s.out.Steps++
		s.w.Step()
		s.settle()
	}
	if len(s.out.Violations) == 0 {
		s.final()
	}
	s.out.Digest = s.digest
	return s.out
}

// newStage makes the fleet and the router of a seed.
func newStage(seed uint64, p plant, history bool) *stage {
	s := &stage{
		out: &Outcome{Seed: seed}, plant: p, keep: history, rng: rand.New(rand.NewPCG(seed, 0x736f616b)), w: virtual.NewWorld(),
		open: map[*request]bool{}, used: map[string]string{}, byHost: map[string]*node{}, transfers: map[string]*transfer{}, began: time.Now(),
	}
	s.openLedger()
	s.build()
	return s
}

func (s *stage) close() {
	s.abandon()
	s.closeRouter()
}

// note adds to the history; all of it goes into the digest.
func (s *stage) note(format string, a ...any) {
	s.buf = fmt.Appendf(s.buf[:0], format, a...)
	h := fnv.New64a()
	_, _ = h.Write(s.buf) // never fails
	s.digest = s.digest*1099511628211 ^ h.Sum64() ^ uint64(s.w.Now())
	if s.keep {
		s.out.History = append(s.out.History, fmt.Sprintf("%10.3f ms  %s", float64(s.w.Now())/1e6, s.buf))
	}
}

func (s *stage) violate(format string, a ...any) {
	if s.closing {
		return // what is under way is not ended as the router would
	}
	s.note("VIOLATION: "+format, a...)
	s.out.Violations = append(s.out.Violations, fmt.Sprintf(format, a...)+fmt.Sprintf(" (at %v)", s.w.Now()))
}

func (s *stage) now() time.Time { return s.began.Add(s.w.Now()) }

// between draws a time.
func (s *stage) between(low, high time.Duration) time.Duration {
	return low + time.Duration(s.rng.Int64N(int64(high-low)+1))
}

// chance draws whether something happens.
func (s *stage) chance(share float64) bool { return s.rng.Float64() < share }

// build makes the fleet and the router's stages.
func (s *stage) build() {
	g := sim.DefaultGroup()
	g.Connector = workers.ConnectorNIXL
	g.BlockSize, g.Blocks = 8, 24+s.rng.IntN(60)
	g.MaxSeqs, g.MaxBatchedTokens = 2+s.rng.IntN(8), 32+s.rng.IntN(200)
	g.Profile, g.Speed, g.OSL, g.Seed = "mocker", 10, 6, s.out.Seed
	g.Recompute, g.Letters = s.chance(0.3), s.chance(0.5)
	g.Lease = s.between(200*time.Millisecond, 2*time.Second)
	s.group = g
	s.spill()
	s.pushes()
	s.w.Patience = 100 * time.Millisecond
	s.ref = reference.New(g, tokenizer())
	s.limits = health.OutlierOptions{
		Consecutive: 1 + s.rng.IntN(3), Connects: 1, MinRequests: 2 + s.rng.IntN(4), Window: 500 * time.Millisecond,
		Penalty: s.between(50*time.Millisecond, time.Second), MaxPenalty: time.Second,
		Forget: time.Second, Trial: 300 * time.Millisecond, Now: s.now,
	}
	s.registry = workers.NewRegistry(nil)
	s.drawSettings()
	s.openRouter()
	for range 1 + s.rng.IntN(3) {
		s.join(workers.Prefill)
	}
	for range 2 + s.rng.IntN(2) {
		s.join(workers.Decode)
	}
	if s.chance(0.3) {
		s.join(workers.Aggregated)
	}
	s.total = 20 + s.rng.IntN(40)
	// Prompts are turns of few conversations: the same again, or longer, or new.
	room := (g.Blocks - 1) * g.BlockSize
	for range 3 + s.rng.IntN(12) {
		n := 4 + s.rng.IntN(room/3)
		var p []uint32
		if len(s.prompts) > 0 && s.chance(0.6) {
			old := s.prompts[s.rng.IntN(len(s.prompts))]
			p = append(p, old[:s.rng.IntN(len(old)+1)]...)
		}
		for len(p) < n {
			p = append(p, 300+uint32(s.rng.IntN(3000)))
		}
		s.prompts = append(s.prompts, p)
	}
}

func (s *stage) openLedger() {
	s.ledger = ledger.New()
	s.ledger.OnEase(s.ease)
}

// plot writes the schedule: when requests come, and what breaks when.
func (s *stage) plot() {
	at := time.Duration(0)
	for i := range s.total {
		if i == 0 || s.chance(0.6) {
			at = s.between(0, schedule)
		} else { // close upon the one before
			at += s.between(0, time.Millisecond)
		}
		s.w.At(at, s.request)
	}
	for range 2 + s.rng.IntN(10) {
		s.w.At(s.between(0, schedule), s.strike)
	}
	if s.chance(0.3) {
		// It is stopped and leaves a snapshot, or it crashes, and the one that it
		// wrote in passing is old.
		at := s.between(schedule/4, schedule)
		saved := at
		if crash := s.chance(0.5); crash {
			saved = s.between(schedule/8, at)
			s.w.At(saved, s.saveIndex)
			s.w.At(at, s.restartRouter)
		} else {
			s.w.At(at, func() {
				s.saveIndex()
				s.restartRouter()
			})
		}
		switch s.plant {
		case positionsFirst:
			s.w.At(saved-200*time.Millisecond, s.notePositions)
		case positionsJustBefore:
			s.w.At(saved-time.Millisecond, s.notePositions)
		}
	}
	s.w.At(probeEvery, s.probe)
	// Everything is well again at last, and every rank says something once
	// more, so that a loss at the end shows.
	s.w.At(schedule+quiet/2, func() {
		for _, n := range s.nodes {
			if n.member {
				n.endFaults()
			}
		}
	})
	for i := range 2 {
		s.w.At(schedule+quiet/2+time.Duration(i+1)*quiet/8, func() {
			for _, n := range s.nodes {
				if n.member {
					n.stir(s.rng.Uint32())
				}
			}
		})
	}
}

// final looks at everything that must hold when nothing happens any more.
func (s *stage) final() {
	for q := range s.open {
		s.violate("request %s never ended", q.id)
		return
	}
	if s.started != s.out.Requests || s.started != s.out.Completed+s.out.Left+s.out.Cut+s.out.Hopeless {
		s.violate("%d requests began, %d ended (%+v)", s.started, s.out.Completed+s.out.Left+s.out.Cut+s.out.Hopeless, *s.out)
	}
	if err := s.ledger.Balanced(); err != nil {
		s.violate("%v", err)
	}
	if n := s.router.bodies.Used(); n != 0 {
		s.violate("%d bytes of bodies were not given back", n)
	}
	if n := s.ledger.DoubleReleases(); n > 0 {
		s.violate("%d reservations were released twice", n)
	}
	if !s.moves.queue.Idle() {
		s.violate("places of rests of streams were not given back")
	}
	for _, n := range s.nodes {
		if !n.member {
			continue
		}
		n.audit()
		if ok, why := n.worker.State.Usable(); !ok {
			s.violate("%s is well and gets no requests: %s", n.name, why)
		}
	}
}

// probe is the router's view of health and load: twice a fault must be seen.
func (s *stage) probe() {
	for _, n := range s.nodes {
		if n.up && !n.hang {
			n.missed = 0
			n.probed(workers.Healthy)
			n.worker.State.SetAnswered(s.now())
			l := workers.UnknownLoad(s.now())
			if c := n.v.Core(); c != nil {
				l.Running, l.Waiting, l.KVUsage = c.Load()
			}
			n.rank.SetLoad(&l)
		} else if n.missed++; n.missed >= 2 {
			n.probed(workers.Unhealthy)
		}
	}
	if s.w.Now() < schedule+quiet {
		s.w.At(s.w.Now()+probeEvery, s.probe)
	}
}

// probed is what probes say of a worker from now on.
func (n *node) probed(h workers.Health) {
	if n.worker.State.Probed().Health != h {
		n.worker.State.SetCondition(workers.Condition{Health: h, Since: n.s.now()})
	}
}

// healthEvent is what outlier ejection reports. Nobody may be ejected who alone can do its
// work.
func (s *stage) healthEvent(e eventlog.Event) {
	s.note("%s", e.Text)
	if e.Kind != "outlier_ejected" {
		return
	}
	s.out.Ejections++
	var who *node
	others := 0 // do the same work and are at hand
	for _, n := range s.nodes {
		if n.name == e.Worker {
			who = n
		}
	}
	for _, n := range s.nodes {
		state := n.worker.State
		if n != who && n.member && n.worker.Role.CanDecode() == who.worker.Role.CanDecode() &&
			!state.Draining() && state.Probed().Health == workers.Healthy && state.Ejection() == nil {
			others++
		}
	}
	if others == 0 {
		s.violate("%s was ejected, and nobody else does its work", e.Worker)
	}
}

// inOrder are the open requests by age: the order of a map is not the same
// twice.
func (s *stage) inOrder() []*request {
	list := make([]*request, 0, len(s.open))
	for q := range s.open {
		list = append(list, q)
	}
	slices.SortFunc(list, func(a, b *request) int { return a.no - b.no })
	return list
}
