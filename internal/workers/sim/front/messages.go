package front

import (
	"encoding/json"
	"strings"

	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// chatMessage is one message of a chat request.
type chatMessage struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content"`
	ToolCalls  json.RawMessage `json:"tool_calls"`
	ToolCallID string          `json:"tool_call_id"`
	Name       string          `json:"name"`
}

// renderChat flattens messages to what the template takes.
func renderChat(in []chatMessage) ([]vocab.Message, *Error) {
	if len(in) == 0 {
		return nil, badRequest("messages", "messages must not be empty.")
	}
	out := make([]vocab.Message, len(in))
	for i, m := range in {
		if m.Role == "" {
			return nil, badRequest("messages", "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages.%d.role', 'msg': 'Field required'}", i)
		}
		text, err := contentText(m.Content)
		if err != nil {
			return nil, err
		}
		text += canonical(m.ToolCalls)
		out[i] = vocab.Message{Role: m.Role, Content: text}
	}
	return out, nil
}

// contentText is the text of a message's content: a string, or text parts.
func contentText(raw json.RawMessage) (string, *Error) {
	if absent(raw) {
		return "", nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text, nil
	}
	var parts []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if json.Unmarshal(raw, &parts) != nil {
		return "", badRequest("messages", "message content must be a string or a list of parts.")
	}
	var b strings.Builder
	for _, p := range parts {
		switch p.Type {
		case "text", "input_text", "output_text":
			b.WriteString(p.Text)
		default:
			return "", badRequest("messages", "At most 0 %s(s) may be provided in one prompt.", strings.TrimSuffix(p.Type, "_url"))
		}
	}
	return b.String(), nil
}

// templateTools is the compact JSON of tools for the template; empty for none.
func templateTools(raw json.RawMessage) string {
	if c := canonical(raw); c != "[]" {
		return c
	}
	return ""
}

// canonical is the compact JSON of a value whatever its spelling: templates see
// parsed values, in which arguments of calls are objects and null is as good as
// absent.
func canonical(raw json.RawMessage) string {
	var v any
	if absent(raw) || json.Unmarshal(raw, &v) != nil {
		return ""
	}
	return string(rawJSON(plain(v)))
}

func plain(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = plain(v[i])
		}
	case map[string]any:
		for k, x := range v {
			if text, ok := x.(string); ok && k == "arguments" {
				var parsed any
				if json.Unmarshal([]byte(text), &parsed) != nil {
					parsed = map[string]any{}
				}
				x = parsed
			}
			if x = plain(x); x == nil {
				delete(v, k)
			} else {
				v[k] = x
			}
		}
	}
	return v
}
