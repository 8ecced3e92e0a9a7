package decision

import (
	"fmt"
	"slices"
)

// Terms are the parts of a kv cost, in blocks. A term stands here, with its row in
// terms, and is computed in selector's rankKV.
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
}

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
	{Title: "SPREAD", At: func(t *Terms) *float64 { return &t.Spread }, Why: func(_, _ *Candidate) string { return "less new work of late" }},
	{Title: "REQS", At: func(t *Terms) *float64 { return &t.Request }, Why: func(_, _ *Candidate) string { return "fewer requests" }},
	{Title: "STALL", Rare: true, At: func(t *Terms) *float64 { return &t.Stall }, Why: func(c, than *Candidate) string {
		if n := than.ActiveRequests - c.ActiveRequests; n > 0 {
			return fmt.Sprintf("%d fewer requests wait there for the prompt", n)
		}
		return "requests wait there for less of the prompt"
	}},
}

// Term is how one of the Terms is shown.
type Term struct {
	// Title heads its column.
	Title string
	At    func(*Terms) *float64
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
		return t.Rare && !slices.ContainsFunc(p.Candidates, func(c Candidate) bool { return *t.At(&c.Terms) != 0 })
	})
}

// Cheaper is by how many blocks the term makes c cheaper than another rank.
func (t *Term) Cheaper(c, than *Candidate) float64 {
	d := *t.At(&than.Terms) - *t.At(&c.Terms)
	if t.Credit {
		return -d
	}
	return d
}
