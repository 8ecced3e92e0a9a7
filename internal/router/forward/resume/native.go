package resume

import (
	"bytes"
	"slices"
	"strconv"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// latest is the newest event of SGLang's /generate (0.5): each has the text and the ids
// of the whole answer so far, and in meta_info how many ids there are. With
// --incremental-streaming-output an event has only what is new; some versions have put the
// prompt's last ids before the first. Neither has as many ids as it counts.
type latest struct {
	text, ids []byte // raw
	count     int    // meta_info.completion_tokens; -1 if it is missing
	events    int    // of this engine that had ids
	least     int    // count of the first of them
	ready     bool   // the newest event is taken apart
	past      bool   // no stop string is as long as this engine's part of the answer
	// Of the engines before, within quotes and brackets.
	textBefore, idsBefore []byte
}

// nativeEvent is what an event of /generate says, raw.
type nativeEvent struct {
	text, ids, index                             []byte
	id, finish, finishKind, length               []byte
	promptTokens, completionTokens, cachedTokens []byte
}

// read takes an event apart. It reports false for an error.
func (n *nativeEvent) read(data []byte) (ok bool) {
	ok = true
	_ = rawjson.Object(data, func(k, v []byte) bool { // what is odd has no ids
		switch string(k) {
		case "text":
			n.text = v
		case "output_ids":
			n.ids = v
		case "index":
			n.index = v
		case "error":
			ok = ok && rawjson.IsNull(v)
		case "meta_info":
			n.meta(v)
		}
		return true
	})
	return ok && string(n.finishKind) != `"abort"` && string(n.finishKind) != `"error"`
}

func (n *nativeEvent) meta(v []byte) {
	_ = rawjson.Object(v, func(k, v []byte) bool {
		switch string(k) {
		case "id":
			n.id = v
		case "prompt_tokens":
			n.promptTokens = v
		case "completion_tokens":
			n.completionTokens = v
		case "cached_tokens":
			n.cachedTokens = v
		case "finish_reason":
			if n.finish = v; rawjson.IsString(v) {
				n.finishKind = v
				return true
			}
			_ = rawjson.Object(v, func(k, v []byte) bool {
				switch string(k) {
				case "type":
					n.finishKind = v
				case "length":
					n.length = v
				}
				return true
			})
		}
		return true
	})
}

// Given says which ids the prompt has, as a raw list, where no engine reports them.
func (s *Stream) Given(prompt []byte) {
	ids, ok := numbers(nil, prompt)
	if !ok || len(ids) == 0 || len(ids) > MaxPrompt {
		s.Refuse(Prompt)
		return
	}
	s.ids, s.prompt = ids, len(ids)
}

// native reads an event of SGLang's own and notes what is to be changed of it. It
// reports false for an error, and for an event that cannot be made one of the stream
// that the client has.
func (s *Stream) native(data []byte) bool {
	var n nativeEvent
	if !n.read(data) {
		return false
	}
	if !rawjson.IsString(n.text) || len(n.ids) < 2 || n.ids[0] != '[' || len(n.index) > 0 {
		s.Refuse(Unexpected)
		s.unclear = s.going
		return !s.going
	}
	s.first = true
	a := &s.latest
	a.count = -1
	if c, ok := rawjson.Uint32(n.completionTokens); ok {
		a.count = int(c)
	}
	if a.count > 0 {
		if a.events++; a.events == 1 {
			a.least = a.count
		}
	}
	s.finished = s.finished || len(n.finish) > 0 && !rawjson.IsNull(n.finish)
	if s.refused == "" {
		a.text, a.ids = append(a.text[:0], n.text...), append(a.ids[:0], n.ids...)
	}
	if s.going {
		return s.joined(data, &n)
	}
	if s.id == nil {
		s.id = bytes.Clone(n.id)
	}
	return true
}

// joined makes an event of an engine that goes on one of the whole answer.
func (s *Stream) joined(data []byte, n *nativeEvent) bool {
	a := &s.latest
	own := n.ids[1 : len(n.ids)-1]
	why := Refusal("")
	switch {
	case listed(own) != a.count:
		why = NoIDs
	case s.passedStop(n):
		why = Stops
	}
	if s.Refuse(why); why != "" {
		s.unclear = true
		return false
	}
	change := func(old, with []byte) {
		if len(old) > 0 {
			from := within(data, old)
			s.cuts = append(s.cuts, cut{from, from + len(old), with})
		}
	}
	plus := func(old []byte, add int) {
		if v, ok := rawjson.Uint32(old); ok {
			change(old, strconv.AppendInt(nil, int64(v)+int64(add), 10))
		}
	}
	change(n.text, slices.Concat([]byte{'"'}, a.textBefore, n.text[1:]))
	ids := append([]byte{'['}, a.idsBefore...)
	if len(own) > 0 && len(a.idsBefore) > 0 {
		ids = append(ids, ',')
	}
	change(n.ids, append(append(ids, own...), ']'))
	if len(s.id) > 0 {
		change(n.id, s.id)
	}
	plus(n.promptTokens, -s.base)
	plus(n.completionTokens, s.base)
	plus(n.length, s.base)
	if c, ok := rawjson.Uint32(n.cachedTokens); ok && int(c) > s.prompt {
		change(n.cachedTokens, strconv.AppendInt(nil, int64(s.prompt), 10))
	}
	return true
}

// listed is how many elements stand between the brackets of a list of numbers.
func listed(inside []byte) int {
	if len(bytes.TrimSpace(inside)) == 0 {
		return 0
	}
	return 1 + bytes.Count(inside, []byte{','})
}

// Broke makes ready the request for the rest once the leg has broken off: of SGLang's own
// events the newest one alone counts.
func (s *Stream) Broke() {
	a := &s.latest
	if !s.Native || s.refused != "" || !s.first {
		return
	}
	ids, ok := numbers(s.ids[:s.prompt+s.base], a.ids)
	switch n := len(ids) - s.prompt - s.base; {
	case s.prompt == 0 || !ok || n != a.count:
		s.Refuse(NoIDs)
		return
	case n == a.least:
		// One event, or several of the same: whether the next one would have had all or
		// only what is new is not known.
		s.Refuse(Unmatched)
		return
	case n+s.base > maxAnswer:
		s.Refuse(TooLong)
		return
	}
	text, ok := rawjson.Unquote(s.tail[:0], a.text)
	if !ok {
		s.Refuse(Unmatched)
		return
	}
	if s.stopBegins() {
		s.Refuse(Stops)
		return
	}
	s.ids, s.tail, s.shown, a.ready = ids, text, len(ids)-s.prompt, true
}

// With stop strings SGLang (0.5.23) sends no event whose text ends with the beginning of
// one, so that none begins in what the client has and ends in the rest. Where older
// versions have sent such an event, the stream is refused. It looks for them in the text of
// its own last tokens, and some tokenizers leave out the space that a text begins with: a
// stop string that it has not seen where its part begins ends the stream with an error.

// stopBegins reports whether a stop string may begin in what the client has of the text,
// or is in it.
func (s *Stream) stopBegins() bool {
	if len(s.Stops) == 0 {
		return false
	}
	a := &s.latest
	all, ok := rawjson.Unquote(nil, slices.Concat([]byte{'"'}, a.textBefore, a.text[1:]))
	for _, stop := range s.Stops {
		ok = ok && !bytes.Contains(all, []byte(stop))
		for n := min(len(stop)-1, len(all)); n > 0; n-- {
			ok = ok && !bytes.HasSuffix(all, []byte(stop[:n]))
		}
	}
	return !ok
}

// passedStop reports whether the part of the engine that goes on begins with a stop string
// that has not ended it.
func (s *Stream) passedStop(n *nativeEvent) bool {
	if len(s.Stops) == 0 || s.latest.past || string(n.finishKind) == `"stop"` {
		return false
	}
	own, ok := rawjson.Unquote(nil, n.text)
	s.latest.past = true
	for _, stop := range s.Stops {
		ok = ok && !bytes.HasPrefix(own, []byte(stop))
		s.latest.past = s.latest.past && len(own) >= len(stop)
	}
	return !ok
}

// handOver keeps what the client has of the answer, for the events of the next engine.
func (a *latest) handOver() {
	if own := a.ids[1 : len(a.ids)-1]; len(own) > 0 {
		if len(a.idsBefore) > 0 {
			a.idsBefore = append(a.idsBefore, ',')
		}
		a.idsBefore = append(a.idsBefore, own...)
	}
	a.textBefore = append(a.textBefore, a.text[1:len(a.text)-1]...)
}

// begin makes ready for the events of the next engine.
func (a *latest) begin() {
	*a = latest{text: a.text[:0], ids: a.ids[:0], count: -1, textBefore: a.textBefore, idsBefore: a.idsBefore}
}

// kept is the memory in bytes that is held.
func (a *latest) kept() int { return cap(a.text) + cap(a.ids) + cap(a.textBefore) + cap(a.idsBefore) }
