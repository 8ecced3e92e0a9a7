package rawjson

import (
	"bytes"
	"iter"
	"strconv"
	"strings"
)

// Value is a JSON value as text. It is empty where there is no value, and an empty Value
// has no members, no elements and an empty String.
type Value []byte

// Get returns the value at a path of names of members and numbers of elements, joined by
// dots ("choices.0.text"). Of members with one name it takes the first.
func (v Value) Get(path string) Value {
	w := Walk(v)
	if !w.find(path) {
		return nil
	}
	if v = w.Value(); w.cut {
		return nil
	}
	return v
}

// Put returns b with raw in the place of the value at a path, as [Value.Get] finds it. It
// returns b itself if there is no such value.
func Put(b []byte, path string, raw []byte) []byte {
	w := Walk(b)
	if !w.find(path) {
		return b
	}
	start := w.i
	if w.Value(); w.cut || w.i == start {
		return b
	}
	return bytes.Join([][]byte{b[:start], raw, b[w.i:]}, nil)
}

// find stops at the value at a path and reports whether there is one.
func (w *Walker) find(path string) bool {
	for more := true; more; {
		var name string
		name, path, more = strings.Cut(path, ".")
		if !w.enter(name) {
			return false
		}
	}
	return true
}

// enter goes into the object or array at which the walker stands, to a member or element.
func (w *Walker) enter(name string) bool {
	w.space()
	if !w.At('[') {
		for more := w.Open('{'); more; more = w.Next() {
			if string(resolved(w.Key())) == name {
				return w.i < len(w.b)
			}
			w.Value()
		}
		return false
	}
	n, err := strconv.Atoi(name)
	if err != nil {
		return false
	}
	for more := w.Open('['); more; more = w.Next() {
		if n == 0 {
			return true
		}
		n--
		w.Value()
	}
	return false
}

// resolved is a key with its escapes resolved.
func resolved(key []byte) []byte {
	if bytes.IndexByte(key, '\\') >= 0 {
		key, _ = unescape(nil, key)
	}
	return key
}

// Members returns the members of an object in order, duplicates included, up to what is
// malformed. Other values have none. Names come with their escapes resolved.
func (v Value) Members() iter.Seq2[[]byte, Value] {
	return func(yield func([]byte, Value) bool) {
		w := Walk(v)
		for more := w.Open('{'); more; more = w.Next() {
			k, e := w.Key(), w.Value()
			if len(e) == 0 || w.cut || !yield(resolved(k), e) {
				return
			}
		}
	}
}

// Elements returns the elements of an array in order, up to what is malformed. Other
// values have none.
func (v Value) Elements() iter.Seq[Value] {
	return func(yield func(Value) bool) {
		w := Walk(v)
		for more := w.Open('['); more; more = w.Next() {
			e := w.Value()
			if len(e) == 0 || w.cut || !yield(e) {
				return
			}
		}
	}
}

// Exists reports whether there is a value; null is one.
func (v Value) Exists() bool { return len(v) > 0 }

// String is the text of a string, "" for null, and the bytes of any other value.
func (v Value) String() string {
	switch {
	case IsNull(v):
		return ""
	case !IsString(v):
		return string(v)
	case bytes.IndexByte(v, '\\') < 0:
		return string(v[1 : len(v)-1])
	}
	text, _ := Unquote(nil, v)
	return string(text)
}

// Bool reports whether the value is true.
func (v Value) Bool() bool { return string(v) == "true" }

// Int is the value of a number without fraction and exponent; ok is false for any other.
func (v Value) Int() (n int, ok bool) {
	n, err := strconv.Atoi(string(v))
	return n, err == nil && v[0] != '+'
}
