package sse

import (
	"bytes"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// Usage is an engine's own count of tokens; -1 is not reported.
type Usage struct {
	PromptTokens, CompletionTokens, CachedTokens int64
}

// noUsage is what is known before an engine reports any.
var noUsage = Usage{-1, -1, -1}

// maxError is how much of an error event is kept, in bytes.
const maxError = 2 << 10

// payload is what one event's JSON says.
type payload struct {
	token  bool // holds generated content
	fails  bool // is an error
	ends   bool // the last event of its protocol
	empty  bool // has an empty list of choices
	finish []byte
	usage  Usage
}

// members calls on for each member of the object v, up to what is odd.
func members(v []byte, on func(key, value []byte)) {
	w := rawjson.Walk(v)
	for more := w.Open('{'); more; more = w.Next() {
		on(w.Key(), w.Value())
	}
}

// member is the value of a member of the object v; nil for none.
func member(v []byte, name string) (value []byte) {
	members(v, func(k, v []byte) {
		if string(k) == name {
			value = v
		}
	})
	return value
}

// filled reports whether a value is there and is neither null nor empty.
func filled(v []byte) bool {
	if len(v) == 0 {
		return false
	}
	switch v[0] {
	case '"':
		return len(v) > 2
	case '{', '[':
		w := rawjson.Walk(v)
		return w.Open(v[0])
	case 'n', 'f':
		return false
	}
	return true
}

func inner(v []byte) []byte {
	if len(v) >= 2 && v[0] == '"' && v[len(v)-1] == '"' {
		return v[1 : len(v)-1]
	}
	return nil
}

// whole reads a number that is a count; -1 for anything else.
func whole(v []byte) int64 {
	if len(v) == 0 || len(v) > 18 {
		return -1
	}
	var n int64
	for _, c := range v {
		if c < '0' || c > '9' {
			return -1
		}
		n = n*10 + int64(c-'0')
	}
	return n
}

// read walks one event's payload, or the body of an answer that is not
// streamed.
func (p *payload) read(b []byte) {
	*p = payload{usage: noUsage}
	var kind, response, message, delta []byte
	w := rawjson.Walk(b)
	for more := w.Open('{'); more; more = w.Next() {
		switch string(w.Key()) {
		case "choices":
			p.choices(&w)
		case "error":
			if v := w.Value(); filled(v) {
				p.fails = true
			}
		case "usage":
			p.count(w.Value())
		case "type":
			kind = inner(w.Value())
		case "response":
			response = w.Value()
		case "message":
			message = w.Value()
		case "delta":
			delta = w.Value()
		case "text", "output_ids", "content", "output", "token_ids":
			// SGLang's native answer, and the bodies of answers that are not
			// streamed.
			if filled(w.Value()) {
				p.token = true
			}
		case "meta_info":
			p.meta(w.Value())
		case "stop_reason":
			p.stop(w.Value())
		case "status":
			if v := inner(w.Value()); string(v) == "completed" || string(v) == "incomplete" || string(v) == "failed" {
				p.finish = v
			}
		default:
			w.Value()
		}
	}
	if kind != nil {
		p.typed(kind, response, message, delta)
	}
}

// choices reads OpenAI's list of choices.
func (p *payload) choices(w *rawjson.Walker) {
	if !w.At('[') {
		w.Value() // null, or nothing that is known
		return
	}
	p.empty = true
	for more := w.Open('['); more; more = w.Next() {
		p.empty = false
		for inside := w.Open('{'); inside; inside = w.Next() {
			switch string(w.Key()) {
			case "delta", "message":
				p.delta(w)
			case "text":
				// Completions have no chunk without a token; a token's text may
				// be empty, when it is a part of a character.
				w.Value()
				p.token = true
			case "token_ids":
				if filled(w.Value()) {
					p.token = true
				}
			case "finish_reason":
				p.stop(w.Value())
			default:
				w.Value()
			}
		}
		w.Close('}')
	}
	w.Close(']')
}

// delta reads what a choice says, or what is new of it.
func (p *payload) delta(w *rawjson.Walker) {
	if !w.At('{') {
		w.Value()
		return
	}
	for more := w.Open('{'); more; more = w.Next() {
		switch string(w.Key()) {
		case "content", "reasoning_content", "reasoning", "tool_calls", "refusal", "function_call", "audio":
			if filled(w.Value()) {
				p.token = true
			}
		default:
			w.Value()
		}
	}
	w.Close('}')
}

// stop reads a finish reason: a string, or in SGLang's native answer an object
// with a type.
func (p *payload) stop(v []byte) {
	if len(v) == 0 || v[0] == 'n' {
		return
	}
	if v[0] == '{' {
		p.finish = inner(member(v, "type"))
	} else {
		p.finish = inner(v)
	}
	if string(p.finish) == "abort" || string(p.finish) == "error" {
		p.fails = true
	}
}

// count reads an engine's usage. In the Messages API the input tokens are those
// that are neither read from the cache nor written to it.
func (p *payload) count(v []byte) {
	beside := int64(0)
	defer func() {
		if p.usage.PromptTokens >= 0 {
			p.usage.PromptTokens += beside
		}
	}()
	members(v, func(key, value []byte) {
		switch string(key) {
		case "prompt_tokens", "input_tokens":
			p.usage.PromptTokens = whole(value)
		case "completion_tokens", "output_tokens":
			p.usage.CompletionTokens = whole(value)
		case "cache_read_input_tokens":
			if n := whole(value); n >= 0 {
				p.usage.CachedTokens = n
				beside += n
			}
		case "cache_creation_input_tokens":
			beside += max(0, whole(value))
		case "cached_tokens":
			if n := whole(value); n >= 0 {
				p.usage.CachedTokens = n
			}
		case "prompt_tokens_details", "input_tokens_details":
			if cached := member(value, "cached_tokens"); cached != nil {
				p.usage.CachedTokens = whole(cached)
			}
		}
	})
}

func (p *payload) meta(v []byte) {
	p.count(v)
	p.stop(member(v, "finish_reason"))
}

// typed reads the events of the Responses and Messages APIs, which say in
// "type" what they are.
func (p *payload) typed(kind, response, message, delta []byte) {
	switch string(kind) {
	case "error":
		p.fails = true
	case "response.failed":
		p.fails, p.ends = true, true
		p.nested(response)
	case "response.completed", "response.incomplete":
		p.ends = true
		p.nested(response)
	case "message_start":
		p.nested(message)
		p.usage.CompletionTokens = -1 // of tokens that are still to come
	case "message":
		// the whole answer of the Messages API, not streamed
	case "message_delta":
		p.stop(member(delta, "stop_reason"))
	case "message_stop":
		p.ends = true
	case "content_block_delta":
		p.token = true
	default:
		// Events that close a part repeat its text; only deltas are new.
		p.token = bytes.HasPrefix(kind, []byte("response.")) && bytes.HasSuffix(kind, []byte(".delta"))
	}
}

func (p *payload) nested(v []byte) {
	members(v, func(key, value []byte) {
		switch string(key) {
		case "usage":
			p.count(value)
		case "status":
			if s := inner(value); string(s) != "in_progress" {
				p.finish = s
			}
		}
	})
}

// reasons are the finish reasons that all engines use.
var reasons = []string{"stop", "length", "tool_calls", "end_turn", "max_tokens", "completed"}

// reason is a finish reason as a string, without a new one for the usual ones.
func reason(b []byte) string {
	for _, usual := range reasons {
		if string(b) == usual {
			return usual
		}
	}
	return string(b[:min(len(b), 64)])
}

// merge takes over what a later event reports.
func (u *Usage) merge(n Usage) {
	if n.PromptTokens >= 0 {
		u.PromptTokens = n.PromptTokens
	}
	if n.CompletionTokens >= 0 {
		u.CompletionTokens = n.CompletionTokens
	}
	if n.CachedTokens >= 0 {
		u.CachedTokens = n.CachedTokens
	}
}
