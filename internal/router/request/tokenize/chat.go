package tokenize

import (
	"fmt"
	"strings"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/tokenize/jinja"
)

// chatRequest is what of a chat request goes into its prompt.
type chatRequest struct {
	messages   *jinja.List
	tools      *jinja.List // nil for none
	kwargs     *jinja.Dict
	generation bool
	addSpecial bool
}

// parseChat reads an OpenAI chat request. What would make the engine render
// something else than the template over text is ErrUnsupported.
func parseChat(body []byte) (*chatRequest, error) {
	r := &chatRequest{generation: true}
	var err error
	bad := func(format string, a ...any) {
		if err == nil {
			err = fmt.Errorf("%s: %w", fmt.Sprintf(format, a...), ErrBadRequest)
		}
	}
	value := func(k string, v []byte) any {
		x, e := jinja.ParseJSON(v)
		if e != nil {
			bad("%s: %v", k, e)
		}
		return x
	}
	walk := rawjson.Object(body, func(k, v []byte) bool {
		if rawjson.IsNull(v) {
			return true
		}
		key := string(k)
		switch key {
		case "messages", "tools":
			l, ok := value(key, v).(*jinja.List)
			if !ok {
				bad("%s is no list", key)
			} else if key == "tools" {
				r.tools = l
			} else {
				r.messages = l
			}
		case "chat_template_kwargs":
			d, ok := value(key, v).(*jinja.Dict)
			if !ok {
				bad("%s is no object", key)
			}
			r.kwargs = d
		case "add_generation_prompt":
			r.generation = string(v) == "true"
		case "add_special_tokens":
			r.addSpecial = string(v) == "true"
		case "continue_final_message":
			if string(v) == "true" {
				err = fmt.Errorf("%s: %w", key, ErrUnsupported)
			}
		case "chat_template", "documents", "reasoning_effort", "mm_processor_kwargs", "media_io_kwargs":
			err = fmt.Errorf("%s: %w", key, ErrUnsupported)
		}
		return err == nil
	})
	switch {
	case walk != nil:
		return nil, fmt.Errorf("%w: %w", ErrBadRequest, walk)
	case err != nil:
		return nil, err
	case r.messages == nil:
		return nil, fmt.Errorf("no messages: %w", ErrBadRequest)
	}
	return r, nil
}

// vars builds a template's variables as vLLM 0.32 does: messages are reduced
// to known keys, contents become strings (or, for a template that loops over
// them, lists of parts), arguments of tool calls become objects, tools get
// their schema's key order.
func (r *chatRequest) vars(parts bool, special *jinja.Dict) (*jinja.Dict, error) {
	out := &jinja.List{Items: make([]any, 0, len(r.messages.Items))}
	for i, m := range r.messages.Items {
		msg, ok := m.(*jinja.Dict)
		if !ok {
			return nil, fmt.Errorf("message %d is no object: %w", i, ErrBadRequest)
		}
		n, err := message(msg, parts)
		if err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
		out.Items = append(out.Items, n)
	}
	vars := &jinja.Dict{}
	for i, k := range special.Keys {
		vars.Set(k, special.Vals[i])
	}
	vars.Set("messages", out)
	vars.Set("tools", nil)
	if r.tools != nil {
		tools := &jinja.List{}
		for i, t := range r.tools.Items {
			n, err := tool(t)
			if err != nil {
				return nil, fmt.Errorf("tool %d: %w", i, err)
			}
			tools.Items = append(tools.Items, n)
		}
		vars.Set("tools", tools)
	}
	vars.Set("documents", nil)
	vars.Set("add_generation_prompt", r.generation)
	if r.kwargs != nil {
		for i, k := range r.kwargs.Keys {
			switch k {
			case "messages", "tools", "documents", "conversation", "chat_template", "tokenize", "continue_final_message":
				return nil, fmt.Errorf("chat_template_kwargs.%s: %w", k, ErrUnsupported)
			}
			vars.Set(k, r.kwargs.Vals[i])
		}
	}
	return vars, nil
}

func message(m *jinja.Dict, parts bool) (*jinja.Dict, error) {
	rv, _ := m.Get("role")
	role, ok := rv.(string)
	if !ok {
		return nil, fmt.Errorf("no role: %w", ErrBadRequest)
	}
	out := jinja.NewDict("role", role)
	cv, _ := m.Get("content")
	var texts []string
	switch c := cv.(type) {
	case nil:
	case string:
		texts = append(texts, c)
	case *jinja.List:
		for _, p := range c.Items {
			text, keep, err := partText(p)
			if err != nil {
				return nil, err
			}
			if keep {
				texts = append(texts, text)
			}
		}
	default:
		return nil, fmt.Errorf("content is no string and no list: %w", ErrBadRequest)
	}
	if parts && role != "tool" {
		l := &jinja.List{}
		for _, t := range texts {
			l.Items = append(l.Items, jinja.NewDict("type", "text", "text", t))
		}
		out.Set("content", l)
	} else {
		out.Set("content", strings.Join(texts, "\n"))
	}
	switch role {
	case "assistant":
		if err := assistant(out, m); err != nil {
			return nil, err
		}
	case "tool":
		if id, ok := m.Get("tool_call_id"); ok {
			out.Set("tool_call_id", id)
		}
	}
	if name, ok := m.Get("name"); ok {
		if s, ok := name.(string); ok {
			out.Set("name", s)
		}
	}
	if role == "developer" {
		tools, _ := m.Get("tools")
		out.Set("tools", tools)
	}
	return out, nil
}

// partText returns the text of a content part.
func partText(p any) (text string, keep bool, err error) {
	switch p := p.(type) {
	case string:
		return p, true, nil
	case *jinja.Dict:
		typ, _ := p.Get("type")
		key := "text"
		switch typ {
		case "text", "input_text", "output_text":
		case "refusal", "thinking":
			key = typ.(string)
		default:
			return "", false, fmt.Errorf("content part of type %v: %w", typ, ErrUnsupported)
		}
		v, _ := p.Get(key)
		if v == nil {
			return "", false, nil
		}
		if s, ok := v.(string); ok {
			return s, true, nil
		}
	}
	return "", false, fmt.Errorf("content part without text: %w", ErrBadRequest)
}

// assistant adds an assistant message's tool calls and reasoning.
func assistant(out, m *jinja.Dict) error {
	if v, ok := m.Get("tool_calls"); ok && v != nil {
		calls, ok := v.(*jinja.List)
		if !ok {
			return fmt.Errorf("tool_calls is no list: %w", ErrBadRequest)
		}
		list := &jinja.List{}
		for _, c := range calls.Items {
			call, ok := c.(*jinja.Dict)
			if !ok {
				return fmt.Errorf("tool call is no object: %w", ErrBadRequest)
			}
			fv, _ := call.Get("function")
			fn, ok := fv.(*jinja.Dict)
			if !ok {
				return fmt.Errorf("tool call without function: %w", ErrBadRequest)
			}
			fn = ordered(fn) // a copy
			av, _ := fn.Get("arguments")
			switch a := av.(type) {
			case string:
				parsed, err := jinja.ParseJSON([]byte(a))
				if err != nil {
					parsed = &jinja.Dict{}
				}
				fn.Set("arguments", parsed)
			case *jinja.Dict, *jinja.List:
			default:
				fn.Set("arguments", &jinja.Dict{})
			}
			call = ordered(call)
			call.Set("function", fn)
			list.Items = append(list.Items, call)
		}
		if len(list.Items) > 0 {
			out.Set("tool_calls", list)
		}
	}
	if v, ok := m.Get("reasoning"); ok && v != nil {
		out.Set("reasoning", v)
		out.Set("reasoning_content", v)
	}
	return nil
}

// tool gives a tool the shape in which vLLM hands it to templates: known keys
// first and present even when null, others after them.
func tool(v any) (any, error) {
	t, ok := v.(*jinja.Dict)
	if !ok {
		return nil, fmt.Errorf("no object: %w", ErrBadRequest)
	}
	fv, _ := t.Get("function")
	fn, ok := fv.(*jinja.Dict)
	if !ok {
		return nil, fmt.Errorf("no function: %w", ErrUnsupported)
	}
	typ, ok := t.Get("type")
	if !ok {
		typ = "function"
	}
	return ordered(t, "type", typ, "function", ordered(fn, "name", nil, "description", nil, "parameters", nil)), nil
}

// ordered returns a copy of d with the given keys first. A given value that is
// not nil wins over d's.
func ordered(d *jinja.Dict, kv ...any) *jinja.Dict {
	out := jinja.NewDict(kv...)
	for i, k := range d.Keys {
		if v, ok := out.Get(k); !ok || v == nil {
			out.Set(k, d.Vals[i])
		}
	}
	return out
}
