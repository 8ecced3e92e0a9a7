package disagg

import (
	"encoding/json"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// Event is the event by which the client gets the token, before those of the decode leg's
// stream: of a completion by a model, for a request with an id that came at a time.
func (t FirstToken) Event(request, model string, created time.Time) []byte {
	raw, err := json.Marshal(map[string]any{
		"id": "cmpl-" + request, "object": "text_completion", "created": created.Unix(), "model": model,
		"choices": []any{map[string]any{"index": 0, "text": t.Text, "logprobs": nil, "finish_reason": nil}},
	})
	if err != nil { // strings and numbers only: cannot happen
		return nil
	}
	return append(append([]byte("data: "), raw...), "\n\n"...)
}

// Before puts the token in front of the text of the decode leg's completion, and counts it
// as generated rather than as prompt.
func (t FirstToken) Before(body []byte) []byte {
	const text = "choices.0.text"
	body = rawjson.Put(body, text, api.RawString(t.Text+rawjson.Value(body).Get(text).String()))
	for path, add := range map[string]int{"usage.completion_tokens": 1, "usage.prompt_tokens": -1} {
		if n, ok := rawjson.Value(body).Get(path).Int(); ok {
			body = rawjson.Put(body, path, api.RawInt(int64(n+add)))
		}
	}
	return body
}
