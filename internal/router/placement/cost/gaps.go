package cost

import "time"

// stretch is after how many tokens the time between the tokens of a running answer is
// counted, before the answer has ended: it ends long after paths were chosen that stall it.
const stretch = 16

// Running is an answer that runs. The zero value is one without a token.
type Running struct {
	// How many tokens were counted until when, and how many there are now.
	counted, tokens int32
	countedAt, at   time.Duration
	on              Decoding // when they were counted
}

// Decoding is what a rank does while an answer runs there.
type Decoding struct {
	// Running is the answers that run there, Held and HeldCached the tokens of their contexts as
	// in Work.
	Running, Held, HeldCached int32
	// Prompts and Computed are how many prompts it has computed so far, and uncached tokens of
	// them.
	Prompts, Computed uint32 // they may begin again from 0
	// Others is how many times as many prompts other routers give the fleet as this one. They are
	// not in Prompts and Computed, and each rank is taken to get its share of them.
	Others float32
	// Times is as in Work.
	Times float32
}

// Due reports whether Ran uses what the rank does when the answer has that many tokens.
func (a *Running) Due(tokens int) bool {
	return a.counted == 0 || tokens-int(a.counted) >= stretch
}

// Ran learns that an answer has that many tokens now, a time since any beginning. on is what its
// rank does; it is not used unless the answer is Due, and the zero value is of an unknown rank.
func (l *Learner) Ran(a *Running, tokens int, now time.Duration, on Decoding) {
	first := a.counted == 0
	a.tokens, a.at = int32(tokens), now
	if first {
		a.counted, a.countedAt, a.on = a.tokens, now, on
	}
	if first || a.tokens-a.counted >= stretch {
		l.mu.Lock()
		l.heard(now)
		l.gap(a, &on)
		l.mu.Unlock()
	}
}

// Ended learns that an answer has all its tokens.
func (l *Learner) Ended(a *Running) {
	if a.tokens < 2 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gap(a, &Decoding{})
	l.answers += (float64(a.tokens) - l.answers) / recent
}

// gap counts the tokens of an answer that are not counted yet, as that share of an
// answer. The caller holds mu.
func (l *Learner) gap(a *Running, on *Decoding) {
	n := float64(a.tokens - a.counted)
	if n <= 0 {
		return
	}
	ms := float64(a.at-a.countedAt) / float64(time.Millisecond) / n
	l.step(&a.on, on, n, ms)
	a.on = *on
	l.gaps += (ms - l.gaps) * n / max(l.answers, n) / recent
	a.counted, a.countedAt = a.tokens, a.at
}

// Steps are of few milliseconds: their errors are relative from stepFloor ms on. stepMemory is
// how many stretches of answers count at most.
const stepFloor, stepMemory = 2, 2000

// maxComputed bounds the tokens that a rank computes within a stretch: more means that its counter
// began again.
const maxComputed = 1 << 24

// step counts a stretch of n tokens of an answer that took ms each, between two looks at its
// rank. The caller holds mu.
func (l *Learner) step(from, to *Decoding, n, ms float64) {
	if from.Running <= 0 || to.Running <= 0 || n < stretch || to.Computed-from.Computed > maxComputed {
		return
	}
	routers := 1 + float64(from.Others+to.Others)/2
	x := [terms]float64{
		stepOne: 1, stepRunning: float64(from.Running+to.Running) / 2, stepHeld: float64(from.Held+to.Held) / 2000, stepCached: float64(from.HeldCached+to.HeldCached) / 2000,
		stepTokens: float64(to.Computed-from.Computed) * routers / 1000 / n, stepPrompt: float64(to.Prompts-from.Prompts) * routers / n,
	}
	ms /= float64(max(from.Times, to.Times, 1))
	predicted := 0.0
	for i, v := range x {
		predicted += l.steps.model[i] * v
	}
	stalled := l.steps.model[stepTokens]*x[stepTokens] + l.steps.model[stepPrompt]*x[stepPrompt]
	l.stalled += (stalled - l.stalled) / stepMemory * stretch
	l.steps.fade(1 - 1.0/stepMemory)
	l.steps.take(&x, ms, stepFloor+max(predicted, ms)/2)
	l.fresh = true
}
