package jinja

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// testFuncs are the tests of "is".
var testFuncs = map[string]func(r *run, v any, a args) bool{
	"defined":   func(_ *run, v any, _ args) bool { _, ok := v.(undefined); return !ok },
	"undefined": func(_ *run, v any, _ args) bool { _, ok := v.(undefined); return ok },
	"none":      func(_ *run, v any, _ args) bool { return v == nil },
	"string":    func(_ *run, v any, _ args) bool { _, ok := v.(string); return ok },
	"boolean":   func(_ *run, v any, _ args) bool { _, ok := v.(bool); return ok },
	"true":      func(_ *run, v any, _ args) bool { return v == true },
	"false":     func(_ *run, v any, _ args) bool { return v == false },
	"integer":   func(_ *run, v any, _ args) bool { return isInt(v) },
	"float":     func(_ *run, v any, _ args) bool { _, ok := v.(float64); return ok },
	"number":    func(_ *run, v any, _ args) bool { _, ok := number(v); return ok || isInt(v) },
	"mapping":   func(_ *run, v any, _ args) bool { _, ok := v.(*Dict); return ok },
	"iterable":  isSequence,
	"sequence":  isSequence,
	"callable":  func(_ *run, v any, _ args) bool { _, ok := v.(*callable); return ok },
	"odd":       func(_ *run, v any, _ args) bool { return wantInt("odd", v)&1 == 1 },
	"even":      func(_ *run, v any, _ args) bool { return wantInt("even", v)&1 == 0 },
	"in":        func(_ *run, v any, a args) bool { return contains(a.first(), v) },
	"equalto":   func(_ *run, v any, a args) bool { return equal(v, a.first()) },
	"eq":        func(_ *run, v any, a args) bool { return equal(v, a.first()) },
	"==":        func(_ *run, v any, a args) bool { return equal(v, a.first()) },
	"ne":        func(_ *run, v any, a args) bool { return !equal(v, a.first()) },
	"lt":        func(_ *run, v any, a args) bool { return order(v, a.first()) < 0 },
	"le":        func(_ *run, v any, a args) bool { return order(v, a.first()) <= 0 },
	"gt":        func(_ *run, v any, a args) bool { return order(v, a.first()) > 0 },
	"ge":        func(_ *run, v any, a args) bool { return order(v, a.first()) >= 0 },
	"divisibleby": func(_ *run, v any, a args) bool {
		return intArith("%", wantInt("divisibleby", v), wantInt("divisibleby", a.first())) == int64(0)
	},
}

func isSequence(_ *run, v any, _ args) bool {
	switch v.(type) {
	case string, *List, *Dict, undefined:
		return true
	}
	return false
}

func isInt(v any) bool {
	switch v.(type) {
	case int64, bigInt:
		return true
	}
	return false
}

// filterFuncs are the filters.
var filterFuncs = map[string]func(r *run, v any, a args) any{
	"tojson": tojson,
	"trim": func(_ *run, v any, a args) any {
		a.only("trim", 1, "chars")
		return trim(str(v), a.get(0, "chars", nil), true, true)
	},
	"length": length, "count": length,
	"string":     func(_ *run, v any, _ args) any { return str(v) },
	"safe":       func(_ *run, v any, _ args) any { return str(v) },
	"upper":      func(_ *run, v any, _ args) any { return strings.ToUpper(str(v)) },
	"lower":      func(_ *run, v any, _ args) any { return strings.ToLower(str(v)) },
	"capitalize": func(_ *run, v any, _ args) any { return capitalize(str(v)) },
	"replace":    func(r *run, v any, a args) any { return r.replace(str(v), a) },
	"default":    defaulted, "d": defaulted,
	"list": func(r *run, v any, _ args) any { return &List{Items: append([]any(nil), r.items(v)...)} },
	"items": func(_ *run, v any, _ args) any {
		switch v := v.(type) {
		case *Dict:
			return dictItems(v)
		case undefined:
			return &List{}
		}
		fail("items: %s is not a dict", typeName(v))
		return nil
	},
	"dictsort": func(_ *run, v any, a args) any {
		a.only("dictsort", 0)
		d, ok := v.(*Dict)
		if !ok {
			fail("dictsort: %s is not a dict", typeName(v))
		}
		l := dictItems(d)
		key := func(item any) string { return strings.ToLower(item.(*List).Items[0].(string)) }
		slices.SortStableFunc(l.Items, func(a, b any) int { return strings.Compare(key(a), key(b)) })
		return l
	},
	"first": func(r *run, v any, _ args) any { return itemOr(r.items(v), 0, "first of nothing") },
	"last":  func(r *run, v any, _ args) any { return itemOr(r.items(v), -1, "last of nothing") },
	"join": func(r *run, v any, a args) any {
		a.only("join", 2, "d", "attribute")
		items := r.items(v)
		if at := a.get(1, "attribute", nil); at != nil {
			items = r.mapAttr(items, wantStr("join", at), nil)
		}
		return r.joinList(str(a.get(0, "d", "")), items)
	},
	"reverse": func(r *run, v any, _ args) any {
		out := slices.Clone(r.items(v))
		slices.Reverse(out)
		if _, ok := v.(string); ok {
			return r.joinList("", out)
		}
		return &List{Items: out}
	},
	"unique": func(r *run, v any, a args) any {
		a.only("unique", 0)
		out := &List{}
		for _, x := range r.items(v) {
			if _, ok := x.(string); !ok {
				fail("unique on %s is not implemented", typeName(x))
			}
			same := func(y any) bool { r.step(); return strings.EqualFold(y.(string), x.(string)) }
			if !slices.ContainsFunc(out.Items, same) {
				out.Items = append(out.Items, x)
			}
		}
		return out
	},
	"int": func(_ *run, v any, a args) any {
		a.only("int", 1, "default")
		switch v := v.(type) {
		case int64, bigInt:
			return v
		case bool:
			n, _ := integer(v)
			return n
		case float64:
			if math.Abs(v) < 1<<53 {
				return int64(v)
			}
		case string:
			if n, err := strconv.ParseInt(strings.TrimSpace(v), 10, 64); err == nil {
				return n
			}
			if f, err := strconv.ParseFloat(strings.TrimSpace(v), 64); err == nil && math.Abs(f) < 1<<53 {
				return int64(f)
			}
		}
		return a.get(0, "default", int64(0))
	},
	"float": func(_ *run, v any, a args) any {
		a.only("float", 1, "default")
		if f, ok := number(v); ok {
			return f
		}
		if s, ok := v.(string); ok {
			if f, err := strconv.ParseFloat(strings.TrimSpace(s), 64); err == nil {
				return f
			}
		}
		return a.get(0, "default", 0.0)
	},
	"abs": func(_ *run, v any, _ args) any {
		if f, ok := v.(float64); ok {
			return math.Abs(f)
		}
		if n := wantInt("abs", v); n < 0 {
			return intArith("-", 0, n)
		}
		return v
	},
	"attr":       func(r *run, v any, a args) any { return r.attr(v, wantStr("attr", a.get(0, "name", nil))) },
	"selectattr": func(r *run, v any, a args) any { return r.choose(v, a, true, true) },
	"rejectattr": func(r *run, v any, a args) any { return r.choose(v, a, true, false) },
	"select":     func(r *run, v any, a args) any { return r.choose(v, a, false, true) },
	"reject":     func(r *run, v any, a args) any { return r.choose(v, a, false, false) },
	"map": func(r *run, v any, a args) any {
		a.only("map", 1, "attribute", "default")
		at, ok := a.kw["attribute"]
		if !ok {
			return r.mapFilter(v, a)
		}
		return &List{Items: r.mapAttr(r.items(v), wantStr("map", at), a.kw["default"])}
	},
	"indent": indent,
}

// mapped are the filters that map can apply.
var mapped = []string{"trim", "string", "upper", "lower", "tojson", "length"}

// mapFilter is map with a filter that takes no arguments.
func (r *run) mapFilter(v any, a args) any {
	name := wantStr("map", a.first())
	out := &List{}
	for _, x := range r.items(v) {
		r.step()
		if !slices.Contains(mapped, name) {
			fail("map with filter %s is not implemented", name)
		}
		out.Items = append(out.Items, r.filters[name](r, x, args{}))
	}
	return out
}

func (r *run) mapAttr(items []any, path string, def any) []any {
	out := make([]any, len(items))
	for i, x := range items {
		r.step()
		for _, p := range strings.Split(path, ".") {
			if n, err := strconv.ParseInt(p, 10, 64); err == nil {
				x = r.index(x, n)
			} else {
				x = r.index(x, p)
			}
		}
		if _, ok := x.(undefined); ok && def != nil {
			x = def
		}
		out[i] = x
	}
	return out
}

// choose is select, reject, selectattr and rejectattr.
func (r *run) choose(v any, a args, byAttr, want bool) any {
	at := ""
	rest := a.pos
	if byAttr {
		at = wantStr("selectattr", a.first())
		rest = rest[1:]
	}
	test := func(_ *run, v any, _ args) bool { return truth(v) }
	if len(rest) > 0 {
		name := wantStr("select", rest[0])
		f, ok := testFuncs[name]
		if !ok {
			fail("test %s is not implemented", name)
		}
		test, rest = f, rest[1:]
	}
	out := &List{}
	for _, x := range r.items(v) {
		r.step()
		subject := x
		if byAttr {
			subject = r.mapAttr([]any{x}, at, nil)[0]
		}
		if test(r, subject, args{pos: rest}) == want {
			out.Items = append(out.Items, x)
		}
	}
	return out
}

func defaulted(_ *run, v any, a args) any {
	a.only("default", 2, "default_value", "boolean")
	_, missing := v.(undefined)
	if missing || truth(a.get(1, "boolean", false)) && !truth(v) {
		return a.get(0, "default_value", "")
	}
	return v
}

func length(_ *run, v any, _ args) any {
	switch v := v.(type) {
	case string:
		return runeLen(v)
	case *List:
		return int64(len(v.Items))
	case *Dict:
		return int64(len(v.Keys))
	case undefined:
		return int64(0)
	}
	fail("%s has no length", typeName(v))
	return nil
}

// tojson is json.dumps with the arguments that transformers passes on.
func tojson(r *run, v any, a args) any {
	a.only("tojson", 2, "ensure_ascii", "indent", "separators", "sort_keys")
	s := jsonStyle{item: ", ", key: ": "}
	s.ascii = truth(a.get(0, "ensure_ascii", false))
	switch in := a.get(1, "indent", nil).(type) {
	case nil:
	case int64:
		s.indent, s.item = strings.Repeat(" ", int(min(max(in, 0), 64))), ","
		if in <= 0 {
			fail("tojson: this indent is not implemented")
		}
	case string:
		s.indent, s.item = in, ","
	default:
		fail("tojson: indent is %s", typeName(in))
	}
	if sep, ok := a.kw["separators"].(*List); ok && len(sep.Items) == 2 {
		s.item, s.key = wantStr("tojson", sep.Items[0]), wantStr("tojson", sep.Items[1])
	} else if a.kw["separators"] != nil {
		fail("tojson: separators are not a pair")
	}
	s.sort = truth(a.kw["sort_keys"])
	out := s.append(nil, v, 0)
	r.fits(len(out))
	return string(out)
}

func indent(r *run, v any, a args) any {
	a.only("indent", 3, "width", "first", "blank")
	pad := ""
	switch w := a.get(0, "width", int64(4)).(type) {
	case int64:
		pad = strings.Repeat(" ", int(min(max(w, 0), 256)))
	case string:
		pad = w
	default:
		fail("indent: width is %s", typeName(w))
	}
	blank := truth(a.get(2, "blank", false))
	s := str(v)
	if !blank && strings.ContainsAny(s, "\r\v\f\x1c\x1d\x1e\u0085\u2028\u2029") {
		fail("indent on this text is not implemented")
	}
	lines := strings.Split(s, "\n")
	r.fits(len(lines)*len(pad) + len(s))
	for i := 1; i < len(lines); i++ {
		if blank || lines[i] != "" {
			lines[i] = pad + lines[i]
		}
	}
	out := strings.Join(lines, "\n")
	if truth(a.get(1, "first", false)) {
		out = pad + out
	}
	return out
}
