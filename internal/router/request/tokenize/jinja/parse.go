package jinja

import (
	"fmt"
	"slices"
)

// node is a compiled statement or expression.
type (
	expr struct {
		eval func(r *run, s *scope) any
		name string // of a plain variable
		attr string // of an attribute or constant subscript
		str  *string
	}
	stmt func(r *run, s *scope) flow
)

// flow says how a statement ended.
type flow uint8

const (
	flowNext flow = iota
	flowBreak
	flowContinue
)

type parser struct {
	toks  []token
	pos   int
	depth int
	loops int

	contentVars map[string]bool // variables set from a content attribute
	partLoop    bool            // a loop runs over a message's content
}

// syntaxError is what the parser panics with; Parse returns it.
type syntaxError struct{ error }

func (p *parser) fail(format string, a ...any) {
	panic(syntaxError{fmt.Errorf("line %d: %s", p.toks[p.pos].line, fmt.Sprintf(format, a...))})
}

func (p *parser) peek() token { return p.toks[p.pos] }

func (p *parser) next() token {
	t := p.toks[p.pos]
	if t.kind != tkEOF {
		p.pos++
	}
	return t
}

func (p *parser) isOp(op string) bool { t := p.peek(); return t.kind == tkOp && t.text == op }

func (p *parser) isName(name string) bool { t := p.peek(); return t.kind == tkName && t.text == name }

func (p *parser) takeOp(op string) bool {
	if p.isOp(op) {
		p.pos++
		return true
	}
	return false
}

func (p *parser) takeName(name string) bool {
	if p.isName(name) {
		p.pos++
		return true
	}
	return false
}

func (p *parser) wantOp(op string) {
	if !p.takeOp(op) {
		p.fail("expected %q, found %q", op, p.peek().text)
	}
}

// list parses what stands with commas between up to end; one may follow the last.
func (p *parser) list(end string, one func()) {
	for !p.takeOp(end) {
		one()
		if !p.isOp(end) {
			p.wantOp(",")
		}
	}
}

func (p *parser) wantName() string {
	t := p.next()
	if t.kind != tkName {
		p.fail("expected a name, found %q", t.text)
	}
	return t.text
}

func (p *parser) want(kind tokKind, name string) {
	if p.next().kind != kind {
		p.pos--
		p.fail("expected %s, found %q", name, p.peek().text)
	}
}

func (p *parser) wantEnd() { p.want(tkEnd, "the end of the tag") }

// enter bounds the nesting of what follows.
func (p *parser) enter() func() {
	if p.depth++; p.depth > maxDepth {
		p.fail("nested too deeply")
	}
	return func() { p.depth-- }
}

// block parses statements until one of the given tags, which it takes up to
// its name, and returns that name.
func (p *parser) block(ends ...string) ([]stmt, string) {
	defer p.enter()()
	var out []stmt
	for {
		t := p.next()
		switch t.kind {
		case tkEOF:
			if len(ends) > 0 {
				p.fail("missing {%% %s %%}", ends[len(ends)-1])
			}
			return out, ""
		case tkData:
			text := t.text
			out = append(out, func(r *run, _ *scope) flow { r.write(text); return flowNext })
		case tkPrint:
			e := p.tuple()
			p.want(tkPrintEnd, "}}")
			out = append(out, func(r *run, s *scope) flow { r.write(str(e.eval(r, s))); return flowNext })
		case tkBegin:
			name := p.wantName()
			if slices.Contains(ends, name) {
				return out, name
			}
			out = append(out, p.statement(name))
		default:
			p.fail("unexpected %q", t.text)
		}
	}
}

func (p *parser) statement(name string) stmt {
	switch name {
	case "if":
		return p.ifStmt()
	case "for":
		return p.forStmt()
	case "set":
		return p.setStmt()
	case "macro":
		return p.macroStmt()
	case "generation": // marks assistant text for training; no effect on it
		p.wantEnd()
		body, _ := p.block("endgeneration")
		p.wantEnd()
		return func(r *run, s *scope) flow { return r.exec(body, newScope(s)) }
	case "break", "continue":
		if p.loops == 0 {
			p.fail("%s outside of a loop", name)
		}
		p.wantEnd()
		f := flowBreak
		if name == "continue" {
			f = flowContinue
		}
		return func(*run, *scope) flow { return f }
	}
	p.fail("tag %q is not implemented", name)
	return nil
}

func (p *parser) ifStmt() stmt {
	type branch struct {
		cond expr
		body []stmt
	}
	var branches []branch
	var otherwise []stmt
	for {
		cond := p.tuple()
		p.wantEnd()
		body, end := p.block("elif", "else", "endif")
		branches = append(branches, branch{cond, body})
		if end == "elif" {
			continue
		}
		if end == "else" {
			p.wantEnd()
			otherwise, _ = p.block("endif")
		}
		p.wantEnd()
		break
	}
	return func(r *run, s *scope) flow {
		for _, b := range branches {
			if truth(b.cond.eval(r, s)) {
				return r.exec(b.body, s)
			}
		}
		return r.exec(otherwise, s)
	}
}

// target parses what is assigned to: names, a tuple of names, or ns.attr.
func (p *parser) target() []string {
	paren := p.takeOp("(")
	names := []string{p.wantName()}
	for p.takeOp(",") {
		if p.isOp(")") {
			break
		}
		names = append(names, p.wantName())
	}
	if paren {
		p.wantOp(")")
	}
	return names
}

func assign(r *run, s *scope, names []string, v any) {
	if len(names) == 1 {
		s.set(names[0], v)
		return
	}
	items := r.items(v)
	if len(items) != len(names) {
		panic(failure{"wrong number of values to unpack"})
	}
	for i, n := range names {
		s.set(n, items[i])
	}
}

func (p *parser) forStmt() stmt {
	names := p.target()
	if !p.takeName("in") {
		p.fail("expected in, found %q", p.peek().text)
	}
	iter := p.or() // no ternary, so that "if" filters the loop
	if iter.attr == "content" || iter.name != "" && p.contentVars[iter.name] {
		p.partLoop = true
	}
	var cond *expr
	if p.takeName("if") {
		e := p.tuple()
		cond = &e
	}
	if p.isName("recursive") {
		p.fail("recursive loops are not implemented")
	}
	p.wantEnd()
	p.loops++
	body, end := p.block("else", "endfor")
	p.loops--
	var otherwise []stmt
	if end == "else" {
		p.wantEnd()
		otherwise, _ = p.block("endfor")
	}
	p.wantEnd()
	return func(r *run, s *scope) flow {
		items := r.items(iter.eval(r, s))
		if cond != nil {
			var kept []any
			for _, x := range items {
				in := newScope(s)
				assign(r, in, names, x)
				r.step()
				if truth(cond.eval(r, in)) {
					kept = append(kept, x)
				}
			}
			items = kept
		}
		if len(items) == 0 {
			return r.exec(otherwise, newScope(s))
		}
		lp := &loop{items: items}
		for i, x := range items {
			r.step()
			lp.i = i
			in := newScope(s)
			in.set("loop", lp)
			assign(r, in, names, x)
			if r.exec(body, in) == flowBreak {
				break
			}
		}
		return flowNext
	}
}

func (p *parser) setStmt() stmt {
	name := p.wantName()
	attr := ""
	names := []string{name}
	if p.takeOp(".") {
		attr = p.wantName()
	}
	for attr == "" && p.takeOp(",") {
		names = append(names, p.wantName())
	}
	store := func(r *run, s *scope, v any) {
		if attr == "" {
			assign(r, s, names, v)
			return
		}
		ns, ok := s.get(name).(*namespace)
		if !ok {
			panic(failure{"cannot set an attribute of " + name + ", which is no namespace"})
		}
		ns.d.Set(attr, v)
	}
	if p.takeOp("=") {
		e := p.tuple()
		p.wantEnd()
		if e.attr == "content" && attr == "" {
			p.contentVars[name] = true
		}
		return func(r *run, s *scope) flow { store(r, s, e.eval(r, s)); return flowNext }
	}
	if p.isOp("|") {
		p.fail("filters on set blocks are not implemented")
	}
	p.wantEnd()
	body, _ := p.block("endset")
	p.wantEnd()
	return func(r *run, s *scope) flow {
		store(r, s, r.capture(body, newScope(s)))
		return flowNext
	}
}

type param struct {
	name string
	def  *expr
}

func (p *parser) macroStmt() stmt {
	name := p.wantName()
	p.wantOp("(")
	var params []param
	p.list(")", func() {
		q := param{name: p.wantName()}
		if p.takeOp("=") {
			e := p.ternary()
			q.def = &e
		}
		params = append(params, q)
	})
	p.wantEnd()
	loops := p.loops
	p.loops = 0
	body, _ := p.block("endmacro")
	p.loops = loops
	p.wantEnd()
	return func(r *run, s *scope) flow {
		s.set(name, &callable{name: name, fn: func(r *run, a args) any {
			in := newScope(s)
			if len(a.pos) > len(params) {
				panic(failure{"too many arguments for macro " + name})
			}
			for k := range a.kw {
				if !slices.ContainsFunc(params, func(q param) bool { return q.name == k }) {
					panic(failure{"unknown argument " + k + " of macro " + name})
				}
			}
			for i, q := range params {
				switch v, ok := a.kw[q.name]; {
				case i < len(a.pos):
					in.set(q.name, a.pos[i])
				case ok:
					in.set(q.name, v)
				case q.def != nil:
					in.set(q.name, q.def.eval(r, in))
				default:
					in.set(q.name, undefined{q.name})
				}
			}
			defer r.nest()()
			return r.capture(body, in)
		}})
		return flowNext
	}
}
