package jinja

import (
	"math"
	"strconv"
	"strings"
	"unicode"
)

// get returns the argument at i or of the given name, def if it is absent.
func (a args) get(i int, name string, def any) any {
	if i < len(a.pos) {
		return a.pos[i]
	}
	if v, ok := a.kw[name]; ok {
		return v
	}
	return def
}

// only fails on more than n positional or other named arguments, which a
// function here would silently ignore.
func (a args) only(what string, n int, names ...string) {
	if len(a.pos) > n {
		fail("%s: too many arguments", what)
	}
	for k := range a.kw {
		known := false
		for _, x := range names {
			known = known || x == k
		}
		if !known {
			fail("%s: argument %s is not implemented", what, k)
		}
	}
}

func wantStr(what string, v any) string {
	s, ok := v.(string)
	if !ok {
		fail("%s: %s is not a str", what, typeName(v))
	}
	return s
}

func wantInt(what string, v any) int64 {
	n, ok := integer(v)
	if !ok {
		fail("%s: %s is not an int", what, typeName(v))
	}
	return n
}

// globals are the functions of every template.
func globals() Dict {
	var d Dict
	add := func(name string, fn func(r *run, a args) any) { d.Set(name, &callable{name, fn}) }
	add("range", func(r *run, a args) any {
		a.only("range", 3)
		lo, hi, step := int64(0), int64(0), int64(1)
		switch len(a.pos) {
		case 1:
			hi = wantInt("range", a.pos[0])
		case 2, 3:
			lo, hi = wantInt("range", a.pos[0]), wantInt("range", a.pos[1])
			if len(a.pos) == 3 {
				step = wantInt("range", a.pos[2])
			}
		default:
			fail("range: wrong number of arguments")
		}
		if step == 0 {
			fail("range: step is zero")
		}
		l := &List{}
		for i := lo; step > 0 && i < hi || step < 0 && i > hi; i += step {
			if len(l.Items) >= 100_000 { // the sandbox's own limit
				fail("range is too large")
			}
			r.step()
			l.Items = append(l.Items, i)
		}
		return l
	})
	add("namespace", func(_ *run, a args) any {
		ns := &namespace{}
		for _, p := range a.pos {
			if d, ok := p.(*Dict); ok {
				for i, k := range d.Keys {
					ns.d.Set(k, d.Vals[i])
				}
			}
		}
		for k, v := range a.kw {
			ns.d.Set(k, v)
		}
		return ns
	})
	add("dict", func(_ *run, a args) any {
		if len(a.pos) > 0 || len(a.kw) > 1 { // keyword order is not kept
			fail("dict() with arguments is not implemented")
		}
		d := &Dict{}
		for k, v := range a.kw {
			d.Set(k, v)
		}
		return d
	})
	add("raise_exception", func(_ *run, a args) any {
		fail("the template refuses the request: %s", str(a.get(0, "message", "")))
		return nil
	})
	add("strftime_now", func(*run, args) any {
		fail("strftime_now depends on the time of day at the engine")
		return nil
	})
	return d
}

// trim is str.strip and its relatives; chars is nil for white space.
func trim(s string, chars any, left, right bool) string {
	in := func(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }
	if chars != nil {
		set := wantStr("strip", chars)
		in = func(r rune) bool { return strings.ContainsRune(set, r) }
	}
	if left {
		s = strings.TrimLeftFunc(s, in)
	}
	if right {
		s = strings.TrimRightFunc(s, in)
	}
	return s
}

func strList(parts []string) *List {
	l := &List{Items: make([]any, len(parts))}
	for i, p := range parts {
		l.Items[i] = p
	}
	return l
}

// split is str.split and str.rsplit.
func split(s string, sep any, limit int64, right bool) *List {
	if sep == nil {
		if limit >= 0 {
			fail("split with a limit and no separator is not implemented")
		}
		return strList(strings.FieldsFunc(s, func(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }))
	}
	by := wantStr("split", sep)
	if by == "" {
		fail("split: empty separator")
	}
	if limit < 0 {
		return strList(strings.Split(s, by))
	}
	if !right {
		return strList(strings.SplitN(s, by, int(min(limit, math.MaxInt32))+1))
	}
	var tail []string
	for int64(len(tail)) < limit {
		i := strings.LastIndex(s, by)
		if i < 0 {
			break
		}
		tail = append(tail, s[i+len(by):])
		s = s[:i]
	}
	tail = append(tail, s)
	for i, j := 0, len(tail)-1; i < j; i, j = i+1, j-1 {
		tail[i], tail[j] = tail[j], tail[i]
	}
	return strList(tail)
}

// affix is str.startswith and str.endswith, which also take a tuple.
func affix(s string, v any, has func(s, p string) bool) bool {
	if l, ok := v.(*List); ok && l.tuple {
		for _, p := range l.Items {
			if has(s, wantStr("startswith", p)) {
				return true
			}
		}
		return false
	}
	return has(s, wantStr("startswith", v))
}

// title is str.title: upper case after every non-letter.
func title(s string) string {
	prev := false
	return strings.Map(func(r rune) rune {
		was := prev
		prev = unicode.IsLetter(r)
		if was {
			return unicode.ToLower(r)
		}
		return unicode.ToTitle(r)
	}, s)
}

func capitalize(s string) string {
	first := true
	return strings.Map(func(r rune) rune {
		if first {
			first = false
			return unicode.ToTitle(r)
		}
		return unicode.ToLower(r)
	}, s)
}

// replace is str.replace.
func (r *run) replace(s string, a args) string {
	a.only("replace", 3, "old", "new", "count")
	from, to := wantStr("replace", a.get(0, "old", nil)), wantStr("replace", a.get(1, "new", nil))
	n := -1
	if c := a.get(2, "count", nil); c != nil {
		n = int(max(min(wantInt("replace", c), math.MaxInt32), -1))
	}
	if grow := len(to) - len(from); grow > 0 && (len(s)/max(len(from), 1)+1)*grow+len(s) > r.limit {
		if strings.Count(s, from)*grow+len(s) > r.limit {
			fail("string is over the limit")
		}
	}
	return strings.Replace(s, from, to, n)
}

// method returns the bound method of a str, dict or list, nil for none.
func method(v any, name string) any {
	bind := func(fn func(r *run, a args) any) any { return &callable{name, fn} }
	switch v := v.(type) {
	case string:
		switch name {
		case "strip", "lstrip", "rstrip":
			return bind(func(_ *run, a args) any {
				a.only(name, 1)
				return trim(v, a.get(0, "", nil), name != "rstrip", name != "lstrip")
			})
		case "split", "rsplit":
			return bind(func(_ *run, a args) any {
				a.only(name, 2, "sep", "maxsplit")
				return split(v, a.get(0, "sep", nil), wantInt(name, a.get(1, "maxsplit", int64(-1))), name == "rsplit")
			})
		case "splitlines":
			return bind(func(_ *run, a args) any {
				a.only(name, 0)
				if strings.ContainsAny(v, "\v\f\x1c\x1d\x1e\u0085\u2028\u2029") {
					fail("splitlines on this text is not implemented")
				}
				s := strings.ReplaceAll(strings.ReplaceAll(v, "\r\n", "\n"), "\r", "\n")
				if s = strings.TrimSuffix(s, "\n"); s == "" && len(v) == 0 {
					return &List{}
				}
				return strList(strings.Split(s, "\n"))
			})
		case "startswith":
			return bind(func(_ *run, a args) any { a.only(name, 1); return affix(v, a.get(0, "", nil), strings.HasPrefix) })
		case "endswith":
			return bind(func(_ *run, a args) any { a.only(name, 1); return affix(v, a.get(0, "", nil), strings.HasSuffix) })
		case "removeprefix":
			return bind(func(_ *run, a args) any { return strings.TrimPrefix(v, wantStr(name, a.get(0, "", nil))) })
		case "removesuffix":
			return bind(func(_ *run, a args) any { return strings.TrimSuffix(v, wantStr(name, a.get(0, "", nil))) })
		case "upper":
			return bind(func(*run, args) any { return strings.ToUpper(v) })
		case "lower":
			return bind(func(*run, args) any { return strings.ToLower(v) })
		case "title":
			return bind(func(*run, args) any { return title(v) })
		case "capitalize":
			return bind(func(*run, args) any { return capitalize(v) })
		case "replace":
			return bind(func(r *run, a args) any { return r.replace(v, a) })
		case "find":
			return bind(func(_ *run, a args) any {
				a.only(name, 1)
				i := strings.Index(v, wantStr(name, a.get(0, "", nil)))
				if i > 0 {
					return runeLen(v[:i])
				}
				return int64(i)
			})
		case "count":
			return bind(func(_ *run, a args) any {
				a.only(name, 1)
				return int64(strings.Count(v, wantStr(name, a.get(0, "", nil))))
			})
		case "join":
			return bind(func(r *run, a args) any { return r.joinList(v, r.items(a.get(0, "", nil))) })
		case "isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower", "format", "encode", "partition", "rpartition",
			"rfind", "index", "zfill", "center", "ljust", "rjust", "swapcase", "casefold", "expandtabs", "translate", "isnumeric":
			fail("str.%s is not implemented", name)
		}
	case *Dict:
		switch name {
		case "items":
			return bind(func(*run, args) any { return dictItems(v) })
		case "keys":
			return bind(func(*run, args) any { return strList(v.Keys) })
		case "values":
			return bind(func(*run, args) any { return &List{Items: v.Vals} })
		case "get":
			return bind(func(_ *run, a args) any {
				a.only(name, 2)
				if k, ok := a.get(0, "", nil).(string); ok {
					if x, ok := v.Get(k); ok {
						return x
					}
				}
				return a.get(1, "", nil)
			})
		case "copy":
			return bind(func(*run, args) any { return v }) // nothing can change it
		case "pop", "update", "clear", "setdefault", "popitem", "fromkeys":
			return bind(func(*run, args) any { fail("dict.%s is not allowed in a template", name); return nil })
		}
	case *List:
		switch name {
		case "append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse":
			return bind(func(*run, args) any { fail("list.%s is not allowed in a template", name); return nil })
		case "count":
			return bind(func(_ *run, a args) any {
				n := int64(0)
				for _, x := range v.Items {
					if equal(x, a.get(0, "", nil)) {
						n++
					}
				}
				return n
			})
		case "index", "copy":
			fail("list.%s is not implemented", name)
		}
	}
	return nil
}

func dictItems(d *Dict) *List {
	l := &List{Items: make([]any, len(d.Keys))}
	for i, k := range d.Keys {
		l.Items[i] = &List{Items: []any{k, d.Vals[i]}, tuple: true}
	}
	return l
}

func (r *run) joinList(sep string, items []any) string {
	var b strings.Builder
	for i, x := range items {
		if i > 0 {
			b.WriteString(sep)
		}
		b.WriteString(str(x))
		if b.Len() > r.limit {
			fail("string is over the limit")
		}
	}
	return b.String()
}

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
	"number": func(_ *run, v any, _ args) bool {
		_, ok := number(v)
		return ok || isInt(v)
	},
	"mapping": func(_ *run, v any, _ args) bool { _, ok := v.(*Dict); return ok },
	"iterable": func(_ *run, v any, _ args) bool {
		switch v.(type) {
		case string, *List, *Dict, undefined:
			return true
		}
		return false
	},
	"sequence": func(_ *run, v any, _ args) bool {
		switch v.(type) {
		case string, *List, *Dict, undefined:
			return true
		}
		return false
	},
	"callable": func(_ *run, v any, _ args) bool { _, ok := v.(*callable); return ok },
	"odd":      func(_ *run, v any, _ args) bool { return wantInt("odd", v)&1 == 1 },
	"even":     func(_ *run, v any, _ args) bool { return wantInt("even", v)&1 == 0 },
	"in":       func(r *run, v any, a args) bool { return r.contains(a.get(0, "", nil), v) },
	"equalto":  func(_ *run, v any, a args) bool { return equal(v, a.get(0, "", nil)) },
	"eq":       func(_ *run, v any, a args) bool { return equal(v, a.get(0, "", nil)) },
	"==":       func(_ *run, v any, a args) bool { return equal(v, a.get(0, "", nil)) },
	"ne":       func(_ *run, v any, a args) bool { return !equal(v, a.get(0, "", nil)) },
	"lt":       func(_ *run, v any, a args) bool { return order(v, a.get(0, "", nil)) < 0 },
	"le":       func(_ *run, v any, a args) bool { return order(v, a.get(0, "", nil)) <= 0 },
	"gt":       func(_ *run, v any, a args) bool { return order(v, a.get(0, "", nil)) > 0 },
	"ge":       func(_ *run, v any, a args) bool { return order(v, a.get(0, "", nil)) >= 0 },
	"divisibleby": func(_ *run, v any, a args) bool {
		return intArith("%", wantInt("divisibleby", v), wantInt("divisibleby", a.get(0, "", nil))) == int64(0)
	},
}

func isInt(v any) bool {
	switch v.(type) {
	case int64, bigInt:
		return true
	}
	return false
}

// filterFuncs are the filters. filterNames breaks the cycle of those that
// apply another filter by name.
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
		order := make([]int, len(l.Items))
		for i := range order {
			order[i] = i
		}
		sortInts(order, func(a, b int) bool { return strings.ToLower(d.Keys[a]) < strings.ToLower(d.Keys[b]) })
		out := &List{}
		for _, i := range order {
			out.Items = append(out.Items, l.Items[i])
		}
		return out
	},
	"first": func(r *run, v any, _ args) any {
		if l := r.items(v); len(l) > 0 {
			return l[0]
		}
		return undefined{"first of nothing"}
	},
	"last": func(r *run, v any, _ args) any {
		if l := r.items(v); len(l) > 0 {
			return l[len(l)-1]
		}
		return undefined{"last of nothing"}
	},
	"join": func(r *run, v any, a args) any {
		a.only("join", 2, "d", "attribute")
		items := r.items(v)
		if at := a.get(1, "attribute", nil); at != nil {
			items = r.mapAttr(items, wantStr("join", at), nil)
		}
		return r.joinList(str(a.get(0, "d", "")), items)
	},
	"reverse": func(r *run, v any, _ args) any {
		items := r.items(v)
		out := make([]any, len(items))
		for i, x := range items {
			out[len(items)-1-i] = x
		}
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
			seen := false
			for _, y := range out.Items {
				r.step()
				seen = seen || strings.EqualFold(y.(string), x.(string))
			}
			if !seen {
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

// mapFilter is map with a filter that takes no arguments.
func (r *run) mapFilter(v any, a args) any {
	name := wantStr("map", a.get(0, "", nil))
	out := &List{}
	for _, x := range r.items(v) {
		r.step()
		switch name {
		case "trim":
			out.Items = append(out.Items, trim(str(x), nil, true, true))
		case "string":
			out.Items = append(out.Items, str(x))
		case "upper":
			out.Items = append(out.Items, strings.ToUpper(str(x)))
		case "lower":
			out.Items = append(out.Items, strings.ToLower(str(x)))
		case "tojson":
			out.Items = append(out.Items, tojson(r, x, args{}))
		case "length":
			out.Items = append(out.Items, length(r, x, args{}))
		default:
			fail("map with filter %s is not implemented", name)
		}
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
		at = wantStr("selectattr", a.get(0, "", nil))
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
	if len(out) > r.limit {
		fail("string is over the limit")
	}
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
	if len(lines)*len(pad)+len(s) > r.limit {
		fail("string is over the limit")
	}
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
