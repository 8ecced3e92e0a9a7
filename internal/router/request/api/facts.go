package api

import "github.com/dynctl/dynctl/internal/router/route"

// Facts are what the plan needs to know of a request.
type Facts struct {
	Kind Kind
	// Splittable says that the endpoint may be served by two legs.
	Splittable bool
	// ISL is the prompt's length in tokens, from Source.
	ISL    int
	Source route.Source
	// N is the number of answers to each prompt, Prompts the number of
	// prompts in the body; 0 counts as 1.
	N, Prompts int
	// Truncated says that the engine may cut the prompt before it works on it.
	Truncated bool
	// Multimodal says that the prompt holds more than text, Opaque that it holds something
	// that is no image, sound or video either. MediaTokens is how many of an
	// estimated ISL are those of media, by what was learned of others.
	Multimodal, Opaque bool
	MediaTokens        int
	// Continues says that the prompt continues from a response that one decode
	// engine has, ServerTools that the engine may run tools and ask itself
	// again, with the same transfer parameters and a longer prompt.
	Continues, ServerTools bool
	// ThinkingBudget says that the answer's limit must be above a number of
	// tokens for thinking (Anthropic's API).
	ThinkingBudget bool
	// PromptLogprobs says that the answer has those of the prompt's own tokens,
	// which a rank that did not compute them cannot (a completion's echo with logprobs, and
	// any echo of a chat, which vLLM turns into prompt_logprobs). RoutedExperts says the same
	// of the experts that computed each token of the prompt.
	PromptLogprobs, RoutedExperts bool
	// MaxTokens is the longest answer asked for, -1 for no limit; MaxTokensKey is the
	// body's member with the limit.
	MaxTokens    int64
	MaxTokensKey string
	// MinTokens is the shortest answer asked for, -1 for none.
	MinTokens int64
	// Output is how many tokens each answer is expected to have, at most MaxTokens where
	// there is that limit; 0 where nothing is known.
	Output int
	// StreamUsage says that the answer is a stream that reports the usage.
	StreamUsage bool
	// Logprobs and Echo are the client's wishes of those names.
	Logprobs, Echo bool
	// TokenIDs are the prompt's ids where they are known; LMCache's first
	// token mode needs them.
	TokenIDs []uint32
}

// ExpectOutput sets Output to n tokens within the limits of the request; 0 is for an unknown
// length.
func (f *Facts) ExpectOutput(n int) {
	if f.Output = n; n == 0 {
		return
	}
	if f.MaxTokens >= 0 {
		f.Output = min(n, int(f.MaxTokens))
	}
	f.Output = max(f.Output, int(f.MinTokens), 1)
}
