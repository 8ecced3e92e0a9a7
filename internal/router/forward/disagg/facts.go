// Package disagg is the transfer of KV between engines: it knows what each
// connector puts into the bodies of the two legs and what the answer of a prefill
// must say, and what of a request matters for that.
//
// Begin of a Connector starts one dispatch: every call makes new transfer ids, and
// the Transfer that it returns can feed one decode leg only.
package disagg

import (
	"fmt"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// Force is a wish for a path from outside (header X-Dynctl-Path).
type Force string

// The wishes; the empty Force is Auto.
const (
	Auto        Force = "auto"
	ForceLocal  Force = "local"
	ForceRemote Force = "remote"
)

// ParseForce reads a wish; the empty string is Auto.
func ParseForce(s string) (Force, error) {
	switch f := Force(s); f {
	case "":
		return Auto, nil
	case Auto, ForceLocal, ForceRemote:
		return f, nil
	}
	return "", fmt.Errorf("unknown path %q (one of auto, local, remote)", s)
}

// Source says where a prompt's length comes from.
type Source string

// The sources, from the surest to none at all.
const (
	FromIDs      Source = "ids"      // the client sent token ids
	FromEngine   Source = "engine"   // an engine tokenized the prompt
	FromLocal    Source = "local"    // the router's own tokenizer did
	FromEstimate Source = "estimate" // code points / 4
	FromNothing  Source = "none"
)

// exact reports whether an engine must count ISL tokens. Only ids of the client
// are counted alike by everybody: /tokenize is not asked with all that a
// request's own template may look at (the choice of a tool, a format for the
// answer), and some models do not use a template for it at all.
func (f *Facts) exact() bool { return f.Source == FromIDs && !f.Truncated && f.ISL > 0 }

// Facts are what the plan needs to know of a request.
type Facts struct {
	Kind api.Kind
	// Splittable says that the endpoint may be served by two legs.
	Splittable bool
	// ISL is the prompt's length in tokens, from Source.
	ISL    int
	Source Source
	// N is the number of answers to each prompt, Prompts the number of
	// prompts in the body; 0 counts as 1.
	N, Prompts int
	// Truncated says that the engine may cut the prompt before it works on it.
	Truncated bool
	// Multimodal says that the prompt holds more than text.
	Multimodal bool
	// Continues says that the prompt goes on from a response that one decode
	// engine has, ServerTools that the engine may run tools and ask itself
	// again, with the same transfer parameters and a longer prompt.
	Continues, ServerTools bool
	// ThinkingBudget says that the answer's limit must be above a number of
	// tokens for thinking (Anthropic's API).
	ThinkingBudget bool
	// PromptLogprobs says that the answer has those of the prompt's own tokens,
	// which a rank that did not compute them cannot (echo with logprobs too).
	PromptLogprobs bool
	// MaxTokens is the longest answer asked for, -1 for no limit; MaxTokensKey is the
	// body's member with the limit.
	MaxTokens    int64
	MaxTokensKey string
	// MinTokens is the shortest answer asked for, -1 for none.
	MinTokens int64
	// StreamUsage says that the answer is a stream that reports the usage.
	StreamUsage bool
	// Logprobs and Echo are the client's wishes of those names.
	Logprobs, Echo bool
	// TokenIDs are the prompt's ids where they are known; LMCache's first
	// token mode needs them.
	TokenIDs []uint32
}

// Peer is the rank behind a candidate.
type Peer struct {
	Worker *workers.Worker
	Rank   *workers.Rank
}
