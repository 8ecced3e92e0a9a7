package chat

import (
	"encoding/json"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/workers/sim/front/httpjson"
)

// AnthropicMessage is one message of /v1/messages.
type AnthropicMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// AnthropicBlock is one part of its content.
type AnthropicBlock struct {
	Type    string          `json:"type"`
	Text    string          `json:"text"`
	ID      string          `json:"id"`
	UseID   string          `json:"tool_use_id"`
	Name    string          `json:"name"`
	Input   json.RawMessage `json:"input"`
	Content json.RawMessage `json:"content"`
}

// FromAnthropic makes a chat of the messages, as vLLM does: what tools found are
// messages before the user's.
func FromAnthropic(in []AnthropicMessage) ([]Message, *httpjson.Error) {
	var out []Message
	for _, m := range in {
		var blocks []AnthropicBlock
		if json.Unmarshal(m.Content, &blocks) != nil {
			out = append(out, Message{Role: m.Role, Content: m.Content})
			continue
		}
		turn := Message{Role: m.Role}
		var parts, calls []any
		for _, b := range blocks {
			switch b.Type {
			case "text":
				parts = append(parts, map[string]string{"type": "text", "text": b.Text})
			case "thinking", "redacted_thinking":
			case "tool_use":
				args := "{}"
				if !httpjson.Absent(b.Input) {
					args = string(b.Input)
				}
				calls = append(calls, map[string]any{"id": b.ID, "type": "function", "function": map[string]string{"name": b.Name, "arguments": args}})
			case "tool_result":
				text := ""
				var found []AnthropicBlock
				if json.Unmarshal(b.Content, &found) == nil {
					for i, f := range found {
						if i > 0 {
							text += "\n"
						}
						text += f.Text
					}
				} else if !httpjson.Absent(b.Content) && json.Unmarshal(b.Content, &text) != nil {
					return nil, httpjson.BadRequest("messages", "the content of a tool_result must be a string or a list.")
				}
				out = append(out, Message{Role: "tool", ToolCallID: b.UseID, Content: rawjson.AppendString(nil, text)})
			default:
				return nil, httpjson.BadRequest("messages", "At most 0 %s(s) may be provided in one prompt.", b.Type)
			}
		}
		if calls != nil {
			turn.ToolCalls = httpjson.Raw(calls)
		}
		if parts != nil {
			turn.Content = httpjson.Raw(parts)
		}
		if parts != nil || m.Role != "user" {
			out = append(out, turn)
		}
	}
	return out, nil
}

// AnthropicTools gives tools the shape of chat requests.
func AnthropicTools(raw json.RawMessage) (json.RawMessage, *httpjson.Error) {
	if httpjson.Absent(raw) {
		return nil, nil
	}
	var in []struct {
		Name        string         `json:"name"`
		Description *string        `json:"description"`
		Schema      map[string]any `json:"input_schema"`
		Strict      *bool          `json:"strict"`
	}
	if json.Unmarshal(raw, &in) != nil {
		return nil, httpjson.BadRequest("tools", "tools must be a list of tools.")
	}
	out := make([]any, len(in))
	for i, t := range in {
		if t.Schema == nil {
			return nil, httpjson.BadRequest("tools", "tools.%d.input_schema: Field required", i)
		}
		if t.Schema["type"] == nil {
			t.Schema["type"] = "object"
		}
		out[i] = map[string]any{"type": "function", "function": map[string]any{"name": t.Name, "description": t.Description, "parameters": t.Schema, "strict": t.Strict}}
	}
	return httpjson.Raw(out), nil
}
