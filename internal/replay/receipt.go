package replay

import (
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// maker makes decisions again. Its memory is reused.
type maker struct {
	in   decide.Input
	plan decide.Plan
}

// load makes the input of a recorded decision, which is left as it is.
func (m *maker) load(d *trace.Decision) {
	decode, prefill := m.in.Decode.Candidates, m.in.Prefill.Candidates
	m.in = *d.Input
	candidates(&m.in.Decode, decode)
	candidates(&m.in.Prefill, prefill)
}

// candidates makes the candidates of in a copy without costs, in the memory of own.
func candidates(in *selector.Input, own []decision.Candidate) {
	in.Candidates = append(own[:0], in.Candidates...)
	for i := range in.Candidates {
		in.Candidates[i].Cost = 0
	}
}

// decide makes the plan for the loaded input.
func (m *maker) decide() *decide.Plan {
	decide.MakePlan(&m.in, &m.plan)
	return &m.plan
}

// Receipt makes the receipt of a recorded decision: its terms and its ranking
// come from making it again. at is the decision's time.
func (m *maker) Receipt(d *trace.Decision, at time.Time) *receipt.Receipt {
	m.load(d)
	r := &receipt.Receipt{
		Schema: receipt.Schema, ID: d.ID, RequestID: d.RequestID, Time: at, Live: true, Endpoint: d.Input.Facts.Kind.String(), Model: d.Model,
		ConfigRevision: d.Revision,
		Decision: decision.Decision{
			Attempt: d.Attempt,
			Decode:  decision.Phase{Candidates: []decision.Candidate{}}, Prefill: decision.Phase{Candidates: []decision.Candidate{}},
		},
		Legs: []receipt.LegEntry{}, Outcome: receipt.Outcome{PromptTokens: -1, CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1},
	}
	p := m.decide()
	p.Fill(&r.Decision, &m.in, r.Candidates())
	r.Inputs.HashedBlocks, r.Inputs.Approximate = len(d.Locals), d.Approximate
	r.Path, r.Reason, r.EffISL = d.Path, d.Reason, d.EffISL
	if d.Error != "" {
		r.ReasonText = d.Error
	}
	if d.Unverifiable != "" {
		r.Note("costs and ranking may be others than they were: " + d.Unverifiable)
	}
	return r
}

// asDecided describes a plan as a recorded decision.
func asDecided(in *decide.Input, p *decide.Plan) *trace.Decision {
	d := &trace.Decision{Input: in}
	d.SetPlan(in, p)
	return d
}

// costOf is what the decode rank of a decision cost.
func costOf(d *trace.Decision) float64 {
	list := d.Input.Decode.Candidates
	if i := slices.IndexFunc(list, func(c decision.Candidate) bool { return c.Rank == d.DecodeRank }); i >= 0 {
		return list[i].Cost
	}
	return 0
}
