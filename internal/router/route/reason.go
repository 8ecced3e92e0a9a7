package route

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
	// ReasonRemoteCheaper and ReasonLocalCheaper are those of a threshold that is auto.
	ReasonRemoteCheaper Reason = "remote_costs_less"
	// ReasonExploration is that of either path, where the threshold is auto and little is known of
	// that path.
	ReasonExploration Reason = "exploration"
)

// Those of a local path by choice:
const (
	ReasonBelow         Reason = "eff_isl_below_threshold"
	ReasonISLBelow      Reason = "isl_below_threshold"
	ReasonForcedLocal   Reason = "forced_local"
	ReasonPrefillBusy   Reason = "prefill_busy"
	ReasonLengthUnknown Reason = "length_unknown"
	ReasonLocalCheaper  Reason = "local_costs_less"
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
	ReasonRoutedExperts  Reason = "routed_experts"
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

// ReasonFallback says that a remote prefill was tried, failed, and the request went
// on locally.
const ReasonFallback Reason = "prefill_failed"

// ReasonEnded says that the remote prefill's first token ended the answer, which
// leaves no KV to move.
const ReasonEnded Reason = "prefill_ended"

// Degraded reports whether the request took another path than the rule wanted.
func (r Reason) Degraded() bool {
	switch r {
	case ReasonNoPrefill, ReasonPrefillAllBusy, ReasonPrefillExcluded, ReasonFallback:
		return true
	}
	return false
}
