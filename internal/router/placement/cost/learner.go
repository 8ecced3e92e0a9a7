package cost

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Leg is what an outcome is of.
type Leg uint8

// The legs.
const (
	// LocalLeg is a decode rank that computes the prompt, up to its first token.
	LocalLeg Leg = iota
	// PrefillLeg is a prefill rank, up to its answer.
	PrefillLeg
	// TransferLeg is a decode rank that gets the KV, up to its first token.
	TransferLeg
	legs
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
var start = [legs]Law{
	LocalLeg:    {20, 20, 1, 20, 0},
	PrefillLeg:  {20, 20, 1, 20, 0},
	TransferLeg: {5, 2, 0, 10, 0},
}

// borrowed is for how many outcomes the law of one kind of rank counts for the
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
	fits      [legs]fit
	assumed   [legs]Law // before anything was seen
	answers   float64   // mean tokens of an answer
	gaps      float64   // mean ms between them, of late
	late      float64   // share of answers whose first token came after its limit, of late
	published time.Duration
	slow      []Slow // ranks that take longer than their peers; never written to
	fresh     bool   // there is something new to publish
	solved    bool   // laws were made before
	// doubt is how many outcomes without a drift are wanted before there is a model
	// again.
	doubt int
}

// NewLearner makes a learner that knows nothing.
func NewLearner(o Objective) *Learner { return newLearner(o, new(atomic.Uint64)) }

func newLearner(o Objective, revision *atomic.Uint64) *Learner {
	// Answers end long after paths are chosen by costs: until then they are taken for
	// such that feel a stall.
	l := &Learner{objective: o, revision: revision, assumed: start, answers: typical, gaps: tight * float64(o.ITL) / float64(time.Millisecond)}
	for i := range l.fits {
		l.fits[i].law = start[i]
	}
	return l
}

// Assume makes a learner that knows nothing yet assume that everything takes so many times
// as long as it would assume else: what becomes of start values that are wrong can be tried.
func (l *Learner) Assume(times float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.assumed {
		for k := range l.assumed[i] {
			l.assumed[i][k] *= times
		}
		l.fits[i].law = l.assumed[i]
	}
}

// Model is the revision in force; nil while too little is known.
func (l *Learner) Model() *Model { return l.model.Load() }

// Took learns that a leg with work w took so long. now is the time since any beginning,
// the same for all calls. It returns what this changed.
func (l *Learner) Took(leg Leg, w *Work, took, now time.Duration) Change {
	l.mu.Lock()
	defer l.mu.Unlock()
	change := l.fits[leg].add(w, float64(took)/float64(time.Millisecond), now)
	l.fresh = true
	switch {
	case change == Doubted && l.doubt == 0:
		l.doubt = quiet
		l.model.Store(nil)
		return Doubted
	case change != NoChange && l.doubt > 0:
		l.doubt = quiet // nobody needs to hear of each
		return NoChange
	}
	l.doubt = max(0, l.doubt-1)
	if l.publish(now) {
		return Learned
	}
	return change
}

// stretch is after how many tokens a running answer counts: it ends long after paths
// were chosen that stall it.
const stretch = 16

// Running is an answer that runs. The zero value is one without a token.
type Running struct{ counted, now mark }

// mark is how many tokens an answer had at a time.
type mark struct {
	tokens int
	at     time.Duration
}

// Ran learns that an answer has so many tokens now, a time since any beginning.
func (l *Learner) Ran(a *Running, tokens int, now time.Duration) {
	a.now = mark{tokens, now}
	if a.counted.tokens == 0 {
		a.counted = a.now
	}
	if tokens-a.counted.tokens >= stretch {
		l.mu.Lock()
		l.gap(a)
		l.mu.Unlock()
	}
}

// Ended learns that an answer has all its tokens, and how long its first one took.
func (l *Learner) Ended(a *Running, first time.Duration) {
	if a.now.tokens < 2 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gap(a)
	l.answers += (float64(a.now.tokens) - l.answers) / recent
	missed := 0.0
	if l.objective.TTFT > 0 && first > l.objective.TTFT {
		missed = 1
	}
	l.late += (missed - l.late) / recent
}

// gap counts the tokens of an answer that are not counted yet, as that share of an
// answer. The caller holds mu.
func (l *Learner) gap(a *Running) {
	n := float64(a.now.tokens - a.counted.tokens)
	if n <= 0 {
		return
	}
	ms := float64(a.now.at-a.counted.at) / float64(time.Millisecond) / n
	l.gaps += (ms - l.gaps) * n / max(l.answers, n) / recent
	a.counted = a.now
}

// publish puts a new revision in force when it is time. The caller holds mu.
func (l *Learner) publish(now time.Duration) (first bool) {
	f := &l.fits
	old := l.model.Load()
	if !l.fresh || l.solved && now-l.published < every ||
		f[LocalLeg].count+f[PrefillLeg].count < EnoughComputed || f[TransferLeg].count < EnoughMoved {
		return false
	}
	local, prefill := f[LocalLeg].law, f[PrefillLeg].law
	f[LocalLeg].solve(&prefill, &f[PrefillLeg])
	f[PrefillLeg].solve(&local, &f[LocalLeg])
	f[TransferLeg].solve(&l.assumed[TransferLeg], nil)
	m := l.objective.model(l.answers, l.gaps)
	m.ExploreBelow, m.Slow = l.exploreBelow(), l.slow
	m.Local, m.Prefill, m.Transfer = f[LocalLeg].law, f[PrefillLeg].law, f[TransferLeg].law
	l.published, l.fresh, l.solved = now, false, true
	if l.doubt > 0 {
		return false // the laws are watched, and decide nothing
	}
	m.Revision = l.revision.Add(1)
	l.model.Store(m)
	return old == nil
}

// slower is by how much a rank's measure must change for a revision of its own.
const slower = 1.1

// Slow sets which ranks take longer than their peers, by slot in rising order. Models
// follow with their next revisions. The list is the learner's from then on.
func (l *Learner) Slow(ranks []Slow) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if slices.EqualFunc(l.slow, ranks, func(a, b Slow) bool {
		return a.Slot == b.Slot && a.Times < b.Times*slower && b.Times < a.Times*slower
	}) {
		return
	}
	l.slow, l.fresh = ranks, true
}

// missing is the share of answers that come too late from which on a limit is missed.
const missing = 0.05

// exploreBelow is Model.ExploreBelow: half the limit to the first token, or 0 while a limit is missed.
// The caller holds mu.
func (l *Learner) exploreBelow() float64 {
	o := &l.objective
	if l.late > missing || l.gaps > float64(o.ITL)/float64(time.Millisecond) {
		return 0
	}
	return float64(o.TTFT) / float64(time.Millisecond) / 2
}

// Known is how much a learner knows.
type Known struct {
	// Local, Prefill and Transfer are the outcomes that count, older ones less.
	Local, Prefill, Transfer float64
	// Model is the revision in force; nil while too little is known.
	Model *Model
	// Crossings are where it changes the path, by load; none without a model.
	Crossings []Crossing
}

// Known is how much is known.
func (l *Learner) Known() Known {
	l.mu.Lock()
	fits, m := l.fits, l.model.Load() // nobody waits for what follows
	l.mu.Unlock()
	k := Known{Local: fits[LocalLeg].seen, Prefill: fits[PrefillLeg].seen, Transfer: fits[TransferLeg].seen, Model: m}
	if m != nil {
		k.Crossings = crossings(m, &fits)
	}
	return k
}

// maxModels bounds how many names of models are learned of.
const maxModels = 64

// Learners are those of a router, by the model that requests ask for. They are safe
// for concurrent use.
type Learners struct {
	revision  atomic.Uint64
	mu        sync.RWMutex // guards the fields below
	objective Objective
	slow      []Slow
	byModel   map[string]*Learner
}

// NewLearners makes an empty set.
func NewLearners(o Objective) *Learners {
	return &Learners{objective: o, byModel: map[string]*Learner{}}
}

// Of is the learner of a model; nil when there are too many models already.
func (l *Learners) Of(model string) *Learner {
	l.mu.RLock()
	one := l.byModel[model]
	l.mu.RUnlock()
	if one != nil {
		return one
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if one = l.byModel[model]; one == nil && len(l.byModel) < maxModels {
		one = newLearner(l.objective, &l.revision)
		one.slow = l.slow
		l.byModel[strings.Clone(model)] = one
	}
	return one
}

// Aim changes what paths are chosen for. Models follow with their next revisions.
func (l *Learners) Aim(o Objective) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.objective = o
	for _, one := range l.byModel {
		one.mu.Lock()
		one.objective, one.fresh = o, true
		one.mu.Unlock()
	}
}

// Slow sets which ranks take longer than their peers, as Learner.Slow.
func (l *Learners) Slow(ranks []Slow) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slow = ranks
	for _, one := range l.byModel {
		one.Slow(ranks)
	}
}

// Known is how much is known of each model.
func (l *Learners) Known() map[string]Known {
	l.mu.RLock()
	learners := maps.Clone(l.byModel) // nobody waits for what follows
	l.mu.RUnlock()
	all := make(map[string]Known, len(learners))
	for name, one := range learners {
		all[name] = one.Known()
	}
	return all
}
