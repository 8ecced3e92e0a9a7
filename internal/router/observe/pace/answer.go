package pace

import "time"

// burst is the gap below which a token came together with the one before it, as far as the
// network and the router's own load can tell. It is the ITL below which no rank is slow.
const burst = 2 * time.Millisecond

// Answer measures the pace of a streamed answer for the [Meter] of its rank. It judges the answer
// as a whole: the time from the first token to the newest, by the number of tokens. Single gaps
// would mislead: after a stall the tokens that were held back come together, and by their gaps
// the rank that stalled would be thousands of times faster than its peers.
//
// What comes together at the start may have been held back before the first token came, for as long
// as that took. The measurement begins behind it, or when it has lasted as long: a fast rank's
// answer continues like that. The zero value measures nothing.
type Answer struct {
	meter             *Meter
	sent, first, last time.Duration // last is 0 before the first token
	// from is when the measurement began, and tokens how many came since then. Before steady
	// they are those that came at once.
	from   time.Duration
	tokens int
	steady bool
}

// NewAnswer measures an answer to a request that was sent to the rank of a meter at a time since
// the router's start.
func NewAnswer(m *Meter, sent time.Duration) Answer { return Answer{meter: m, sent: sent} }

// Came reports how many tokens have come until a time since the router's start.
func (a *Answer) Came(now time.Duration, tokens int) {
	switch {
	case a.meter == nil || tokens <= 0:
		return
	case a.last == 0:
		a.first, a.from, a.tokens = now, now, tokens-1
		a.meter.Tokens(tokens - 1) // the first one is in First
	case a.steady:
		a.measure(now, tokens)
	case now-a.last >= burst:
		a.steady, a.from, a.tokens = true, a.last, 0
		a.measure(now, tokens)
	case now-a.first >= a.first-a.sent:
		a.steady = true
		a.measure(now, tokens)
	default:
		a.tokens += tokens
		a.meter.Tokens(tokens)
	}
	a.last = now
}

// measure counts tokens by the pace of all since the measurement began.
func (a *Answer) measure(now time.Duration, tokens int) {
	a.tokens += tokens
	a.meter.Gap((now-a.from)/time.Duration(a.tokens), tokens)
}
