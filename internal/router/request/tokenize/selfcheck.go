package tokenize

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// Aspect is a part of tokenizing that a local tokenizer may get right or not.
type Aspect string

// The closed set of aspects.
const (
	AspectPrompt Aspect = "prompt" // plain text
	AspectChat   Aspect = "chat"   // messages with string contents
	AspectParts  Aspect = "parts"  // contents that are lists of text parts
	AspectTools  Aspect = "tools"  // tools, tool calls and tool results
)

// Probe is one question put to both tokenizers. Body is a chat request, or
// nil for a plain prompt.
type Probe struct {
	Name       string
	Aspect     Aspect
	Text       string
	AddSpecial bool
	Body       []byte
}

// ProbeResult is the outcome of one probe.
type ProbeResult struct {
	Name   string
	Aspect Aspect
	Agree  bool
	Reason string // why not
}

// Agreement lists the aspects in which a local tokenizer gives an engine's ids. The zero value
// agrees on nothing.
type Agreement struct {
	Agreed []Aspect // every probe of the aspect gave equal ids
	Probes []ProbeResult
}

// Has reports whether the tokenizers agree on an aspect.
func (a Agreement) Has(x Aspect) bool { return slices.Contains(a.Agreed, x) }

// SelfCheck compares the ids that local and engine give for each probe. An
// aspect is agreed when it has a probe and all of its probes give equal ids.
// An engine that cannot be queried is an error; a probe that it refuses, or that
// local cannot do, is a disagreement.
func SelfCheck(ctx context.Context, local, engine Tokenizer, probes []Probe) (Agreement, error) {
	var a Agreement
	bad := make(map[Aspect]bool)
	for _, p := range probes {
		ask := func(t Tokenizer) (Result, error) {
			if p.Body != nil {
				return t.Chat(ctx, p.Body)
			}
			return t.Prompt(ctx, p.Text, p.AddSpecial)
		}
		r := ProbeResult{Name: p.Name, Aspect: p.Aspect}
		want, err := ask(engine)
		switch {
		case errors.Is(err, ErrRefused):
			r.Reason = err.Error()
		case err != nil:
			return Agreement{}, fmt.Errorf("tokenizer self-check %q: %w", p.Name, err)
		default:
			if got, err := ask(local); err != nil {
				r.Reason = err.Error()
			} else if i := firstDifference(got.IDs, want.IDs); i >= 0 {
				r.Reason = fmt.Sprintf("ids differ at %d (%d local, %d engine tokens)", i, len(got.IDs), len(want.IDs))
			} else {
				r.Agree = true
			}
		}
		bad[p.Aspect] = bad[p.Aspect] || !r.Agree
		a.Probes = append(a.Probes, r)
	}
	for _, x := range []Aspect{AspectPrompt, AspectChat, AspectParts, AspectTools} {
		if b, asked := bad[x]; asked && !b {
			a.Agreed = append(a.Agreed, x)
		}
	}
	return a, nil
}

// firstDifference returns the first index at which a and b differ, or -1.
func firstDifference(a, b []uint32) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	if len(a) != len(b) {
		return min(len(a), len(b))
	}
	return -1
}

// DefaultProbes are the probes of a start-up check for one model name.
func DefaultProbes(model string) []Probe {
	m := string(rawjson.AppendQuote(nil, model))
	const text = "It's 12345 o'clock — naïve café, Ⅷ½, “quotes”…\n\n\tfunc main() { return 0x7f }\r\n 你好，世界！ 👩‍👩‍👧 e\u0301 \u00a0 <|x|>"
	chat := func(name string, aspect Aspect, rest string) Probe {
		return Probe{Name: name, Aspect: aspect, Body: []byte(`{"model":` + m + `,` + rest + `}`)}
	}
	quoted := string(rawjson.AppendQuote(nil, text))
	return []Probe{
		{Name: "plain", Aspect: AspectPrompt, Text: text, AddSpecial: true},
		{Name: "plain without special tokens", Aspect: AspectPrompt, Text: text},
		{Name: "spaces", Aspect: AspectPrompt, Text: "  a\n\n  b   \n", AddSpecial: true},
		chat("one turn", AspectChat, `"messages":[{"role":"user","content":`+quoted+`}]`),
		chat("system and many turns", AspectChat, `"messages":[{"role":"system","content":" Be brief. "},`+
			`{"role":"user","content":"Hi\n"},{"role":"assistant","content":"\n Hello "},{"role":"user","content":`+quoted+`}]`),
		chat("last turn is the assistant's", AspectChat, `"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],`+
			`"add_generation_prompt":false`),
		chat("text parts", AspectParts, `"messages":[{"role":"system","content":[{"type":"text","text":"one"},{"type":"text","text":"two"}]},`+
			`{"role":"user","content":[{"type":"text","text":"three "},{"type":"text","text":" four"}]}]`),
		chat("tools", AspectTools, `"messages":[{"role":"user","content":"Wetter in Zürich?"}],"tools":[`+
			`{"function":{"parameters":{"type":"object","required":["city"],"properties":{"city":{"type":"string","description":"<naïve> & 'quoted'"},`+
			`"n":{"type":"number","default":1.0,"maximum":1e20}}},"name":"weather","description":"Get \"weather\" 天气"},"type":"function"},`+
			`{"type":"function","function":{"name":"now"}}]`),
		chat("tool calls and results", AspectTools, `"messages":[{"role":"user","content":"x"},{"role":"assistant","content":null,"tool_calls":[`+
			`{"id":"call_1","type":"function","function":{"name":"weather","arguments":"{\"city\":\"Zürich\",\"days\":[1,2]}"}}]},`+
			`{"role":"tool","tool_call_id":"call_1","content":"{\"t\":21}"},{"role":"user","content":"thanks"}],"tools":[`+
			`{"type":"function","function":{"name":"weather","description":"d","parameters":{"type":"object","properties":{}}}}]`),
	}
}

// SelfChecked uses a local tokenizer for what it was found to agree on, and the
// engine for the rest.
type SelfChecked struct {
	local  Tokenizer
	engine Tokenizer // nil for none
	agreed Agreement
}

// NewSelfChecked returns a SelfChecked tokenizer. engine may be nil: what is not agreed is
// ErrUnsupported then.
func NewSelfChecked(local, engine Tokenizer, a Agreement) *SelfChecked {
	return &SelfChecked{local: local, engine: engine, agreed: a}
}

// Prompt implements Tokenizer.
func (g *SelfChecked) Prompt(ctx context.Context, text string, addSpecial bool) (Result, error) {
	if g.agreed.Has(AspectPrompt) {
		return g.local.Prompt(ctx, text, addSpecial)
	}
	if g.engine == nil {
		return Result{}, fmt.Errorf("local ids were not checked: %w", ErrUnsupported)
	}
	return g.engine.Prompt(ctx, text, addSpecial)
}

// Chat implements Tokenizer.
func (g *SelfChecked) Chat(ctx context.Context, body []byte) (Result, error) {
	if !slices.ContainsFunc(aspects(body), func(x Aspect) bool { return !g.agreed.Has(x) }) {
		r, err := g.local.Chat(ctx, body)
		if !errors.Is(err, ErrUnsupported) || g.engine == nil {
			return r, err
		}
	}
	if g.engine == nil {
		return Result{}, fmt.Errorf("local chat template was not checked: %w", ErrUnsupported)
	}
	return g.engine.Chat(ctx, body)
}

// aspects returns what a chat request needs of a tokenizer.
func aspects(body []byte) []Aspect {
	out := []Aspect{AspectChat}
	add := func(x Aspect) {
		if !slices.Contains(out, x) {
			out = append(out, x)
		}
	}
	_ = rawjson.Object(body, func(k, v []byte) bool { // malformed: the tokenizer says so
		switch string(k) {
		case "tools":
			if !rawjson.IsNull(v) {
				add(AspectTools)
			}
		case "messages":
			_ = rawjson.Array(v, func(m []byte) bool {
				_ = rawjson.Object(m, func(k, v []byte) bool {
					switch string(k) {
					case "content":
						if len(v) > 0 && v[0] == '[' {
							add(AspectParts)
						}
					case "tool_calls", "tool_call_id":
						add(AspectTools)
					}
					return true
				})
				return true
			})
		}
		return true
	})
	return out
}
