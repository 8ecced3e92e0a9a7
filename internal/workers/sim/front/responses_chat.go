package front

import (
	"encoding/json"
)

// inputItem is one item of the input: a message, or what an assistant did
// besides text.
type inputItem struct {
	Type      string          `json:"type"`
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	CallID    string          `json:"call_id"`
	Name      string          `json:"name"`
	Arguments string          `json:"arguments"`
	Output    json.RawMessage `json:"output"`
}

// chatOfItems makes a chat of input items, as vLLM does: an assistant's
// words and calls in a row are one message.
func chatOfItems(items []inputItem) ([]chatMessage, *Error) {
	var out []chatMessage
	joinable := func() *chatMessage {
		if n := len(out); n > 0 && out[n-1].Role == "assistant" {
			return &out[n-1]
		}
		out = append(out, chatMessage{Role: "assistant"})
		return &out[len(out)-1]
	}
	for _, it := range items {
		switch {
		case it.Type == "function_call":
			m := joinable()
			var calls []json.RawMessage
			if !absent(m.ToolCalls) && json.Unmarshal(m.ToolCalls, &calls) != nil {
				return nil, badRequest("input", "tool calls are no list.")
			}
			m.ToolCalls = rawJSON(append(calls, rawJSON(map[string]any{"id": it.CallID, "type": "function", "function": map[string]string{"name": it.Name, "arguments": it.Arguments}})))
		case it.Type == "function_call_output":
			out = append(out, chatMessage{Role: "tool", ToolCallID: it.CallID, Content: it.Output})
		case it.Type == "reasoning":
			joinable() // the template does not show what was thought
		case it.Role == "assistant":
			// Of an answer's parts only the first is taken.
			content := it.Content
			var parts []struct {
				Text json.RawMessage `json:"text"`
			}
			if json.Unmarshal(content, &parts) == nil && len(parts) > 0 {
				content = parts[0].Text
			}
			if m := joinable(); m.Content == nil {
				m.Content = content
			} else {
				out = append(out, chatMessage{Role: "assistant", Content: content})
			}
		case it.Role != "":
			out = append(out, chatMessage{Role: it.Role, Content: it.Content})
		default:
			return nil, badRequest("input", "Unsupported input item type: %s", it.Type)
		}
	}
	return out, nil
}

// itemTools gives the flat tools of the Responses API the shape of chat
// requests.
func itemTools(raw json.RawMessage) json.RawMessage {
	var in []map[string]any
	if absent(raw) || json.Unmarshal(raw, &in) != nil {
		return nil
	}
	var out []any
	for _, t := range in {
		if t["type"] == "function" {
			delete(t, "type")
			out = append(out, map[string]any{"type": "function", "function": t})
		}
	}
	return rawJSON(out)
}
