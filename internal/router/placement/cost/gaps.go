package cost

import "time"

// stretch is after how many tokens the time between the tokens of a running answer is
// counted, before the answer has ended: it ends long after paths were chosen that stall it.
// The law of that time is learned from longer stretches. A prompt that is being computed at
// the end of a stretch has no first token yet and is counted in the next one, which is a
// smaller error in a longer stretch.
const stretch, lawStretch = 16, 100

// lawMemory is how many stretches the law of the time between tokens remembers, lawEnough
// of how many it is made at least.
const lawMemory, lawEnough = 1000, 12

// Running is an answer that runs. The zero value is one without a token, on a rank of which
// nothing is known.
type Running struct {
	// Slot is that of its rank. Rank says what that has in work; nil when nobody can.
	Slot uint32
	Rank interface{ Load() Load }

	counted, now mark
	begun        loaded
}

// mark is how many tokens an answer had at a time.
type mark struct {
	tokens int
	at     time.Duration
}

// loaded is a mark with what the rank had in work then, and for how many ms in all it had
// computed prompts.
type loaded struct {
	mark
	load    Load
	prompts float64
}

// Load is what a rank has in work.
type Load struct {
	// Queued is the prompt tokens that it has to compute, of requests without a first
	// token.
	Queued int
	// Waiting is its requests without a first token, Answers those with one, and Held the
	// tokens of the latter.
	Waiting, Answers, Held int
}

// LoadOf is what is in work on a rank by the router's account: of so many requests some are
// answering, prompt tokens are queued, and all requests hold so many tokens.
func LoadOf(requests, answering, queued, held int) Load {
	l := Load{Queued: queued, Waiting: max(requests-answering, 0), Answers: answering}
	if requests > 0 {
		l.Held = held * answering / requests
	}
	return l
}

// computing is for how many ms a rank that answers has computed prompts in all, the newest
// of which had its first token at a time.
type computing struct {
	ms float64
	at time.Duration
}

// stalled counts that a rank has computed a prompt, for which its answers waited. The caller
// holds mu.
func (l *Learner) stalled(w *Work, now time.Duration) {
	ms := l.fits[LocalLeg].law.compute(w)
	s := l.prompts[w.Slot]
	// Those whose first tokens come at once were computed in one step: another takes longer
	// than that.
	if step := l.step(); s.ms == 0 || float64(now-s.at)/float64(time.Millisecond) >= step {
		ms += step
	}
	l.prompts[w.Slot] = computing{s.ms + ms, max(s.at, now)}
}

// step is what a step takes in which prompts are computed, besides them. The caller holds
// mu.
func (l *Learner) step() float64 {
	return min(l.fits[LocalLeg].law[termOne], l.fits[PrefillLeg].law[termOne])
}

// Ran learns that an answer has so many tokens now, a time since any beginning.
func (l *Learner) Ran(a *Running, tokens int, now time.Duration) {
	a.now = mark{tokens, now}
	first := a.counted.tokens == 0
	if first {
		a.counted = a.now
	}
	if first || tokens-a.counted.tokens >= stretch {
		l.mu.Lock()
		l.heard(now)
		l.gap(a)
		if first || tokens-a.begun.tokens >= lawStretch {
			l.learnGap(a)
		}
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
	l.learnGap(a)
	l.lengths.add(a.now.tokens)
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

// Terms of the law of the time between the tokens of an answer, in ms: a constant, the
// tokens of all answers of its rank in thousands, how many answers those are, and for how
// many ms a token the rank computed prompts.
const (
	gapHeld    = termCompute
	gapPrompts = termQueued
	gapAnswers = termRunning
)

// gapValues are the terms' values.
func gapValues(held, answers, prompts float64) (v [terms]float64) {
	v[termOne], v[gapHeld], v[gapAnswers], v[gapPrompts] = 1, held/1000, answers, prompts
	return v
}

// learnGap teaches the law of the time between tokens what an answer's newest stretch took.
// The caller holds mu.
func (l *Learner) learnGap(a *Running) {
	if a.Rank == nil {
		return
	}
	was, now := &a.begun, loaded{a.now, a.Rank.Load(), l.prompts[a.Slot].ms}
	n := float64(now.tokens - was.tokens)
	if was.tokens > 0 && n >= stretch {
		ms := float64(now.at-was.at) / float64(time.Millisecond) / n
		x := gapValues(float64(now.load.Held+was.load.Held)/2, float64(now.load.Answers+was.load.Answers)/2, (now.prompts-was.prompts)/n)
		f := &l.gapFit
		f.fade(1 - 1.0/lawMemory)
		f.count++
		weight := n / lawStretch / (ms*ms + 1e-3)
		for i := range x {
			for j := range x {
				f.info[i][j] += weight * x[i] * x[j]
			}
			f.moment[i] += weight * x[i] * ms
		}
	}
	*was = now
}
