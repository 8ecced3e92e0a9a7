package jinja

import (
	"math"
	"slices"
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
		if !slices.Contains(names, k) {
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
	slices.Reverse(tail)
	return strList(tail)
}

// affix is str.startswith and str.endswith, which also take a tuple.
func affix(s string, v any, has func(s, p string) bool) bool {
	if l, ok := v.(*List); ok && l.tuple {
		return slices.ContainsFunc(l.Items, func(p any) bool { return has(s, wantStr("startswith", p)) })
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
