// Package decide is the decision: which ranks serve a request, whether its prompt
// is prefilled by the decode rank itself (local) or by a prefill rank from which the
// KV cache moves (remote), what the ledger is told of it, and, attempt by attempt,
// what follows when a leg fails.
//
// Choose is a pure function of an Input, which holds values only, random draws and
// turns included: replay makes recorded decisions again with it. A Run makes the
// Input from the fleet as its caller sees it and goes through the attempts of one
// request; the router, its dry run, the simulation and the virtual soak each drive
// one. It reads no clock and changes nothing outside: effects are returned.
package decide

import (
	"errors"
	"fmt"
	"slices"

	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/router/attempt"
	"github.com/dynctl/dynctl/internal/router/decision"
	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/selector"
	"github.com/dynctl/dynctl/internal/workers"
)

// Path says where the prompt is prefilled.
type Path string

// The paths.
const (
	Local  Path = "local"
	Remote Path = "remote"
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

// Fallback says what becomes of a request that should go remote when no
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
	// On is what the threshold is compared with; empty is OnEffISL.
	On Measure
	// Fallback applies when there is no prefill rank; empty is FallbackLocal.
	Fallback Fallback
	// PrefillGate keeps a request local while the prefill rank that would be
	// chosen has more prompt tokens in work than this; 0 is off.
	PrefillGate int
	// DecodeGate sends a request remote that would stay local while the chosen
	// decode rank uses more than this share of its KV cache; 0 is off. A rank
	// that does not tell its usage is not gated.
	DecodeGate float64
	// Connector overrides the workers' own; empty leaves it to them.
	Connector workers.Connector
}

// Input is all that a plan depends on. The peers are parallel to the
// candidates of their phase.
type Input struct {
	Rule  Rule
	Facts disagg.Facts
	Force disagg.Force
	// GaveUp is the reason for which remote prefill was tried and given up in this
	// request, whose path is forced since; empty otherwise.
	GaveUp string

	Decode       selector.Input
	DecodePeers  []disagg.Peer
	Prefill      selector.Input
	PrefillPeers []disagg.Peer
}

// LoadCredit is what a cached block takes off the cost of a decode rank whose
// prompt is computed elsewhere in any case, as a share of its ordinary credit:
// the block then saves its transfer, not its computation.
const LoadCredit = 1.0 / 32

// Settle tells the ranking of the decode ranks what it must know of the rest;
// it is called once both phases have their candidates. Without prefill ranks a
// rank that decodes does the whole request (phase Aggregated). With a threshold
// that sends every prompt to a prefill rank, cached blocks count as LoadCredit
// says, and in kv_dynamo not at all, as in Dynamo's decode router without
// conditional disaggregation.
func (in *Input) Settle() {
	able := func(c decision.Candidate) bool { return c.KeptOut == "" }
	switch {
	case len(in.PrefillPeers) == 0:
		in.Decode.Phase = selector.Aggregated
	case !in.AlwaysRemote(), !slices.ContainsFunc(in.Prefill.Candidates, able):
	case in.Decode.Policy == selector.KVDynamo:
		in.Decode.Weights.OverlapCredit = 0
	default:
		in.Decode.Weights.OverlapCredit *= LoadCredit
	}
}

// AlwaysRemote reports whether the request goes to a prefill rank, if there is
// one, whatever the decode ranks hold.
func (in *Input) AlwaysRemote() bool {
	return in.Rule.Threshold <= 0 && in.Force != disagg.ForceLocal && whole(&in.Facts) == ""
}

// Work is what one path would cost, in tokens.
type Work struct {
	// Compute is the prompt tokens to prefill, Queued those that stand before
	// them on the rank, Transfer those whose KV moves between ranks.
	Compute, Queued, Transfer int
}

// Plan is the answer. Reuse one to avoid allocation.
type Plan struct {
	Path   Path
	Reason decision.Reason
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

	// Decode and Prefill are the rankings of the phases. Prefill is filled
	// whenever the request could be split, also when it stays local.
	Decode, Prefill selector.Ranking
	// DecodeIndex and PrefillIndex are the chosen candidates, -1 for none.
	// PrefillIndex is set for a local plan, too, if remote was possible.
	DecodeIndex, PrefillIndex int
	// Local and Remote are the predicted work of both paths; HasRemote tells
	// whether remote was possible. The one that was not taken is the what-if.
	Local, Remote Work
	HasRemote     bool

	veto []string
}

// Errors of a plan.
var (
	ErrNoDecode  = errors.New("no decode worker")
	ErrNoPrefill = errors.New("no prefill worker")
	// ErrWhole: the request cannot be served in two legs, and no decode worker
	// can serve it in one.
	ErrWhole = errors.New("the request cannot be split, and every decode worker of its model needs a prefill worker beside it")
)

// CachedTokens is how many tokens of a prompt a rank with overlap leading
// blocks takes from its cache. The last token is always computed, because its
// logits give the first token of the answer; as caches hold whole blocks, a
// prompt that is cached to its end loses its last block.
func CachedTokens(isl, overlapBlocks, blockSize int) int {
	if isl <= 0 || overlapBlocks <= 0 || blockSize <= 0 {
		return 0
	}
	return min(overlapBlocks, (isl-1)/blockSize) * blockSize
}

// Choose fills out with the plan for in, reusing its memory.
func Choose(in *Input, out *Plan) {
	c := &in.Rule
	*out = Plan{
		Decode: out.Decode, Prefill: out.Prefill, veto: out.veto[:0], DecodeIndex: -1, PrefillIndex: -1,
		Threshold: c.Threshold, On: c.On, Connector: c.Connector,
	}
	if out.On == "" {
		out.On = OnEffISL
	}
	out.Prefill.Reset()
	selector.Rank(&in.Decode, &out.Decode)
	d, ok := out.Decode.Best()
	if !ok {
		out.Err = fmt.Errorf("%w: %w", ErrNoDecode, out.Decode.Err())
		return
	}
	out.chose(in, d)
	alone := !needsPrefill(in.DecodePeers[d].Worker)
	intact := mustStayWhole(in, out, alone)
	if intact == "" {
		out.rankPrefill(in, d)
	}
	path, reason := wanted(in, out)
	switch {
	case in.Force == disagg.ForceLocal:
		path, reason = Local, decision.ReasonForcedLocal
		switch in.GaveUp {
		case "":
		case string(attempt.Ended):
			reason = decision.ReasonEnded
		default:
			reason = decision.ReasonFallback
		}
	case intact != "":
		path, reason = Local, intact
	}
	if path == Local && !alone && intact == "" && in.Force != disagg.ForceLocal && out.HasRemote {
		path, reason = Remote, decision.ReasonDecodeOnly
	}
	if path == Remote && !out.HasRemote {
		reason = noPrefill(&out.Prefill)
		if c.Fallback == FallbackError {
			out.Reason = reason
			out.Err = fmt.Errorf("%w: %w", ErrNoPrefill, out.Prefill.Err())
			return
		}
		path = Local
	}
	if path == Local && !alone && !out.chooseAlone(in) && (intact == "" || in.Facts.Splittable) {
		out.Reason = reason
		if intact != "" {
			out.Err = ErrWhole
			if slices.ContainsFunc(in.DecodePeers, func(p disagg.Peer) bool { return !needsPrefill(p.Worker) }) {
				out.Err = fmt.Errorf("%w: %w", ErrNoDecode, out.Decode.Err())
			}
		} else if in.Force == disagg.ForceLocal {
			out.Err = fmt.Errorf("%w can prefill by itself: %w", ErrNoDecode, selector.ErrAllExcluded)
		} else {
			out.Err = fmt.Errorf("%w: %w", ErrNoPrefill, out.Prefill.Err())
		}
		return
	}
	out.Path, out.Reason = path, reason
}

// chose notes decode rank d and what its prompt costs there.
func (p *Plan) chose(in *Input, d int) {
	f, decode := &in.Facts, &in.Decode.Candidates[d]
	p.DecodeIndex = d
	p.CachedTokens = CachedTokens(f.ISL, decode.OverlapBlocks, in.Decode.BlockSize)
	p.EffISL = f.ISL - p.CachedTokens
	p.Local = Work{Compute: p.EffISL, Queued: decode.PrefillTokens}
	if p.Connector = in.Rule.Connector; p.Connector == workers.ConnectorNone {
		p.Connector = in.DecodePeers[d].Worker.Connector
	}
}

// needsPrefill reports whether a decode worker refuses a request that no
// prefill worker works on with it, as SGLang's do.
func needsPrefill(w *workers.Worker) bool {
	return w.Role == workers.Decode && w.WireEngine() == workers.SGLang
}

// chooseAlone chooses the best decode rank that can prefill by itself, if there
// is one.
func (p *Plan) chooseAlone(in *Input) bool {
	rest := in.Decode
	rest.Veto = make([]string, len(in.DecodePeers))
	found := false
	for i := range in.DecodePeers {
		if needsPrefill(in.DecodePeers[i].Worker) {
			rest.Veto[i] = "cannot prefill by itself"
		} else {
			found = true
		}
	}
	if !found {
		return false
	}
	selector.Rank(&rest, &p.Decode)
	d, ok := p.Decode.Best()
	if ok {
		p.chose(in, d)
	}
	return ok
}

// rankPrefill ranks the prefill ranks that can send to decode rank d.
func (p *Plan) rankPrefill(in *Input, d int) {
	to := in.DecodePeers[d].Worker
	p.veto = slices.Grow(p.veto, len(in.PrefillPeers))[:len(in.PrefillPeers)]
	for i := range in.PrefillPeers {
		p.veto[i] = mismatch(in.PrefillPeers[i].Worker, to, in.Rule.Connector)
		from := in.PrefillPeers[i].Worker
		switch {
		case p.veto[i] != "":
		case !carries(p.Connector, in.Facts.Kind, from):
			p.veto[i] = "takes no transfer parameters on this endpoint"
		case in.Facts.Kind.IsChat() && from.ChatDiffers(to):
			// Its KV would be of another prompt; a longer one makes vLLM's
			// decode engine exit.
			p.veto[i] = "makes other tokens of a chat than the decode worker"
		}
	}
	pin := in.Prefill
	pin.Veto = p.veto
	selector.Rank(&pin, &p.Prefill)
	best, ok := p.Prefill.Best()
	if !ok {
		return
	}
	c := &in.Prefill.Candidates[best]
	p.PrefillIndex, p.HasRemote = best, true
	p.PrefillCached = CachedTokens(in.Facts.ISL, c.OverlapBlocks, in.Prefill.BlockSize)
	p.Remote = Work{Compute: in.Facts.ISL - p.PrefillCached, Queued: c.PrefillTokens, Transfer: p.EffISL}
}

// mismatch says why KV cannot move between two workers; "" if it can.
func mismatch(from, to *workers.Worker, override workers.Connector) string {
	switch {
	case from == to:
		return "is the decode worker itself"
	case from.WireEngine() != to.WireEngine():
		return "another engine than the decode worker's"
	case override == workers.ConnectorNone && from.Connector != to.Connector:
		return "another connector than the decode worker's"
	case from.BlockSize != 0 && to.BlockSize != 0 && from.BlockSize != to.BlockSize:
		return "another KV block size than the decode worker's"
	}
	return ""
}

// mustStayWhole says why a request cannot be served in two legs; "" if it can.
// A short prompt is not worth two legs where the decode rank could do it alone.
func mustStayWhole(in *Input, out *Plan, alone bool) decision.Reason {
	c := out.Connector
	f := &in.Facts
	if f.Splittable && c != workers.ConnectorNone && !carries(c, f.Kind, in.DecodePeers[out.DecodeIndex].Worker) {
		return decision.ReasonEndpoint
	}
	if r := whole(f); r != "" && (alone || c != workers.ConnectorSGLang || !pairs(r)) {
		return r
	}
	switch {
	case c == workers.ConnectorNone:
		return decision.ReasonNoConnector
	case alone && f.Source != disagg.FromEstimate && f.Source != disagg.FromNothing && f.ISL < in.Decode.BlockSize &&
		(c == workers.ConnectorSharedStorage || in.Rule.Threshold > 0 && in.Force != disagg.ForceRemote):
		return decision.ReasonShort
	}
	return ""
}

// whole says what of a request keeps it from being served in two legs by any
// rank; "" for nothing.
func whole(f *disagg.Facts) decision.Reason {
	switch {
	case !f.Splittable:
		return decision.ReasonEndpoint
	case f.N > 1:
		return decision.ReasonAnswers
	case f.Continues:
		return decision.ReasonContinues
	case f.ServerTools:
		return decision.ReasonServerTools
	case f.PromptLogprobs:
		return decision.ReasonPromptLogprobs
	case f.MaxTokens == 0:
		return decision.ReasonNoOutput
	// What SGLang's connector can do comes last: nothing else is in its way.
	case f.Prompts > 1:
		return decision.ReasonPrompts
	case f.Multimodal:
		return decision.ReasonMultimodal
	}
	return ""
}

// pairs reports whether SGLang's engines serve in two legs what others do not:
// each of several prompts has a room of its own, and both engines read the
// client's whole body.
func pairs(r decision.Reason) bool {
	return r == decision.ReasonPrompts || r == decision.ReasonMultimodal
}

// carries reports whether a connector's fields exist on an endpoint of w.
func carries(c workers.Connector, k api.Kind, w *workers.Worker) bool {
	switch k {
	case api.Chat, api.Completion:
		return true
	case api.Generate:
		return c == workers.ConnectorNIXL || c == workers.ConnectorSharedStorage
	case api.SGLangGenerate:
		return c == workers.ConnectorSGLang
	case api.Messages, api.Responses:
		// SGLang's have no bootstrap fields; vLLM's were seen to take and give
		// transfer parameters in 0.32, and older ones drop what they do not know.
		return c == workers.ConnectorSharedStorage || (c == workers.ConnectorNIXL || c == workers.ConnectorLMCache) && w.VersionAtLeast(0, 32)
	}
	return false
}

// wanted is the path by force, threshold and gates, as if every path could be
// had.
func wanted(in *Input, out *Plan) (Path, decision.Reason) {
	c, f := &in.Rule, &in.Facts
	if in.Force == disagg.ForceRemote {
		return Remote, decision.ReasonForcedRemote
	}
	path, reason := Local, decision.ReasonBelow
	switch {
	case c.Threshold <= 0:
		path, reason = Remote, decision.ReasonAlways
	case f.Source == disagg.FromNothing:
		reason = decision.ReasonLengthUnknown
	case out.On == OnISL && f.ISL >= c.Threshold:
		path, reason = Remote, decision.ReasonISLAbove
	case out.On == OnISL:
		reason = decision.ReasonISLBelow
	case out.EffISL >= c.Threshold:
		path, reason = Remote, decision.ReasonAbove
	}
	if d := &in.Decode.Candidates[out.DecodeIndex]; path == Local && c.DecodeGate > 0 && d.HasLoad && d.KVUsage > c.DecodeGate {
		path, reason = Remote, decision.ReasonDecodeBusy
	}
	if path == Remote && c.PrefillGate > 0 && out.HasRemote && out.Remote.Queued > c.PrefillGate {
		path, reason = Local, decision.ReasonPrefillBusy
	}
	return path, reason
}

// noPrefill is the reason for a prefill ranking without a choice.
func noPrefill(r *selector.Ranking) decision.Reason {
	switch r.Verdict {
	case selector.AllBusy:
		return decision.ReasonPrefillAllBusy
	case selector.AllExcluded:
		return decision.ReasonPrefillExcluded
	}
	return decision.ReasonNoPrefill
}
