package front

import (
	"cmp"
	"encoding/json"
	"strings"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// forcedCall is the function that the answer must call.
type forcedCall struct {
	Name string
	// Before and After are the arguments around the text of the answer.
	Before, After string
	quiet         bool // the arguments have no place for the text
	named         bool // by name: vLLM then says "stop", not "tool_calls"
}

// Text is what a piece of the answer adds to the arguments.
func (f *forcedCall) Text(piece string) string {
	if f.quiet {
		return ""
	}
	q := rawjson.AppendString(nil, piece)
	return string(q[1 : len(q)-1]) // as it stands inside a JSON string
}

// Finish is the reason that the answer ends for, where the engine's is why.
func (f *forcedCall) Finish(why string) string {
	if f.named && why == "stop" || why == "length" {
		return why
	}
	return "tool_calls"
}

// readForcedCall is the call that tool_choice asks for, nil if it is free.
func readForcedCall(rawTools, rawChoice json.RawMessage) (*forcedCall, *Error) {
	var tools []struct {
		Type     string `json:"type"`
		Name     string `json:"name"` // Anthropic and Responses
		Function struct {
			Name       string          `json:"name"`
			Parameters json.RawMessage `json:"parameters"`
		} `json:"function"`
		Parameters  json.RawMessage `json:"parameters"`
		InputSchema json.RawMessage `json:"input_schema"`
	}
	if !absent(rawTools) && json.Unmarshal(rawTools, &tools) != nil {
		return nil, badRequest("tools", "tools must be a list of functions.")
	}
	if absent(rawChoice) {
		return nil, nil
	}
	want, named := "", false
	var word string
	var choice struct {
		Type     string `json:"type"`
		Name     string `json:"name"`
		Function struct {
			Name string `json:"name"`
		} `json:"function"`
	}
	switch {
	case json.Unmarshal(rawChoice, &word) == nil:
		switch word {
		case "auto", "none":
			return nil, nil
		case "required", "any":
		default:
			return nil, badRequest("tool_choice", "Invalid value for `tool_choice`: %s! Only named tools, \"none\", \"auto\" or \"required\" are supported.", word)
		}
	case json.Unmarshal(rawChoice, &choice) == nil:
		switch choice.Type {
		case "auto", "none":
			return nil, nil
		case "any":
		default:
			want, named = choice.Function.Name, true
			want = cmp.Or(want, choice.Name)
		}
	default:
		return nil, badRequest("tool_choice", "tool_choice must be a string or an object.")
	}
	if len(tools) == 0 {
		return nil, badRequest("tool_choice", "When using `tool_choice`, `tools` must be set.")
	}
	for _, t := range tools {
		name, schema := t.Function.Name, t.Function.Parameters
		if name == "" {
			name = t.Name
			if schema = t.Parameters; schema == nil {
				schema = t.InputSchema
			}
		}
		if want == "" || name == want {
			f := &forcedCall{Name: name, named: named}
			f.Before, f.After, f.quiet = arguments(schema)
			return f, nil
		}
	}
	return nil, badRequest("tool_choice", "The tool specified in `tool_choice` does not match any of the specified `tools`")
}

// arguments makes an object that fits a simple schema, in two halves around the
// answer's text, which becomes the value of the first text property; quiet if
// there is none.
func arguments(raw json.RawMessage) (before, after string, quiet bool) {
	var schema struct {
		Properties map[string]struct {
			Type string            `json:"type"`
			Enum []json.RawMessage `json:"enum"`
		} `json:"properties"`
		Required []string `json:"required"`
	}
	if absent(raw) || json.Unmarshal(raw, &schema) != nil {
		return `{"text": "`, `"}`, false
	}
	textKey := ""
	var fixed []string
	for _, k := range schema.Required {
		p := schema.Properties[k]
		key := string(rawjson.AppendString(nil, k)) + ": "
		switch {
		case len(p.Enum) > 0:
			fixed = append(fixed, key+string(p.Enum[0]))
		case p.Type == "integer" || p.Type == "number":
			fixed = append(fixed, key+"1")
		case p.Type == "boolean":
			fixed = append(fixed, key+"true")
		case p.Type == "array":
			fixed = append(fixed, key+"[]")
		case p.Type == "object":
			fixed = append(fixed, key+"{}")
		case textKey == "":
			textKey = key
		default:
			fixed = append(fixed, key+`""`)
		}
	}
	before = "{" + strings.Join(fixed, ", ")
	if textKey == "" {
		return before, "}", true
	}
	if len(fixed) > 0 {
		before += ", "
	}
	return before + textKey + `"`, `"}`, false
}
