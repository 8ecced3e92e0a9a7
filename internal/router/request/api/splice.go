package api

import (
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// Edit is one change of a body.
type Edit struct {
	// Key is a top-level member ("stream"), or, with dots, a member of an
	// object in it ("sampling_params.max_tokens"). Where the outer value is a
	// list, the edit applies to each object in it.
	Key string
	// Value is the raw JSON that the member gets; nil deletes the member.
	Value []byte
	// IfPresent leaves a body alone that does not have the member.
	IfPresent bool
}

// Set is an edit that gives a member a value, whether it is there or not.
func Set(key string, raw []byte) Edit { return Edit{Key: key, Value: raw} }

// Replace is an edit that gives a member a value if it is there.
func Replace(key string, raw []byte) Edit { return Edit{Key: key, Value: raw, IfPresent: true} }

// Delete is an edit that removes a member.
func Delete(key string) Edit { return Edit{Key: key} }

// Raw values for edits. They must not be changed.
var (
	RawTrue  = []byte("true")
	RawFalse = []byte("false")
	RawNull  = []byte("null")
	RawOne   = []byte("1")
)

// RawInt is an integer as raw JSON.
func RawInt(n int64) []byte { return strconv.AppendInt(nil, n, 10) }

// RawString is a string as raw JSON.
func RawString(s string) []byte { return rawjson.AppendString(nil, s) }

// Splice appends to dst the body that v was parsed from with the edits made.
// Everything that is not edited stays byte for byte: order, white space, big
// numbers, unknown members. Edits of one call must not overlap ("a" and
// "a.b"); of two edits of one key the later wins.
func Splice(dst []byte, v *View, edits []Edit) []byte {
	var few [24][]byte
	for _, seg := range v.Segments(few[:0], edits) {
		dst = append(dst, seg...)
	}
	return dst
}

// Segments is [Splice] without the copy: it appends to dst pieces whose
// concatenation is the new body. Most of them are parts of v.Body, which must
// stay unchanged while they are used.
func (v *View) Segments(dst [][]byte, edits []Edit) [][]byte {
	if len(edits) == 0 {
		return append(dst, v.Body)
	}
	s := splicer{body: v.Body, out: dst}
	open := v.scan.Space(0)
	s.keep(Span{0, open})
	s.object(Span{open, len(v.Body)}, v.Fields, cut(edits))
	s.flush()
	return s.out
}

// Size is the number of bytes in segments.
func Size(segments [][]byte) int {
	n := 0
	for _, s := range segments {
		n += len(s)
	}
	return n
}

// step is an edit with the first part of its key cut off.
type step struct {
	head, tail string // tail is "" where the path ends
	edit       *Edit
	done       bool
}

func cut(edits []Edit) []step {
	steps := make([]step, len(edits))
	for i := range edits {
		head, tail, _ := strings.Cut(edits[i].Key, ".")
		steps[i] = step{head: head, tail: tail, edit: &edits[i]}
	}
	return steps
}

// splicer gathers the pieces of a new body; pieces of the old one that touch
// are joined.
type splicer struct {
	body []byte
	out  [][]byte
	run  Span // kept bytes that are not in out yet
}

func (s *splicer) flush() {
	if s.run.Len() > 0 {
		s.out = append(s.out, s.run.Of(s.body))
	}
	s.run = Span{}
}

func (s *splicer) keep(p Span) {
	if p.Len() <= 0 {
		return
	}
	if s.run.Len() > 0 && s.run.End == p.Start {
		s.run.End = p.End
		return
	}
	s.flush()
	s.run = p
}

func (s *splicer) put(b []byte) {
	s.flush()
	s.out = append(s.out, b)
}

// object writes the object that begins at at.Start, and everything up to
// at.End, with the steps made. Fields are its members.
func (s *splicer) object(at Span, fields []Field, steps []step) {
	gap := at.Start + 1 // where the bytes before the next member begin
	s.keep(Span{at.Start, gap})
	first := len(fields) > 0
	for i := range fields {
		f := &fields[i]
		exact, nested := match(s.body, f, steps)
		if exact != nil && exact.Value == nil {
			gap = f.Value.End // leave out what stands before the member, too
			continue
		}
		lead := Span{gap, f.Key.Start - 1}
		if first && i > 0 {
			// The members before were deleted: the white space of the first
			// takes the place of comma and white space.
			lead = Span{at.Start + 1, fields[0].Key.Start - 1}
		}
		first = false
		s.keep(lead)
		gap = f.Value.End
		switch {
		case exact != nil:
			s.keep(Span{f.Key.Start - 1, f.Value.Start})
			s.put(exact.Value)
		case nested:
			s.keep(Span{f.Key.Start - 1, f.Value.Start})
			s.value(f.Value, inner(f, s.body, steps))
		default:
			s.keep(Span{f.Key.Start - 1, f.Value.End})
		}
	}
	empty := len(fields) == 0 || first
	if empty && len(fields) > 0 { // all were deleted
		s.keep(Span{at.Start + 1, fields[0].Key.Start - 1})
	}
	if added := missing(steps, !empty); len(added) > 0 {
		s.put(added)
	}
	s.keep(Span{gap, at.End})
}

func named(body []byte, f *Field, name string) bool {
	if f.name != "" {
		return f.name == name
	}
	return string(f.Key.Of(body)) == name
}

// match finds the edit of a member itself, and whether there are edits inside
// of it.
func match(body []byte, f *Field, steps []step) (exact *Edit, nested bool) {
	for i := range steps {
		st := &steps[i]
		if !named(body, f, st.head) {
			continue
		}
		st.done = true
		if st.tail == "" {
			exact = st.edit
		} else {
			nested = true
		}
	}
	return exact, nested
}

// inner are the steps inside of a member, one part of the path further.
func inner(f *Field, body []byte, steps []step) []step {
	var in []step
	for i := range steps {
		if st := &steps[i]; st.tail != "" && named(body, f, st.head) {
			head, tail, _ := strings.Cut(st.tail, ".")
			in = append(in, step{head: head, tail: tail, edit: st.edit})
		}
	}
	return in
}

// value writes a value with edits inside of it.
func (s *splicer) value(at Span, steps []step) {
	switch s.body[at.Start] {
	case '{':
		var fields []Field
		sc := rawjson.NewScanner(s.body[:at.End], 1<<30)
		sc.Object(at.Start, func(key, keyEnd int, escaped bool, i int) int {
			f := Field{Key: Span{key, keyEnd}, Value: Span{i, sc.Value(i)}}
			if escaped {
				f.name = unquote(s.body[key-1 : keyEnd+1])
			}
			fields = append(fields, f)
			return f.Value.End
		})
		s.object(at, fields, steps)
	case '[':
		from := at.Start
		eachElement(s.body, at, func(_ int, el Span) bool {
			if s.body[el.Start] == '{' {
				s.keep(Span{from, el.Start})
				again := append([]step(nil), steps...)
				s.value(el, again)
				from = el.End
			}
			return true
		})
		s.keep(Span{from, at.End})
	case 'n':
		if added := missing(steps, false); len(added) > 0 {
			s.put([]byte("{"))
			s.put(added)
			s.put([]byte("}"))
			return
		}
		s.keep(at)
	default:
		s.keep(at)
	}
}

// missing is the text of the members that steps add because nothing had their
// names, with a comma before it where one is needed.
func missing(steps []step, comma bool) []byte {
	var out []byte
	for i := range steps {
		st := &steps[i]
		if st.done || st.edit.Value == nil || st.edit.IfPresent {
			continue
		}
		value := st.edit.Value
		if st.tail != "" {
			var in []step
			for k := i; k < len(steps); k++ {
				if other := &steps[k]; !other.done && other.head == st.head && other.tail != "" {
					other.done = true
					head, tail, _ := strings.Cut(other.tail, ".")
					in = append(in, step{head: head, tail: tail, edit: other.edit})
				}
			}
			value = append(append([]byte("{"), missing(in, false)...), '}')
		} else if later := lastOf(steps, i); later != st {
			if later.edit.Value == nil {
				continue
			}
			value = later.edit.Value
		}
		if comma {
			out = append(out, ',')
		}
		comma = true
		out = rawjson.AppendString(out, st.head)
		out = append(out, ':')
		out = append(out, value...)
	}
	return out
}

// lastOf is the last step with the same whole path as step i, and marks all
// of them as done.
func lastOf(steps []step, i int) *step {
	last := &steps[i]
	for k := i; k < len(steps); k++ {
		if st := &steps[k]; st.head == steps[i].head && st.tail == "" {
			st.done = true
			last = st
		}
	}
	return last
}
