// Package sse reads along with event streams while they are forwarded. It
// never changes a byte: a Scanner is shown the pieces of a stream, split
// anywhere, and says what they held: tokens, the finish reason, usage, an
// error, the end. A Head holds back what comes before the first token, a Gate
// the beginning of an event until its end.
//
// Streams are server-sent events (WHATWG HTML, 9.2) as OpenAI's, Anthropic's,
// vLLM's (0.32) and SGLang's (0.5) APIs send them: lines that end in LF or
// CRLF, "data:" with one JSON object for each event, "event:" with a type in
// the Responses and Messages APIs, comments as keep-alives, and "[DONE]" at
// the end of OpenAI's. Payloads are walked, not decoded; nothing is allocated
// for an event that arrives in one piece.
package sse
