package resume

import (
	"strings"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// Refusal is why a stream cannot be continued elsewhere: a closed set, fit for metric labels.
// Empty is none.
type Refusal string

// The refusals that a request brings with it.
const (
	// Endpoint: only completions and chats are continued.
	Endpoint Refusal = "endpoint"
	// Several: more than one prompt, or more than one answer (n, best_of, beams).
	Several Refusal = "several_answers"
	// Penalties: presence and frequency penalties count generated tokens only, which
	// are a part of the prompt at the other engine.
	Penalties Refusal = "penalties"
	// Seed: a seeded draw starts over.
	Seed Refusal = "seed"
	// Guided: a grammar starts over.
	Guided Refusal = "guided_decoding"
	// Logprobs: those of the tokens before cannot be had again.
	Logprobs Refusal = "logprobs"
	// Echo: the prompt is a part of the answer.
	Echo Refusal = "echo"
	// Tools and Reasoning: their parsers start over.
	Tools     Refusal = "tools"
	Reasoning Refusal = "reasoning"
	// Stops: the beginning of a stop string may be text that the engine has held back, and
	// what text that is cannot be known here.
	Stops Refusal = "stop_strings"
	// Prompt: it is cut by the engine, or is not of text and ids alone.
	Prompt Refusal = "prompt"
	// Field: the request has a member that nothing is known of, or whose state cannot be
	// moved.
	Field Refusal = "other_field"
	// TooLong: the request or its answer is longer than is kept for a stream.
	TooLong Refusal = "too_long"
)

// The refusals that the stream itself brings.
const (
	// NoIDs: the engine reports no token ids, or not all of them.
	NoIDs Refusal = "no_ids"
	// Unmatched: which ids the text that was sent belongs to is not known.
	Unmatched Refusal = "tokens_unmatched"
	// Unexpected: an event that is not a completion's, or too large.
	Unexpected Refusal = "unexpected_event"
	// FirstToken: the prefill's own first token is a part of the answer.
	FirstToken Refusal = "first_token_of_prefill"
	// Silent: of a chat nothing was sent yet, and its first tokens may be a parser's.
	Silent Refusal = "nothing_sent"
	// Memory: none is left for what is kept of the stream.
	Memory Refusal = "memory"
	// SentIDs: the client requested ids, and has some of a character that was cut.
	SentIDs Refusal = "ids_sent"
)

var words = map[Refusal]string{
	Endpoint:   "only streamed completions and chats are continued",
	Several:    "it has more than one answer",
	Penalties:  "presence or frequency penalties count generated tokens only",
	Seed:       "it has a seed, and another engine would draw from the start",
	Guided:     "guided decoding would start over",
	Logprobs:   "it wants log probabilities",
	Echo:       "it echoes the prompt",
	Tools:      "its tool parser would start over",
	Reasoning:  "its reasoning parser would start over",
	Stops:      "it has stop strings, which the router cannot match across two engines",
	Prompt:     "the engine may truncate its prompt, or the prompt is more than text",
	Field:      "it has a member that the router cannot continue",
	TooLong:    "its prompt or its answer is longer than the router keeps",
	NoIDs:      "the engine does not report token ids",
	Unmatched:  "it is unknown which tokens the client's text ends with",
	Unexpected: "the engine sent an event that is too large, or unknown in a completion",
	FirstToken: "its first token came from the prefill engine",
	Silent:     "the client has no text yet, and the first tokens may be a parser's",
	Memory:     "the memory for requests is used up (limits.body_memory)",
	SentIDs:    "the client requested token ids and has those of an incomplete character",
}

// String is the refusal in words.
func (r Refusal) String() string { return words[r] }

// MaxPrompt is the longest prompt in tokens that is kept for a stream.
const MaxPrompt = 128 << 10

// maxRest bounds what is kept of a request besides its prompt in bytes, maxAnswer the
// tokens of an answer.
const (
	maxRest   = 64 << 10
	maxAnswer = 1 << 20
)

// Rule says what a request's member means for a continuation.
type rule struct {
	refusal Refusal
	// harmless reports whether a value changes nothing; nil if none does.
	harmless func(raw string) bool
}

func among(list ...string) func(string) bool {
	return func(raw string) bool {
		for _, v := range list {
			if raw == v {
				return true
			}
		}
		return false
	}
}

var (
	anyValue = func(string) bool { return true }
	zero     = func(raw string) bool { return raw == "null" || strings.Trim(raw, "-0.") == "" }
	off      = among("null", "false")
	empty    = among("null", "[]", "{}", `""`)
	single   = among("null", "1")
)

// rules are the members of a completion that are known. Any other is refused.
var rules = map[string]rule{
	"model": {harmless: anyValue}, "prompt": {harmless: anyValue}, "stream": {harmless: anyValue}, "stream_options": {harmless: anyValue},
	"max_tokens": {harmless: anyValue}, "min_tokens": {harmless: anyValue}, "ignore_eos": {harmless: anyValue},
	"temperature": {harmless: anyValue}, "top_p": {harmless: anyValue}, "top_k": {harmless: anyValue}, "min_p": {harmless: anyValue},
	"repetition_penalty": {harmless: anyValue}, // it counts the prompt, too
	"stop_token_ids":     {harmless: anyValue}, "logit_bias": {harmless: anyValue}, "allowed_token_ids": {harmless: anyValue},
	"skip_special_tokens": {harmless: anyValue}, "add_special_tokens": {harmless: anyValue},
	"user": {harmless: anyValue}, "session_id": {harmless: anyValue}, "priority": {harmless: anyValue}, "cache_salt": {harmless: anyValue},
	"return_token_ids": {harmless: anyValue}, "stream_interval": {harmless: anyValue},

	"presence_penalty": {Penalties, zero}, "frequency_penalty": {Penalties, zero},
	"seed": {refusal: Seed, harmless: among("null")}, // unless greedy
	"n":    {Several, single}, "best_of": {Several, single}, "use_beam_search": {Several, off},
	"response_format": {Guided, among("null", `{"type":"text"}`, `{"type": "text"}`)}, "structured_outputs": {Guided, empty},
	"guided_json": {Guided, empty}, "guided_regex": {Guided, empty}, "guided_choice": {Guided, empty}, "guided_grammar": {Guided, empty},
	"logprobs": {Logprobs, among("null", "false")}, "prompt_logprobs": {Logprobs, among("null")},
	"echo": {Echo, off}, "suffix": {Prompt, empty}, "truncate_prompt_tokens": {Prompt, among("null")}, "prompt_embeds": {Prompt, empty},
	"stop": {Stops, empty}, "include_stop_str_in_output": {harmless: anyValue},
	"tools": {Tools, empty}, "tool_choice": {Tools, among("null", `"none"`)},
	"thinking_token_budget": {Reasoning, among("null", "-1")}, "reasoning_effort": {Reasoning, among("null")},
}

// ofChats are the members that chats have besides, or in another way. Those that make
// the prompt stand in its ids.
var ofChats = map[string]rule{
	"messages": {harmless: anyValue}, "chat_template": {harmless: anyValue}, "chat_template_kwargs": {harmless: anyValue}, "documents": {harmless: anyValue},
	"add_generation_prompt": {harmless: anyValue}, "max_completion_tokens": {harmless: anyValue}, "parallel_tool_calls": {harmless: anyValue},
	"metadata": {harmless: anyValue}, "store": {harmless: anyValue}, "prompt_cache_key": {harmless: anyValue},
	"top_logprobs": {Logprobs, among("null", "0")}, "prompt": {refusal: Prompt, harmless: among("null")},
}

// ofNative are the members of SGLang's /generate (GenerateReqInput of 0.5), ofSampling
// those of its sampling_params. Whether its repetition penalty counts the prompt differs
// between versions.
var (
	ofNative = map[string]rule{
		"model": {harmless: anyValue}, "input_ids": {harmless: anyValue}, "text": {Prompt, among("null")}, "stream": {harmless: anyValue},
		"rid": {harmless: anyValue}, "lora_path": {harmless: anyValue}, "priority": {harmless: anyValue}, "extra_key": {harmless: anyValue},
		"log_metrics": {harmless: anyValue}, "no_logs": {harmless: anyValue}, "logprob_start_len": {harmless: anyValue},
		"return_text_in_logprobs": {harmless: anyValue}, "return_logprob": {Logprobs, off}, "top_logprobs_num": {Logprobs, zero},
		"token_ids_logprob": {Logprobs, empty}, "return_hidden_states": {Field, off},
	}
	ofSampling = map[string]rule{
		"max_new_tokens": {harmless: anyValue}, "min_new_tokens": {harmless: anyValue}, "ignore_eos": {harmless: anyValue},
		"temperature": {harmless: anyValue}, "top_p": {harmless: anyValue}, "top_k": {harmless: anyValue}, "min_p": {harmless: anyValue},
		"stop_token_ids": {harmless: anyValue}, "logit_bias": {harmless: anyValue}, "skip_special_tokens": {harmless: anyValue},
		"spaces_between_special_tokens": {harmless: anyValue}, "no_stop_trim": {harmless: anyValue},
		"presence_penalty": {Penalties, zero}, "frequency_penalty": {Penalties, zero}, "repetition_penalty": {Penalties, among("null", "1", "1.0")},
		"n": {Several, single}, "stop": {Stops, empty}, "stop_regex": {Stops, empty}, "sampling_seed": {Seed, among("null")},
		"json_schema": {Guided, empty}, "regex": {Guided, empty}, "ebnf": {Guided, empty}, "structural_tag": {Guided, empty},
		"custom_params": {Field, empty},
	}
)

// kept are the members of a chat that its rest has, too; the others make its prompt, or
// say nothing of the answer.
func kept(member string) bool {
	switch member {
	case "model", "stream", "stream_options", "stop", "min_tokens", "ignore_eos", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
		"stop_token_ids", "logit_bias", "allowed_token_ids", "skip_special_tokens", "user", "session_id", "priority", "cache_salt", "return_token_ids", "stream_interval", "seed":
		return true
	}
	return false
}

// Judge says why the stream that a request asks for could not be continued, and which member
// of it, if one does, says so. watched says that its stop strings are.
func Judge(v *api.View, watched bool) (why Refusal, member string) {
	switch {
	case v.Kind != api.Completion && v.Kind != api.Chat && v.Kind != api.SGLangGenerate || !v.Stream:
		return Endpoint, ""
	case v.Prompts() != 1:
		return Several, "prompt"
	case v.Multimodal:
		return Prompt, ""
	case v.Kind == api.SGLangGenerate && v.Prompt == api.PromptText:
		return NoIDs, v.PromptKey
	case v.Kind == api.SGLangGenerate && v.Prompt != api.PromptIDs:
		return Prompt, v.PromptKey
	case v.Prompt != api.PromptMessages && v.Prompt != api.PromptText && v.Prompt != api.PromptIDs && v.Prompt != api.PromptTexts && v.Prompt != api.PromptIDLists:
		return Prompt, "prompt"
	case v.EstimateTokens() > MaxPrompt:
		return TooLong, "prompt"
	case len(v.Body)-v.PromptValue.Len() > maxRest:
		return TooLong, ""
	}
	tables := []map[string]rule{rules}
	switch v.Kind {
	case api.Chat:
		tables = []map[string]rule{ofChats, rules}
	case api.SGLangGenerate:
		tables = []map[string]rule{ofNative}
	}
	for i := range v.Fields {
		name, raw := v.Member(i)
		if v.Kind == api.SGLangGenerate && name == "sampling_params" {
			if why, member := judgeSampling(raw, watched); why != "" {
				return why, member
			}
			continue
		}
		if why := judge(tables, name, raw); why != "" && (why != Seed || !greedy(v)) && (why != Stops || !watched) {
			return why, name
		}
	}
	return "", ""
}

// judge says why a member is an obstacle, by the first table that knows it.
func judge(tables []map[string]rule, name string, raw []byte) Refusal {
	for _, table := range tables {
		switch r, known := table[name]; {
		case !known:
		case r.harmless != nil && r.harmless(string(raw)):
			return ""
		default:
			return r.refusal
		}
	}
	if string(raw) == "null" {
		return ""
	}
	return Field
}

// judgeSampling judges the sampling_params of SGLang's /generate.
func judgeSampling(raw []byte, watched bool) (why Refusal, member string) {
	if string(raw) == "null" {
		return "", ""
	}
	err := rawjson.Object(raw, func(k, v []byte) bool {
		if member = string(k); watched && member == "stop" {
			return true
		}
		why = judge([]map[string]rule{ofSampling}, member, v)
		return why == ""
	})
	switch {
	case why != "":
		return why, "sampling_params." + member
	case err != nil:
		return Field, "sampling_params"
	}
	return "", ""
}

// greedy reports whether a request draws nothing.
func greedy(v *api.View) bool {
	raw, ok := v.Get("temperature")
	return ok && string(raw) != "null" && zero(string(raw))
}
