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

// first is the first positional argument, nil if it is absent.
func (a args) first() any { return a.get(0, "", nil) }

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

// isSpace is str.isspace for one character.
func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

// trim is str.strip and its relatives; chars is nil for white space.
func trim(s string, chars any, left, right bool) string {
	in := isSpace
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
func split(s string, a args, right bool) *List {
	sep, limit := a.get(0, "sep", nil), wantInt("split", a.get(1, "maxsplit", int64(-1)))
	if sep == nil {
		if limit >= 0 {
			fail("split with a limit and no separator is not implemented")
		}
		return strList(strings.FieldsFunc(s, isSpace))
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
		r.fits(strings.Count(s, from)*grow + len(s))
	}
	return strings.Replace(s, from, to, n)
}

// A method is one of str, dict or list.
type method[T any] struct {
	most  int // positional arguments
	names []string
	fn    func(r *run, v T, a args) any
}

var strMethods = map[string]method[string]{
	"strip":  {1, nil, func(_ *run, s string, a args) any { return trim(s, a.first(), true, true) }},
	"lstrip": {1, nil, func(_ *run, s string, a args) any { return trim(s, a.first(), true, false) }},
	"rstrip": {1, nil, func(_ *run, s string, a args) any { return trim(s, a.first(), false, true) }},
	"split":  {2, []string{"sep", "maxsplit"}, func(_ *run, s string, a args) any { return split(s, a, false) }},
	"rsplit": {2, []string{"sep", "maxsplit"}, func(_ *run, s string, a args) any { return split(s, a, true) }},
	"splitlines": {0, nil, func(_ *run, s string, _ args) any {
		if strings.ContainsAny(s, "\v\f\x1c\x1d\x1e\u0085\u2028\u2029") {
			fail("splitlines on this text is not implemented")
		}
		if s == "" {
			return &List{}
		}
		s = strings.ReplaceAll(strings.ReplaceAll(s, "\r\n", "\n"), "\r", "\n")
		return strList(strings.Split(strings.TrimSuffix(s, "\n"), "\n"))
	}},
	"startswith":   {1, nil, func(_ *run, s string, a args) any { return affix(s, a.first(), strings.HasPrefix) }},
	"endswith":     {1, nil, func(_ *run, s string, a args) any { return affix(s, a.first(), strings.HasSuffix) }},
	"removeprefix": {1, nil, func(_ *run, s string, a args) any { return strings.TrimPrefix(s, wantStr("removeprefix", a.first())) }},
	"removesuffix": {1, nil, func(_ *run, s string, a args) any { return strings.TrimSuffix(s, wantStr("removesuffix", a.first())) }},
	"upper":        {0, nil, func(_ *run, s string, _ args) any { return strings.ToUpper(s) }},
	"lower":        {0, nil, func(_ *run, s string, _ args) any { return strings.ToLower(s) }},
	"title":        {0, nil, func(_ *run, s string, _ args) any { return title(s) }},
	"capitalize":   {0, nil, func(_ *run, s string, _ args) any { return capitalize(s) }},
	"replace":      {3, []string{"old", "new", "count"}, func(r *run, s string, a args) any { return r.replace(s, a) }},
	"find": {1, nil, func(_ *run, s string, a args) any {
		i := strings.Index(s, wantStr("find", a.first()))
		if i > 0 {
			return runeLen(s[:i])
		}
		return int64(i)
	}},
	"count": {1, nil, func(_ *run, s string, a args) any { return int64(strings.Count(s, wantStr("count", a.first()))) }},
	"join":  {1, nil, func(r *run, s string, a args) any { return r.joinList(s, r.items(a.first())) }},
}

var dictMethods = map[string]method[*Dict]{
	"items":  {0, nil, func(_ *run, d *Dict, _ args) any { return dictItems(d) }},
	"keys":   {0, nil, func(_ *run, d *Dict, _ args) any { return strList(d.Keys) }},
	"values": {0, nil, func(_ *run, d *Dict, _ args) any { return &List{Items: d.Vals} }},
	"copy":   {0, nil, func(_ *run, d *Dict, _ args) any { return d }}, // nothing can change it
	"get": {2, nil, func(_ *run, d *Dict, a args) any {
		if k, ok := a.first().(string); ok {
			if x, ok := d.Get(k); ok {
				return x
			}
		}
		return a.get(1, "", nil)
	}},
}

var listMethods = map[string]method[*List]{
	"count": {1, nil, func(_ *run, l *List, a args) any {
		n := int64(0)
		for _, x := range l.Items {
			if equal(x, a.first()) {
				n++
			}
		}
		return n
	}},
}

// Methods that a template may have and that are not here: those that would
// change a value fail when they are called.
var (
	missingOfStr = []string{"isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower", "format", "encode", "partition", "rpartition",
		"rfind", "index", "zfill", "center", "ljust", "rjust", "swapcase", "casefold", "expandtabs", "translate", "isnumeric"}
	missingOfList = []string{"index", "copy"}
	changesOfDict = []string{"pop", "update", "clear", "setdefault", "popitem", "fromkeys"}
	changesOfList = []string{"append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"}
)

// methodOf returns the bound method of a str, dict or list, nil for none.
func methodOf(v any, name string) any {
	switch v := v.(type) {
	case string:
		return bind("str", strMethods, v, name, missingOfStr, nil)
	case *Dict:
		return bind("dict", dictMethods, v, name, nil, changesOfDict)
	case *List:
		return bind("list", listMethods, v, name, missingOfList, changesOfList)
	}
	return nil
}

func bind[T any](what string, methods map[string]method[T], v T, name string, missing, changes []string) any {
	m, ok := methods[name]
	switch {
	case ok:
		return &callable{name, func(r *run, a args) any {
			a.only(name, m.most, m.names...)
			return m.fn(r, v, a)
		}}
	case slices.Contains(missing, name):
		fail("%s.%s is not implemented", what, name)
	case slices.Contains(changes, name):
		return &callable{name, func(*run, args) any { fail("%s.%s is not allowed in a template", what, name); return nil }}
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
		r.fits(b.Len())
	}
	return b.String()
}
