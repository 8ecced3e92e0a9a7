package front

import (
	"encoding/json"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// anthropicMessage is one message of /v1/messages.
type anthropicMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// anthropicBlock is one part of its content.
type anthropicBlock struct {
	Type    string          `json:"type"`
	Text    string          `json:"text"`
	ID      string          `json:"id"`
	UseID   string          `json:"tool_use_id"`
	Name    string          `json:"name"`
	Input   json.RawMessage `json:"input"`
	Content json.RawMessage `json:"content"`
}

// chatOfAnthropic makes a chat of the messages, as vLLM does: what tools found are
// messages before the user's.
func chatOfAnthropic(in []anthropicMessage) ([]chatMessage, *Error) {
	var out []chatMessage
	for _, m := range in {
		var blocks []anthropicBlock
		if json.Unmarshal(m.Content, &blocks) != nil {
			out = append(out, chatMessage{Role: m.Role, Content: m.Content})
			continue
		}
		turn := chatMessage{Role: m.Role}
		var parts, calls []any
		for _, b := range blocks {
			switch b.Type {
			case "text":
				parts = append(parts, map[string]string{"type": "text", "text": b.Text})
			case "thinking", "redacted_thinking":
			case "tool_use":
				args := "{}"
				if !absent(b.Input) {
					args = string(b.Input)
				}
				calls = append(calls, map[string]any{"id": b.ID, "type": "function", "function": map[string]string{"name": b.Name, "arguments": args}})
			case "tool_result":
				text := ""
				var found []anthropicBlock
				if json.Unmarshal(b.Content, &found) == nil {
					for i, f := range found {
						if i > 0 {
							text += "\n"
						}
						text += f.Text
					}
				} else if !absent(b.Content) && json.Unmarshal(b.Content, &text) != nil {
					return nil, badRequest("messages", "the content of a tool_result must be a string or a list.")
				}
				out = append(out, chatMessage{Role: "tool", ToolCallID: b.UseID, Content: rawjson.AppendString(nil, text)})
			default:
				return nil, badRequest("messages", "At most 0 %s(s) may be provided in one prompt.", b.Type)
			}
		}
		if calls != nil {
			turn.ToolCalls = rawJSON(calls)
		}
		if parts != nil {
			turn.Content = rawJSON(parts)
		}
		if parts != nil || m.Role != "user" {
			out = append(out, turn)
		}
	}
	return out, nil
}

// anthropicTools gives tools the shape of chat requests.
func anthropicTools(raw json.RawMessage) (json.RawMessage, *Error) {
	if absent(raw) {
		return nil, nil
	}
	var in []struct {
		Name        string         `json:"name"`
		Description *string        `json:"description"`
		Schema      map[string]any `json:"input_schema"`
		Strict      *bool          `json:"strict"`
	}
	if json.Unmarshal(raw, &in) != nil {
		return nil, badRequest("tools", "tools must be a list of tools.")
	}
	out := make([]any, len(in))
	for i, t := range in {
		if t.Schema == nil {
			return nil, badRequest("tools", "tools.%d.input_schema: Field required", i)
		}
		if t.Schema["type"] == nil {
			t.Schema["type"] = "object"
		}
		out[i] = map[string]any{"type": "function", "function": map[string]any{"name": t.Name, "description": t.Description, "parameters": t.Schema, "strict": t.Strict}}
	}
	return rawJSON(out), nil
}
