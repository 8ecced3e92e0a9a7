package disagg

import "fmt"

// Reason is why a path was taken: a closed set, fit for metric labels.
type Reason string

// The reasons. Those of a remote path:
const (
	ReasonAbove        Reason = "eff_isl_above_threshold"
	ReasonISLAbove     Reason = "isl_above_threshold"
	ReasonAlways       Reason = "always_remote"
	ReasonForcedRemote Reason = "forced_remote"
	ReasonDecodeBusy   Reason = "decode_busy"
	ReasonDecodeOnly   Reason = "decode_cannot_prefill"
)

// Those of a local path by choice:
const (
	ReasonBelow         Reason = "eff_isl_below_threshold"
	ReasonISLBelow      Reason = "isl_below_threshold"
	ReasonForcedLocal   Reason = "forced_local"
	ReasonPrefillBusy   Reason = "prefill_busy"
	ReasonLengthUnknown Reason = "length_unknown"
)

// Those of a local path because the request cannot be split:
const (
	ReasonEndpoint       Reason = "endpoint_not_split"
	ReasonPrompts        Reason = "several_prompts"
	ReasonAnswers        Reason = "several_answers"
	ReasonMultimodal     Reason = "multimodal"
	ReasonContinues      Reason = "previous_response"
	ReasonServerTools    Reason = "server_tools"
	ReasonPromptLogprobs Reason = "prompt_logprobs"
	ReasonNoOutput       Reason = "no_output"
	ReasonNoConnector    Reason = "no_connector"
	ReasonShort          Reason = "prompt_short"
)

// Those of a local path because remote was wanted and could not be had:
const (
	ReasonNoPrefill       Reason = "no_prefill_worker"
	ReasonPrefillAllBusy  Reason = "prefill_all_busy"
	ReasonPrefillExcluded Reason = "prefill_all_excluded"
)

// ReasonFallback is for the caller, not for Make: a remote prefill was tried,
// failed, and the request went on locally.
const ReasonFallback Reason = "prefill_failed"

// ReasonEnded is for the caller, too: the remote prefill's first token ended the
// answer, which leaves no KV to move.
const ReasonEnded Reason = "prefill_ended"

// Reasons lists the closed set.
func Reasons() []Reason {
	return []Reason{
		ReasonAbove, ReasonISLAbove, ReasonAlways, ReasonForcedRemote, ReasonDecodeBusy, ReasonDecodeOnly,
		ReasonBelow, ReasonISLBelow, ReasonForcedLocal, ReasonPrefillBusy, ReasonLengthUnknown,
		ReasonEndpoint, ReasonPrompts, ReasonAnswers, ReasonMultimodal, ReasonContinues, ReasonServerTools, ReasonPromptLogprobs, ReasonNoOutput, ReasonNoConnector, ReasonShort,
		ReasonNoPrefill, ReasonPrefillAllBusy, ReasonPrefillExcluded, ReasonFallback, ReasonEnded,
	}
}

// Degraded reports whether the request took another path than the rule wanted.
func (r Reason) Degraded() bool {
	switch r {
	case ReasonNoPrefill, ReasonPrefillAllBusy, ReasonPrefillExcluded, ReasonFallback:
		return true
	}
	return false
}

// Words tells the plan's reason in plain words, with its figures.
func (p *Plan) Words(in *Input) string {
	switch p.Reason {
	case ReasonAbove:
		return fmt.Sprintf("eff_isl %d >= %d", p.EffISL, p.Threshold)
	case ReasonBelow:
		return fmt.Sprintf("eff_isl %d < %d", p.EffISL, p.Threshold)
	case ReasonISLAbove:
		return fmt.Sprintf("isl %d >= %d", in.Facts.ISL, p.Threshold)
	case ReasonISLBelow:
		return fmt.Sprintf("isl %d < %d", in.Facts.ISL, p.Threshold)
	case ReasonDecodeOnly:
		return "the decode worker cannot prefill by itself"
	case ReasonAlways:
		return fmt.Sprintf("threshold %d: every prompt is prefilled remotely", p.Threshold)
	case ReasonForcedRemote:
		return "the request asked for remote prefill"
	case ReasonForcedLocal:
		return "the request asked for local prefill"
	case ReasonDecodeBusy:
		return fmt.Sprintf("below the threshold, but %s uses %.0f%% of its KV cache, gate %.0f%%",
			in.Decode.Candidates[p.DecodeIndex].Label, 100*in.Decode.Candidates[p.DecodeIndex].KVUsage, 100*in.Config.DecodeGate)
	case ReasonPrefillBusy:
		return fmt.Sprintf("over the threshold, but %s has %d prompt tokens in prefill, gate %d",
			in.Prefill.Candidates[p.PrefillIndex].Label, p.Remote.Queued, in.Config.PrefillGate)
	case ReasonLengthUnknown:
		return "the prompt's length is not known"
	case ReasonEndpoint:
		return "this endpoint is not split with this connector"
	case ReasonPrompts:
		return fmt.Sprintf("the request holds %d prompts", in.Facts.Prompts)
	case ReasonAnswers:
		return fmt.Sprintf("the request asks for %d answers", in.Facts.N)
	case ReasonMultimodal:
		return "the prompt holds more than text"
	case ReasonContinues:
		return "the response goes on from one that only its decode worker has"
	case ReasonServerTools:
		return "the engine may run tools by itself and use the transfer parameters again"
	case ReasonPromptLogprobs:
		return "the answer needs the prompt's own log probabilities"
	case ReasonNoOutput:
		return "the request asks for no output tokens"
	case ReasonNoConnector:
		return fmt.Sprintf("%s has no KV connector", in.Decode.Candidates[p.DecodeIndex].Label)
	case ReasonShort:
		return fmt.Sprintf("the prompt of %d tokens fills no block of %d", in.Facts.ISL, in.Decode.BlockSize)
	case ReasonNoPrefill:
		return "remote wanted, but there is no prefill worker"
	case ReasonPrefillAllBusy:
		return "remote wanted, but every prefill rank is busy"
	case ReasonPrefillExcluded:
		return "remote wanted, but every prefill rank is excluded"
	case ReasonFallback:
		return "remote prefill failed; the decode rank prefills by itself"
	case ReasonEnded:
		return "the remote prefill's first token ended the answer, which leaves no KV to move; the decode rank prefills by itself"
	}
	return string(p.Reason)
}
