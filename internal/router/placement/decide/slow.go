package decide

import (
	"slices"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// This file passes over ranks that take longer than their peers, with Rule.Auto.

// Why a rank is passed over where the one that the policy likes best is slow: because it
// takes longer than its peers, or, of prefill ranks, because the request would stay local
// for it.
const (
	slower     = "slower than its peers, and another costs less"
	lessRoom   = "slower than its peers, and others have room"
	behindGate = "in place of a slower one, has more tokens in work than routing.prefill_gate"
)

// judged is the model that says which ranks are slow; nil where none is, or nobody asks.
func (in *Input) judged() *cost.Model {
	if m := in.Costs; in.Rule.Auto && m != nil && len(m.Slow) > 0 {
		return m
	}
	return nil
}

// passSlowDecode takes another decode rank than a slow one, d, which the policy likes best:
// the one that it likes best among those that are not slow, unless that has as many times
// the requests as the slow one takes longer. So a slow rank gets its share of the requests,
// and goes on to be measured. A session stays at its home. Ranks that the phase keeps out
// stay out.
func (p *Plan) passSlowDecode(in *Input, phase *selector.Input, d int) int {
	m := in.judged()
	atHome := phase.Home == "" || phase.Home == phase.Candidates[d].Rank
	if m == nil || phase.Policy == selector.Session && phase.SessionKey != 0 && atHome {
		return d
	}
	times := func(i int) float64 { return m.Times(in.Decode.Candidates[i].Slot) }
	if times(d) <= 1 {
		return d
	}
	p.slowVeto = slices.Grow(p.slowVeto[:0], len(in.DecodePeers))[:len(in.DecodePeers)]
	clear(p.slowVeto)
	copy(p.slowVeto, phase.Veto)
	for i := range p.slowVeto {
		if p.slowVeto[i] == "" && times(i) > 1 {
			p.slowVeto[i] = lessRoom
		}
	}
	others := *phase
	others.Veto = p.slowVeto
	selector.Pick(&others, &p.Decode)
	with := func(i int) float64 { return float64(in.Decode.Candidates[i].ActiveRequests + 1) }
	if other, ok := p.Decode.Best(); ok && with(other) <= times(d)*with(d) {
		return other
	}
	selector.Pick(phase, &p.Decode)
	return d
}

// passSlowPrefill takes another prefill rank than a slow one where that costs less: the one
// that the policy likes best among those that are not slow, and that the gate does not stop.
func (p *Plan) passSlowPrefill(in *Input) {
	m := in.judged()
	if m == nil || !p.HasRemote {
		return
	}
	takes := func() float64 {
		w := p.prefillWork(in)
		return m.Prefill.Time(&w)
	}
	slow := func(i int) bool { return m.Times(in.Prefill.Candidates[i].Slot) > 1 }
	if !slow(p.PrefillIndex) {
		return
	}
	own := takes()
	// A gate stops nothing on its way to a decode rank that cannot prefill.
	stops := !needsPrefill(in.DecodePeers[p.DecodeIndex].Worker)
	for i := range p.prefillVeto {
		switch {
		case p.prefillVeto[i] != "":
		case slow(i):
			p.prefillVeto[i] = slower
		case stops && in.gated(i):
			p.prefillVeto[i] = behindGate
		}
	}
	p.choosePrefill(in)
	if p.HasRemote && takes() < own {
		return
	}
	for i, why := range p.prefillVeto {
		if why == slower || why == behindGate {
			p.prefillVeto[i] = ""
		}
	}
	p.choosePrefill(in)
}
