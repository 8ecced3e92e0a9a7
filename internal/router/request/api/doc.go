// Package api is the router's HTTP vocabulary: which paths exist, what a
// request says, how its body is changed without being re-encoded, and how an
// error is written.
//
// A request body is looked at one time. [View.Parse] checks that it is valid JSON (RFC 8259,
// depth and sizes bounded), refuses duplicates of the members that the router reads or writes,
// checks the types of those, and remembers where each top-level member stands. A change is a
// list of [Edit] values that [Splice] (or [View.Segments], without a copy) applies to the bytes:
// what is not edited stays byte for byte as the client wrote it.
//
// Wire formats: OpenAI (chat, completions, responses, embeddings, models),
// Anthropic messages, vLLM 0.32 (/inference/v1/generate, /tokenize, /score,
// /rerank, /pooling, /classify), SGLang 0.5 (/generate).
package api
