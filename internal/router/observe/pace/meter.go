// Package pace judges how fast ranks answer: from what requests have shown of each
// it finds those that are slow against their peers, and were faster or slow from the start.
//
// A Meter is what requests add to, one atomic operation an event. The Judge takes
// meters' readings by value, the time included, and has no clock of its own.
package pace

import (
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/traffic"
)

// Counts is a histogram of durations in the buckets of package traffic.
type Counts [traffic.Buckets]uint32

// Meter counts what requests show of one rank. The zero value is ready, and nil
// takes everything and keeps nothing.
type Meter struct {
	gaps, firsts, work [traffic.Buckets]atomic.Uint32
	tokens             atomic.Uint64 // those that are not in gaps
	// waiting has the number of prompts that wait for their first token above
	// waitingShift, and below it the sum of the moments when they began, in ms.
	waiting atomic.Uint64
	// answered and pending are requests that have an answer or its first token, and
	// those that have not.
	answered atomic.Uint64
	pending  atomic.Int64
}

const waitingShift = 48

// Gap counts tokens of an answer whose tokens come d apart, as far as it has come.
func (m *Meter) Gap(d time.Duration, tokens int) {
	if m != nil && tokens > 0 {
		m.gaps[traffic.Bucket(d)].Add(uint32(tokens))
	}
}

// Begin notes that a prompt is computed from now on, a time since the router's start.
func (m *Meter) Begin(now time.Duration) {
	if m != nil {
		m.waiting.Add(1<<waitingShift + uint64(now.Milliseconds()))
	}
}

// End takes back what Begin has counted, with the same time.
func (m *Meter) End(began time.Duration) {
	if m != nil {
		m.waiting.Add(-(1<<waitingShift + uint64(began.Milliseconds())))
	}
}

// Sent counts a request that is sent to the rank.
func (m *Meter) Sent() {
	if m != nil {
		m.pending.Add(1)
	}
}

// Answered takes back what Sent has counted: the answer has come, at least its first
// token, or, where answered is false, never will.
func (m *Meter) Answered(answered bool) {
	if m == nil {
		return
	}
	m.pending.Add(-1)
	if answered {
		m.answered.Add(1)
	}
}

// Answers are how many requests the rank has answered, at least with a first token, and how
// many it has still to.
func (m *Meter) Answers() (answered uint64, pending int) {
	if m == nil {
		return 0, 0
	}
	return m.answered.Load(), int(m.pending.Load())
}

// First counts a first token after d. Tokens are those of the prompt that had to be
// computed for it; below 0 where another rank has computed them.
func (m *Meter) First(d time.Duration, tokens int) {
	if m == nil {
		return
	}
	m.firsts[traffic.Bucket(d)].Add(1)
	if tokens >= 0 {
		m.work[traffic.Bucket(perPrompt(d, tokens))].Add(1)
	}
}

// Tokens counts those whose pace is not known, as of an answer that was not streamed.
func (m *Meter) Tokens(n int) {
	if m != nil && n > 0 {
		m.tokens.Add(uint64(n))
	}
}

// perPrompt is what d for a prompt of some tokens would be for one of 1,024, so that
// ranks with other prompts and other caches can be compared. The 256 stand for what
// every prompt costs.
func perPrompt(d time.Duration, tokens int) time.Duration {
	return time.Duration(float64(d) * (1024 + 256) / float64(max(tokens, 0)+256))
}

// Reading is what a meter has counted since it was last read, and what waits now.
type Reading struct {
	Gaps, Firsts, Work Counts
	// Tokens are those that are not in Gaps, which has a sample for each of its tokens.
	Tokens uint64
	// Waiting is how many prompts wait for their first token, and Age for how long
	// in the mean, as if each had 1,024 tokens.
	Waiting int
	Age     time.Duration
}

// Read takes what was counted. Now is the time since the router's start; tokens are
// those of the prompts that wait.
func (m *Meter) Read(now time.Duration, tokens int, r *Reading) {
	take := func(to *Counts, from *[traffic.Buckets]atomic.Uint32) {
		for i := range from {
			if to[i] = 0; from[i].Load() != 0 {
				to[i] = from[i].Swap(0)
			}
		}
	}
	take(&r.Gaps, &m.gaps)
	take(&r.Firsts, &m.firsts)
	take(&r.Work, &m.work)
	r.Tokens = m.tokens.Swap(0)
	w := m.waiting.Load()
	r.Waiting, r.Age = int(w>>waitingShift), 0
	if r.Waiting > 0 {
		began := time.Duration(w&(1<<waitingShift-1)/uint64(r.Waiting)) * time.Millisecond
		r.Age = perPrompt(max(0, now-began), tokens/r.Waiting)
	}
}
