package disagg

import (
	"encoding/json"
	"time"

	"github.com/tidwall/gjson"

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
	put := func(path string, raw []byte) {
		v := gjson.GetBytes(body, path)
		if !v.Exists() || v.Index <= 0 {
			return
		}
		out := make([]byte, 0, len(body)+len(raw))
		out = append(append(append(out, body[:v.Index]...), raw...), body[v.Index+len(v.Raw):]...)
		body = out
	}
	put("choices.0.text", api.RawString(t.Text+gjson.GetBytes(body, "choices.0.text").String()))
	if n := gjson.GetBytes(body, "usage.completion_tokens"); n.Exists() {
		put("usage.completion_tokens", api.RawInt(n.Int()+1))
	}
	if n := gjson.GetBytes(body, "usage.prompt_tokens"); n.Exists() {
		put("usage.prompt_tokens", api.RawInt(n.Int()-1))
	}
	return body
}
