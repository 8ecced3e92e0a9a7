package api

// keyID numbers the top-level members that the router reads or writes. A
// second member of the same name is refused: JSON parsers disagree on which
// one counts, so that the router and an engine could read two requests in one.
type keyID uint8

const (
	keyOther keyID = iota
	keyModel
	keyStream
	keyStreamOptions
	keyMaxTokens
	keyMaxCompletionTokens
	keyMaxOutputTokens
	keyMaxNewTokens
	keyMinTokens
	keyMinCompletionTokens
	keyN
	keyBestOf
	keyLogprobs
	keyPromptLogprobs
	keyReturnLogprob
	keyReturnExperts
	keyEcho
	keyPrompt
	keyPromptEmbeds
	keyMessages
	keyInput
	keyInputIDs
	keyText
	keyTokenIDs
	keySystem
	keyInstructions
	keyPriority
	keyCacheSalt
	keyUser
	keySessionID
	keyConversationID
	keyPromptCacheKey
	keyPreviousResponseID
	keyLoRAPath
	keySamplingParams
	keyXArgs
	keyRequestID
	keyRID
	keyFeatures
	keyTools
	keyNvext
	keyTransfer // see isTransferField
	keyCount
)

// keyNames are the members by their numbers.
var keyNames = [keyCount]string{
	keyModel:               "model",
	keyStream:              "stream",
	keyStreamOptions:       "stream_options",
	keyMaxTokens:           "max_tokens",
	keyMaxCompletionTokens: "max_completion_tokens",
	keyMaxOutputTokens:     "max_output_tokens",
	keyMaxNewTokens:        "max_new_tokens",
	keyMinTokens:           "min_tokens",
	keyMinCompletionTokens: "min_completion_tokens",
	keyN:                   "n",
	keyBestOf:              "best_of",
	keyLogprobs:            "logprobs",
	keyPromptLogprobs:      "prompt_logprobs",
	keyReturnLogprob:       "return_logprob",
	keyReturnExperts:       "return_routed_experts",
	keyEcho:                "echo",
	keyPrompt:              "prompt",
	keyPromptEmbeds:        "prompt_embeds",
	keyMessages:            "messages",
	keyInput:               "input",
	keyInputIDs:            "input_ids",
	keyText:                "text",
	keyTokenIDs:            "token_ids",
	keySystem:              "system",
	keyInstructions:        "instructions",
	keyPriority:            "priority",
	keyCacheSalt:           "cache_salt",
	keyUser:                "user",
	keySessionID:           "session_id",
	keyConversationID:      "conversation_id",
	keyPromptCacheKey:      "prompt_cache_key",
	keyPreviousResponseID:  "previous_response_id",
	keyLoRAPath:            "lora_path",
	keySamplingParams:      "sampling_params",
	keyXArgs:               "vllm_xargs",
	keyRequestID:           "request_id",
	keyRID:                 "rid",
	keyFeatures:            "features",
	keyTools:               "tools",
	keyNvext:               "nvext",
}

func lookupKey(k []byte) keyID {
	switch string(k) {
	case "model":
		return keyModel
	case "stream":
		return keyStream
	case "stream_options":
		return keyStreamOptions
	case "max_tokens":
		return keyMaxTokens
	case "max_completion_tokens":
		return keyMaxCompletionTokens
	case "max_output_tokens":
		return keyMaxOutputTokens
	case "max_new_tokens":
		return keyMaxNewTokens
	case "min_tokens":
		return keyMinTokens
	case "min_completion_tokens":
		return keyMinCompletionTokens
	case "n":
		return keyN
	case "best_of":
		return keyBestOf
	case "logprobs":
		return keyLogprobs
	case "prompt_logprobs":
		return keyPromptLogprobs
	case "return_logprob":
		return keyReturnLogprob
	case "return_routed_experts":
		return keyReturnExperts
	case "echo":
		return keyEcho
	case "prompt":
		return keyPrompt
	case "prompt_embeds":
		return keyPromptEmbeds
	case "messages":
		return keyMessages
	case "input":
		return keyInput
	case "input_ids":
		return keyInputIDs
	case "text":
		return keyText
	case "token_ids":
		return keyTokenIDs
	case "system":
		return keySystem
	case "instructions":
		return keyInstructions
	case "priority":
		return keyPriority
	case "cache_salt":
		return keyCacheSalt
	case "user":
		return keyUser
	case "session_id":
		return keySessionID
	case "conversation_id":
		return keyConversationID
	case "prompt_cache_key":
		return keyPromptCacheKey
	case "previous_response_id":
		return keyPreviousResponseID
	case "lora_path":
		return keyLoRAPath
	case "sampling_params":
		return keySamplingParams
	case "vllm_xargs":
		return keyXArgs
	case "request_id":
		return keyRequestID
	case "rid":
		return keyRID
	case "features":
		return keyFeatures
	case "tools":
		return keyTools
	case "nvext":
		return keyNvext
	}
	if isTransferField(k) {
		return keyTransfer
	}
	return keyOther
}

// isTransferField reports whether a member steers the transfer of KV blocks, the choice of a
// rank or what KV events report, which only the router may do.
func isTransferField(k []byte) bool {
	switch string(k) {
	case "kv_transfer_params", "ec_transfer_params", "disaggregated_params", "disagg_spec",
		"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key",
		"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "decode_tp_size",
		"disagg_request_id", "ctx_request_id", "ret_first_tok",
		"kv_cache_report_mode": // has vLLM report hits as stores, which the index would count
		return true
	}
	return false
}
