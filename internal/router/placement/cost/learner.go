package cost

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// LegKind is what an outcome is of.
type LegKind uint8

// The legs.
const (
	// LocalLeg is a decode rank that computes the prompt, up to its first token.
	LocalLeg LegKind = iota
	// PrefillLeg is a prefill rank, up to its answer.
	PrefillLeg
	// TransferLeg is a decode rank that gets the KV, up to its first token.
	TransferLeg
	legKinds
)

// Costs decide from so many outcomes on: of prompts that were computed, wherever, and
// of KV that moved. What is learned late is paid for by the requests before.
const (
	EnoughComputed = 12
	EnoughMoved    = 6
)

// every is how often a new revision may be published.
const every = time.Second

// start is what is assumed before anything was seen: little more than that time
// grows with work. It weighs next to nothing.
var start = [legKinds]LegModel{
	LocalLeg:    {20, 20, 1, 20, 0},
	PrefillLeg:  {20, 20, 1, 20, 0},
	TransferLeg: {5, 2, 0, 10, 0},
}

// startStep is the same of steps.
var startStep = LegModel{8, 0.1, 0.2, 0.1, 20, 10}

// borrowed is for how many outcomes the model of one kind of rank counts for the
// other.
const borrowed = 8

// recent is over how many answers their length and the time between tokens are averaged.
// Before there are any, typical is their length in tokens, and tight the time between
// tokens as a share of its limit.
const recent, typical, tight = 50, 250, 0.8

// Learner makes the models of one fleet from outcomes. It is safe for concurrent use.
type Learner struct {
	model    atomic.Pointer[Model]
	revision *atomic.Uint64 // shared by those of a router

	mu        sync.Mutex // guards the fields below
	objective Objective
	constants Constants
	fits      [legKinds]fit
	steps     fit                // of StepModel
	assumed   [legKinds]LegModel // before anything was seen
	answers   float64            // mean tokens of an answer
	gaps      float64            // mean ms between them, of late
	stalled   float64            // mean ms of it for which prompts were computed
	unknown   float64            // tokens of the newest prompts that no rank held
	prompts   float64            // all tokens of these
	published time.Duration
	fresh     bool             // there is something new to publish
	solved    bool             // models were made before
	used      time.Duration    // when it was last heard of requests, or served; 0 for not yet
	requests  uint64           // whose plans were carried out
	sampled   [legKinds]uint64 // requests at the newest outcome of a leg
	// doubt is how many outcomes without a drift are wanted before there is a model
	// again.
	doubt   int
	crossed crossed // the crossings last computed
}

// NewLearner makes a learner that knows nothing.
func NewLearner(o Objective) *Learner { return newLearner(o, new(atomic.Uint64)) }

func newLearner(o Objective, revision *atomic.Uint64) *Learner {
	// Answers end long after paths are chosen by costs: until then they are taken for
	// such that feel a stall.
	o = o.sound()
	l := &Learner{objective: o, constants: Tuned, revision: revision, assumed: start, answers: typical, gaps: tight * float64(o.ITL) / float64(time.Millisecond)}
	l.steps.model = startStep
	for i := range l.fits {
		l.fits[i].model = start[i]
	}
	return l
}

// Assume makes a learner that knows nothing yet assume that everything takes that many times
// as long as it would assume else: what happens with start values that are wrong can be tried.
func (l *Learner) Assume(times float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.assumed {
		for k := range l.assumed[i] {
			l.assumed[i][k] *= times
		}
		l.fits[i].model = l.assumed[i]
	}
}

// Set sets the constants by which models are made from now on.
func (l *Learner) Set(c Constants) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.constants = c
}

// Model is the revision in force; nil while too little is known.
func (l *Learner) Model() *Model { return l.model.Load() }

// Took learns that a leg with work w took so long. now is the time since any beginning,
// the same for all calls. It returns what this changed.
func (l *Learner) Took(leg LegKind, w *Work, took, now time.Duration) Change {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.heard(now)
	if w.Context > 0 {
		// What another rank holds is needed again, too: it is computed where that costs less.
		l.unknown += float64(min(w.Tokens, w.Context-int(w.Found))) - l.unknown/memory
		l.prompts += float64(w.Context) - l.prompts/memory
	}
	moved := *w
	if leg == TransferLeg {
		moved.Times = 0
	}
	change := l.fits[leg].add(&moved, float64(took)/float64(time.Millisecond), now)
	l.fresh, l.sampled[leg] = true, l.requests
	switch {
	case change == Doubted && l.doubt == 0:
		l.doubt = quiet
		l.model.Store(nil)
		return Doubted
	case change != 0 && l.doubt > 0:
		l.doubt = quiet // nobody needs to hear of each
		return 0
	}
	l.doubt = max(0, l.doubt-1)
	return change | l.publish(now)
}

// Requested learns that the plan of a request is carried out, from which outcomes may come.
func (l *Learner) Requested(now time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.heard(now)
	l.requests++
}

// Renew publishes what was learned since the last revision, if no outcome comes that does:
// that a path was not taken for a while counts, too. It is meant to be called once a second.
func (l *Learner) Renew(now time.Duration) Change {
	l.mu.Lock()
	defer l.mu.Unlock()
	if m := l.model.Load(); m != nil && m.Lacks != l.lacks(now) {
		l.fresh = true
	}
	return l.publish(now)
}

// lacks are the legs of which little is known now. The caller holds mu.
func (l *Learner) lacks(now time.Duration) (legs Legs) {
	for i := range l.fits {
		if f := &l.fits[i]; f.seen < EnoughMoved || now-f.last > l.constants.stale() {
			legs |= 1 << i
		}
	}
	return legs
}

// heard notes that something is learned of now. The caller holds mu.
func (l *Learner) heard(now time.Duration) { l.used = max(l.used, now) }

// publish makes the next revision and puts it in force, unless there is nothing new, too
// little is known, or the last one is younger than every. The caller holds mu.
func (l *Learner) publish(now time.Duration) (news Change) {
	f := &l.fits
	timed := float64(l.steps.count) >= l.constants.Stretches
	paths := f[LocalLeg].count+f[PrefillLeg].count >= EnoughComputed && f[TransferLeg].count >= EnoughMoved
	if !l.fresh || l.solved && now-l.published < every || !paths && !(timed && f[LocalLeg].count >= EnoughComputed) {
		return 0
	}
	local, prefill := f[LocalLeg].model, f[PrefillLeg].model
	f[LocalLeg].solve(&prefill, &f[PrefillLeg])
	f[PrefillLeg].solve(&local, &f[LocalLeg])
	f[TransferLeg].solve(&l.assumed[TransferLeg], nil)
	if timed {
		l.steps.solve(&startStep, nil)
	}
	l.published, l.fresh, l.solved = now, false, true
	if l.doubt > 0 {
		return 0 // the cost models are watched, and decide nothing
	}
	m := l.objective.model(l.answers, l.gaps)
	m.Revision = l.revision.Add(1)
	m.Local, m.Prefill, m.Transfer = f[LocalLeg].model, f[PrefillLeg].model, f[TransferLeg].model
	m.Length, m.NoRemote, m.Lacks, m.Constants = max(l.answers, 1), !paths, l.lacks(now), l.constants
	if l.prompts > 0 {
		m.Fresh = min(l.unknown/l.prompts, 1)
	}
	l.objective.price(m)
	if timed {
		m.Step, m.Stalled = StepModel(l.steps.model), l.stalled
		m.Error = max(min(f[LocalLeg].off(), f[PrefillLeg].off()), l.steps.off())
	}
	old := l.model.Swap(m)
	if paths && !old.Compares() {
		news |= Learned
	}
	if timed && !old.Timed() {
		news |= Timed
	}
	return news
}

// aim changes what paths are chosen for.
func (l *Learner) aim(o Objective) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if o = o.sound(); l.objective != o {
		l.objective, l.fresh = o, true
	}
}

// Known is how much a learner knows.
type Known struct {
	// Requests is how many plans were carried out.
	Requests uint64
	// Local, Prefill and Transfer are the outcomes that count, older ones less.
	Local, Prefill, Transfer float64
	// Lacks are the legs with few samples, or no new ones. Age is the time since a leg's newest
	// outcome, and Since the number of requests since then.
	Lacks Legs
	Age   [legKinds]time.Duration
	Since [legKinds]uint64
	// Stretches are the stretches of answers that count; from Wanted on the time of a step is
	// known.
	Stretches, Wanted float64
	// Calm is how many outcomes without a drift are wanted before there is a model again; 0 for
	// no doubt.
	Calm int
	// Model is the revision in force; nil while too little is known.
	Model *Model
}

// Known is how much is known now.
func (l *Learner) Known(now time.Duration) Known {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := Known{
		Requests: l.requests, Local: l.fits[LocalLeg].seen, Prefill: l.fits[PrefillLeg].seen, Transfer: l.fits[TransferLeg].seen, Lacks: l.lacks(now),
		Stretches: l.steps.seen, Wanted: l.constants.Stretches, Calm: l.doubt, Model: l.model.Load(),
	}
	for i := range l.fits {
		k.Age[i], k.Since[i] = now-l.fits[i].last, l.requests-l.sampled[i]
	}
	return k
}

// MaxModels bounds of how many names of models is learned at once.
const MaxModels = 64

// Learners are those of a router, by the model that requests ask for. They are safe
// for concurrent use.
type Learners struct {
	// Full, if set, is called with a model whose sample was dropped because MaxModels others are
	// learned.
	Full func(model string)

	revision  atomic.Uint64
	refused   atomic.Uint64
	mu        sync.RWMutex // guards the fields below
	objective Objective
	byModel   map[string]*Learner
}

// NewLearners makes an empty set.
func NewLearners(o Objective) *Learners {
	return &Learners{objective: o, byModel: map[string]*Learner{}}
}

// Model is the revision in force for requests of a model; nil while too little is known. It
// makes no learner.
func (l *Learners) Model(model string) *Model {
	l.mu.RLock()
	one := l.byModel[model]
	l.mu.RUnlock()
	if one == nil {
		return nil
	}
	return one.Model()
}

// Of returns the learner of a model, a new one for a new model. It returns nil, and counts that,
// where MaxModels others are learned.
func (l *Learners) Of(model string) *Learner {
	l.mu.RLock()
	one, full := l.byModel[model], len(l.byModel) >= MaxModels
	l.mu.RUnlock()
	if one == nil && !full {
		one = l.begin(model)
	}
	if one == nil {
		l.refused.Add(1)
		if l.Full != nil {
			l.Full(model)
		}
	}
	return one
}

// begin makes the learner of a model, if it has none and there is room.
func (l *Learners) begin(model string) *Learner {
	l.mu.Lock()
	defer l.mu.Unlock()
	one := l.byModel[model]
	if one == nil && len(l.byModel) < MaxModels {
		one = newLearner(l.objective, &l.revision)
		l.byModel[strings.Clone(model)] = one
	}
	return one
}

// Refused is how often something was not learned because there were too many models.
func (l *Learners) Refused() uint64 { return l.refused.Load() }

// Forget drops the models that no worker has served, and that had no sample, since a time.
// Call it now and then; served reports whether a worker serves a model now.
func (l *Learners) Forget(served func(model string) bool, now, since time.Duration) {
	for name, one := range l.All() {
		if one.keep(served(name), now, since) {
			continue
		}
		l.mu.Lock()
		delete(l.byModel, name)
		l.mu.Unlock()
	}
}

// keep reports whether a learner was of use since a time. One that has heard nothing yet was
// made just now.
func (l *Learner) keep(served bool, now, since time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if served || l.used == 0 {
		l.heard(now)
	}
	return l.used >= since
}

// Aim changes what paths are chosen for. Models follow with their next revisions.
func (l *Learners) Aim(o Objective) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.objective = o
	for _, one := range l.byModel {
		one.aim(o)
	}
}

// All are the learners there are, by model.
func (l *Learners) All() map[string]*Learner {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return maps.Clone(l.byModel)
}

// Known is how much is known of each model now.
func (l *Learners) Known(now time.Duration) map[string]Known {
	all := map[string]Known{}
	for name, one := range l.All() {
		all[name] = one.Known(now)
	}
	return all
}
