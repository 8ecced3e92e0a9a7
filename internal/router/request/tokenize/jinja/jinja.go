// Package jinja renders chat templates: the part of Jinja2 that they use, with
// Python's values, so that the text is the one that transformers renders
// (jinja2 3.1, an immutable sandbox with trim_blocks, lstrip_blocks and loop
// controls on, and tojson as json.dumps with ensure_ascii=False).
//
// What is not implemented is an error when the template is parsed, or, for
// operations on values, when it is rendered; nothing is rendered nearly right.
// A render is bounded in steps, nesting and output.
package jinja

import (
	"errors"
	"fmt"
)

// ErrTemplate is wrapped by every error of a template: bad syntax, something
// not implemented, a failed render or raise_exception.
var ErrTemplate = errors.New("chat template")

// Template is a parsed template, safe for concurrent use.
type Template struct {
	body     []stmt
	partLoop bool
}

// Limits of one template and one render.
const (
	maxTemplate = 1 << 20 // bytes
	maxSteps    = 1 << 20 // loop rounds and calls
	maxCalls    = 64      // macro nesting
)

// Parse compiles a template.
func Parse(src string) (t *Template, err error) {
	if len(src) > maxTemplate {
		return nil, fmt.Errorf("%w: %d bytes are over the limit", ErrTemplate, len(src))
	}
	toks, err := lex(src)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTemplate, err)
	}
	p := &parser{toks: toks, contentVars: map[string]bool{}}
	defer func() {
		switch e := recover().(type) {
		case nil:
		case syntaxError:
			t, err = nil, fmt.Errorf("%w: %w", ErrTemplate, e.error)
		default:
			panic(e)
		}
	}()
	body, _ := p.block()
	return &Template{body: body, partLoop: p.partLoop}, nil
}

// LoopsOverContent reports whether the template takes a message's content as a
// list of parts (vLLM calls it the openai content format).
func (t *Template) LoopsOverContent() bool { return t.partLoop }

// failure is what evaluation panics with; Render returns it.
type failure struct{ msg string }

// Render renders the template with the given variables, at most limit bytes.
func (t *Template) Render(vars *Dict, limit int) (out []byte, err error) {
	r := &run{limit: limit, filters: filterFuncs}
	defer func() {
		switch e := recover().(type) {
		case nil:
		case failure:
			out, err = nil, fmt.Errorf("%w: %s", ErrTemplate, e.msg)
		default:
			panic(e)
		}
	}()
	global := &scope{vars: globals()}
	top := newScope(global)
	for i, k := range vars.Keys {
		top.set(k, vars.Vals[i])
	}
	r.exec(t.body, top)
	return r.out, nil
}

// run is the state of one render.
type run struct {
	out     []byte
	limit   int
	steps   int
	depth   int
	filters map[string]func(r *run, v any, a args) any
}

func (r *run) write(s string) {
	if len(r.out)+len(s) > r.limit {
		panic(failure{fmt.Sprintf("output is over %d bytes", r.limit)})
	}
	r.out = append(r.out, s...)
}

// fits fails on a string of more bytes than a render may have.
func (r *run) fits(bytes int) {
	if bytes > r.limit {
		fail("string is over the limit")
	}
}

func (r *run) step() {
	if r.steps++; r.steps > maxSteps {
		panic(failure{"too many steps"})
	}
}

func (r *run) nest() func() {
	if r.depth++; r.depth > maxCalls {
		panic(failure{"macros are nested too deeply"})
	}
	return func() { r.depth-- }
}

func (r *run) exec(body []stmt, s *scope) flow {
	for _, st := range body {
		if f := st(r, s); f != flowNext {
			return f
		}
	}
	return flowNext
}

// capture runs body and returns what it wrote.
func (r *run) capture(body []stmt, s *scope) string {
	at := len(r.out)
	r.exec(body, s)
	text := string(r.out[at:])
	r.out = r.out[:at]
	return text
}

// scope is a chain of variables; few each, so a list.
type scope struct {
	vars   Dict
	parent *scope
}

func newScope(parent *scope) *scope { return &scope{parent: parent} }

func (s *scope) set(name string, v any) { s.vars.Set(name, v) }

func (s *scope) get(name string) any {
	for x := s; x != nil; x = x.parent {
		if v, ok := x.vars.Get(name); ok {
			return v
		}
	}
	return undefined{name}
}

// loop is the loop variable.
type loop struct {
	items []any
	i     int
}
