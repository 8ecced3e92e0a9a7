package jinja

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

func fail(format string, a ...any) { panic(failure{fmt.Sprintf(format, a...)}) }

// typeName names a value's type in errors.
func typeName(v any) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case bool:
		return "bool"
	case int64, bigInt:
		return "int"
	case float64:
		return "float"
	case string:
		return "str"
	case *List:
		return "list"
	case *Dict:
		return "dict"
	case undefined:
		return "undefined (" + v.name + ")"
	}
	return "object"
}

// items returns what iterating over v yields.
func (r *run) items(v any) []any {
	switch v := v.(type) {
	case *List:
		return v.Items
	case *Dict:
		return strList(v.Keys).Items
	case string:
		var out []any
		for _, c := range v {
			r.step()
			out = append(out, string(c))
		}
		return out
	case undefined:
		return nil
	}
	fail("cannot iterate over %s", typeName(v))
	return nil
}

// attr is v.name: methods first, then items, as Python's getattr order has it.
func (r *run) attr(v any, name string) any {
	switch v := v.(type) {
	case undefined:
		fail("%s is undefined", v.name)
	case *namespace:
		if x, ok := v.d.Get(name); ok {
			return x
		}
		return undefined{name}
	case *loop:
		return v.attr(name)
	}
	if m := methodOf(v, name); m != nil {
		return m
	}
	if d, ok := v.(*Dict); ok {
		if x, ok := d.Get(name); ok {
			return x
		}
	}
	return undefined{name}
}

// index is v[key]: items first, then attributes.
func (r *run) index(v, key any) any {
	switch v := v.(type) {
	case undefined:
		fail("%s is undefined", v.name)
	case *Dict:
		if k, ok := key.(string); ok {
			if x, ok := v.Get(k); ok {
				return x
			}
		}
	case *List:
		if n, ok := key.(int64); ok {
			return itemOr(v.Items, n, "list index")
		}
	case string:
		if n, ok := key.(int64); ok {
			if c := element([]rune(v), n); c != nil {
				return string(*c)
			}
			return undefined{"string index"}
		}
	}
	if k, ok := key.(string); ok {
		return r.attr(v, k)
	}
	return undefined{"subscript"}
}

// itemOr is the item at n, or undefined by that name.
func itemOr(items []any, n int64, name string) any {
	if x := element(items, n); x != nil {
		return *x
	}
	return undefined{name}
}

// element is list[n], from the end where n is below 0; nil without one.
func element[T any](list []T, n int64) *T {
	if n < 0 {
		n += int64(len(list))
	}
	if n < 0 || n >= int64(len(list)) {
		return nil
	}
	return &list[n]
}

// slice is v[lo:hi:step].
func (r *run) slice(v any, lo, hi, step *int64) any {
	n := int64(0)
	var rs []rune
	switch v := v.(type) {
	case string:
		rs = []rune(v)
		n = int64(len(rs))
	case *List:
		n = int64(len(v.Items))
	default:
		fail("cannot slice %s", typeName(v))
	}
	st := int64(1)
	if step != nil {
		st = *step
	}
	if st == 0 {
		fail("slice step cannot be zero")
	}
	start, end := int64(0), n
	low, high := int64(0), n
	if st < 0 {
		start, end = n-1, -1
		low, high = -1, n-1
	}
	clamp := func(p *int64, def int64) int64 {
		if p == nil {
			return def
		}
		x := *p
		if x < 0 {
			x += n
		}
		return min(max(x, low), high)
	}
	start, end = clamp(lo, start), clamp(hi, end)
	var at []int64
	for i := start; st > 0 && i < end || st < 0 && i > end; i += st {
		at = append(at, i)
	}
	if l, ok := v.(*List); ok {
		out := &List{tuple: l.tuple}
		for _, i := range at {
			out.Items = append(out.Items, l.Items[i])
		}
		return out
	}
	var b strings.Builder
	for _, i := range at {
		b.WriteRune(rs[i])
	}
	return b.String()
}

// comparisons are the operators that compare.
var comparisons = map[string]func(a, b any) bool{
	"==":     equal,
	"!=":     func(a, b any) bool { return !equal(a, b) },
	"<":      func(a, b any) bool { return order(a, b) < 0 },
	"<=":     func(a, b any) bool { return order(a, b) <= 0 },
	">":      func(a, b any) bool { return order(a, b) > 0 },
	">=":     func(a, b any) bool { return order(a, b) >= 0 },
	"in":     func(a, b any) bool { return contains(b, a) },
	"not in": func(a, b any) bool { return !contains(b, a) },
}

func order(a, b any) int {
	if x, ok := number(a); ok {
		if y, ok := number(b); ok {
			return cmp.Compare(x, y)
		}
	}
	if x, ok := a.(string); ok {
		if y, ok := b.(string); ok {
			return strings.Compare(x, y)
		}
	}
	fail("cannot order %s and %s", typeName(a), typeName(b))
	return 0
}

func contains(in, x any) bool {
	switch in := in.(type) {
	case string:
		s, ok := x.(string)
		if !ok {
			fail("cannot look for %s in a str", typeName(x))
		}
		return strings.Contains(in, s)
	case *Dict:
		s, ok := x.(string)
		if ok {
			_, ok = in.Get(s)
		}
		return ok
	case *List:
		return slices.ContainsFunc(in.Items, func(e any) bool { return equal(e, x) })
	case undefined:
		return false
	}
	fail("cannot look into %s", typeName(in))
	return false
}

func (r *run) arith(op string, a, b any) any {
	if op == "~" {
		return r.join(str(a), str(b))
	}
	if x, ok := a.(string); ok {
		y, ok := b.(string)
		if op == "+" && ok {
			return r.join(x, y)
		}
		if n, ok := b.(int64); ok && op == "*" {
			if n > 0 && int64(len(x))*n > int64(r.limit) {
				fail("string is over the limit")
			}
			return strings.Repeat(x, int(max(n, 0)))
		}
		fail("operator %s on str and %s", op, typeName(b))
	}
	if x, ok := a.(*List); ok {
		if y, ok := b.(*List); ok && op == "+" && x.tuple == y.tuple {
			return &List{Items: append(append([]any(nil), x.Items...), y.Items...), tuple: x.tuple}
		}
	}
	if x, ok := integer(a); ok {
		if y, ok := integer(b); ok {
			return intArith(op, x, y)
		}
	}
	x, ok1 := number(a)
	y, ok2 := number(b)
	if !ok1 || !ok2 {
		fail("operator %s on %s and %s", op, typeName(a), typeName(b))
	}
	switch op {
	case "+":
		return x + y
	case "-":
		return x - y
	case "*":
		return x * y
	case "**":
		return math.Pow(x, y)
	}
	if y == 0 {
		fail("division by zero")
	}
	switch op {
	case "/":
		return x / y
	case "//":
		return math.Floor(x / y)
	}
	return x - y*math.Floor(x/y)
}

func (r *run) join(a, b string) string {
	r.fits(len(a) + len(b))
	return a + b
}

func integer(v any) (int64, bool) {
	switch v := v.(type) {
	case int64:
		return v, true
	case bool:
		if v {
			return 1, true
		}
		return 0, true
	}
	return 0, false
}

// intArith refuses what would leave int64.
func intArith(op string, x, y int64) any {
	var z int64
	ok := true
	switch op {
	case "+":
		z = x + y
		ok = (z > x) == (y > 0)
	case "-":
		z = x - y
		ok = (z < x) == (y > 0)
	case "*":
		z = x * y
		ok = x == 0 || z/x == y && !(x == -1 && y == math.MinInt64)
	case "**":
		f := math.Pow(float64(x), float64(y))
		if y < 0 {
			return f
		}
		z, ok = int64(f), math.Abs(f) < 1<<53
	default:
		if y == 0 {
			fail("division by zero")
		}
		if op == "/" {
			return float64(x) / float64(y)
		}
		z = x / y
		m := x % y
		if m != 0 && (m < 0) != (y < 0) {
			z, m = z-1, m+y
		}
		if op == "%" {
			return m
		}
	}
	if !ok {
		fail("integer overflow")
	}
	return z
}

func (l *loop) attr(name string) any {
	n := len(l.items)
	at := func(i int) any {
		if i < 0 || i >= n {
			return undefined{"loop." + name}
		}
		return l.items[i]
	}
	switch name {
	case "index":
		return int64(l.i + 1)
	case "index0":
		return int64(l.i)
	case "revindex":
		return int64(n - l.i)
	case "revindex0":
		return int64(n - l.i - 1)
	case "first":
		return l.i == 0
	case "last":
		return l.i == n-1
	case "length":
		return int64(n)
	case "previtem":
		return at(l.i - 1)
	case "nextitem":
		return at(l.i + 1)
	case "depth":
		fail("loop.depth is not implemented")
	case "cycle":
		i := l.i
		return &callable{name: name, fn: func(_ *run, a args) any {
			if len(a.pos) == 0 {
				fail("loop.cycle needs values")
			}
			return a.pos[i%len(a.pos)]
		}}
	}
	fail("loop.%s is not implemented", name)
	return nil
}

// runeLen is len(s) in code points.
func runeLen(s string) int64 { return int64(utf8.RuneCountInString(s)) }
