package lifecycle

import (
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/observe/traffic"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Answer is what was seen of the answer while it was forwarded.
type Answer struct {
	Streamed   bool
	FirstToken time.Time
	Finish     string
	// Prompt, Cached and Completion are tokens as the engine reports them; -1 when it
	// does not.
	Prompt, Cached, Completion int
	// FromPrefill says that Cached is the prefill engine's count. Decode is the decode
	// engine's own then.
	FromPrefill bool
	Decode      int
	Gaps        traffic.Gaps
	// Events counts the streamed events with content, of all decode legs.
	Events int
	// UsageAdded reports that the router requested the usage of the newest decode leg, and
	// that the client did not.
	UsageAdded bool

	leg *LegRecord // the newest decode leg
}

// Of begins the answer to a decode leg. What an earlier engine has reported does not count.
func (a *Answer) Of(l *LegRecord) { a.leg = l }

// Unknown forgets the usage that an engine has reported.
func (a *Answer) Unknown() { a.Prompt, a.Cached, a.Completion, a.FromPrefill = -1, -1, -1, false }

// Learn keeps what an answer said of itself.
func (a *Answer) Learn(s sse.Summary) {
	a.Finish = s.FinishReason
	a.Prompt, a.Cached, a.Completion = int(s.Usage.PromptTokens), int(s.Usage.CachedTokens), int(s.Usage.CompletionTokens)
}

// Piece reports another piece of the stream, with its tokens.
func (a *Answer) Piece(now time.Time, tokens int) {
	gap := a.Gaps.Tick(now)
	a.Events += tokens
	if l := a.leg; l != nil {
		l.Tokens += tokens
		l.send(Event{Kind: Piece, At: now, Took: gap, Count: tokens})
	}
}

// recomputed reports whether the decode engine of a good request computed again what a
// prefill engine had computed for it: it counts transferred tokens as cached, and reports
// fewer than were moved. NIXL's engines do not count them; see Recompute.
func (r *Record) recomputed(block int) bool {
	cached, p := r.Answer.Cached, &r.Routing.Run.Plan
	if r.Answer.FromPrefill {
		cached = r.Answer.Decode
	}
	return p.Path == route.Remote && cached >= 0 && disagg.CountsTransfers(p.Connector) && cached+block < p.Remote.Transfer
}

// predicted is how many tokens the rank whose count [Answer] has was predicted to have cached.
func (r *Record) predicted() int {
	p := &r.Routing.Run.Plan
	if r.Answer.FromPrefill {
		return p.PrefillCached
	}
	return p.CachedTokens
}
