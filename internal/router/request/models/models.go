// Package models is the answer to /v1/models, merged from what workers answered.
package models

import (
	"encoding/json"
	"fmt"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// Alias is another name under which a model is offered.
type Alias struct{ Name, Target string }

// List is a merged answer.
type List struct {
	ids     []string
	objects map[string]json.RawMessage
}

// Merge joins the answers of several workers to /v1/models: every model
// once, in the order in which it is first seen, described as the first worker
// that has it does. An alias whose target some worker has is added under its
// own id with "root" naming the target. The error names the answers that could
// not be read (by index); the list then holds those of the others.
func Merge(answers [][]byte, aliases []Alias) (*List, error) {
	l := &List{objects: make(map[string]json.RawMessage)}
	var bad error
	for i, raw := range answers {
		var list struct {
			Data []json.RawMessage `json:"data"`
		}
		if err := json.Unmarshal(raw, &list); err != nil {
			bad = fmt.Errorf("model list %d: %w", i, err)
			continue
		}
		for _, m := range list.Data {
			var head struct {
				ID string `json:"id"`
			}
			if json.Unmarshal(m, &head) != nil || head.ID == "" {
				bad = fmt.Errorf("model list %d: an entry has no id", i)
				continue
			}
			l.add(head.ID, m)
		}
	}
	for _, a := range aliases {
		target, ok := l.objects[a.Target]
		if !ok {
			continue
		}
		var v api.View
		if v.Parse(target, api.Unknown, api.Limits{}) != nil {
			continue
		}
		l.add(a.Name, api.Splice(nil, &v, []api.Edit{api.Set("id", api.RawString(a.Name)), api.Set("root", api.RawString(a.Target))}))
	}
	return l, bad
}

func (l *List) add(id string, object json.RawMessage) {
	if _, ok := l.objects[id]; ok {
		return
	}
	l.ids = append(l.ids, id)
	l.objects[id] = object
}

// Only is the list of those models that want accepts.
func (l *List) Only(want func(id string) bool) *List {
	out := &List{objects: make(map[string]json.RawMessage)}
	for _, id := range l.ids {
		if want(id) {
			out.add(id, l.objects[id])
		}
	}
	return out
}

// JSON is the body of the answer to /v1/models.
func (l *List) JSON() []byte {
	out := []byte(`{"object":"list","data":[`)
	for i, id := range l.ids {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, l.objects[id]...)
	}
	return append(out, ']', '}')
}

// Model is the body of the answer to /v1/models/{id}.
func (l *List) Model(id string) (body []byte, ok bool) {
	body, ok = l.objects[id]
	return body, ok
}
