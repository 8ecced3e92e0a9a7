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
	keyTransfer // any member of transferFields
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
}

// transferFields steer the transfer of KV blocks or the choice of a rank, which
// only the router may do.
var transferFields = [...]string{
	"kv_transfer_params", "ec_transfer_params", "disaggregated_params", "disagg_spec",
	"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key",
	"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "decode_tp_size",
	"disagg_request_id", "ctx_request_id", "ret_first_tok",
}

// keySlots finds the number of a member by its name. It is an open hash table,
// because a request pays for a map of the runtime with each of its members.
var keySlots = func() (slots [256]keySlot) {
	add := func(name string, id keyID) {
		h := hashKey([]byte(name))
		for slots[h].name != "" {
			h++
		}
		slots[h] = keySlot{name, id}
	}
	for id, name := range keyNames {
		if name != "" {
			add(name, keyID(id))
		}
	}
	for _, name := range transferFields {
		add(name, keyTransfer)
	}
	return slots
}()

type keySlot struct {
	name string
	id   keyID
}

// hashKey is where a name belongs; nearly all of them have a slot of their own.
func hashKey(k []byte) uint8 { return 3*uint8(len(k)) + 17*k[0] + 11*k[len(k)-1] }

func lookupKey(k []byte) keyID {
	if len(k) == 0 {
		return keyOther
	}
	for h := hashKey(k); ; h++ {
		if s := &keySlots[h]; s.name == string(k) || s.name == "" {
			return s.id
		}
	}
}

func isTransferField(k []byte) bool { return lookupKey(k) == keyTransfer }
