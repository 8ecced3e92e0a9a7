package jinja

import (
	"slices"
	"strconv"
	"strings"
)

// tuple parses an expression, or several with commas between.
func (p *parser) tuple() expr {
	e := p.ternary()
	if !p.isOp(",") {
		return e
	}
	list := []expr{e}
	for p.takeOp(",") {
		if t := p.peek().kind; t == tkEnd || t == tkPrintEnd || p.isOp(")") {
			break
		}
		list = append(list, p.ternary())
	}
	return tupleOf(list)
}

func tupleOf(list []expr) expr {
	return expr{eval: func(r *run, s *scope) any {
		return &List{Items: argExprs{pos: list}.eval(r, s).pos, tuple: true}
	}}
}

func (p *parser) ternary() expr {
	defer p.enter()()
	e := p.or()
	for p.takeName("if") {
		then, cond := e, p.or()
		otherwise := expr{eval: func(*run, *scope) any { return undefined{"the value of an if without else"} }}
		if p.takeName("else") {
			otherwise = p.ternary()
		}
		e = expr{eval: func(r *run, s *scope) any {
			if truth(cond.eval(r, s)) {
				return then.eval(r, s)
			}
			return otherwise.eval(r, s)
		}}
	}
	return e
}

func (p *parser) or() expr  { return p.logic("or", true, p.and) }
func (p *parser) and() expr { return p.logic("and", false, p.not) }

// logic parses a chain of or, or of and, whose value is that of the first operand
// that decides it.
func (p *parser) logic(word string, decides bool, sub func() expr) expr {
	a := sub()
	for p.takeName(word) {
		l, b := a, sub()
		a = expr{eval: func(r *run, s *scope) any {
			if v := l.eval(r, s); truth(v) == decides {
				return v
			}
			return b.eval(r, s)
		}}
	}
	return a
}

func (p *parser) not() expr {
	if p.takeName("not") {
		defer p.enter()()
		e := p.not()
		return expr{eval: func(r *run, s *scope) any { return !truth(e.eval(r, s)) }}
	}
	return p.compare()
}

func (p *parser) compare() expr {
	first := p.sum()
	type step struct {
		holds func(a, b any) bool
		e     expr
	}
	var steps []step
	for {
		t := p.peek()
		op := ""
		switch {
		case t.kind == tkOp, p.isName("in"):
			op = t.text
		case p.isName("not") && p.toks[p.pos+1].kind == tkName && p.toks[p.pos+1].text == "in":
			op = "not in"
		}
		holds := comparisons[op]
		if holds == nil {
			break
		}
		p.pos += len(strings.Fields(op))
		steps = append(steps, step{holds, p.sum()})
	}
	if len(steps) == 0 {
		return first
	}
	return expr{eval: func(r *run, s *scope) any {
		a := first.eval(r, s)
		for _, st := range steps {
			b := st.e.eval(r, s)
			if !st.holds(a, b) {
				return false
			}
			a = b
		}
		return true
	}}
}

// binary parses a left-associative chain of operators.
func (p *parser) binary(sub func() expr, ops ...string) expr {
	a := sub()
	for {
		i := slices.IndexFunc(ops, p.takeOp)
		if i < 0 {
			return a
		}
		op, l, b := ops[i], a, sub()
		a = expr{eval: func(r *run, s *scope) any { return r.arith(op, l.eval(r, s), b.eval(r, s)) }}
	}
}

func (p *parser) sum() expr     { return p.binary(p.concat, "+", "-") }
func (p *parser) concat() expr  { return p.binary(p.product, "~") }
func (p *parser) product() expr { return p.binary(p.power, "*", "//", "/", "%") }
func (p *parser) power() expr   { return p.binary(func() expr { return p.unary(true) }, "**") }

func (p *parser) unary(filters bool) expr {
	defer p.enter()()
	var e expr
	switch {
	case p.takeOp("-"):
		x := p.unary(false)
		e = expr{eval: func(r *run, s *scope) any { return r.arith("-", int64(0), x.eval(r, s)) }}
	case p.takeOp("+"):
		e = p.unary(false)
	default:
		e = p.postfix(p.primary())
	}
	if filters {
		e = p.filters(e)
	}
	return e
}

func (p *parser) filters(e expr) expr {
	for {
		switch {
		case p.takeOp("|"):
			e = p.filter(e)
		case p.takeName("is"):
			e = p.test(e)
		case p.isOp("("):
			e = p.call(e)
		default:
			return e
		}
	}
}

func (p *parser) filter(e expr) expr {
	name := p.wantName()
	f, ok := filterFuncs[name]
	if !ok {
		p.fail("filter %q is not implemented", name)
	}
	var a argExprs
	if p.isOp("(") {
		a = p.args()
	}
	return expr{eval: func(r *run, s *scope) any { return f(r, e.eval(r, s), a.eval(r, s)) }}
}

func (p *parser) test(e expr) expr {
	negate := p.takeName("not")
	name := ""
	if t := p.peek(); t.kind == tkOp && t.text == "==" {
		p.pos++
		name = "=="
	} else {
		name = p.wantName()
	}
	f, ok := testFuncs[name]
	if !ok {
		p.fail("test %q is not implemented", name)
	}
	var a argExprs
	switch t := p.peek(); {
	case p.isOp("("):
		a = p.args()
	case t.kind == tkString || t.kind == tkInt || t.kind == tkFloat || p.isOp("[") || p.isOp("{") ||
		t.kind == tkName && t.text != "else" && t.text != "or" && t.text != "and" && t.text != "is" && t.text != "if" &&
			t.text != "in" && t.text != "not":
		a.pos = []expr{p.postfix(p.primary())}
	}
	return expr{eval: func(r *run, s *scope) any { return f(r, e.eval(r, s), a.eval(r, s)) != negate }}
}

type kwExpr struct {
	name string
	e    expr
}

type argExprs struct {
	pos []expr
	kw  []kwExpr
}

// args are the evaluated arguments of a call.
type args struct {
	pos []any
	kw  map[string]any
}

func (a argExprs) eval(r *run, s *scope) (out args) {
	for _, e := range a.pos {
		out.pos = append(out.pos, e.eval(r, s))
	}
	if len(a.kw) > 0 {
		out.kw = make(map[string]any, len(a.kw))
		for _, k := range a.kw {
			out.kw[k.name] = k.e.eval(r, s)
		}
	}
	return out
}

func (p *parser) args() (a argExprs) {
	p.wantOp("(")
	p.list(")", func() {
		if t := p.peek(); t.kind == tkName && p.toks[p.pos+1].kind == tkOp && p.toks[p.pos+1].text == "=" {
			p.pos += 2
			a.kw = append(a.kw, kwExpr{t.text, p.ternary()})
		} else if p.isOp("*") || p.isOp("**") {
			p.fail("unpacked arguments are not implemented")
		} else {
			a.pos = append(a.pos, p.ternary())
		}
	})
	return a
}

func (p *parser) call(e expr) expr {
	a := p.args()
	return expr{eval: func(r *run, s *scope) any {
		f, ok := e.eval(r, s).(*callable)
		if !ok {
			panic(failure{"value is not callable"})
		}
		r.step()
		return f.fn(r, a.eval(r, s))
	}}
}

func (p *parser) postfix(e expr) expr {
	for {
		switch {
		case p.takeOp("."):
			t := p.next()
			if t.kind != tkName && t.kind != tkInt {
				p.fail("expected an attribute, found %q", t.text)
			}
			e = attribute(e, t.text)
		case p.takeOp("["):
			e = p.subscript(e)
		case p.isOp("("):
			e = p.call(e)
		default:
			return e
		}
	}
}

func attribute(e expr, name string) expr {
	return expr{attr: name, eval: func(r *run, s *scope) any { return r.attr(e.eval(r, s), name) }}
}

func (p *parser) subscript(e expr) expr {
	var lo, hi, step *expr
	opt := func() *expr {
		if p.isOp(":") || p.isOp("]") {
			return nil
		}
		x := p.ternary()
		return &x
	}
	lo = opt()
	if p.takeOp("]") {
		if lo == nil {
			p.fail("empty subscript")
		}
		key := *lo
		out := expr{eval: func(r *run, s *scope) any { return r.index(e.eval(r, s), key.eval(r, s)) }}
		if key.str != nil {
			out.attr = *key.str
		}
		return out
	}
	p.wantOp(":")
	hi = opt()
	if p.takeOp(":") {
		step = opt()
	}
	p.wantOp("]")
	part := func(r *run, s *scope, x *expr) *int64 {
		if x == nil {
			return nil
		}
		switch v := x.eval(r, s).(type) {
		case nil:
			return nil
		case int64:
			return &v
		}
		panic(failure{"slice indices must be integers"})
	}
	return expr{eval: func(r *run, s *scope) any {
		return r.slice(e.eval(r, s), part(r, s, lo), part(r, s, hi), part(r, s, step))
	}}
}

func constant(v any) expr { return expr{eval: func(*run, *scope) any { return v }} }

func (p *parser) primary() expr {
	defer p.enter()()
	t := p.next()
	switch t.kind {
	case tkString:
		text := t.text
		for p.peek().kind == tkString {
			text += p.next().text
		}
		e := constant(text)
		e.str = &text
		return e
	case tkInt:
		n, err := strconv.ParseInt(t.text, 10, 64)
		if err != nil {
			p.fail("integer %s is too large", t.text)
		}
		return constant(n)
	case tkFloat:
		f, err := strconv.ParseFloat(t.text, 64)
		if err != nil {
			p.fail("bad number %s", t.text)
		}
		return constant(f)
	case tkName:
		switch t.text {
		case "true", "True":
			return constant(true)
		case "false", "False":
			return constant(false)
		case "none", "None":
			return constant(nil)
		}
		name := t.text
		return expr{name: name, eval: func(_ *run, s *scope) any { return s.get(name) }}
	case tkOp:
		switch t.text {
		case "(":
			if p.takeOp(")") {
				return tupleOf(nil)
			}
			e := p.tuple()
			p.wantOp(")")
			return expr{eval: e.eval, str: e.str}
		case "[":
			var list []expr
			p.list("]", func() { list = append(list, p.ternary()) })
			return expr{eval: func(r *run, s *scope) any {
				return &List{Items: argExprs{pos: list}.eval(r, s).pos}
			}}
		case "{":
			return p.dict()
		}
	}
	p.pos--
	p.fail("unexpected %q", t.text)
	return expr{}
}

func (p *parser) dict() expr {
	var keys, vals []expr
	p.list("}", func() {
		keys = append(keys, p.ternary())
		p.wantOp(":")
		vals = append(vals, p.ternary())
	})
	return expr{eval: func(r *run, s *scope) any {
		d := &Dict{}
		for i := range keys {
			k, ok := keys[i].eval(r, s).(string)
			if !ok {
				panic(failure{"dict keys that are not strings are not implemented"})
			}
			d.Set(k, vals[i].eval(r, s))
		}
		return d
	}}
}
