package decide

import (
	"fmt"

	"github.com/dynctl/dynctl/internal/router/route"
)

// Words is the plan's reason in plain words, with its figures.
func (p *Plan) Words(in *Input) string {
	words := p.words(in)
	if in.Rule.Auto && !in.Costs.Compares() && p.byThreshold() {
		words += ", since the costs are not known yet"
	}
	return words
}

func (p *Plan) words(in *Input) string {
	switch p.Reason {
	case route.ReasonAbove:
		return fmt.Sprintf("eff_isl %d >= %d", p.EffISL, p.Threshold)
	case route.ReasonBelow:
		return fmt.Sprintf("eff_isl %d < %d", p.EffISL, p.Threshold)
	case route.ReasonISLAbove:
		return fmt.Sprintf("isl %d >= %d", in.Facts.ISL, p.Threshold)
	case route.ReasonISLBelow:
		return fmt.Sprintf("isl %d < %d", in.Facts.ISL, p.Threshold)
	case route.ReasonRemoteCheaper:
		return fmt.Sprintf("remote costs %.1f ms, local %.1f ms", p.Costs.Remote, p.Costs.Local)
	case route.ReasonLocalCheaper:
		return fmt.Sprintf("local costs %.1f ms, remote %.1f ms", p.Costs.Local, p.Costs.Remote)
	case route.ReasonExploration:
		return fmt.Sprintf("to measure %s prefill, which has too few samples (1 request in %.0f)", p.Path, in.Costs.Tuning().TeachEvery)
	case route.ReasonDecodeOnly:
		return "the decode worker needs a prefill worker"
	case route.ReasonAlways:
		return fmt.Sprintf("threshold %d: every prompt is prefilled remotely", p.Threshold)
	case route.ReasonForcedRemote:
		return "the request forces remote prefill"
	case route.ReasonForcedLocal:
		return "the request forces local prefill"
	case route.ReasonDecodeBusy:
		return fmt.Sprintf("%s, but %s uses %.0f%% of its KV cache, gate %.0f%%", p.wanted(in, route.Local),
			in.Decode.Candidates[p.DecodeIndex].Rank, 100*in.Decode.Candidates[p.DecodeIndex].KVUsage, 100*in.Rule.DecodeGate)
	case route.ReasonPrefillBusy:
		if !in.gated(p.PrefillIndex) {
			return fmt.Sprintf("%s, but %s has %d prompt tokens in prefill, %s %d, and the costs are not known yet", p.wanted(in, route.Remote),
				in.Prefill.Candidates[p.PrefillIndex].Rank, p.Remote.Queued, in.Decode.Candidates[p.DecodeIndex].Rank, p.Local.Queued)
		}
		return fmt.Sprintf("%s, but %s has %d prompt tokens in prefill, gate %d", p.wanted(in, route.Remote),
			in.Prefill.Candidates[p.PrefillIndex].Rank, p.Remote.Queued, in.Rule.PrefillGate)
	case route.ReasonLengthUnknown:
		return "the prompt's length is unknown"
	case route.ReasonEndpoint:
		return "this connector cannot split requests of this endpoint"
	case route.ReasonPrompts:
		return fmt.Sprintf("the request holds %d prompts", in.Facts.Prompts)
	case route.ReasonAnswers:
		return fmt.Sprintf("the request wants %d answers", in.Facts.N)
	case route.ReasonMultimodal:
		if in.Facts.Opaque {
			return "the prompt holds more than text, images, sounds and videos"
		}
		return "the prompt holds images, sounds or videos, which this connector and version are not known to move"
	case route.ReasonContinues:
		return "the request continues a response that only its decode worker has"
	case route.ReasonServerTools:
		return "the engine may call tools and then reuse the transfer parameters"
	case route.ReasonPromptLogprobs:
		return "the request wants log probabilities of the prompt"
	case route.ReasonRoutedExperts:
		return "the request wants the experts that computed the prompt"
	case route.ReasonNoOutput:
		return "the request wants no output tokens"
	case route.ReasonNoConnector:
		return in.Decode.Candidates[p.DecodeIndex].Rank + " has no KV connector" // of most requests, where none is split
	case route.ReasonShort:
		return fmt.Sprintf("the prompt of %d tokens fills no block of %d", in.Facts.ISL, in.Decode.BlockSize)
	case route.ReasonNoPrefill:
		return "remote wanted, but there is no prefill worker"
	case route.ReasonPrefillAllBusy:
		return "remote wanted, but every prefill rank is busy"
	case route.ReasonPrefillExcluded:
		return "remote wanted, but every prefill rank is excluded"
	case route.ReasonFallback:
		why := ""
		if in.GaveUp != "" {
			why = " (" + in.GaveUp + ")"
		}
		return "remote prefill failed" + why + "; the decode rank prefills"
	case route.ReasonEnded:
		return "the remote prefill's first token ended the answer, so there is no KV to move; the decode rank prefills"
	}
	return string(p.Reason)
}

// wanted says why a path would have been taken that a gate closed.
func (p *Plan) wanted(in *Input, path route.Path) string {
	counted := p.EffISL
	if p.On == OnISL {
		counted = in.Facts.ISL
	}
	switch remote := path == route.Remote; {
	case p.CostRevision != 0 && (p.Costs.Remote < p.Costs.Local) == remote:
		return string(path) + " costs less"
	case p.CostRevision != 0 || in.Facts.Source == route.FromNothing || p.Threshold <= 0 || (counted >= p.Threshold) != remote:
		return string(path) + " wanted"
	case remote:
		return "over the threshold"
	default:
		return "below the threshold"
	}
}
