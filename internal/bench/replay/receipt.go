package replay

import (
	"time"

	"github.com/dynctl/dynctl/internal/router/decision"
	"github.com/dynctl/dynctl/internal/router/receipt"
	"github.com/dynctl/dynctl/internal/router/trace"
)

// Receipt makes the receipt of a recorded decision: its terms and its ranking
// come from making it again. at is the decision's time.
func (m *maker) Receipt(d *trace.Decision, at time.Time) (*receipt.Receipt, error) {
	if err := m.load(d); err != nil {
		return nil, err
	}
	r := &receipt.Receipt{
		Schema: receipt.Schema, ID: d.ID, RequestID: d.RequestID, Time: at, Live: true, Endpoint: d.Facts.Kind, Model: d.Model,
		Decision: decision.Decision{
			Attempt: d.Attempt,
			Decode:  decision.Phase{Candidates: []decision.Candidate{}}, Prefill: decision.Phase{Candidates: []decision.Candidate{}},
		},
		Legs: []receipt.Leg{}, Outcome: receipt.Outcome{PromptTokens: -1, CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1},
	}
	p := m.decide()
	if why := decision.Reason(d.Reason); why == decision.ReasonFallback || why == decision.ReasonEnded {
		p.Reason = why // this format does not tell the input that remote prefill was tried before
	}
	p.Fill(&r.Decision, &m.in, r.Candidates())
	r.Inputs.HashedBlocks, r.Inputs.Approximate = len(d.Locals), d.Approximate
	r.Path, r.Reason, r.EffISL = d.Path, d.Reason, d.EffISL
	if d.Error != "" {
		r.ReasonText = d.Error
	}
	return r, nil
}
