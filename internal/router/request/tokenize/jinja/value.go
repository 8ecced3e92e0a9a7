package jinja

import (
	"bytes"
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// Values are nil (None), bool, int64, bigInt, float64, string, *List, *Dict,
// undefined, *namespace and *callable.

// List is a Python list or tuple.
type List struct {
	Items []any
	tuple bool
}

// Dict is a Python dict with string keys, in insertion order.
type Dict struct {
	Keys  []string
	Vals  []any
	index map[string]int // only when large
}

// bigInt is an integer that does not fit into int64, as its decimal digits.
type bigInt string

// undefined is the value of a name or attribute that is not there.
type undefined struct{ name string }

// namespace is the result of namespace(): the one thing a template may change.
type namespace struct{ d Dict }

// callable is a function, macro or bound method.
type callable struct {
	name string
	fn   func(r *run, a args) any
}

// NewDict returns a Dict of alternating keys and values.
func NewDict(kv ...any) *Dict {
	d := &Dict{}
	for i := 0; i+1 < len(kv); i += 2 {
		d.Set(kv[i].(string), kv[i+1])
	}
	return d
}

func (d *Dict) find(k string) int {
	if d.index == nil {
		return slices.Index(d.Keys, k)
	}
	if i, ok := d.index[k]; ok {
		return i
	}
	return -1
}

// Get returns the value of k.
func (d *Dict) Get(k string) (any, bool) {
	if i := d.find(k); i >= 0 {
		return d.Vals[i], true
	}
	return nil, false
}

// Set adds or replaces a member; a replaced one keeps its place.
func (d *Dict) Set(k string, v any) {
	if i := d.find(k); i >= 0 {
		d.Vals[i] = v
		return
	}
	d.Keys = append(d.Keys, k)
	d.Vals = append(d.Vals, v)
	switch {
	case d.index != nil:
		d.index[k] = len(d.Keys) - 1
	case len(d.Keys) > 16:
		d.index = make(map[string]int, 32)
		for i, x := range d.Keys {
			d.index[x] = i
		}
	}
}

// maxDepth bounds how deep JSON may nest.
const maxDepth = 128

// ParseJSON reads JSON as Python's json.loads does: objects keep their order,
// integers stay exact, of a repeated key the last value counts.
func ParseJSON(b []byte) (any, error) {
	return parseJSON(bytes.Trim(b, " \t\r\n"), 0)
}

func parseJSON(b []byte, depth int) (any, error) {
	if len(b) == 0 || depth > maxDepth {
		return nil, rawjson.ErrSyntax
	}
	switch b[0] {
	case '"':
		s, ok := rawjson.Unquote(nil, b)
		if !ok {
			return nil, rawjson.ErrSyntax
		}
		return string(s), nil
	case '{':
		d := &Dict{}
		var inner error
		err := rawjson.Object(b, func(k, v []byte) bool {
			var x any
			if x, inner = parseJSON(v, depth+1); inner != nil {
				return false
			}
			quoted := make([]byte, 0, len(k)+2)
			key, ok := rawjson.Unquote(nil, append(append(append(quoted, '"'), k...), '"'))
			if !ok {
				inner = rawjson.ErrSyntax
				return false
			}
			d.Set(string(key), x)
			return true
		})
		return d, cmp.Or(err, inner)
	case '[':
		l := &List{}
		var inner error
		err := rawjson.Array(b, func(v []byte) bool {
			var x any
			if x, inner = parseJSON(v, depth+1); inner != nil {
				return false
			}
			l.Items = append(l.Items, x)
			return true
		})
		return l, cmp.Or(err, inner)
	}
	switch s := string(b); s {
	case "null":
		return nil, nil
	case "true":
		return true, nil
	case "false":
		return false, nil
	default:
		return parseNumber(s)
	}
}

func parseNumber(s string) (any, error) {
	digits := strings.TrimPrefix(s, "-")
	if digits == "" || digits[0] < '0' || digits[0] > '9' || len(digits) > 1 && digits[0] == '0' && digits[1] >= '0' && digits[1] <= '9' {
		return nil, rawjson.ErrSyntax
	}
	if strings.Trim(digits, "0123456789") == "" {
		if n, err := strconv.ParseInt(s, 10, 64); err == nil {
			return n, nil
		}
		return bigInt(s), nil
	}
	if strings.Trim(digits, "0123456789.eE+-") != "" {
		return nil, rawjson.ErrSyntax
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil && !math.IsInf(f, 0) {
		return nil, rawjson.ErrSyntax
	}
	return f, nil
}

// truth is bool(v).
func truth(v any) bool {
	switch v := v.(type) {
	case nil, undefined:
		return false
	case string:
		return v != ""
	case *List:
		return len(v.Items) > 0
	case *Dict:
		return len(v.Keys) > 0
	}
	n, ok := number(v)
	return !ok || n != 0
}

// str is str(v), what {{ v }} prints.
func str(v any) string {
	switch v := v.(type) {
	case string:
		return v
	case undefined:
		return ""
	}
	return string(repr(nil, v))
}

// repr appends repr(v).
func repr(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return append(b, "None"...)
	case bool:
		if v {
			return append(b, "True"...)
		}
		return append(b, "False"...)
	case int64:
		return strconv.AppendInt(b, v, 10)
	case bigInt:
		return append(b, v...)
	case float64:
		return appendFloat(b, v, "inf", "nan")
	case string:
		return reprString(b, v)
	case *List:
		open, end := byte('['), byte(']')
		if v.tuple {
			open, end = '(', ')'
		}
		b = append(b, open)
		for i, x := range v.Items {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = repr(b, x)
		}
		if v.tuple && len(v.Items) == 1 {
			b = append(b, ',')
		}
		return append(b, end)
	case *Dict:
		b = append(b, '{')
		for i, k := range v.Keys {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = append(reprString(b, k), ": "...)
			b = repr(b, v.Vals[i])
		}
		return append(b, '}')
	case undefined:
		return append(b, "Undefined"...)
	}
	panic(failure{"value has no text form"})
}

func reprString(b []byte, s string) []byte {
	q := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		q = '"'
	}
	b = append(b, q)
	for _, r := range s {
		switch {
		case r == rune(q) || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\n':
			b = append(b, `\n`...)
		case r == '\r':
			b = append(b, `\r`...)
		case r == '\t':
			b = append(b, `\t`...)
		case unicode.IsPrint(r):
			b = append(b, string(r)...)
		case r < 0x100:
			b = append(b, `\x`...)
			b = append(b, strconv.FormatInt(int64(r)+0x100, 16)[1:]...)
		case r < 0x10000:
			b = append(b, `\u`...)
			b = append(b, strconv.FormatInt(int64(r)+0x10000, 16)[1:]...)
		default:
			b = append(b, `\U000`...)
			b = append(b, strconv.FormatInt(int64(r)+0x100000, 16)...)
		}
	}
	return append(b, q)
}

// appendFloat is repr(float): the shortest digits, fixed notation between
// 1e-4 and 1e16.
func appendFloat(b []byte, f float64, inf, nan string) []byte {
	switch {
	case math.IsNaN(f):
		return append(b, nan...)
	case math.IsInf(f, 1):
		return append(b, inf...)
	case math.IsInf(f, -1):
		return append(append(b, '-'), inf...)
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.AppendFloat(b, f, 'e', -1, 64)
	}
	n := len(b)
	b = strconv.AppendFloat(b, f, 'f', -1, 64)
	if !strings.Contains(string(b[n:]), ".") {
		b = append(b, ".0"...)
	}
	return b
}

// jsonStyle is how tojson writes.
type jsonStyle struct {
	item, key string // separators
	indent    string // one level, "" for one line
	sort      bool
	ascii     bool
}

func (s jsonStyle) append(b []byte, v any, level int) []byte {
	switch v := v.(type) {
	case nil:
		return append(b, "null"...)
	case bool:
		return strconv.AppendBool(b, v)
	case int64:
		return strconv.AppendInt(b, v, 10)
	case bigInt:
		return append(b, v...)
	case float64:
		return appendFloat(b, v, "Infinity", "NaN")
	case string:
		return s.quote(b, v)
	case *List:
		b = append(b, '[')
		for i, x := range v.Items {
			b = s.append(s.separate(b, i, level+1), x, level+1)
		}
		return append(s.close(b, len(v.Items), level), ']')
	case *Dict:
		order := make([]int, len(v.Keys))
		for i := range order {
			order[i] = i
		}
		if s.sort {
			slices.SortFunc(order, func(a, c int) int { return strings.Compare(v.Keys[a], v.Keys[c]) })
		}
		b = append(b, '{')
		for i, at := range order {
			b = s.quote(s.separate(b, i, level+1), v.Keys[at])
			b = s.append(append(b, s.key...), v.Vals[at], level+1)
		}
		return append(s.close(b, len(v.Keys), level), '}')
	}
	panic(failure{"value is not JSON serializable"})
}

func (s jsonStyle) separate(b []byte, i, level int) []byte {
	if i > 0 {
		b = append(b, s.item...)
	}
	if s.indent != "" {
		b = append(append(b, '\n'), strings.Repeat(s.indent, level)...)
	}
	return b
}

func (s jsonStyle) close(b []byte, n, level int) []byte {
	if n > 0 && s.indent != "" {
		b = append(append(b, '\n'), strings.Repeat(s.indent, level)...)
	}
	return b
}

func (s jsonStyle) quote(b []byte, v string) []byte {
	if !s.ascii {
		return rawjson.AppendQuote(b, v)
	}
	q := rawjson.AppendQuote(nil, v)
	for _, r := range string(q) {
		switch {
		case r < 0x7f:
			b = append(b, byte(r))
		case r < 0x10000:
			b = appendU(b, r)
		default:
			r -= 0x10000
			b = appendU(appendU(b, 0xd800+r>>10), 0xdc00+r&0x3ff)
		}
	}
	return b
}

func appendU(b []byte, r rune) []byte {
	return append(append(b, '\\', 'u'), strconv.FormatInt(int64(r)+0x10000, 16)[1:]...)
}

// equal is a == b.
func equal(a, b any) bool {
	if x, ok := number(a); ok {
		y, ok := number(b)
		return ok && x == y
	}
	switch a := a.(type) {
	case nil:
		return b == nil
	case string:
		s, ok := b.(string)
		return ok && s == a
	case bigInt:
		s, ok := b.(bigInt)
		return ok && s == a
	case undefined:
		_, ok := b.(undefined)
		return ok
	case *List:
		l, ok := b.(*List)
		return ok && l.tuple == a.tuple && slices.EqualFunc(a.Items, l.Items, equal)
	case *Dict:
		d, ok := b.(*Dict)
		if !ok || len(d.Keys) != len(a.Keys) {
			return false
		}
		for i, k := range a.Keys {
			if v, ok := d.Get(k); !ok || !equal(a.Vals[i], v) {
				return false
			}
		}
		return true
	}
	return a == b
}

// number returns the value of a bool, int or float.
func number(v any) (float64, bool) {
	if f, ok := v.(float64); ok {
		return f, true
	}
	n, ok := integer(v)
	return float64(n), ok
}
