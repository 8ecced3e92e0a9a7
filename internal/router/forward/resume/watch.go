package resume

import (
	"bytes"
	"errors"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// With stop strings ids run ahead of the text: vLLM (0.32) holds back as many characters
// as the longest of them has, less one, because they may be the beginning of one. So the
// text of the ids is made here, too. The next engine is asked to go on after all of them,
// and what its predecessor held back is sent before what it says, unless a stop string
// that begins there ends in it: no engine sees that one whole.

// ErrUnclear says that an engine's part of the answer cannot be joined to what the client
// has. It is no fault of the engine's.
var ErrUnclear = errors.New("the engine's output cannot be joined to what the client has")

// ErrStopped says that a stop string has ended the stream, which an engine cannot know.
// All of the stream has been given out.
var ErrStopped = errors.New("a stop string begins before the engine's part of the answer")

var replacement = []byte("\uFFFD")

// Limits of the stop strings that are watched.
const (
	maxStops     = 64
	maxStopBytes = 1 << 10
)

// watch is the text beside the ids of a stream with stop strings.
type watch struct {
	spoke bool   // the client has some text
	ahead []byte // text of the engine's ids behind that which it has sent, up to a whole character
	ids   int    // it is that of as many ids, the prompt's included; 0 for none of this engine
	part  []byte // bytes of a character that is not whole

	// held is what the engines before have sent ids of and the client does not have yet. It
	// is watched until no stop string can begin in it.
	held []byte
	said []byte // the text of this engine's ids, up to a whole character
	text []byte // what it sent, which waits behind held
	// checked is how much of held and said was searched.
	checked int
	over    bool   // no stop string begins in held, or an engine sees it
	stop    string // the one that does, and where; after as many ids
	at, end int
}

// begin makes ready for the next engine.
func (w *watch) begin() { *w = watch{spoke: w.spoke, held: w.held, checked: len(w.held)} }

// handOver keeps what the client does not have of the text of the ids.
func (w *watch) handOver() {
	w.held = append(append(bytes.Clone(w.held), w.text...), w.ahead...)
}

// kept is the memory in bytes that is held.
func (w *watch) kept() int {
	return cap(w.ahead) + cap(w.held) + cap(w.said) + cap(w.part) + cap(w.text)
}

// StopStrings are the stop strings of a request; ok is false where it has none that can
// be watched.
func StopStrings(v *api.View) (stops []string, ok bool) {
	raw, _ := v.Get("stop")
	beside := textMembers
	if v.Kind == api.SGLangGenerate {
		raw, beside = nil, nil
		sampling, _ := v.Get("sampling_params")
		_ = rawjson.Object(sampling, func(k, v []byte) bool { // what is no object is refused for that
			if string(k) == "stop" {
				raw = v
			}
			return true
		})
	}
	size := 0
	add := func(v []byte) bool {
		s, is := rawjson.Unquote(nil, v)
		if ok = rawjson.IsString(v) && is && len(s) > 0; ok {
			stops, size = append(stops, string(s)), size+len(s)
		}
		return ok
	}
	switch {
	case rawjson.IsString(raw):
		add(raw)
	case len(raw) > 0 && raw[0] == '[':
		ok = true
		ok = rawjson.Array(raw, add) == nil && ok
	}
	if !ok || len(stops) > maxStops || size > maxStopBytes {
		return nil, false
	}
	for name, harmless := range beside {
		if raw, is := v.Get(name); is && !harmless(string(raw)) {
			return nil, false
		}
	}
	return stops, true
}

// textMembers are the members that change which text comes with which ids, or when stop
// strings count.
var textMembers = map[string]func(string) bool{
	"include_stop_str_in_output": off, "return_token_ids": off, "min_tokens": zero, "skip_special_tokens": among("null", "true"),
}

// heard notes that the last n ids came with a text, raw.
func (s *Stream) heard(n int, raw []byte) {
	w := &s.watch
	for i := len(s.ids) - n; i < len(s.ids); i++ {
		var ok bool
		if w.part, ok = s.Decode(w.part, s.ids[i]); !ok || len(w.part)+len(w.ahead) > maxTail {
			s.Refuse(Unmatched)
			return
		}
		// Bytes that are no character become U+FFFD, and text that ends with one waits for
		// the next token (the Hugging Face package's DecodeStream, which vLLM uses).
		before := len(w.ahead)
		if w.ahead = rawjson.AppendLossy(w.ahead, w.part); bytes.HasSuffix(w.ahead, replacement) {
			w.ahead = w.ahead[:before]
			continue
		}
		w.part, w.ids = w.part[:0], i+1
		if len(w.held) > 0 {
			w.said = append(w.said, w.ahead[before:]...)
			s.look(i + 1)
		}
	}
	if len(raw) > 2 && rawjson.IsString(raw) {
		var ok bool
		if s.text, ok = rawjson.Unquote(s.text[:0], raw); !ok || !bytes.HasPrefix(w.ahead, s.text) {
			s.Refuse(Unmatched)
			return
		}
		w.ahead = append(w.ahead[:0], w.ahead[len(s.text):]...)
		w.spoke = w.spoke || len(w.held) == 0
	}
	if w.ids > 0 {
		s.sure = w.ids - s.prompt
	}
}

// look searches for a stop string that begins in what was held, now that the text of so
// many ids is whole. As vLLM does after each token, it takes the first of the list that ends
// in what is new.
func (s *Stream) look(ids int) {
	w := &s.watch
	if w.over || w.stop != "" {
		return
	}
	all, longest := append(w.held[:len(w.held):len(w.held)], w.said...), 0
	for _, stop := range s.Stops {
		longest = max(longest, utf8.RuneCountInString(stop))
		from := max(0, w.checked-len(stop)+1)
		at := bytes.Index(all[from:], []byte(stop))
		switch {
		case at < 0:
			continue
		case from+at < len(w.held):
			w.stop, w.at, w.end = stop, from+at, ids
		default:
			w.over = true // the engine sees it
		}
		return
	}
	w.checked = len(all)
	w.over = utf8.RuneCount(w.said) >= longest-1
}

// behind makes the text of an event that comes while held is watched. It reports false
// where that cannot be watched any more.
func (s *Stream) behind(c *choice, change func(old, with []byte)) bool {
	w := &s.watch
	if s.refused != "" || c.text == nil {
		return false
	}
	var ok bool
	if w.text, ok = rawjson.Unquote(w.text, c.text); !ok {
		return false
	}
	show := ""
	switch {
	case w.stop != "":
		if len(c.finish) == 0 {
			return false
		}
		show = string(w.held[:w.at])
		change(c.finish, []byte(`"stop"`))
		if len(c.reason) > 0 {
			change(c.reason, rawjson.AppendQuote(nil, w.stop))
		}
		s.ids = s.ids[:w.end]
		s.finished, s.stopped = true, true
	case s.finished || w.over:
		show = string(w.held) + string(w.text)
		w.held, w.said, w.text, w.spoke = nil, nil, nil, true
	}
	c.shown = rawjson.AppendQuote(nil, show)
	if !s.Chat {
		change(c.text, c.shown)
	}
	return true
}
