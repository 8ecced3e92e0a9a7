package replay

import (
	"time"

	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/receipt"
	"github.com/dynctl/dynctl/internal/router/selector"
	"github.com/dynctl/dynctl/internal/router/trace"
)

// Receipt makes the receipt of a recorded decision: its terms and its ranking
// come from making it again. at is the decision's time.
func (m *maker) Receipt(d *trace.Decision, at time.Time) (*receipt.Receipt, error) {
	if err := m.load(d); err != nil {
		return nil, err
	}
	p := m.decide()
	in := &m.in
	r := &receipt.Receipt{
		Schema: receipt.Schema, ID: d.ID, RequestID: d.RequestID, Time: at, Live: true, Endpoint: d.Facts.Kind, Model: d.Model,
		Decision: receipt.Decision{Attempt: d.Attempt, Inputs: receipt.Inputs{
			ISL: d.Facts.ISL, ISLSource: d.Facts.Source, BlockSize: in.Decode.BlockSize, HashedBlocks: len(d.Locals), Approximate: d.Approximate,
			SessionKey: d.Decode.SessionKey, Threshold: p.Threshold, ThresholdOn: string(p.On), Force: d.Force,
			Draw: d.Decode.Draw, DecodeTurn: d.Decode.Turn, PrefillTurn: d.Prefill.Turn,
		},
			Path: d.Path, Reason: d.Reason, ReasonText: p.Words(in), EffISL: d.EffISL, Predicted: receipt.Prediction{
				CachedTokens: p.CachedTokens, PrefillCachedTokens: p.PrefillCached,
				Local: receipt.Work(p.Local), Remote: receipt.Work(p.Remote), HasRemote: p.HasRemote,
			}},
		Legs: []receipt.Leg{}, Outcome: receipt.Outcome{PromptTokens: -1, CachedTokens: -1, CompletionTokens: -1, TTFTMS: -1, E2EMS: -1},
	}
	if d.Error != "" {
		r.ReasonText = d.Error
	}
	if p.Path == disagg.Remote {
		r.Connector, r.Predicted.RemoteTokens = string(p.Connector), p.Remote.Transfer
	}
	phase(r, &r.Decode, &in.Decode, &p.Decode)
	phase(r, &r.Prefill, &in.Prefill, &p.Prefill)
	return r, nil
}

func phase(c *receipt.Receipt, out *receipt.Phase, in *selector.Input, r *selector.Ranking) {
	out.Candidates = []receipt.Candidate{}
	if len(r.Scores) != len(in.Candidates) || r.Verdict == "" {
		return
	}
	out.Policy, out.Verdict, out.Eligible, out.Tied, out.TieBreak, out.Sampled = string(r.Policy), string(r.Verdict), r.Eligible, r.Tied, string(r.TieBreak), r.Sampled
	if best, ok := r.Best(); ok {
		out.Chosen = in.Candidates[best].Label
	}
	if len(r.Order) > 1 {
		out.RunnerUp = in.Candidates[r.Order[1]].Label
	}
	out.MarginBlocks, _ = r.Margin()
	add := func(i int) {
		k, s := &in.Candidates[i], &r.Scores[i]
		c.AddCandidate(out, receipt.Candidate{
			Rank: k.Label, Slot: k.Slot, OverlapBlocks: k.OverlapBlocks, Cost: s.Cost,
			PrefillTerm: s.Terms.PrefillBlocks, OverlapCredit: s.Terms.OverlapCredit, QueueTerm: s.Terms.QueueBlocks,
			DecodeTerm: s.Terms.DecodeBlocks, SpreadTerm: s.Terms.SpreadBlocks, RequestTerm: s.Terms.RequestTerm,
			ActiveRequests: k.ActiveRequests, PrefillTokens: k.PrefillTokens, DecodeBlocks: k.DecodeBlocks, FreshTokens: k.FreshTokens,
			LastTurn: k.LastTurn, ResidentBlocks: k.ResidentBlocks, KVBlocks: k.KVBlocks, HasLoad: k.HasLoad, Running: k.Running,
			Waiting: k.Waiting, KVUsage: k.KVUsage, Excluded: s.Excluded.String(), ExcludedCode: s.Excluded.Code,
		})
	}
	for _, i := range r.Order {
		add(i)
	}
	for i := range in.Candidates {
		if r.Scores[i].Excluded.Code != "" {
			add(i)
		}
	}
}
