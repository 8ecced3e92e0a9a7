package decide

import (
	"sync"

	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/workers"
)

// memory is what decisions stand in, candidates and rankings: 100 KB in a fleet of
// 256 ranks. A run has it while it decides, and not while an engine works for it,
// unless its owner does without Compact and Release.
type memory struct {
	in   Input
	plan Plan
	// judged is Judge's ranking.
	judged selector.Ranking
}

var memories = sync.Pool{New: func() any { return new(memory) }}

// acquire gets memory for a decision, unless the run has it.
func (r *Run) acquire() {
	if r.memory == nil {
		r.memory = memories.Get().(*memory)
		r.In, r.Plan = r.memory.in, r.memory.plan
	}
}

// Release gives the memory back, if the run has any; In and Plan are those of no
// decision then.
func (r *Run) Release() {
	m := r.memory
	if m == nil {
		return
	}
	r.reset()
	m.in, m.plan = r.In, r.Plan
	r.memory = nil
	r.reset()
	m.poison()
	memories.Put(m)
}

// Compact keeps of a plan that can be carried out who was chosen and the plan's
// figures, and gives the memory back: candidates, rankings and what else they were
// made from belong to another request from then on. A plan with an error stays as it
// is.
func (r *Run) Compact() {
	if r.memory == nil || r.Plan.Err != nil {
		return
	}
	in, plan := Input{}, r.Plan
	plan.Decode, plan.Prefill, plan.decodeVeto, plan.prefillVeto, plan.pricing = selector.Ranking{}, selector.Ranking{}, nil, nil, nil
	in.Decode.BlockSize, in.Prefill.BlockSize = r.In.Decode.BlockSize, r.In.Prefill.BlockSize
	var chosen [2]workers.Peer
	if i := plan.DecodeIndex; i >= 0 {
		chosen[0], plan.DecodeIndex, in.DecodePeers = r.In.DecodePeers[i], 0, r.chosen[:1]
	}
	if i := plan.PrefillIndex; i >= 0 {
		chosen[1], plan.PrefillIndex, in.PrefillPeers = r.In.PrefillPeers[i], 0, r.chosen[1:]
	}
	r.Release()
	r.In, r.Plan, r.chosen = in, plan, chosen
}

// reset makes In and Plan those of no decision, and keeps the memory that the run
// has.
func (r *Run) reset() {
	if r.memory == nil {
		r.In, r.Plan, r.chosen = Input{}, noPlan, [2]workers.Peer{} // they are no memory
		return
	}
	in := &r.In
	*in = Input{
		Decode: selector.Input{Candidates: in.Decode.Candidates[:0]}, DecodePeers: in.DecodePeers[:0],
		Prefill: selector.Input{Candidates: in.Prefill.Candidates[:0]}, PrefillPeers: in.PrefillPeers[:0],
	}
	r.Plan.reset()
}

// noPlan is the plan before any decision.
var noPlan = func() (p Plan) { p.reset(); return }()

// reset makes the plan one of nothing, and keeps its memory.
func (p *Plan) reset() {
	p.Decode.Reset()
	p.Prefill.Reset()
	*p = Plan{Decode: p.Decode, Prefill: p.Prefill, decodeVeto: p.decodeVeto, prefillVeto: p.prefillVeto, pricing: p.pricing, DecodeIndex: -1, PrefillIndex: -1}
}
