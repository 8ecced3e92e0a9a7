package decision

import (
	"fmt"
	"slices"
)

// Terms are the parts of a kv cost: in blocks where policy kv_blocks or kv_dynamo chose, and
// in ms where policy kv did by times. A term stands here, with its row in terms, and is computed
// in selector's rankKV or by a quote of package cost.
type Terms struct {
	// Prefill is the whole prompt.
	Prefill float64 `json:"prefill_blocks"`
	// OverlapCredit is what the cached prefix takes off it.
	OverlapCredit float64 `json:"overlap_credit_blocks"`
	// Queue is the weighted prefill work that the rank has already.
	Queue float64 `json:"queue_blocks"`
	// Decode is the weighted decode load.
	Decode float64 `json:"decode_blocks"`
	// Spread is the weighted turnover of the rank's cache.
	Spread float64 `json:"spread_blocks"`
	// Request is the weighted number of active requests.
	Request float64 `json:"request_blocks"`
	// Stall is what the prompt's uncached part costs the requests in progress on an
	// aggregated rank, which wait while it is computed.
	Stall float64 `json:"stall_blocks"`
	// Slow is what a slow rank costs beyond what its peers would.
	Slow float64 `json:"slow_blocks,omitempty"`
	Times
}

// Times are the parts of a cost in ms of one request's time. The first five are the request's
// own time, the others the delay that it causes to others, by its weight.
type Times struct {
	// Wait is the time before the prompt is computed, and that for room in the cache of the rank
	// that answers. Compute is the time of its uncached tokens, Transfer that of moving their KV, and
	// Answer that of its answer's tokens. Late is the cost of the risk that the request is late.
	Wait     float64 `json:"wait_ms,omitempty"`
	Compute  float64 `json:"compute_ms,omitempty"`
	Transfer float64 `json:"transfer_ms,omitempty"`
	Answer   float64 `json:"answer_ms,omitempty"`
	Late     float64 `json:"late_ms,omitempty"`
	// The delays on the rank: Pause of answers that pause while the prompt is computed, Behind
	// of prompts that wait behind it, Slower of answers that get slower. Spoil is the cost of
	// the risk that they are late, Evict that of prompts whose KV leaves the cache.
	Pause  float64 `json:"caused_pause_ms,omitempty"`
	Behind float64 `json:"caused_wait_ms,omitempty"`
	Slower float64 `json:"caused_slower_ms,omitempty"`
	Spoil  float64 `json:"caused_late_ms,omitempty"`
	Evict  float64 `json:"caused_evict_ms,omitempty"`
}

// Sum is the whole cost.
func (t *Times) Sum() float64 {
	return t.Wait + t.Compute + t.Transfer + t.Answer + t.Late + t.Pause + t.Behind + t.Slower + t.Spoil + t.Evict
}

// Own is the request's own time, Caused the delay that it causes to others, in ms.
func (t *Times) Own() float64 { return t.Wait + t.Compute + t.Transfer + t.Answer + t.Late }

// Caused is the delay that the request causes to others, in ms.
func (t *Times) Caused() float64 { return t.Pause + t.Behind + t.Slower + t.Spoil + t.Evict }

// terms is how each of them is shown, in their order.
var terms = []Term{
	{Title: "PREFILL", At: func(t *Terms) *float64 { return &t.Prefill }},
	{Title: "CREDIT", At: func(t *Terms) *float64 { return &t.OverlapCredit }, Credit: true, Why: func(c, than *Candidate) string {
		if t, u := &c.Tiers, &than.Tiers; *t != *u {
			return fmt.Sprintf("its cache counts %.1f blocks more, tiers beside the device included", c.OverlapCredit-than.OverlapCredit)
		}
		return fmt.Sprintf("%d more blocks in its cache", c.OverlapBlocks-than.OverlapBlocks)
	}},
	{Title: "QUEUE", At: func(t *Terms) *float64 { return &t.Queue }, Why: func(c, than *Candidate) string {
		return fmt.Sprintf("%d fewer prompt tokens queued", than.PrefillTokens-c.PrefillTokens)
	}},
	{Title: "DECODE", At: func(t *Terms) *float64 { return &t.Decode }, Why: func(c, than *Candidate) string {
		return fmt.Sprintf("%d fewer blocks decoding", than.DecodeBlocks-c.DecodeBlocks)
	}},
	{Title: "SPREAD", At: func(t *Terms) *float64 { return &t.Spread }, Why: func(_, _ *Candidate) string { return "less new work recently" }},
	{Title: "REQS", At: func(t *Terms) *float64 { return &t.Request }, Why: func(_, _ *Candidate) string { return "fewer requests" }},
	{Title: "STALL", Rare: true, At: func(t *Terms) *float64 { return &t.Stall }, Why: func(c, than *Candidate) string {
		if n := than.ActiveRequests - c.ActiveRequests; n > 0 {
			return fmt.Sprintf("%d fewer requests wait there for the prompt", n)
		}
		return "requests wait there for less of the prompt"
	}},
	{Title: "SLOW", Rare: true, At: func(t *Terms) *float64 { return &t.Slow }, Why: func(c, than *Candidate) string {
		return fmt.Sprintf("it is not %.1f times slower than its peers", than.Speed()/c.Speed())
	}},
	{Title: "WAIT", Unit: Milliseconds, At: func(t *Terms) *float64 { return &t.Wait }, Why: because("it begins sooner")},
	{Title: "COMPUTE", Unit: Milliseconds, At: func(t *Terms) *float64 { return &t.Compute }, Why: func(c, than *Candidate) string {
		if n := c.OverlapBlocks - than.OverlapBlocks; n > 0 {
			return fmt.Sprintf("%d more blocks in its cache", n)
		}
		return "it computes the prompt sooner"
	}},
	{Title: "MOVE", Unit: Milliseconds, Rare: true, At: func(t *Terms) *float64 { return &t.Transfer }, Why: because("less KV to move")},
	{Title: "ANSWER", Unit: Milliseconds, At: func(t *Terms) *float64 { return &t.Answer }, Why: because("its answers are faster")},
	{Title: "LATE", Unit: Milliseconds, Rare: true, At: func(t *Terms) *float64 { return &t.Late }, Why: because("less likely to be late")},
	{Title: "+PAUSE", Unit: Milliseconds, Rare: true, At: func(t *Terms) *float64 { return &t.Pause }, Why: because("answers there pause for less")},
	{Title: "+BEHIND", Unit: Milliseconds, Rare: true, At: func(t *Terms) *float64 { return &t.Behind }, Why: because("fewer prompts will wait behind it")},
	{Title: "+SLOWER", Unit: Milliseconds, Rare: true, At: func(t *Terms) *float64 { return &t.Slower }, Why: because("it slows answers there less")},
	{Title: "+LATE", Unit: Milliseconds, Rare: true, At: func(t *Terms) *float64 { return &t.Spoil }, Why: because("fewer answers there get late")},
	{Title: "+EVICT", Unit: Milliseconds, Rare: true, At: func(t *Terms) *float64 { return &t.Evict }, Why: because("less leaves its cache")},
}

// Milliseconds is the unit of costs that are times.
const Milliseconds = "ms"

// because is Why of a term that needs no figures.
func because(words string) func(_, _ *Candidate) string {
	return func(_, _ *Candidate) string { return words }
}

// Term is how one of the Terms is shown.
type Term struct {
	// Title heads its column.
	Title string
	At    func(*Terms) *float64
	// Unit is that of its costs, Milliseconds or empty for blocks.
	Unit string
	// Credit says that it is taken off the cost.
	Credit bool
	// Rare says that a table has no column for it where no candidate has it.
	Rare bool
	// Why says in words why it makes c cheaper than another rank; nil for a term
	// that all ranks share.
	Why func(c, than *Candidate) string
}

// EachTerm lists how the Terms are shown, in their order. It is for reading only.
func EachTerm() []Term { return terms }

// ShownTerms lists the terms that a table of the phase's candidates has columns for.
func (p *Phase) ShownTerms() []Term {
	return slices.DeleteFunc(slices.Clone(terms), func(t Term) bool {
		return t.Unit != p.Unit || t.Rare && !slices.ContainsFunc(p.Candidates, func(c Candidate) bool { return *t.At(&c.Terms) != 0 })
	})
}

// Cheaper is by how much the term makes c cheaper than another rank.
func (t *Term) Cheaper(c, than *Candidate) float64 {
	d := *t.At(&than.Terms) - *t.At(&c.Terms)
	if t.Credit {
		return -d
	}
	return d
}
