package resume

import (
	"bytes"
	"math"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// maxShape bounds, in bytes, the events that are compared with the one before.
const maxShape = 2 << 10

// shape is what an event has in common with the one before: all but its text and its
// one id. Nearly every event of a stream is such a one. Comparing the bytes costs a
// part of what taking it apart does.
type shape struct {
	// in is what stands before the text, between text and id, and after the id; out is
	// what the client gets before the text, after it, and after the id if it gets that.
	// An empty start means that there is no shape.
	in, out [3][]byte
}

// forget has the next event taken apart.
func (h *shape) forget() { h.in[0] = h.in[0][:0] }

// learn keeps the shape of an event that was taken apart, if it has text and one id and
// is not the last.
func (s *Stream) learn(e, data []byte, c *choice) {
	h := &s.shape
	h.forget()
	end, prompt := len(c.finish) > 0 && !rawjson.IsNull(c.finish), len(c.prompt) > 0 && !rawjson.IsNull(c.prompt)
	if s.refused != "" || s.Native || len(s.watch.held) > 0 || len(e) > maxShape || end || prompt || !rawjson.IsString(c.text) || !one(c.ids) ||
		s.Chat && s.going { // whose text becomes a part of something else
		return
	}
	text, ids := within(e, c.text), within(e, c.ids)
	after := text + len(c.text)
	if after > ids {
		return
	}
	first, last := ids+1, ids+len(c.ids)-1 // the id's
	for i, p := range [3][2]int{{0, text}, {after, first}, {last, len(e)}} {
		h.in[i] = append(h.in[i][:0], e[p[0]:p[1]]...)
	}
	at := within(e, data)
	h.out[0] = s.changed(h.out[0][:0], e, 0, text, at)
	if !s.KeepIDs {
		h.out[1] = s.changed(h.out[1][:0], e, after, len(e), at)
		return
	}
	h.out[1] = s.changed(h.out[1][:0], e, after, first, at)
	h.out[2] = s.changed(h.out[2][:0], e, last, len(e), at)
}

// one reports whether a raw list has one id.
func one(ids []byte) bool {
	return len(ids) > 2 && ids[0] == '[' && ids[len(ids)-1] == ']' && bytes.IndexByte(ids, ',') < 0
}

// changed appends e[from:to] with the cuts within it; data, which they are of, begins
// at a place in e.
func (s *Stream) changed(dst, e []byte, from, to, at int) []byte {
	for _, c := range s.cuts {
		if a, b := at+c.from, at+c.to; a >= from && b <= to {
			dst = append(append(dst, e[from:a]...), c.with...)
			from = b
		}
	}
	return append(dst, e[from:to]...)
}

// alike takes an event that has the shape of the one before, and puts it out; false if
// it has not.
func (s *Stream) alike(e []byte) bool {
	h := &s.shape
	if len(h.in[0]) == 0 || s.refused != "" || !bytes.HasPrefix(e, h.in[0]) {
		return false
	}
	rest := e[len(h.in[0]):]
	w := rawjson.Walk(rest)
	text := w.Value()
	if !rawjson.IsString(text) || bytes.IndexByte(text, '\n') >= 0 {
		return false
	}
	rest, ok := bytes.CutPrefix(rest[len(text):], h.in[1])
	id, n := uint64(0), 0
	for ; n < len(rest) && n < 10 && rest[n] >= '0' && rest[n] <= '9'; n++ {
		id = id*10 + uint64(rest[n]-'0')
	}
	if !ok || n == 0 || id > math.MaxUint32 || !bytes.Equal(rest[n:], h.in[2]) || len(s.ids)-s.prompt >= maxAnswer {
		return false
	}
	s.out = append(append(append(s.out, h.out[0]...), text...), h.out[1]...)
	if s.KeepIDs {
		s.out = append(append(s.out, rest[:n]...), h.out[2]...)
	}
	s.ids = append(s.ids, uint32(id))
	s.took(1, text)
	return true
}
