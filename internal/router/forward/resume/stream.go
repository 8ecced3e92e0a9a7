package resume

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strconv"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// maxEvent is the largest event in bytes that is taken apart: the first one has the
// prompt's ids.
const maxEvent = 2 << 20

// maxTail bounds, in bytes, the text of which it is not known which ids it belongs to.
const maxTail = 64 << 10

// keepBytes is the most memory, in bytes, that is kept from one event to the next.
const keepBytes = 4 << 10

// ErrEngine is the error that an engine sent in its stream.
var ErrEngine = errors.New("the engine ended its stream with an error")

// Stream reads along with an answer that may be continued. The zero value is ready; it is not
// safe for concurrent use. It finds the events itself, and not through sse.Scanner, because it
// rewrites them: it needs each whole, with its place in what is put out, where a Scanner is
// shown bytes that have gone out already.
type Stream struct {
	// KeepIDs says that the client requested ids: they stay in the events.
	KeepIDs bool
	// Chat says that the client's stream is a chat's. The engine that continues answers a
	// completion.
	Chat bool
	// Native says that the events are those of SGLang's /generate.
	Native bool
	// Stops are the request's stop strings, and Decode appends the bytes of a token; nil
	// where there are no stop strings. Usage says that the client wants its tokens counted.
	Stops  []string
	Decode func(dst []byte, id uint32) ([]byte, bool)
	Usage  bool

	refused Refusal
	ids     []uint32 // of the prompt, then of the answer
	prompt  int      // how many are the prompt's; 0 while that is not known
	base    int      // how many of the answer came from engines before this one
	sure    int      // as many of the answer's ids stand for text that was sent
	tail    []byte   // what was sent since, of which it is not known to which ids it belongs
	shown   int      // ids that were shown to the client

	going   bool   // another engine has begun the answer
	first   bool   // the first event of this engine has come
	id      []byte // of the answer, raw
	created []byte
	model   []byte

	finished, done, usage bool

	latest  latest // of SGLang's own events
	watch   watch  // of a stream with stop strings
	stopped bool   // by one that no engine has seen
	unclear bool   // an event could not be joined to what the client has

	shape shape
	part  []byte // the beginning of an event
	out   []byte
	last  []byte // an error that was held back
	cuts  []cut
	text  []byte // memory
}

// cut puts with in the place of event[from:to].
type cut struct {
	from, to int
	with     []byte
}

// Open is what reads along with the answer to a request, with why it could not be continued,
// and which member of the request, if one does, says so. decode appends the bytes of a token;
// nil where no tokenizer here can.
func Open(v *api.View, decode func(dst []byte, id uint32) ([]byte, bool)) (s Stream, why Refusal, member string) {
	s.Chat, s.Native = v.Kind == api.Chat, v.Kind == api.SGLangGenerate
	stops, watched := StopStrings(v)
	watched = watched && (decode != nil || s.Native)
	if why, member = Judge(v, watched); watched {
		if s.Stops = stops; !s.Native {
			s.Decode, s.Usage = decode, v.IncludeUsage
		}
	}
	raw, ok := v.Get("return_token_ids")
	s.KeepIDs = ok && string(raw) == "true" || s.Native
	return s, why, member
}

// Begin makes the stream ready for the answer of an engine, which continues from what the
// client has. Of an answer that the client has nothing of, it keeps nothing.
func (s *Stream) Begin() {
	if !s.going {
		*s = Stream{KeepIDs: s.KeepIDs, Chat: s.Chat, Native: s.Native, Stops: s.Stops, Decode: s.Decode, Usage: s.Usage, out: s.out}
		return
	}
	if s.refused == "" {
		s.ids = s.ids[:s.prompt+s.base]
	}
	s.shape.forget()
	s.latest.begin()
	s.watch.begin()
	s.sure, s.tail, s.shown = s.base, s.tail[:0], s.base
	s.part, s.last, s.first, s.finished, s.done, s.usage = s.part[:0], nil, false, false, false, false
}

// Refused says why the stream cannot be continued, as far as that is known.
func (s *Stream) Refused() Refusal { return s.refused }

// Refuse gives up continuing the stream; the first reason counts, and an empty one is none.
func (s *Stream) Refuse(why Refusal) {
	if s.refused == "" && why != "" {
		s.refused = why
		s.ids, s.tail, s.latest.text, s.latest.ids = nil, nil, nil, nil
	}
}

// Ended reports whether nothing is missing of the stream but what Closing gives.
func (s *Stream) Ended() bool { return s.finished }

// Done reports whether the stream's end was announced.
func (s *Stream) Done() bool { return s.done }

// IDs are those of the prompt and of the answer, valid until the next call of Pass.
func (s *Stream) IDs() []uint32 { return s.ids }

// Kept is how much memory, in bytes, is held for another engine's sake.
func (s *Stream) Kept() int { return 4*cap(s.ids) + s.latest.kept() + s.watch.kept() }

// Generated is how many tokens of the answer the engines have reported.
func (s *Stream) Generated() int { return max(0, len(s.ids)-s.prompt) }

// Sent is how many tokens of the answer stand for text that the client has.
func (s *Stream) Sent() int { return s.sure }

// Held is an error event of the engine that was not passed on.
func (s *Stream) Held() []byte { return s.last }

// Pass takes the next piece of the stream and returns what the client gets of it:
// whole events, valid until the next call. ErrEngine says that the next one is an
// error, which is in Held.
func (s *Stream) Pass(p []byte) ([]byte, error) {
	s.out = s.out[:0]
	if len(s.part) > 0 {
		s.part = append(s.part, p...)
		p = s.part
	}
	for len(p) > 0 {
		n := eventEnd(p)
		if n == 0 {
			break
		}
		switch err := s.event(p[:n]); {
		case errors.Is(err, ErrStopped):
			s.part = s.part[:0]
			return s.out, err
		case err != nil:
			s.last = append([]byte(nil), p[:n]...)
			s.part = s.part[:0]
			return s.out, err
		}
		p = p[n:]
	}
	if len(p) > maxEvent {
		s.Refuse(Unexpected)
		s.out = append(s.out, p...)
		p = nil
	}
	s.part = append(s.part[:0], p...)
	if cap(s.part) > keepBytes && len(s.part) == 0 { // only the first event is so large
		s.part = nil
	}
	if cap(s.out) > keepBytes {
		out := s.out
		s.out = nil
		return out, nil
	}
	return s.out, nil
}

// eventEnd is the length of the first event of p with the empty line that ends it;
// 0 if it has not come.
func eventEnd(p []byte) int {
	for i := 0; ; {
		k := bytes.IndexByte(p[i:], '\n')
		if k < 0 {
			return 0
		}
		i += k + 1
		switch {
		case i < len(p) && p[i] == '\n':
			return i + 1
		case i+1 < len(p) && p[i] == '\r' && p[i+1] == '\n':
			return i + 2
		}
	}
}

var dataField = []byte("data:")

// event takes one event apart, which ends with an empty line, and puts it out.
func (s *Stream) event(e []byte) error {
	for len(e) > 0 && (e[0] == ':' || e[0] == '\n' || e[0] == '\r') { // comments, and empty lines
		k := bytes.IndexByte(e, '\n') + 1
		s.out = append(s.out, e[:k]...)
		e = e[k:]
	}
	if len(e) == 0 || s.alike(e) {
		return nil
	}
	line, rest, _ := bytes.Cut(e, []byte("\n"))
	if !bytes.HasPrefix(line, dataField) || len(bytes.TrimSpace(rest)) > 0 {
		if bytes.HasPrefix(line, []byte("event: error")) {
			return ErrEngine
		}
		s.Refuse(Unexpected)
		s.out = append(s.out, e...)
		return nil
	}
	data := bytes.TrimSpace(line[len(dataField):])
	if string(data) == "[DONE]" {
		s.done = true
		s.out = append(s.out, e...)
		return nil
	}
	s.cuts = s.cuts[:0]
	var c choice
	if s.Native && !s.native(data) || !s.Native && !s.payload(data, &c) {
		if s.unclear {
			return ErrUnclear
		}
		return ErrEngine
	}
	slices.SortFunc(s.cuts, func(a, b cut) int { return a.from - b.from })
	from, at := 0, within(e, data)
	for _, c := range s.cuts {
		if at+c.from < from { // a member named twice, one of them within another
			s.Refuse(Unexpected)
			continue
		}
		s.out = append(append(s.out, e[from:at+c.from]...), c.with...)
		from = at + c.to
	}
	s.out = append(s.out, e[from:]...)
	s.learn(e, data, &c)
	if s.stopped {
		s.out = append(s.out, s.Closing(s.Usage)...)
		s.done = true
		return ErrStopped
	}
	return nil
}

// within is the place of a part in the slice that it was cut from.
func within(whole, part []byte) int { return cap(whole) - cap(part) }

var (
	null       = []byte("null")
	chatObject = []byte(`"chat.completion.chunk"`)
)

// choice is what an event says of its one choice, raw.
type choice struct {
	text, ids, prompt, finish, reason []byte
	shown                             []byte // instead of the text; nil for the text itself
}

// payload reads an event's JSON and notes what is to be changed of it. It reports
// false for an error.
func (s *Stream) payload(data []byte, c *choice) bool {
	w := rawjson.Walk(data)
	change := func(old, with []byte) {
		from := within(data, old)
		s.cuts = append(s.cuts, cut{from, from + len(old), with})
	}
	keep := func(at *[]byte, v []byte) {
		switch {
		case *at == nil:
			*at = append([]byte(nil), v...)
		case s.going && !bytes.Equal(*at, v):
			change(v, *at)
		}
	}
	choices, usage := 0, false
	for more := w.Open('{'); more; more = w.Next() {
		switch string(w.Key()) {
		case "id":
			keep(&s.id, w.Value())
		case "created":
			keep(&s.created, w.Value())
		case "model":
			keep(&s.model, w.Value())
		case "object":
			if v := w.Value(); s.Chat && s.going {
				change(v, chatObject)
			}
		case "prompt_token_ids":
			c.prompt = w.Value()
		case "error":
			if v := w.Value(); len(v) > 0 && !rawjson.IsNull(v) {
				return false
			}
		case "choices":
			var ok bool
			if choices, ok = s.choices(&w, c); !ok {
				return false
			}
		case "usage":
			if v := w.Value(); len(v) > 0 && v[0] == '{' {
				usage = true
				s.count(v, change)
			}
		default:
			w.Value()
		}
	}
	s.usage = s.usage || usage && choices == 0
	if choices == 0 && c.prompt == nil {
		return true
	}
	s.token(c)
	if len(s.watch.held) > 0 && !s.behind(c, change) {
		s.unclear = true
		return false
	}
	if !s.KeepIDs && len(c.ids) > 0 && c.ids[0] == '[' {
		change(c.ids, null)
	}
	if (!s.KeepIDs || s.going) && len(c.prompt) > 0 && c.prompt[0] == '[' {
		change(c.prompt, null) // it is longer than the client's own
	}
	if s.Chat && s.going && c.text != nil {
		s.asChat(data, c)
	}
	return true
}

// asChat makes the choice of a completion one of a chat.
func (s *Stream) asChat(data []byte, c *choice) {
	from, content := within(data, c.text), c.text
	if c.shown != nil {
		content = c.shown
	}
	if key := bytes.LastIndex(data[:from], []byte(`"text"`)); key >= 0 {
		s.cuts = append(s.cuts, cut{key, from + len(c.text), append(append([]byte(`"delta":{"content":`), content...), '}')})
	}
	if len(c.prompt) == 0 {
		return
	}
	from = within(data, c.prompt)
	key := bytes.LastIndex(data[:from], []byte(`"prompt_token_ids"`))
	comma := bytes.LastIndexByte(data[:max(0, key)], ',')
	if comma < 0 || len(bytes.TrimSpace(data[comma+1:key])) > 0 {
		return
	}
	s.cuts = slices.DeleteFunc(s.cuts, func(c cut) bool { return c.from == from })
	s.cuts = append(s.cuts, cut{comma, from + len(c.prompt), nil})
}

// count puts the tokens of the engines before among those of the answer.
func (s *Stream) count(v []byte, change func(old, with []byte)) {
	if s.base == 0 {
		return
	}
	u := rawjson.Walk(v)
	for more := u.Open('{'); more; more = u.Next() {
		k, v := u.Key(), u.Value()
		add := 0
		switch string(k) {
		case "prompt_tokens":
			add = -s.base
		case "completion_tokens":
			add = s.base
		case "prompt_tokens_details":
			d := rawjson.Walk(v)
			for more := d.Open('{'); more; more = d.Next() {
				k, v := d.Key(), d.Value()
				if n, ok := rawjson.Uint32(v); ok && string(k) == "cached_tokens" && int(n) > s.prompt {
					change(v, strconv.AppendInt(nil, int64(s.prompt), 10))
				}
			}
		}
		if n, ok := rawjson.Uint32(v); ok && add != 0 {
			change(v, strconv.AppendInt(nil, int64(n)+int64(add), 10))
		}
	}
}

// choices reads the list of choices, of which there is one at most. It reports false
// for an error.
func (s *Stream) choices(w *rawjson.Walker, c *choice) (seen int, ok bool) {
	if !w.At('[') {
		w.Value()
		return 0, true
	}
	for more := w.Open('['); more; more = w.Next() {
		if seen++; seen > 1 {
			s.Refuse(Unexpected)
		}
		var finish, index []byte
		for inside := w.Open('{'); inside; inside = w.Next() {
			switch k, v := w.Key(), w.Value(); string(k) {
			case "text":
				c.text = v
			case "delta":
				s.delta(v, c)
			case "token_ids":
				c.ids = v
			case "prompt_token_ids":
				c.prompt = v
			case "finish_reason":
				finish, c.finish = v, v
			case "stop_reason":
				c.reason = v
			case "index":
				index = v
			}
		}
		w.Close('}')
		if len(finish) > 0 && !rawjson.IsNull(finish) {
			if f := string(finish); f == `"abort"` || f == `"error"` {
				return seen, false
			}
			s.finished = true
		}
		if len(index) > 0 && string(index) != "0" {
			s.Refuse(Unexpected)
		}
	}
	w.Close(']')
	return seen, true
}

// delta reads what an event adds to a chat's answer: text, or what a parser of the
// engine has made of its tokens.
func (s *Stream) delta(v []byte, c *choice) {
	w := rawjson.Walk(v)
	for more := w.Open('{'); more; more = w.Next() {
		k, v := w.Key(), w.Value()
		filled := len(v) > 2 && v[0] != 'n'
		switch string(k) {
		case "content":
			if c.text = v; !rawjson.IsString(v) {
				c.text = nil
			}
		case "reasoning", "reasoning_content":
			if filled {
				s.Refuse(Reasoning)
			}
		case "tool_calls", "function_call":
			if filled {
				s.Refuse(Tools)
			}
		}
	}
}

// token notes what an event has of the answer.
func (s *Stream) token(c *choice) {
	text, ids, prompt := c.text, c.ids, c.prompt
	if s.refused != "" {
		return
	}
	if !s.first {
		s.first = true
		if s.prompt == 0 {
			all, ok := numbers(nil, prompt)
			switch {
			case !ok || len(all) == 0:
				s.Refuse(NoIDs)
				return
			case len(all) > MaxPrompt:
				s.Refuse(TooLong)
				return
			}
			s.ids = all
			s.prompt = len(s.ids)
		}
	}
	before := len(s.ids)
	all, ok := numbers(s.ids, ids)
	switch {
	case !ok:
		s.Refuse(NoIDs)
		return
	case len(all)-s.prompt > maxAnswer:
		s.Refuse(TooLong)
		return
	}
	s.ids = all
	s.took(len(s.ids)-before, text)
}

// took notes that the last n ids came with a text, raw.
func (s *Stream) took(n int, text []byte) {
	if s.KeepIDs {
		s.shown = len(s.ids) - s.prompt
	}
	if s.Decode != nil {
		s.heard(n, text)
		return
	}
	switch {
	case len(text) <= 2: // nothing was said
	case n == 1:
		// The engine decodes token by token and puts out whatever is whole: with text
		// after this one nothing is left behind.
		s.sure, s.tail = len(s.ids)-s.prompt, s.tail[:0]
	case n == 0 && !s.finished:
		s.Refuse(NoIDs)
	default:
		var ok bool
		if s.text, ok = rawjson.Unquote(s.text[:0], text); !ok || len(s.tail)+len(s.text) > maxTail {
			s.Refuse(Unmatched)
			return
		}
		s.tail = append(s.tail, s.text...)
	}
}

// numbers appends the ids of a JSON list; false if one is none.
func numbers(dst []uint32, list []byte) ([]uint32, bool) {
	if len(list) < 2 || list[0] != '[' {
		return dst, true
	}
	n, digits := uint64(0), 0
	for _, c := range list[1:] {
		switch {
		case c >= '0' && c <= '9' && digits < 10:
			n, digits = n*10+uint64(c-'0'), digits+1
		case c >= '0' && c <= '9', c == '-', c == '.':
			return dst, false
		default:
			if n > math.MaxUint32 {
				return dst, false
			}
			if digits > 0 {
				dst = append(dst, uint32(n))
			}
			n, digits = 0, 0
		}
	}
	return dst, true
}

// Resumable reports whether another engine can continue the stream now, and has anything to
// add: something was sent, nothing that engines reported is missing, and the end has not come.
func (s *Stream) Resumable() bool {
	return s.refused == "" && !s.Native && (s.Decode == nil || s.watch.spoke) && s.first && !s.finished && s.sure > 0 && len(s.tail) == 0 && len(s.part) == 0 && s.prompt+s.sure == len(s.ids)
}

// Unaligned are ids of the answer, and the text that was sent of them, whose end among them is
// not known. No text: nothing is open.
func (s *Stream) Unaligned() (ids []uint32, text string) {
	if s.refused != "" || len(s.tail) == 0 {
		return nil, ""
	}
	return s.ids[s.prompt+s.sure:], string(s.tail)
}

// AlignBy finds where the text that was sent ends among its tokens, with what an engine
// says of their text.
func (s *Stream) AlignBy(textOf func(ids []uint32) (string, error)) {
	ids, text := s.Unaligned()
	if text == "" {
		return
	}
	// What was held back is the beginning of a character: three tokens at most.
	for n := len(ids); n > max(0, len(ids)-4); n-- {
		got, err := textOf(ids[:n])
		if err != nil {
			return
		}
		if got == text {
			s.Align(n)
			return
		}
	}
}

// Align says that the text ends after the first n of the unaligned ids.
func (s *Stream) Align(n int) { s.sure, s.tail = s.sure+n, s.tail[:0] }

// Next are the ids of the prompt with which another engine continues: those of the first
// prompt, and of the answer those whose text the client has, which end with a whole character.
// What came beyond is forgotten; the other engine says it again.
func (s *Stream) Next() ([]uint32, Refusal) {
	switch {
	case s.refused != "":
		return nil, s.refused
	case !s.first, s.Native && !s.latest.ready:
		return nil, NoIDs
	case len(s.tail) > 0:
		return nil, Unmatched
	case s.Chat && (s.sure == 0 || s.Decode != nil && !s.watch.spoke):
		return nil, Silent
	case s.KeepIDs && s.shown > s.sure:
		return nil, SentIDs
	}
	s.ids = s.ids[:s.prompt+s.sure]
	s.base, s.going = s.sure, true
	if s.Native {
		s.latest.handOver()
	}
	s.watch.handOver()
	s.Begin()
	return s.ids, ""
}

// Closing is the end of a stream whose engine died after the answer's last token:
// the count of its tokens if the client asked for that and has not got it, and the
// end mark.
func (s *Stream) Closing(usage bool) []byte {
	var b []byte
	if usage && !s.usage {
		n := int64(len(s.ids) - s.prompt)
		b = append(b, `data: {"id":`...)
		b = append(b, s.id...)
		if s.Chat {
			b = append(append(b, `,"object":`...), chatObject...)
		} else {
			b = append(b, `,"object":"text_completion"`...)
		}
		b = append(b, `,"created":`...)
		b = append(b, s.created...)
		b = append(b, `,"model":`...)
		b = append(b, s.model...)
		b = append(b, `,"choices":[],"usage":{"prompt_tokens":`...)
		b = strconv.AppendInt(b, int64(s.prompt), 10)
		b = append(b, `,"total_tokens":`...)
		b = strconv.AppendInt(b, int64(s.prompt)+n, 10)
		b = append(b, `,"completion_tokens":`...)
		b = strconv.AppendInt(b, n, 10)
		b = append(b, "}}\n\n"...)
	}
	return append(b, "data: [DONE]\n\n"...)
}
