// Package decide makes the decision: which ranks serve a request, and its path. On the
// local path the decode rank prefills the prompt itself. On the remote path a prefill
// rank does, and the KV cache moves. The decision also has what the ledger records and,
// attempt by attempt, what follows when a leg fails.
//
// MakePlan is a pure function of an Input, which holds values only, random draws and
// turns included: replay makes recorded decisions again with it. A Run makes the
// Input from the fleet as its caller sees it and goes through the attempts of one
// request; the router, its dry run, the simulation and the virtual soak each drive
// one. It reads no clock and changes nothing outside: effects are returned.
package decide

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// Measure names what is compared with the threshold.
type Measure string

// The measures.
const (
	// OnEffISL compares the tokens that the decode rank does not hold.
	OnEffISL Measure = "eff_isl"
	// OnISL compares the whole prompt, as production-stack does.
	OnISL Measure = "isl"
)

// Fallback says what happens to a request that should go remote when no
// prefill rank can take it.
type Fallback string

// The fallbacks.
const (
	FallbackLocal Fallback = "local"
	FallbackError Fallback = "error"
)

// Rule is the operator's part of the plan.
type Rule struct {
	// Threshold in tokens: remote when the measure is at least this; 0 or
	// less is always remote.
	Threshold int
	// Auto takes the path that costs less where both are available and Input.Costs compares
	// them; else the threshold decides, which is more than 0 then.
	Auto bool
	// On is what the threshold is compared with; empty is OnEffISL.
	On Measure
	// Fallback applies when there is no prefill rank; empty is FallbackLocal.
	Fallback Fallback
	// PrefillGate keeps a request local while the prefill rank that would be
	// chosen has more prompt tokens in work than this; 0 is off.
	PrefillGate int
	// StartGate is for Auto while too little is known of the costs. It keeps a request local
	// where the prefill rank that would be chosen has more prompt tokens in work than the decode
	// rank, by more than this: a threshold does not see that a burst queues. 0 is off.
	StartGate int
	// DecodeGate sends a request remote that would stay local while the chosen
	// decode rank uses more than this share of its KV cache; 0 is off. A rank that does
	// not report its usage is not gated.
	DecodeGate float64
	// Connector overrides the workers' own; empty leaves it to them.
	Connector workers.Connector
	// LoadCredit is what a cached block takes off the cost of a decode rank whose
	// prompt is computed elsewhere in any case, as a share of its ordinary
	// credit: the block then saves its transfer, not its computation. Policy
	// kv_dynamo gives no credit then, as Dynamo's decode router without
	// conditional disaggregation.
	LoadCredit float64
}

// LoadCredit is the router's Rule.LoadCredit.
const LoadCredit = 1.0 / 32

// Input is all that a plan depends on. The peers are parallel to the
// candidates of their phase.
type Input struct {
	Rule Rule
	// Model is the model that the request is for, by the engines' name; empty where it
	// carries none.
	Model string
	Facts api.Facts
	Force route.Force
	// GaveUp is the reason why remote prefill was tried and given up in this
	// request, whose path is forced since; empty otherwise.
	GaveUp string
	// Costs is the cost model, with Rule.Auto or policy kv; nil while too little is known.
	Costs *cost.Model

	Decode       selector.Input
	DecodePeers  []workers.Peer
	Prefill      selector.Input
	PrefillPeers []workers.Peer
}

// Work is what one path would cost, in tokens.
type Work struct {
	// Compute is the prompt tokens to prefill, Queued those that stand before
	// them on the rank, Transfer those whose KV moves between ranks.
	Compute, Queued, Transfer int
}

// Plan is the answer. Reuse one to avoid allocation.
type Plan struct {
	Path   route.Path
	Reason route.Reason
	// Err says why nothing can be done; Path is empty then. It wraps
	// ErrNoDecode or ErrNoPrefill and an error of package selector.
	Err error

	// EffISL is ISL minus CachedTokens; Threshold and On are the rule that
	// was applied.
	EffISL    int
	Threshold int
	On        Measure
	// CachedTokens is what the decode rank is predicted to find in its cache,
	// PrefillCached what the prefill rank is.
	CachedTokens, PrefillCached int
	// Connector is how KV moves, if it does.
	Connector workers.Connector

	// Decode and Prefill are the rankings of the phases. Prefill holds those for
	// the chosen decode rank, and is filled whenever the request could be split,
	// also when it stays local.
	Decode, Prefill selector.Ranking
	// DecodeIndex and PrefillIndex are the chosen candidates, -1 for none.
	// PrefillIndex is set for a local plan, too, if remote was possible.
	DecodeIndex, PrefillIndex int
	// Local and Remote are the predicted work of both paths; HasRemote says whether
	// remote was possible. The one that was not taken is the what-if.
	Local, Remote Work
	HasRemote     bool
	// Paths is the work of both paths, as far as they were possible. Costs is what that would
	// cost by revision CostRevision of the cost model, with Rule.Auto, where remote was possible.
	// The revision is 0 where the costs were not needed or not known.
	Paths        cost.Paths
	Costs        cost.Costs
	CostRevision uint64

	// Why candidates of a phase are kept out of a ranking; see selector.Input.Veto.
	decodeVeto, prefillVeto []string
	pricing                 *pricing // nil before a decision
}

// pricing is what policy kv prices candidates by, and the request of the quotes.
type pricing struct {
	decode, prefill selector.Pricing
	request         cost.Request
	ways            []selector.Way // memory
	// ranked says that the plan's ranking of prefill ranks is that for any decode rank.
	ranked bool
}

// Errors of a plan.
var (
	ErrNoDecode  = errors.New("no decode worker")
	ErrNoPrefill = errors.New("no prefill worker")
	// ErrWhole: the request cannot be served in two legs, and no decode worker
	// can serve it in one.
	ErrWhole = errors.New("the request cannot be split, and every decode worker of its model needs a prefill worker")
)

// MakePlan fills out with the plan for in, reusing its memory.
//
// The best decode rank is taken with the best prefill rank that works with it, if they can do
// together what the rule wants. If they cannot, it is the best of the decode ranks that can, and
// only without one the request goes local, or ends, as the rule's fallback says. What only some
// requests or ranks are kept local for (a gate, a rank without a connector) is what the rule
// wants for them.
func MakePlan(in *Input, out *Plan) {
	c := &in.Rule
	out.reset()
	out.Threshold, out.On, out.Connector = c.Threshold, cmp.Or(c.On, OnEffISL), c.Connector
	prefill := eligible(&in.Prefill)
	decode := in.DecodePhase()
	out.price(in, &decode)
	selector.Pick(&decode, &out.Decode)
	d, ok := out.Decode.Best()
	if !ok {
		out.Err = fmt.Errorf("%w: %w", ErrNoDecode, out.Decode.Err())
		return
	}
	if out.planFor(in, d) {
		return
	}
	// Draws and turns are among those that can serve, so they are ranked again.
	if (prefill || !alone(in)) && out.keepOutUnserved(in) {
		decode.Veto = out.decodeVeto
		selector.Pick(&decode, &out.Decode)
		d, _ = out.Decode.Best()
		out.planFor(in, d)
		return
	}
	out.fallBack(in, decode.Phase == route.Aggregated)
}

// DecodePhase is the decode phase as it is ranked at first. Without a prefill rank that
// could be chosen a rank that decodes does the whole request. With a rule that sends
// every prompt to a prefill rank, cached blocks count as Rule.LoadCredit says.
func (in *Input) DecodePhase() selector.Input {
	phase := in.Decode
	switch {
	case !eligible(&in.Prefill):
		phase.Phase = route.Aggregated
	case !in.alwaysRemote():
	case phase.Policy == selector.KVDynamo:
		phase.Weights.OverlapCredit = 0
	default:
		phase.Weights.OverlapCredit *= in.Rule.LoadCredit
	}
	return phase
}

// alwaysRemote reports whether the request goes to a prefill rank, if there is
// one, whatever the decode ranks hold.
func (in *Input) alwaysRemote() bool {
	return in.Rule.Threshold <= 0 && in.Force != route.ForceLocal && whole(&in.Facts) == ""
}

// eligible reports whether a phase has a rank that could be chosen.
func eligible(in *selector.Input) bool {
	for i := range in.Candidates {
		if in.Eligible(i) {
			return true
		}
	}
	return false
}

// alone reports whether every decode rank can prefill by itself.
func alone(in *Input) bool {
	return !slices.ContainsFunc(in.DecodePeers, func(p workers.Peer) bool { return needsPrefill(p.Worker) })
}

// needsPrefill reports whether a decode worker refuses a request that no
// prefill worker works on with it, as SGLang's do.
func needsPrefill(w *workers.Worker) bool {
	return w.Role == workers.Decode && w.WireEngine() == workers.SGLang
}

// PathsOf reports which paths the rule leaves to requests on workers of one model. Workers count
// that are usable or only ejected.
func PathsOf(r *Rule, list []*workers.Worker) (local, remote bool) {
	prefill := slices.ContainsFunc(list, func(w *workers.Worker) bool { return w.Role.CanPrefill() && Serves(w) })
	for _, w := range list {
		if !w.Role.CanDecode() || !Serves(w) {
			continue
		}
		local = local || !needsPrefill(w)
		remote = remote || prefill && cmp.Or(r.Connector, w.Connector) != workers.ConnectorNone
	}
	return local, remote
}

// wish is what the rule wants for a request on one decode rank, as if there were a
// prefill rank for every one.
type wish struct {
	path   route.Path
	reason route.Reason
	// whole says that the request must be served in one leg there, needs that the worker refuses
	// it without a prefill worker beside it.
	whole, needs bool
	// cached is what is taken from the rank's cache, in tokens.
	cached    int
	connector workers.Connector
}

// wish is what the rule wants for the request on decode rank d.
func (in *Input) wish(d int) (w wish) {
	w = in.wants(in.DecodePeers[d].Worker)
	in.measure(&w, d)
	return w
}

// wants is the part of a wish that all ranks of workers like one share. It has no path where
// measure finds that by the rank.
func (in *Input) wants(to *workers.Worker) (w wish) {
	if w.connector = in.Rule.Connector; w.connector == workers.ConnectorNone {
		w.connector = to.Connector
	}
	intact := mustStayWhole(in, to, w.connector)
	w.whole, w.needs = intact != "", needsPrefill(to)
	switch {
	case in.Force == route.ForceLocal:
		w.path, w.reason = route.Local, route.ReasonForcedLocal
		switch in.GaveUp {
		case "":
		case string(attempt.Ended):
			w.reason = route.ReasonEnded
		default:
			w.reason = route.ReasonFallback
		}
	case w.whole:
		w.path, w.reason = route.Local, intact
	case in.Force == route.ForceRemote:
		w.path, w.reason = route.Remote, route.ReasonForcedRemote
	case in.Rule.Threshold <= 0:
		w.path, w.reason = route.Remote, route.ReasonAlways
	}
	return w
}

// measure completes a wish for decode rank d.
func (in *Input) measure(w *wish, d int) {
	c, f, k := &in.Rule, &in.Facts, &in.Decode.Candidates[d]
	w.cached = selector.CachedTokens(f.ISL, int(in.Decode.Weights.Held(k)), in.Decode.BlockSize)
	switch {
	case w.path != "":
	case c.On == OnISL && f.Source != route.FromNothing && f.ISL >= c.Threshold:
		w.path, w.reason = route.Remote, route.ReasonISLAbove
	case c.On != OnISL && f.Source != route.FromNothing && f.ISL-w.cached >= c.Threshold:
		w.path, w.reason = route.Remote, route.ReasonAbove
	case c.DecodeGate > 0 && k.HasLoad && k.KVUsage > c.DecodeGate:
		w.path, w.reason = route.Remote, route.ReasonDecodeBusy
	case f.Source == route.FromNothing:
		w.path, w.reason = route.Local, route.ReasonLengthUnknown
	case c.On == OnISL:
		w.path, w.reason = route.Local, route.ReasonISLBelow
	default:
		w.path, w.reason = route.Local, route.ReasonBelow
	}
}

// planFor makes the plan for decode rank d and reports whether it can be carried out.
func (p *Plan) planFor(in *Input, d int) bool {
	c, f, decode := &in.Rule, &in.Facts, &in.Decode.Candidates[d]
	w := in.wish(d)
	p.DecodeIndex, p.CachedTokens, p.Connector = d, w.cached, w.connector
	p.EffISL = f.ISL - w.cached
	p.Local = Work{Compute: p.EffISL, Queued: decode.PrefillTokens}
	p.PrefillIndex, p.HasRemote, p.Remote, p.PrefillCached = -1, false, Work{}, 0
	if w.whole || !p.pricing.ranked {
		p.Prefill.Reset()
	}
	if !w.whole {
		p.rankPrefill(in, d)
	}
	p.Path, p.Reason = w.path, w.reason
	alone := !needsPrefill(in.DecodePeers[d].Worker)
	p.Costs, p.CostRevision = cost.Costs{}, 0
	p.Paths = cost.Paths{Local: in.Decode.Work(d, p.EffISL, f.ISL), Transfer: in.Decode.Work(d, p.EffISL, 0)}
	found := in.Decode.Found(&p.Decode)
	if p.HasRemote {
		p.Paths.Prefill = in.Prefill.Work(p.PrefillIndex, p.Remote.Compute, f.ISL)
		found = max(found, in.Prefill.Found(&p.Prefill))
		p.Paths.Prefill.Found = found
	}
	p.Paths.Local.Found = found
	if c.Auto && p.HasRemote {
		p.weigh(in, d)
	}
	if p.Path == route.Remote && p.HasRemote && (in.gated(p.PrefillIndex) || p.startGated(in)) {
		p.Path, p.Reason = route.Local, route.ReasonPrefillBusy
	}
	if p.Path == route.Local && !alone && p.HasRemote && in.Force != route.ForceLocal {
		p.Path, p.Reason = route.Remote, route.ReasonDecodeOnly
	}
	return p.Path == route.Remote && p.HasRemote || p.Path == route.Local && alone
}

// gated reports whether prefill rank i has more in work than the prefill gate lets pass.
func (in *Input) gated(i int) bool {
	gate := in.Rule.PrefillGate
	return in.Force != route.ForceRemote && gate > 0 && in.Prefill.Candidates[i].PrefillTokens > gate
}

// startGated reports whether the threshold, which decides while too little is known of the
// costs, would have the prompt wait behind many more than on the decode rank.
func (p *Plan) startGated(in *Input) bool {
	c := &in.Rule
	return c.Auto && !in.Costs.Compares() && c.StartGate > 0 && p.byThreshold() && p.Remote.Queued-p.Local.Queued > c.StartGate
}

// weigh compares what the paths cost and takes the cheaper one, where the threshold
// would decide, and a gate does not. Now and then it takes the other one, to learn of it.
func (p *Plan) weigh(in *Input, d int) {
	decode := &in.Decode.Candidates[d]
	if !p.byThreshold() {
		return
	}
	if m := in.Costs; m.Compares() {
		request := &cost.Request{}
		if m.Timed() {
			request = &p.pricing.request
		}
		p.Costs, p.CostRevision = m.Compare(request, &p.Paths), m.Revision
		if m.RemoteCheaper(p.Costs.Local, p.Costs.Remote) {
			p.Path, p.Reason = route.Remote, route.ReasonRemoteCheaper
		} else {
			p.Path, p.Reason = route.Local, route.ReasonLocalCheaper
		}
	}
	if p.teaches(in) {
		p.Path, p.Reason = other(p.Path), route.ReasonExploration
	}
	if gate := in.Rule.DecodeGate; p.Path == route.Local && gate > 0 && decode.HasLoad && decode.KVUsage > gate {
		p.Path, p.Reason = route.Remote, route.ReasonDecodeBusy
	}
}

// price has policy kv rank both phases by times, where they are known.
func (p *Plan) price(in *Input, phase *selector.Input) {
	in.Prefill.Pricing = nil
	if p.pricing == nil {
		p.pricing = &pricing{}
	}
	x := p.pricing
	x.ranked = false
	if !in.Costs.Timed() {
		return
	}
	*x = pricing{ways: x.ways[:0], request: cost.Request{ISL: in.Facts.ISL, Output: in.Facts.Output, Others: in.Decode.Weights.Others, Usual: in.Decode.Usual()}}
	x.prefill = selector.Pricing{Model: in.Costs, Quote: in.Costs.Quote(&x.request)}
	if in.Prefill.Policy == selector.KV {
		in.Prefill.Pricing = &x.prefill
	}
	if phase.Policy != selector.KV {
		return
	}
	x.decode = x.prefill
	phase.Pricing = &x.decode
	if phase.Phase == route.Aggregated {
		return
	}
	selector.Pick(&in.Prefill, &p.Prefill)
	best, ok := p.Prefill.Best()
	if !ok {
		return
	}
	w := in.Prefill.Work(best, in.Prefill.Uncached(best), in.Facts.ISL)
	x.decode.Quote.Prefill(&w, &x.decode.Prefill)
	x.ranked = true
	gated := in.gated(best)
	var like *workers.Worker
	var wants wish
	for i := range in.Decode.Candidates {
		if to := in.DecodePeers[i].Worker; !to.Like(like) {
			like, wants = to, in.wants(to)
		}
		x.ways = append(x.ways, in.way(&wants, i, gated))
	}
	x.decode.Ways = x.ways
}

// way is which paths the rule leaves to a request on decode rank i, of whose worker it wants so
// much. gated says that a gate keeps it from the prefill rank.
func (in *Input) way(wants *wish, i int, gated bool) selector.Way {
	byCost := in.Rule.Auto && in.Costs.Compares()
	switch {
	case wants.whole:
		return selector.LocalOnly
	case wants.needs:
		return selector.RemoteOnly
	case gated:
		return selector.LocalOnly
	case byCost && wants.path == "" && in.Rule.DecodeGate <= 0 && in.Facts.Source != route.FromNothing:
		return selector.EitherPath // whatever the rank holds, the threshold would decide
	}
	w := *wants
	in.measure(&w, i)
	switch {
	case byCost && byThreshold(w.reason):
		return selector.EitherPath
	case w.path == route.Remote:
		return selector.RemoteOnly
	}
	return selector.LocalOnly
}

// other is the other path.
func other(p route.Path) route.Path {
	if p == route.Remote {
		return route.Local
	}
	return route.Remote
}

// teaches reports whether the request takes the other path, of which little is known, so that
// it becomes known: one request in a number, by its own number, and only where that is safe.
func (p *Plan) teaches(in *Input) bool {
	m, c := in.Costs, in.Costs.Tuning()
	legs, lacks := cost.Legs(1<<cost.PrefillLeg|1<<cost.TransferLeg), cost.Legs(0xff)
	if p.Path == route.Remote {
		legs = 1 << cost.LocalLeg
	}
	if m != nil {
		lacks = m.Lacks
	}
	if lacks&legs == 0 || !c.Teaches(in.Decode.Turn) {
		return false
	}
	if p.CostRevision == 0 { // nothing is known but who waits where
		here, there := p.Local.Queued, p.Remote.Queued
		if p.Path == route.Remote {
			here, there = there, here
		}
		return there <= here
	}
	taken, instead := p.Costs.Local, p.Costs.Remote
	if p.Path == route.Remote {
		taken, instead = instead, taken
	}
	return instead <= float64(c.TeachWithin*taken)
}

// byThreshold reports whether the threshold decided.
func (p *Plan) byThreshold() bool { return byThreshold(p.Reason) }

func byThreshold(r route.Reason) bool {
	switch r {
	case route.ReasonAbove, route.ReasonISLAbove, route.ReasonBelow, route.ReasonISLBelow:
		return true
	default:
		return false
	}
}

// rankPrefill ranks the prefill ranks that can send to decode rank d.
func (p *Plan) rankPrefill(in *Input, d int) {
	p.prefillVeto = slices.Grow(p.prefillVeto[:0], len(in.PrefillPeers))[:len(in.PrefillPeers)]
	var like *workers.Worker
	why, to := "", in.DecodePeers[d].Worker
	for i := range in.PrefillPeers {
		if from := in.PrefillPeers[i].Worker; !from.Like(like) || from == to || like == to {
			like, why = from, in.pairs(i, d, p.Connector).prefill
		}
		p.prefillVeto[i] = why
	}
	if slice := in.DecodePeers[d].Worker.Slice; slice != "" {
		p.stayInSlice(in, slice)
	}
	p.choosePrefill(in)
}

// choosePrefill takes the prefill rank that the policy likes best of those without a veto.
func (p *Plan) choosePrefill(in *Input) {
	phase := in.Prefill
	phase.Veto = p.prefillVeto
	// Where all of them can send to the decode rank, they are ranked already.
	if !p.pricing.ranked || slices.ContainsFunc(p.prefillVeto, func(why string) bool { return why != "" }) {
		selector.Pick(&phase, &p.Prefill)
	}
	p.pricing.ranked = false // but for this decode rank
	best, ok := p.Prefill.Best()
	if !ok {
		p.HasRemote = false
		return
	}
	c := &in.Prefill.Candidates[best]
	p.PrefillIndex, p.HasRemote = best, true
	p.PrefillCached = selector.CachedTokens(in.Facts.ISL, int(in.Prefill.Weights.Held(c)), in.Prefill.BlockSize)
	p.Remote = Work{Compute: in.Facts.ISL - p.PrefillCached, Queued: c.PrefillTokens, Transfer: p.EffISL}
}

// stayInSlice keeps the prefill ranks of other slices out, if one of the decode
// rank's own could be chosen.
func (p *Plan) stayInSlice(in *Input, slice string) {
	can := func(i int) bool { return p.prefillVeto[i] == "" && in.Prefill.Eligible(i) }
	for i := range in.PrefillPeers {
		if in.PrefillPeers[i].Worker.Slice != slice || !can(i) {
			continue
		}
		for k := range in.PrefillPeers {
			if other := in.PrefillPeers[k].Worker.Slice; p.prefillVeto[k] == "" && other != "" && other != slice {
				p.prefillVeto[k] = "slice differs from the decode worker's"
			}
		}
		return
	}
}

// keepOutUnserved keeps the decode ranks out that cannot do what the rule wants for
// them, and reports whether one is left that can.
func (p *Plan) keepOutUnserved(in *Input) (any bool) {
	p.decodeVeto = slices.Grow(p.decodeVeto[:0], len(in.DecodePeers))[:len(in.DecodePeers)]
	for d := range in.DecodePeers {
		p.decodeVeto[d] = ""
		if !in.Decode.Eligible(d) {
			continue
		}
		w := in.wish(d)
		needs := needsPrefill(in.DecodePeers[d].Worker)
		if w.path == route.Local && !needs {
			any = true
			continue
		}
		if w.whole || in.Force == route.ForceLocal {
			p.decodeVeto[d] = cannotAlone
			continue
		}
		p.decodeVeto[d] = "no available prefill worker"
		for i := range in.PrefillPeers {
			if !in.Prefill.Eligible(i) {
				continue
			}
			if p.decodeVeto[d] = in.pairs(i, d, w.connector).decode; p.decodeVeto[d] == "" {
				any = true
				break
			}
		}
	}
	return any
}

const cannotAlone = "needs a prefill worker"

// fallBack makes the plan where no decode rank can do what the rule wants for it:
// local on the best one that can prefill by itself, ranked as one that does the whole
// request. The plan is that of the rank that was best, and whole says whether it was
// ranked so.
func (p *Plan) fallBack(in *Input, whole bool) {
	if p.Path == route.Remote && in.Rule.Fallback == FallbackError {
		p.failed(noPrefill(&p.Prefill), fmt.Errorf("%w: %w", ErrNoPrefill, p.Prefill.Err()))
		return
	}
	able := func(k workers.Peer) bool { return !needsPrefill(k.Worker) }
	if any := slices.ContainsFunc(in.DecodePeers, able); any && !(whole && able(in.DecodePeers[p.DecodeIndex])) {
		p.decodeVeto = slices.Grow(p.decodeVeto[:0], len(in.DecodePeers))[:len(in.DecodePeers)]
		for i, k := range in.DecodePeers {
			p.decodeVeto[i] = ""
			if !able(k) {
				p.decodeVeto[i] = cannotAlone
			}
		}
		phase := in.Decode
		phase.Phase, phase.Veto = route.Aggregated, p.decodeVeto
		p.price(in, &phase)
		selector.Pick(&phase, &p.Decode)
		if d, ok := p.Decode.Best(); ok {
			p.planFor(in, d)
		}
	}
	switch {
	case able(in.DecodePeers[p.DecodeIndex]):
		if p.Path == route.Remote {
			p.Path, p.Reason = route.Local, noPrefill(&p.Prefill)
		}
	case !in.Facts.Splittable:
		// It may not need a prefill worker for this: the request goes to it.
	case in.Force == route.ForceLocal:
		p.failed(p.Reason, fmt.Errorf("%w can prefill prompts: %w", ErrNoDecode, selector.ErrAllExcluded))
	case p.Path == route.Local && p.Prefill.Policy == "":
		err := ErrWhole
		if slices.ContainsFunc(in.DecodePeers, able) {
			err = fmt.Errorf("%w: %w", ErrNoDecode, p.Decode.Err())
		}
		p.failed(p.Reason, err)
	default:
		p.failed(noPrefill(&p.Prefill), fmt.Errorf("%w: %w", ErrNoPrefill, p.Prefill.Err()))
	}
}

// failed makes the plan one that cannot be carried out.
func (p *Plan) failed(r route.Reason, err error) { p.Path, p.Reason, p.Err = "", r, err }

// unpaired is why a prefill and a decode rank do not work together, in words that
// go with the one and with the other; empty if they do.
type unpaired struct{ prefill, decode string }

// pairs says why prefill rank i cannot send KV to decode rank d over a connector.
func (in *Input) pairs(i, d int, c workers.Connector) unpaired {
	from, to := in.PrefillPeers[i].Worker, in.DecodePeers[d].Worker
	switch {
	case from == to:
		return unpaired{"is the decode worker itself", "no other prefill worker"}
	case !from.SameModel(to, in.Model):
		return unpaired{"does not serve the decode worker's model", "no prefill worker of its model"}
	case from.WireEngine() != to.WireEngine():
		return unpaired{"engine differs from the decode worker's", "no prefill worker with its engine"}
	case in.Rule.Connector == workers.ConnectorNone && from.Connector != to.Connector:
		return unpaired{"connector differs from the decode worker's", "no prefill worker with its connector"}
	case from.BlockSize != 0 && to.BlockSize != 0 && from.BlockSize != to.BlockSize:
		return unpaired{"KV block size differs from the decode worker's", "no prefill worker with its KV block size"}
	case from.Revision != "" && to.Revision != "" && from.Revision != to.Revision:
		return unpaired{"revision differs from the decode worker's", "no prefill worker with its revision"}
	case c.Reported() == workers.ConnectorNIXL && workers.HandshakeDiffers(from, to) != "":
		why := workers.HandshakeDiffers(from, to)
		return unpaired{"NIXL would refuse its handshake with the decode worker: " + why, "no prefill worker whose handshake NIXL would accept: " + why}
	case !carries(c, in.Facts.Kind, from):
		return unpaired{"accepts no transfer parameters on this endpoint", "no prefill worker that accepts transfer parameters on this endpoint"}
	case in.Facts.Multimodal && !disagg.MovesMedia(c, from):
		return unpaired{"not known to move images, sounds and videos", "no prefill worker that is known to move images, sounds and videos"}
	case in.Facts.Kind.IsChat() && from.ChatDiffers(to):
		// Its KV would be of another prompt; a longer one makes vLLM's
		// decode engine exit.
		return unpaired{"tokenizes chats differently from the decode worker", "no prefill worker that tokenizes chats as it does"}
	}
	return unpaired{}
}

// mustStayWhole says why a request cannot be served in two legs by a decode worker
// over a connector; "" if it can. A short prompt is not worth two legs where the
// worker could do it alone.
func mustStayWhole(in *Input, to *workers.Worker, c workers.Connector) route.Reason {
	f, alone := &in.Facts, !needsPrefill(to)
	if f.Splittable && c != workers.ConnectorNone && !carries(c, f.Kind, to) {
		return route.ReasonEndpoint
	}
	if r := whole(f); r != "" && (alone || c != workers.ConnectorSGLang || !roomEach(r)) && (r != route.ReasonMultimodal || f.Opaque || !disagg.MovesMedia(c, to)) {
		return r
	}
	switch {
	case c == workers.ConnectorNone:
		return route.ReasonNoConnector
	case alone && f.Source != route.FromEstimate && f.Source != route.FromNothing && f.ISL < in.Decode.BlockSize &&
		(c == workers.ConnectorSharedStorage || in.Rule.Threshold > 0 && in.Force != route.ForceRemote):
		return route.ReasonShort
	}
	return ""
}

// whole says what of a request keeps it from being served in two legs by any
// rank; "" for nothing.
func whole(f *api.Facts) route.Reason {
	switch {
	case !f.Splittable:
		return route.ReasonEndpoint
	case f.N > 1:
		return route.ReasonAnswers
	case f.Continues:
		return route.ReasonContinues
	case f.ServerTools:
		return route.ReasonServerTools
	case f.PromptLogprobs:
		return route.ReasonPromptLogprobs
	case f.RoutedExperts:
		return route.ReasonRoutedExperts
	case f.MaxTokens == 0:
		return route.ReasonNoOutput
	// What SGLang's connector can do comes last: nothing else is in its way.
	case f.Prompts > 1:
		return route.ReasonPrompts
	case f.Multimodal:
		return route.ReasonMultimodal
	}
	return ""
}

// roomEach reports whether SGLang's engines serve in two legs what others do not:
// each of several prompts has a room of its own, and both engines read the
// client's whole body.
func roomEach(r route.Reason) bool {
	return r == route.ReasonPrompts || r == route.ReasonMultimodal
}

// carries reports whether a connector's fields exist on an endpoint of w.
func carries(c workers.Connector, k api.Kind, w *workers.Worker) bool {
	return disagg.Carries(c, k, w)
}

// noPrefill is the reason for a prefill ranking without a choice.
func noPrefill(r *selector.Ranking) route.Reason {
	switch r.Verdict {
	case selector.AllBusy:
		return route.ReasonPrefillAllBusy
	case selector.AllExcluded:
		return route.ReasonPrefillExcluded
	}
	return route.ReasonNoPrefill
}
