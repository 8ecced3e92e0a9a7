// Package tokenize turns the prompt of a request into the token ids that an
// engine would compute for it.
//
// Two tokenizers do this: [Local] runs a model's tokenizer.json in process,
// and [Engine] asks an engine's POST /tokenize.
//
// Wire formats: POST /tokenize in the prompt form and the chat form as read
// from vLLM 0.32.0; SGLang answers the prompt form with the same keys. POST …/render (see
// [Engine.Render]) as read from vLLM 0.32.0 and 0.33.0.
package tokenize

import (
	"context"
	"errors"

	"github.com/dynctl/dynctl/internal/blockhash"
)

// Result is a tokenized prompt.
type Result struct {
	IDs    []uint32 // the prompt's token ids; not to be modified
	Tokens int      // the prompt's length in tokens
	Engine bool     // answered by an engine's /tokenize, not by this process
	Cached bool     // that answer was a kept one
	// Media are the images, sounds and videos among the ids, in the order of their
	// placeholders; of engines' answers only those of [Engine.Render] have them.
	Media []Media
}

// Media is an item of a prompt that is not text, as an engine names it.
type Media struct {
	Modality string // the engine's word, as "image"
	blockhash.Media
}

// Tokenizer computes the ids of a prompt. Implementations are safe for
// concurrent use.
type Tokenizer interface {
	// Prompt tokenizes plain text. addSpecial adds what the model's
	// post-processor adds to a prompt, such as a begin-of-sequence token.
	Prompt(ctx context.Context, text string, addSpecial bool) (Result, error)

	// Chat tokenizes the rendered form of an OpenAI chat completion request,
	// given as the raw JSON body.
	Chat(ctx context.Context, body []byte) (Result, error)
}

// Errors a caller branches on. They are wrapped with details.
var (
	// ErrUnsupported: this tokenizer cannot produce exact ids for the request
	// (an image in a message, a chat template it does not have). Another
	// tokenizer may.
	ErrUnsupported = errors.New("not supported by this tokenizer")

	// ErrTooLarge: the text or the answer is over a configured limit.
	ErrTooLarge = errors.New("over the size limit")

	// ErrBadRequest: the body is not a request that can be tokenized.
	ErrBadRequest = errors.New("bad request")

	// ErrUnavailable: the engine could not be reached, timed out, or answered
	// that it cannot tokenize, whatever the question; later it may.
	ErrUnavailable = errors.New("engine tokenizer unavailable")

	// ErrRefused: the engine refused this very request (see Refuses); trying the
	// same again will not work.
	ErrRefused = errors.New("engine refused to tokenize")

	// ErrBadAnswer: the engine answered 200 with something that is not a
	// tokenization.
	ErrBadAnswer = errors.New("engine gave a malformed tokenization")
)
