package resume

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// chunked is a model whose tokens are pieces of an answer, of one to four bytes in turn,
// so that they begin and end within characters.
type chunked struct{ pieces []string }

func chunks(text string, at int) *chunked {
	m := &chunked{}
	for i := 0; len(text) > 0; i++ {
		n := min(len(text), 1+(i*at)%4)
		m.pieces, text = append(m.pieces, text[:n]), text[n:]
	}
	return m
}

func (m *chunked) decode(dst []byte, id uint32) ([]byte, bool) {
	if id < 1 || int(id) > len(m.pieces) {
		return dst, false
	}
	return append(dst, m.pieces[id-1]...), true
}

// stream is what an engine says after the first tokens, so many in an event, as vLLM
// does: text with the last byte of a character, held back for the stop strings, which are
// looked for after each token in the order of their list.
func (m *chunked) stream(after, at int, stops []string, id string) (events []string) {
	hold := 0
	for _, s := range stops {
		hold = max(hold, utf8.RuneCountInString(s)-1)
	}
	text, pend, sent, streamed := "", "", 0, 0
	var ids []uint32
	for i := after; i < len(m.pieces); {
		finish, reason := any(nil), any(nil)
		for ; i < len(m.pieces) && len(ids) < at && finish == nil; i++ {
			ids = append(ids, uint32(i+1))
			pend += m.pieces[i]
			if shown := string(rawjson.AppendLossy(nil, []byte(pend))); !strings.HasSuffix(shown, "\uFFFD") {
				before := len(text)
				text, pend = text+shown, ""
				for _, s := range stops {
					if k := strings.Index(text[max(0, before-len(s)+1):], s); k >= 0 {
						text, finish, reason = text[:max(0, before-len(s)+1)+k], "stop", s
						break
					}
				}
			}
			if i+1 == len(m.pieces) && finish == nil {
				finish = "length"
			}
		}
		show := text
		if finish == nil {
			for range hold {
				_, n := utf8.DecodeLastRuneInString(show)
				show = show[:len(show)-n]
			}
		}
		show = show[min(sent, len(show)):]
		sent += len(show)
		choice := map[string]any{"index": 0, "text": show, "logprobs": nil, "finish_reason": finish, "stop_reason": reason, "token_ids": ids, "prompt_token_ids": nil}
		if streamed == 0 {
			choice["prompt_token_ids"] = prompt
		}
		if id == "" { // whoever was not asked for ids
			choice["prompt_token_ids"], choice["token_ids"] = nil, nil
		}
		streamed += len(ids)
		events = append(events, event(map[string]any{"id": id, "object": "text_completion", "created": len(id), "model": "m", "choices": []any{choice}}))
		if ids = nil; finish != nil {
			break
		}
	}
	usage := map[string]any{"prompt_tokens": len(prompt) + after, "completion_tokens": streamed, "total_tokens": len(prompt) + after + streamed}
	return append(events, event(map[string]any{"id": id, "object": "text_completion", "created": len(id), "model": "m", "choices": []any{}, "usage": usage}), "data: [DONE]\n\n")
}

// ending is how a stream ended.
func ending(stream string) string {
	out := ""
	for e := range strings.SplitSeq(stream, "\n\n") {
		for _, part := range []string{`"finish_reason":"`, `"stop_reason":"`} {
			if _, rest, ok := strings.Cut(e, part); ok {
				word, _, _ := strings.Cut(rest, `"`)
				out += part + word
			}
		}
	}
	return out
}

// TestStopStrings: cut after any event, and again at the engine that goes on, a stream
// with stop strings ends where the undisturbed engine's does, with its text, reason and
// count of tokens, wherever the stop string lies.
func TestStopStrings(t *testing.T) {
	type stopsOf struct {
		answer string
		stops  []string
	}
	var cases []stopsOf
	for _, answer := range []string{answer, "wa\xe3y\xf0\x9fgle\xff\xfe single: \xe2\x82 end."} { // the second has bytes that are no characters
		runes := []rune(string(rawjson.AppendLossy(nil, []byte(answer))))
		for i := range runes { // a stop string at each place, of one to nine characters
			for _, n := range []int{1, 2, 5, 9} {
				if i+n <= len(runes) && i%4 == n%4 {
					cases = append(cases, stopsOf{answer, []string{string(runes[i : i+n])}})
				}
			}
		}
	}
	for _, stops := range [][]string{{"never in the answer"}, {"流不", "川流不息"}, {"川流不息", "流不"}, {"goes.", "oes", "it goes"}, {"x", "ße", "ßen: 川流"}} {
		cases = append(cases, stopsOf{answer, stops})
	}
	seams, stopped := 0, 0
	for _, c := range cases {
		stops := c.stops
		for _, at := range []int{1, 3} {
			for _, size := range []int{0, 1, 3} {
				m := chunks(c.answer, size)
				whole := m.stream(0, at, stops, "one")
				undisturbed := strings.Join(m.stream(0, at, stops, ""), "")
				undisturbed = strings.ReplaceAll(strings.ReplaceAll(undisturbed, `"id":""`, `"id":"one"`), `"created":0`, `"created":3`)
				want, usage := texts(t, undisturbed)
				end := ending(undisturbed)
				for first := 1; first < len(whole)-2; first++ {
					for _, second := range []int{1, 1000} {
						s := &Stream{Stops: stops, Decode: m.decode, Usage: true}
						s.Begin()
						got, events := "", whole[:first]
						for engine := 0; ; engine++ {
							done := false
							for _, e := range events {
								out, err := s.Pass([]byte(e))
								got += string(out)
								if done = errors.Is(err, ErrStopped) || s.Done(); done {
									if errors.Is(err, ErrStopped) {
										stopped++
									}
									break
								} else if err != nil {
									t.Fatalf("%q, %d: %v %s", stops, first, err, s.Held())
								}
							}
							if s.Ended() && !s.Done() {
								got += string(s.Closing(true))
								done = true
							}
							if done {
								break
							}
							ids, why := s.Next()
							if why != "" {
								t.Fatalf("%q, %d tokens an event, cut after %d events of engine %d: %q\n%s", stops, at, len(events), engine, why, got)
							}
							seams++
							rest := m.stream(len(ids)-len(prompt), at, stops, fmt.Sprint("engine", engine))
							if engine == 0 && second < len(rest) {
								rest = rest[:second]
							}
							events = rest
						}
						text, n := texts(t, got)
						if text != want || n != usage || ending(got) != end || !strings.HasSuffix(got, "data: [DONE]\n\n") {
							t.Fatalf("stop %q, %d tokens an event, cut after %d events, then %d:\n%q %s %s\nwant\n%q %s %s\n%s", stops, at, first, second, text, n, ending(got), want, usage, end, got)
						}
					}
				}
			}
		}
	}
	if seams < 1000 || stopped < 100 {
		t.Errorf("%d seams, %d of them within a stop string", seams, stopped)
	}
	t.Logf("%d seams, %d of them within a stop string", seams, stopped)
}

// TestStopStringsOfChats: the rest of a chat is a completion, with what was held back
// before it.
func TestStopStringsOfChats(t *testing.T) {
	m := chunks("ab, cd. ef", 0)
	const (
		role = `data: {"id":"one","object":"chat.completion.chunk","created":3,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"prompt_token_ids":[1000]}` + "\n\n"
		head = `data: {"id":"one","object":"chat.completion.chunk","created":3,"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null,"stop_reason":null,"token_ids":[1,2,3]}]}` + "\n\n"
		rest = `data: {"id":"two","object":"text_completion","created":4,"choices":[{"index":0,"text":" c","finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[4,5,6,7,8]}]}` + "\n\n"
	)
	for stop, want := range map[string]string{
		"xyz":   `data: {"id":"one","object":"chat.completion.chunk","created":3,"choices":[{"index":0,"delta":{"content":"b, c"},"finish_reason":null,"stop_reason":null,"token_ids":null}]}` + "\n\n",
		", cd.": `data: {"id":"one","object":"chat.completion.chunk","created":3,"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop","stop_reason":", cd.","token_ids":null}]}` + "\n\ndata: [DONE]\n\n",
	} {
		s := &Stream{Chat: true, Stops: []string{stop}, Decode: m.decode}
		s.Begin()
		if _, err := s.Pass([]byte(role)); err != nil {
			t.Fatal(err)
		}
		if _, why := s.Next(); why != Silent {
			t.Errorf("of a role alone: %q", why)
		}
		if _, err := s.Pass([]byte(head)); err != nil {
			t.Fatal(err)
		}
		if ids, why := s.Next(); why != "" || !slices.Equal(ids, []uint32{1000, 1, 2, 3}) {
			t.Fatalf("%v %q", ids, why)
		}
		out, err := s.Pass([]byte(rest))
		out = bytes.ReplaceAll(out, []byte(`,"prompt_token_ids":null`), nil)
		if string(out) != want || errors.Is(err, ErrStopped) != (stop == ", cd.") {
			t.Errorf("%q: %v\n%s\nwant\n%s", stop, err, out, want)
		}
	}
}

// TestStopStringsRefused: which requests' stop strings are not watched, and a text that
// is not the ids'.
func TestStopStringsRefused(t *testing.T) {
	for body, want := range map[string]string{
		`{"prompt":"a","stream":true,"stop":"x"}`:                                            "[x] true",
		`{"prompt":"a","stream":true,"stop":["x","\u00e9\"y"]}`:                              `[x é"y] true`,
		`{"prompt":"a","stream":true,"stop":["x"],"min_tokens":0}`:                           "[x] true",
		`{"prompt":"a","stream":true,"stop":["x"],"min_tokens":3}`:                           "[] false",
		`{"prompt":"a","stream":true,"stop":["x"],"include_stop_str_in_output":true}`:        "[] false",
		`{"prompt":"a","stream":true,"stop":["x"],"return_token_ids":true}`:                  "[] false",
		`{"prompt":"a","stream":true,"stop":["x"],"skip_special_tokens":false}`:              "[] false",
		`{"prompt":"a","stream":true,"stop":["x",""]}`:                                       "[] false",
		`{"prompt":"a","stream":true,"stop":["x",7]}`:                                        "[] false",
		`{"prompt":"a","stream":true,"stop":[]}`:                                             "[] true",
		`{"prompt":"a","stream":true}`:                                                       "[] false",
		`{"prompt":"a","stream":true,"stop":["` + strings.Repeat("x", maxStopBytes) + `y"]}`: "[] false",
	} {
		var v api.View
		if err := v.Parse([]byte(body), api.Completion, api.Limits{}); err != nil {
			t.Fatal(err)
		}
		stops, ok := StopStrings(&v)
		if got := fmt.Sprint(stops, ok); got != want {
			t.Errorf("%.80s: %s, want %s", body, got, want)
		}
		if why, _ := Judge(&v, ok); ok && why != "" {
			t.Errorf("%s: %q", body, why)
		}
	}
	m := chunks("abcdef", 0)
	// What an engine that goes on says is not what its ids say, while something is held back.
	s := &Stream{Stops: []string{"never"}, Decode: m.decode}
	s.Begin()
	const event = `data: {"id":"a","choices":[{"index":0,"text":%q,"finish_reason":null,"token_ids":%s,"prompt_token_ids":[1000]}]}` + "\n\n"
	if _, err := s.Pass(fmt.Appendf(nil, event, "a", "[1,2]")); err != nil {
		t.Fatal(err)
	}
	if _, why := s.Next(); why != "" {
		t.Fatal(why)
	}
	if out, err := s.Pass(fmt.Appendf(nil, event, "x", "[3]")); !errors.Is(err, ErrUnclear) || len(out) > 0 || s.Refused() != Unmatched {
		t.Errorf("%v %q %q", err, out, s.Refused())
	}
	for _, c := range []struct{ text, ids string }{{"x", "[1,2]"}, {"a", "[1,99]"}, {"abc", "[1,2]"}} {
		s := &Stream{Stops: []string{"never"}, Decode: m.decode}
		s.Begin()
		if out, err := s.Pass(fmt.Appendf(nil, event, c.text, c.ids)); err != nil || len(out) == 0 || s.Refused() != Unmatched {
			t.Errorf("%v: %v %q", c, err, s.Refused())
		}
	}
}
