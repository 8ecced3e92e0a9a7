package cost

import "time"

// stretch is after how many tokens the time between the tokens of a running answer is
// counted, before the answer has ended: it ends long after paths were chosen that stall it.
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
	first := a.counted.tokens == 0
	if first {
		a.counted = a.now
	}
	if first || tokens-a.counted.tokens >= stretch {
		l.mu.Lock()
		l.heard(now)
		l.gap(a)
		l.mu.Unlock()
	}
}

// Ended learns that an answer has all its tokens.
func (l *Learner) Ended(a *Running) {
	if a.now.tokens < 2 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gap(a)
	l.answers += (float64(a.now.tokens) - l.answers) / recent
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
