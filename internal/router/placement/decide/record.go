package decide

import (
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Fill writes the plan and what it was made from into d, whose memory it reuses,
// with at most limit candidates of each phase. The attempt is left as it is; how
// many blocks were hashed, and of what, the caller knows.
func (p *Plan) Fill(d *decision.Decision, in *Input, limit int) {
	d.Inputs = decision.Inputs{
		ISL: in.Facts.ISL, ISLSource: string(in.Facts.Source), Multimodal: in.Facts.Multimodal, Output: in.Facts.Output, BlockSize: in.Decode.BlockSize,
		SessionKey: in.Decode.SessionKey, Threshold: p.Threshold, ThresholdOn: string(p.On), Force: string(in.Force),
		Draw: in.Decode.Draw, DecodeTurn: in.Decode.Turn, PrefillTurn: in.Prefill.Turn,
	}
	d.Path, d.Reason, d.ReasonText, d.EffISL, d.Connector = string(p.Path), string(p.Reason), p.Words(in), p.EffISL, ""
	if p.Err != nil {
		d.ReasonText = p.Err.Error()
	}
	fill(&d.Decode, &in.Decode, &p.Decode, limit)
	fill(&d.Prefill, &in.Prefill, &p.Prefill, limit)
	d.Predicted = decision.Prediction{
		CachedTokens: p.CachedTokens, PrefillCachedTokens: p.PrefillCached,
		Local: decision.Work(p.Local), Remote: decision.Work(p.Remote), HasRemote: p.HasRemote,
		CostRevision: p.CostRevision, LocalMS: p.Costs.Local, RemoteMS: p.Costs.Remote,
	}
	if p.Path == route.Remote {
		d.Connector, d.Predicted.RemoteTokens = string(p.Connector), p.Remote.Transfer
	}
}

// fill writes a ranking: its candidates in order, then those that were excluded.
func fill(out *decision.Phase, in *selector.Input, r *selector.Ranking, limit int) {
	*out = decision.Phase{
		Policy: string(r.Policy), Verdict: string(r.Verdict), MarginBlocks: r.Margin, Eligible: r.Eligible,
		Tied: r.Tied, TieBreak: string(r.TieBreak), Sampled: r.Sampled, Candidates: out.Candidates[:0],
	}
	if r.Policy == "" {
		return
	}
	if s := in.Siblings; s != nil {
		out.Unseen = s.Unseen
	}
	out.Home = in.Home
	if r.InTime {
		out.Unit = decision.Milliseconds
	}
	for n, i := range r.Order {
		c := &in.Candidates[i]
		switch n {
		case 0:
			out.Chosen = c.Rank
		case 1:
			out.RunnerUp = c.Rank
		}
		out.Add(c, limit)
	}
	out.Omitted += r.Eligible - len(r.Order)
	for i := range in.Candidates {
		c := &in.Candidates[i]
		if c.ExcludedCode == "" {
			continue
		}
		if len(out.Candidates) < limit {
			c.Excluded = in.Why(i)
		}
		out.Add(c, limit)
	}
}
