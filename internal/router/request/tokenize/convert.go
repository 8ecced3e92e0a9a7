package tokenize

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// chatBody is a chat request that renders to the same prompt as a request of
// another API. Texts stay as the client wrote them where they can.
type chatBody struct {
	Messages     []chatMessage   `json:"messages"`
	Tools        []chatTool      `json:"tools,omitempty"`
	Kwargs       json.RawMessage `json:"chat_template_kwargs,omitempty"`
	Effort       string          `json:"reasoning_effort,omitempty"`
	Generation   *bool           `json:"add_generation_prompt,omitempty"`
	ContinueLast bool            `json:"continue_final_message,omitempty"`
}

type chatMessage struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content,omitempty"`
	Reasoning  json.RawMessage `json:"reasoning,omitempty"`
	ToolCalls  []chatToolCall  `json:"tool_calls,omitempty"`
	ToolCallID *string         `json:"tool_call_id,omitempty"`
}

type chatToolCall struct {
	ID       string       `json:"id"`
	Type     string       `json:"type"`
	Function chatFunction `json:"function"`
}

type chatFunction struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

type chatTool struct {
	Type     string         `json:"type"`
	Function chatDefinition `json:"function"`
}

type chatDefinition struct {
	Name        string          `json:"name"`
	Description json.RawMessage `json:"description,omitempty"`
	Parameters  json.RawMessage `json:"parameters,omitempty"`
	Strict      json.RawMessage `json:"strict,omitempty"`
	Defer       json.RawMessage `json:"defer_loading,omitempty"`
}

type chatPart struct {
	Type string          `json:"type"`
	Text json.RawMessage `json:"text"`
}

// billing begins a block of the system prompt that is other in each request of
// one client; vLLM leaves it out, since it would spoil the prefix cache.
const billing = "x-anthropic-billing-header"

func unsupported(format string, a ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, a...), ErrUnsupported)
}

func absent(raw json.RawMessage) bool { return len(raw) == 0 || rawjson.IsNull(raw) }

func isText(raw json.RawMessage) bool { return len(raw) > 0 && raw[0] == '"' }

// given is raw, or nothing where it is null.
func given(raw json.RawMessage) json.RawMessage {
	if absent(raw) {
		return nil
	}
	return raw
}

func decoded(raw json.RawMessage) (string, error) {
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		return "", fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	return s, nil
}

func quoted(s string) json.RawMessage { return rawjson.AppendQuote(nil, s) }

// ChatOfMessages is the chat request that vLLM 0.32 makes of a request to
// /v1/messages (Anthropic's API), as far as it goes into the prompt. The error
// is an ErrUnsupported for what depends on the engine's chat template (system
// messages in the middle) or is more than text.
func ChatOfMessages(body []byte) ([]byte, error) {
	var q struct {
		System   json.RawMessage `json:"system"`
		Messages []struct {
			Role    string          `json:"role"`
			Content json.RawMessage `json:"content"`
		} `json:"messages"`
		Tools []struct {
			Name        string          `json:"name"`
			Description json.RawMessage `json:"description"`
			Schema      json.RawMessage `json:"input_schema"`
			Strict      json.RawMessage `json:"strict"`
			Defer       json.RawMessage `json:"defer_loading"`
		} `json:"tools"`
		Kwargs   json.RawMessage `json:"chat_template_kwargs"`
		Thinking struct {
			Type string `json:"type"`
		} `json:"thinking"`
		Output struct {
			Effort string `json:"effort"`
		} `json:"output_config"`
	}
	if err := json.Unmarshal(body, &q); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	out := chatBody{Kwargs: given(q.Kwargs), Effort: q.Output.Effort}
	if q.Thinking.Type == "disabled" {
		out.Effort = "none" // or the least effort, where templates do not know none
	}
	system, err := systemText(q.System)
	if err != nil {
		return nil, err
	}
	if system != "" {
		out.Messages = append(out.Messages, chatMessage{Role: "system", Content: quoted(system)})
	}
	for i, m := range q.Messages {
		if m.Role == "system" {
			return nil, unsupported("messages[%d]: a system message in the conversation", i)
		}
		if err := out.addBlocks(m.Role, m.Content); err != nil {
			return nil, fmt.Errorf("messages[%d]: %w", i, err)
		}
	}
	for _, t := range q.Tools {
		if absent(t.Schema) {
			return nil, unsupported("tool %q of another kind", t.Name)
		}
		out.Tools = append(out.Tools, chatTool{"function", chatDefinition{
			Name: t.Name, Description: given(t.Description), Parameters: withType(t.Schema), Strict: given(t.Strict), Defer: given(t.Defer),
		}})
	}
	return json.Marshal(&out)
}

// systemText joins the blocks of the system prompt.
func systemText(raw json.RawMessage) (string, error) {
	if absent(raw) {
		return "", nil
	}
	if isText(raw) {
		return decoded(raw)
	}
	var blocks []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if err := json.Unmarshal(raw, &blocks); err != nil {
		return "", fmt.Errorf("system: %w: %w", ErrBadRequest, err)
	}
	var b strings.Builder
	for _, p := range blocks {
		if p.Type == "text" && !strings.HasPrefix(p.Text, billing) {
			b.WriteString(p.Text)
		}
	}
	return b.String(), nil
}

// addBlocks adds one message of Anthropic's API: results of tools become
// messages of their own before it.
func (c *chatBody) addBlocks(role string, content json.RawMessage) error {
	m := chatMessage{Role: role}
	if isText(content) {
		m.Content = content
		c.Messages = append(c.Messages, m)
		return nil
	}
	var blocks []struct {
		Type      string          `json:"type"`
		Text      json.RawMessage `json:"text"`
		ID        string          `json:"id"`
		ToolUseID string          `json:"tool_use_id"`
		Name      string          `json:"name"`
		Input     json.RawMessage `json:"input"`
		Content   json.RawMessage `json:"content"`
		Thinking  *string         `json:"thinking"`
	}
	if err := json.Unmarshal(content, &blocks); err != nil {
		return fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	var parts []chatPart
	var reasoning strings.Builder
	thought := false
	for _, b := range blocks {
		switch b.Type {
		case "text":
			if isText(b.Text) && len(b.Text) > len(`""`) {
				parts = append(parts, chatPart{"text", b.Text})
			}
		case "thinking":
			if b.Thinking != nil {
				thought = true
				reasoning.WriteString(*b.Thinking)
			}
		case "redacted_thinking":
		case "tool_use":
			input := "{}"
			if !absent(b.Input) {
				input = string(b.Input)
			}
			m.ToolCalls = append(m.ToolCalls, chatToolCall{b.ID, "function", chatFunction{b.Name, input}})
		case "tool_result":
			if role != "user" {
				return unsupported("the result of a tool in a message of the %s", role)
			}
			result, err := toolResult(b.Content)
			if err != nil {
				return err
			}
			id := b.ToolUseID
			c.Messages = append(c.Messages, chatMessage{Role: "tool", ToolCallID: &id, Content: result})
		default:
			return unsupported("a block of type %q", b.Type)
		}
	}
	if thought {
		m.Reasoning = quoted(reasoning.String())
	}
	switch len(parts) {
	case 0:
		if role == "user" {
			return nil
		}
	case 1:
		m.Content = parts[0].Text
	default:
		raw, err := json.Marshal(parts)
		if err != nil {
			return err
		}
		m.Content = raw
	}
	c.Messages = append(c.Messages, m)
	return nil
}

// toolResult is the text of a tool's result.
func toolResult(raw json.RawMessage) (json.RawMessage, error) {
	switch {
	case absent(raw):
		return quoted(""), nil
	case isText(raw):
		return raw, nil
	}
	var items []struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	if err := json.Unmarshal(raw, &items); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	var texts []string
	for _, p := range items {
		if p.Type != "text" {
			return nil, unsupported("the result of a tool with a part of type %q", p.Type)
		}
		texts = append(texts, p.Text)
	}
	return quoted(strings.Join(texts, "\n")), nil
}

// withType adds the type that the schema of a tool's input may leave out.
func withType(schema json.RawMessage) json.RawMessage {
	has, empty := false, true
	if rawjson.Object(schema, func(k, _ []byte) bool {
		empty = false
		has = has || string(k) == "type"
		return !has
	}) != nil || has {
		return schema
	}
	head := strings.TrimRight(strings.TrimSuffix(strings.TrimSpace(string(schema)), "}"), " \t\r\n")
	if !empty {
		head += ","
	}
	return json.RawMessage(head + `"type":"object"}`)
}

// ChatOfResponses is the chat request that vLLM 0.32 makes of a request to
// /v1/responses without earlier responses, as far as it goes into the prompt. The
// error is an ErrUnsupported for what it makes by other means.
func ChatOfResponses(body []byte) ([]byte, error) {
	var q struct {
		Input        json.RawMessage   `json:"input"`
		Instructions json.RawMessage   `json:"instructions"`
		Previous     json.RawMessage   `json:"previous_response_id"`
		Messages     json.RawMessage   `json:"previous_input_messages"`
		Tools        []json.RawMessage `json:"tools"`
		Kwargs       json.RawMessage   `json:"chat_template_kwargs"`
		Reasoning    struct {
			Effort string `json:"effort"`
		} `json:"reasoning"`
	}
	if err := json.Unmarshal(body, &q); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	if !absent(q.Previous) || !absent(q.Messages) {
		return nil, unsupported("a response that continues an earlier one")
	}
	out := chatBody{Kwargs: given(q.Kwargs), Effort: q.Reasoning.Effort}
	if isText(q.Instructions) && len(q.Instructions) > len(`""`) {
		out.Messages = append(out.Messages, chatMessage{Role: "system", Content: q.Instructions})
	}
	if isText(q.Input) {
		out.Messages = append(out.Messages, chatMessage{Role: "user", Content: q.Input})
	} else if err := out.addItems(q.Input); err != nil {
		return nil, err
	}
	for i, raw := range q.Tools {
		var t struct {
			Type string `json:"type"`
			chatDefinition
		}
		if err := json.Unmarshal(raw, &t); err != nil {
			return nil, fmt.Errorf("tools[%d]: %w: %w", i, ErrBadRequest, err)
		}
		if t.Type != "function" {
			return nil, unsupported("tools[%d]: a tool of type %q", i, t.Type)
		}
		d := t.chatDefinition
		d.Description, d.Parameters, d.Strict, d.Defer = given(d.Description), given(d.Parameters), given(d.Strict), given(d.Defer)
		out.Tools = append(out.Tools, chatTool{"function", d})
	}
	return json.Marshal(&out)
}

type responseItem struct {
	Type      string          `json:"type"`
	Role      string          `json:"role"`
	Status    string          `json:"status"`
	Content   json.RawMessage `json:"content"`
	CallID    string          `json:"call_id"`
	Name      string          `json:"name"`
	Namespace string          `json:"namespace"`
	Arguments string          `json:"arguments"`
	Output    json.RawMessage `json:"output"`
	Summary   []chatPart      `json:"summary"`
	Encrypted json.RawMessage `json:"encrypted_content"`
}

// addItems adds the items of the Responses API. What an assistant thought, said
// and called are items of their own there and one message here.
func (c *chatBody) addItems(raw json.RawMessage) error {
	var items []responseItem
	if err := json.Unmarshal(raw, &items); err != nil {
		return fmt.Errorf("input: %w: %w", ErrBadRequest, err)
	}
	first := len(c.Messages)
	assistant := func() *chatMessage {
		if n := len(c.Messages); n > first && c.Messages[n-1].Role == "assistant" {
			return &c.Messages[n-1]
		}
		return nil
	}
	for i := range items {
		it := &items[i]
		last := assistant()
		switch {
		case it.Type == "function_call" && it.Namespace == "":
			call := chatToolCall{it.CallID, "function", chatFunction{it.Name, it.Arguments}}
			if last == nil {
				c.Messages = append(c.Messages, chatMessage{Role: "assistant"})
				last = assistant()
			}
			last.ToolCalls = append(last.ToolCalls, call)
		case it.Type == "function_call_output":
			if !isText(it.Output) {
				return unsupported("input[%d]: the output of a function that is no text", i)
			}
			c.Messages = append(c.Messages, chatMessage{Role: "tool", ToolCallID: &it.CallID, Content: it.Output})
		case it.Type == "reasoning" && absent(it.Encrypted):
			thought, err := firstText(it.Content)
			if err != nil {
				return fmt.Errorf("input[%d]: %w", i, err)
			}
			if thought == nil && len(it.Summary) > 0 {
				thought = it.Summary[0].Text
			}
			if thought == nil {
				thought = quoted("")
			}
			if last != nil && last.Reasoning == nil {
				last.Reasoning = thought
			} else {
				c.Messages = append(c.Messages, chatMessage{Role: "assistant", Reasoning: thought})
			}
		case it.Role == "assistant" && (it.Type == "" || it.Type == "message"):
			said, err := firstText(it.Content)
			if err != nil || said == nil {
				return unsupported("input[%d]: an answer without text", i)
			}
			if last != nil && last.Content == nil {
				last.Content = said
			} else {
				c.Messages = append(c.Messages, chatMessage{Role: "assistant", Content: said})
			}
		case it.Role != "" && (it.Type == "" || it.Type == "message"):
			content, err := textParts(it.Content)
			if err != nil {
				return fmt.Errorf("input[%d]: %w", i, err)
			}
			c.Messages = append(c.Messages, chatMessage{Role: it.Role, Content: content})
		default:
			return unsupported("input[%d]: an item of type %q", i, it.Type)
		}
	}
	if n := len(items); n > 0 {
		switch it := &items[n-1]; {
		case it.Status != "in_progress" && it.Status != "incomplete":
		case it.Type == "", it.Type == "message", it.Type == "reasoning":
			no := false
			c.Generation, c.ContinueLast = &no, true
		}
	}
	return nil
}

// partsOf are the parts of a content, or its text; neither for none.
func partsOf(raw json.RawMessage) (parts []chatPart, text json.RawMessage, err error) {
	if absent(raw) || isText(raw) {
		return nil, given(raw), nil
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	return parts, nil, nil
}

// firstText is the text of a content, or of its first part; nil for none.
func firstText(raw json.RawMessage) (json.RawMessage, error) {
	parts, text, err := partsOf(raw)
	if len(parts) > 0 && isText(parts[0].Text) {
		text = parts[0].Text
	}
	return text, err
}

// textParts gives the parts of a content their names in a chat.
func textParts(raw json.RawMessage) (json.RawMessage, error) {
	parts, text, err := partsOf(raw)
	if err != nil || parts == nil {
		return text, err
	}
	for i := range parts {
		switch parts[i].Type {
		case "input_text", "output_text", "text":
			parts[i].Type = "text"
		default:
			return nil, unsupported("a part of type %q", parts[i].Type)
		}
	}
	return json.Marshal(parts)
}
