package tokenize

import (
	"fmt"

	"github.com/dynctl/dynctl/internal/router/tokenize/rawjson"
)

// separators stand between the parts of a routing text, so that moving text
// from one message to the next makes another text. They cannot occur in JSON
// strings' usual content.
const (
	sepField = "\x1e" // before each field of the body
	sepRole  = "\x1f" // after a message's role
)

// Text gives the routing text of a request to emit, in pieces and in order:
// what stands in for the prompt when there are no tokens, so that requests
// with a common head have a common head here. Pieces are at most as long as
// the strings in the body (no copy is made of long ones) and are valid during
// the call only; their boundaries carry no meaning. Everything a chat
// template may render counts: tools before messages, roles, contents, tool
// calls. Ids in a completion prompt are given as their JSON text.
func Text(kind Kind, body []byte, emit func([]byte)) error {
	var prompt, messages, system, tools, instructions, input []byte
	err := rawjson.Object(body, func(k, v []byte) bool {
		switch string(k) {
		case "prompt":
			prompt = v
		case "messages":
			messages = v
		case "system":
			system = v
		case "tools":
			tools = v
		case "instructions":
			instructions = v
		case "input":
			input = v
		}
		return true
	})
	if err != nil {
		return fmt.Errorf("routing text: %w: %w", ErrBadRequest, err)
	}
	t := textWalk{emit: emit, fieldSep: []byte(sepField), roleSep: []byte(sepRole)}
	switch kind {
	case KindCompletion:
		t.value(prompt)
	case KindMessages:
		t.field(tools)
		t.field(system)
		t.messages(messages)
	case KindResponses:
		t.field(tools)
		t.field(instructions)
		if rawjson.IsString(input) {
			t.field(input)
		} else {
			t.messages(input)
		}
	default:
		t.field(tools)
		t.messages(messages)
	}
	return nil
}

// textWalk gives raw values to emit as text.
type textWalk struct {
	emit              func([]byte)
	fieldSep, roleSep []byte
}

// field emits a value behind a separator, nothing for an absent one.
func (t textWalk) field(v []byte) {
	if len(v) == 0 || rawjson.IsNull(v) {
		return
	}
	t.emit(t.fieldSep)
	t.value(v)
}

// value emits a string's text, the text of a list's elements, and any other
// value as it stands.
func (t textWalk) value(v []byte) {
	switch {
	case len(v) == 0 || rawjson.IsNull(v):
	case v[0] == '"':
		rawjson.Pieces(v, t.emit)
	case v[0] == '[':
		first := true
		_ = rawjson.Array(v, func(e []byte) bool {
			if !first {
				t.emit(t.fieldSep)
			}
			first = false
			if text := textPart(e, true); text != nil {
				rawjson.Pieces(text, t.emit)
			} else if e[0] == '"' {
				rawjson.Pieces(e, t.emit)
			} else {
				t.emit(e)
			}
			return true
		})
	default:
		t.emit(v)
	}
}

func (t textWalk) messages(v []byte) {
	_ = rawjson.Array(v, func(m []byte) bool {
		var role, content, calls []byte
		isObject := rawjson.Object(m, func(k, v []byte) bool {
			switch string(k) {
			case "role":
				role = v
			case "content", "output":
				content = v
			case "tool_calls", "arguments":
				calls = v
			}
			return true
		}) == nil
		if !isObject {
			t.field(m)
			return true
		}
		t.emit(t.fieldSep)
		t.value(role)
		t.emit(t.roleSep)
		t.value(content)
		t.field(calls)
		return true
	})
}
