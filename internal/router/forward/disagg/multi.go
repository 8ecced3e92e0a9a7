package disagg

import (
	"cmp"
	"fmt"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// multi is vLLM's MultiConnector with several children that take part in a transfer:
// both legs carry the union of what each of them reads, and the engine takes the KV
// from the first that has it. The legs follow each other. A prefill answer must
// satisfy all of them. Children without parameters of their own (shared storage,
// LMCache's stores) add nothing: their engines have the connector of the other child.
type multi struct {
	name workers.Connector
	of   []Connector
}

func (m multi) Begin(d Dispatch) (*Transfer, error) {
	t := &Transfer{kind: m.name, mode: Sequential, dispatch: d}
	parts := make([]*Transfer, len(m.of))
	for i, c := range m.of {
		p, err := c.Begin(d)
		if err != nil {
			return nil, err
		}
		t.requestID = cmp.Or(t.requestID, p.requestID)
		parts[i] = p
	}
	ask, err := union(parts, func(p *Transfer) []api.Edit { return p.prefill })
	if err != nil {
		return nil, fmt.Errorf("%s: %w", m.name, err)
	}
	t.prefill = oneToken(&d.Facts, ask)
	t.check = func(t *Transfer, a *answer) error {
		for _, p := range parts {
			if err := p.check(p, a); err != nil {
				return err
			}
			if f := p.facts; f.EngineID != "" {
				f.PromptTokens, f.CachedTokens = a.promptTokens, a.cachedTokens
				t.facts = f
			}
		}
		decode, err := union(parts, func(p *Transfer) []api.Edit { return p.decode })
		if err != nil {
			return &ParamsError{Field: transferParams, Problem: err.Error()}
		}
		t.decode = []api.Edit{decode}
		return nil
	}
	return t, nil
}

// union is the edit that sets the transfer parameters of all parts together, their values
// byte for byte. A member that two of them have is an error, as it is to the engine.
func union(parts []*Transfer, edits func(*Transfer) []api.Edit) (api.Edit, error) {
	out, seen := []byte{'{'}, map[string]bool{}
	var err error
	for _, p := range parts {
		for _, e := range edits(p) {
			if e.Key != transferParams {
				continue
			}
			for key, v := range rawjson.Value(e.Value).Members() {
				name := string(key)
				if seen[name] {
					err = fmt.Errorf("member %q is of two connectors", clip(name))
					break
				}
				if seen[name] = true; len(out) > 1 {
					out = append(out, ',')
				}
				out = append(append(rawjson.AppendQuote(out, name), ':'), v...)
			}
		}
	}
	return api.Set(transferParams, append(out, '}')), err
}
