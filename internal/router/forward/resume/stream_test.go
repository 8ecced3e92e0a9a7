package resume

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// A model of an engine whose tokens are the bytes of its answer.
const answer = "Flüsse fließen: 川流不息 🏞️, and on it goes."

var prompt = []uint32{1000, 1001, 1002}

// engine streams what follows after the first tokens of the answer, at most limit of
// them, so many bytes in an event, as vLLM does: text with the last byte of a character.
func engine(after, limit, at int, usage, ids bool, id string) (events []string) {
	var pend []byte
	whole := []byte(answer)
	end := min(len(whole), after+limit)
	for i := after; i < end; i += at {
		next := min(i+at, end)
		pend = append(pend, whole[i:next]...)
		n := len(pend)
		for n > 0 && !fullEnd(pend[:n]) {
			n--
		}
		text := string(pend[:n])
		pend = append([]byte(nil), pend[n:]...)
		choice := map[string]any{"index": 0, "text": text, "logprobs": nil, "finish_reason": nil, "token_ids": nil, "prompt_token_ids": nil}
		if next == end {
			choice["finish_reason"] = "length"
		}
		if ids {
			choice["token_ids"] = tokens(whole[i:next])
			if i == after {
				choice["prompt_token_ids"] = append(slices.Clone(prompt), tokens(whole[:after])...)
			}
		}
		events = append(events, event(map[string]any{"id": id, "object": "text_completion", "created": len(id), "model": "m", "choices": []any{choice}}))
	}
	if usage {
		p, c := len(prompt)+after, end-after
		events = append(events, event(map[string]any{"id": id, "object": "text_completion", "created": len(id), "model": "m", "choices": []any{}, "usage": map[string]any{"prompt_tokens": p, "total_tokens": p + c, "completion_tokens": c, "prompt_tokens_details": map[string]any{"cached_tokens": p}}}))
	}
	return append(events, "data: [DONE]\n\n")
}

func fullEnd(b []byte) bool { return !strings.ContainsRune(string(b), '\uFFFD') }

func tokens(b []byte) []uint32 {
	out := make([]uint32, len(b))
	for i, c := range b {
		out[i] = uint32(c)
	}
	return out
}

func event(v any) string {
	b, _ := json.Marshal(v)
	return "data: " + string(b) + "\n\n"
}

// texts joins what a client reads, and counts usage.
func texts(t *testing.T, stream string) (text, usage string) {
	t.Helper()
	for e := range strings.SplitSeq(stream, "\n\n") {
		data, ok := strings.CutPrefix(e, "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var v struct {
			ID      string
			Created int
			Choices []struct {
				Text string
				IDs  []int `json:"token_ids"`
				PIDs []int `json:"prompt_token_ids"`
			}
			Usage *struct {
				P int `json:"prompt_tokens"`
				C int `json:"completion_tokens"`
				T int `json:"total_tokens"`
				D struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err := json.Unmarshal([]byte(data), &v); err != nil {
			t.Fatalf("%v in %q", err, data)
		}
		if v.ID != "one" || v.Created != 3 {
			t.Fatalf("another answer: %q", data)
		}
		for _, c := range v.Choices {
			if text += c.Text; c.IDs != nil || c.PIDs != nil {
				t.Fatalf("ids in %q", data)
			}
		}
		if v.Usage != nil {
			if v.Usage.D.Cached > v.Usage.P {
				t.Fatalf("more is cached than the prompt has: %q", data)
			}
			usage += fmt.Sprint(v.Usage.P, v.Usage.C, v.Usage.T)
		}
	}
	return text, usage
}

// TestEveryPosition: cut after any token, and within any event, the answer of two
// engines is that of one.
func TestEveryPosition(t *testing.T) {
	for _, at := range []int{1, 2, 3, 7} {
		want, usage := texts(t, strings.Join(engine(0, 1000, at, true, false, "one"), ""))
		first := strings.Join(engine(0, 1000, at, true, true, "one"), "")
		seams := 0
		for cut := range len(first) {
			if cut%11 != 0 && !strings.HasSuffix(first[:cut], "\n\n") {
				continue
			}
			var s Stream
			s.Begin()
			got := ""
			for i := 0; i < cut; i += 50 {
				out, err := s.Pass([]byte(first[i:min(cut, i+50)]))
				if err != nil {
					t.Fatal(err)
				}
				got += string(out)
			}
			if s.Done() || s.Ended() {
				if !s.Done() {
					got += string(s.Closing(true))
				}
			} else if ids, text := s.Unaligned(); text != "" {
				for n := len(ids); n > 0; n-- {
					if b := bytesOf(ids[:n]); b == text {
						s.Align(n)
						break
					}
				}
			}
			if !s.Done() && !s.Ended() {
				ids, why := s.Next()
				if why == NoIDs && got == "" {
					continue // nothing was sent: that is another attempt, not this
				}
				sent := len(ids) - len(prompt)
				if why != "" || !slices.Equal(ids[:len(prompt)], prompt) || bytesOf(ids[len(prompt):]) != answer[:sent] || !fullEnd([]byte(answer[:sent])) {
					t.Fatalf("cut after %d: %v %q", cut, ids, why)
				}
				seams++
				out, err := s.Pass([]byte(strings.Join(engine(sent, 1000, at, true, true, "another"), "")))
				if err != nil {
					t.Fatal(err)
				}
				got += string(out)
			}
			if text, n := texts(t, got); text != want || n != usage {
				t.Fatalf("%d tokens an event, cut after %d bytes: %q %s\nwant %q %s", at, cut, text, n, want, usage)
			}
		}
		if seams < 20 {
			t.Errorf("%d seams", seams)
		}
	}
}

func bytesOf(ids []uint32) string {
	b := make([]byte, len(ids))
	for i, id := range ids {
		b[i] = byte(id)
	}
	return string(b)
}

// TestEvents: what is no event of a completion's, and what is an error.
func TestEvents(t *testing.T) {
	good := engine(0, 6, 1, false, true, "one")
	for _, c := range []struct {
		name, more string
		refused    Refusal
		fails      bool
	}{
		{"comment", ": ping\n\n", "", false},
		{"error", "data: {\"error\":{\"message\":\"gone\"}}\n\n", "", true},
		{"error event", "event: error\ndata: {}\n\n", "", true},
		{"abort", "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\n", "", true},
		{"no ids", "data: {\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":null}]}\n\n", NoIDs, false},
		{"two lines", "data: {\"choices\":[]\ndata: }\n\n", Unexpected, false},
		{"second choice", "data: {\"choices\":[{\"index\":1,\"text\":\"x\",\"token_ids\":[1]}]}\n\n", Unexpected, false},
	} {
		var s Stream
		if _, err := s.Pass([]byte(good[0] + good[1])); err != nil {
			t.Fatal(err)
		}
		out, err := s.Pass([]byte(c.more))
		if errors.Is(err, ErrEngine) != c.fails || s.Refused() != c.refused {
			t.Errorf("%s: %v, refused %q, want %q", c.name, err, s.Refused(), c.refused)
		}
		if c.fails != (len(s.Held()) > 0) || c.fails && len(out) > 0 {
			t.Errorf("%s: passes on %q and holds %q", c.name, out, s.Held())
		}
	}
	var old Stream // an engine that does not know of ids
	if _, err := old.Pass([]byte(strings.Join(engine(0, 6, 1, false, false, "one"), ""))); err != nil || old.Refused() != NoIDs {
		t.Errorf("%v %q", err, old.Refused())
	}
	kept := Stream{KeepIDs: true}
	if out, _ := kept.Pass([]byte(good[0])); string(out) != good[0] {
		t.Errorf("%s", out)
	}
}

// TestJudge: every refusal that a request brings has words.
func TestJudge(t *testing.T) {
	for body, want := range map[string]Refusal{
		`{"prompt":"a","stream":true}`:                                          "",
		`{"prompt":[1,2],"stream":true,"temperature":0.7}`:                      "",
		`{"prompt":"a"}`:                                                        Endpoint,
		`{"prompt":["a","b"],"stream":true}`:                                    Several,
		`{"prompt":"a","stream":true,"n":2}`:                                    Several,
		`{"prompt":"a","stream":true,"use_beam_search":true}`:                   Several,
		`{"prompt":"a","stream":true,"presence_penalty":1e-3}`:                  Penalties,
		`{"prompt":"a","stream":true,"presence_penalty":-0.0}`:                  "",
		`{"prompt":"a","stream":true,"seed":1,"temperature":0.0}`:               "",
		`{"prompt":"a","stream":true,"seed":1,"temperature":0.1}`:               Seed,
		`{"prompt":"a","stream":true,"seed":1}`:                                 Seed,
		`{"prompt":"a","stream":true,"guided_json":{"type":"object"}}`:          Guided,
		`{"prompt":"a","stream":true,"response_format":{"type":"text"}}`:        "",
		`{"prompt":"a","stream":true,"logprobs":1}`:                             Logprobs,
		`{"prompt":"a","stream":true,"logprobs":0}`:                             Logprobs,
		`{"prompt":"a","stream":true,"echo":true}`:                              Echo,
		`{"prompt":"a","stream":true,"stop":["x"]}`:                             Stops,
		`{"prompt":"a","stream":true,"stop":[]}`:                                "",
		`{"prompt":"a","stream":true,"tools":[{}]}`:                             Tools,
		`{"prompt":"a","stream":true,"thinking_token_budget":5}`:                Reasoning,
		`{"prompt":"a","stream":true,"truncate_prompt_tokens":5}`:               Prompt,
		`{"prompt":"a","stream":true,"max_completion_tokens":5}`:                Field,
		`{"prompt":"a","stream":true,"vllm_xargs":{"a":1}}`:                     Field,
		`{"prompt":"` + strings.Repeat("a", 4*MaxPrompt+4) + `","stream":true}`: TooLong,
	} {
		var v api.View
		if err := v.Parse([]byte(body), api.Completion, api.Limits{}); err != nil {
			t.Fatal(err)
		}
		if why, _ := Judge(&v, false); why != want || why != "" && why.String() == "" {
			t.Errorf("%.80s: %q %q, want %q", body, why, why.String(), want)
		}
	}
	for body, want := range map[string]Refusal{
		`{"messages":[{"role":"user","content":"hi"}],"stream":true,"max_completion_tokens":5,"tools":[],"logprobs":false}`: "",
		`{"messages":[{"role":"user","content":"hi"}],"stream":true,"chat_template_kwargs":{"a":1},"metadata":{"b":2}}`:     "",
		`{"messages":[{"role":"user","content":"hi"}],"stream":true,"tools":[{"type":"function","function":{"name":"f"}}]}`: Tools,
		`{"messages":[{"role":"user","content":"hi"}],"stream":true,"tool_choice":"required"}`:                              Tools,
		`{"messages":[{"role":"user","content":"hi"}],"stream":true,"reasoning_effort":"low"}`:                              Reasoning,
		`{"messages":[{"role":"user","content":"hi"}],"stream":true,"logprobs":true}`:                                       Logprobs,
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://a/b"}}]}],"stream":true}`:    Prompt,
		`{"messages":[{"role":"user","content":"hi"}],"stream":true,"max_output_tokens":5}`:                                 Field,
	} {
		var chat api.View
		if err := chat.Parse([]byte(body), api.Chat, api.Limits{}); err != nil {
			t.Fatal(err)
		}
		if why, _ := Judge(&chat, false); why != want {
			t.Errorf("%s: %q, want %q", body, why, want)
		}
	}
	var other api.View
	if err := other.Parse([]byte(`{"messages":[{"role":"user","content":"hi"}],"max_tokens":3,"stream":true}`), api.Messages, api.Limits{}); err != nil {
		t.Fatal(err)
	}
	if why, _ := Judge(&other, false); why != Endpoint {
		t.Errorf("messages: %q", why)
	}
}

// TestChats: the rest of a chat, which a completion answers, reads as the chat's; what
// an engine's parsers have made of tokens is not gone on with.
func TestChats(t *testing.T) {
	const (
		role   = `data: {"id":"one","object":"chat.completion.chunk","created":3,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"prompt_token_ids":[1000,1001,1002]}` + "\n\n"
		first  = `data: {"id":"one","object":"chat.completion.chunk","created":3,"choices":[{"index":0,"delta":{"content":"F"},"finish_reason":null,"token_ids":[70]}]}` + "\n\n"
		rest   = `data: {"id":"two","object":"text_completion","created":4,"choices":[{"index":0,"text":"l","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[1000,1001,1002,70],"token_ids":[108]}]}` + "\n\n"
		want   = `data: {"id":"one","object":"chat.completion.chunk","created":3,"choices":[{"index":0,"delta":{"content":"l"},"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}]}` + "\n\n"
		reason = `data: {"id":"one","object":"chat.completion.chunk","created":3,"choices":[{"index":0,"delta":{"reasoning":"hm"},"finish_reason":null,"token_ids":[70]}]}` + "\n\n"
		call   = `data: {"id":"one","object":"chat.completion.chunk","created":3,"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]},"finish_reason":null,"token_ids":[70]}]}` + "\n\n"
	)
	s := Stream{Chat: true}
	if _, err := s.Pass([]byte(role)); err != nil {
		t.Fatal(err)
	}
	if _, why := s.Next(); why != Silent {
		t.Errorf("of a role alone: %q", why)
	}
	if _, err := s.Pass([]byte(first)); err != nil {
		t.Fatal(err)
	}
	if ids, why := s.Next(); why != "" || !slices.Equal(ids, []uint32{1000, 1001, 1002, 70}) {
		t.Fatalf("%v %q", ids, why)
	}
	if out, err := s.Pass([]byte(rest)); err != nil || string(out) != want {
		t.Errorf("%v\n%s\n%s", err, out, want)
	}
	for event, why := range map[string]Refusal{reason: Reasoning, call: Tools} {
		s := Stream{Chat: true}
		if _, err := s.Pass([]byte(role + event + first)); err != nil || s.Refused() != why {
			t.Errorf("%v %q, want %q", err, s.Refused(), why)
		}
	}
}

// FuzzStream: whatever an engine says, in whatever pieces, nothing breaks, no more
// bytes are held than one event may have, and what is passed on in two pieces is what
// is passed on in one.
func FuzzStream(f *testing.F) {
	f.Add([]byte(strings.Join(engine(0, 9, 1, true, true, "one"), "")), uint16(40))
	f.Add([]byte("data: {\"choices\":[{\"token_ids\":[1,2],\"text\":\"\\ud83d\"}]}\r\n\r\n: x\n\ndata: [DONE]\n\n"), uint16(3))
	f.Fuzz(func(t *testing.T, b []byte, at uint16) {
		one, two := Stream{}, Stream{}
		run := func(s *Stream, parts ...[]byte) (out []byte, err error) {
			for _, p := range parts {
				var piece []byte
				piece, err = s.Pass(bytes.Clone(p))
				if out = append(out, piece...); err != nil {
					break
				}
			}
			return out, err
		}
		k := min(int(at), len(b))
		got, err := run(&one, b)
		again, err2 := run(&two, b[:k], b[k:])
		if (err == nil) != (err2 == nil) || !bytes.Equal(got, again) || one.Refused() != two.Refused() {
			t.Fatalf("%q\n%q\n%q", b, got, again)
		}
		three := Stream{}
		if whole := bytes.LastIndex(b, []byte("\n\n")); err == nil && whole >= 0 {
			four := Stream{}
			gotByShape, errByShape := run(&four, b[:whole+2])
			gotApart, errApart := apart(&three, b[:whole+2])
			same(t, b, &four, &three, gotByShape, gotApart, errByShape, errApart)
		}
		five := Stream{Stops: []string{"on", "ß", "\x00"}, Usage: true, Decode: func(dst []byte, id uint32) ([]byte, bool) { return append(dst, byte(id)), id < 512 }}
		five.Begin()
		run(&five, b)
		if ids, why := five.Next(); why == "" && len(ids) < five.prompt {
			t.Fatalf("%d ids of a prompt of %d", len(ids), five.prompt)
		}
		run(&five, b)
		run(&five, []byte(strings.Join(engine(3, 9, 1, true, true, "two"), "")))
		one.Unaligned()
		if ids, why := one.Next(); why == "" && len(ids) < one.prompt {
			t.Fatalf("%d ids of a prompt of %d", len(ids), one.prompt)
		}
		run(&one, b)
	})
}

// TestMemory: what is kept for a stream is what docs/continuation.md says.
func TestMemory(t *testing.T) {
	const streams, inputs, outputs = 200, 3000, 1000
	var ids strings.Builder
	for i := range inputs {
		fmt.Fprintf(&ids, "%d,", 10_000+i)
	}
	head := `data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,"model":"a-model-of-some-name","choices":[{"index":0,"text":" x","logprobs":null,"finish_reason":null,"stop_reason":null,`
	first := []byte(head + `"prompt_token_ids":[` + ids.String()[:ids.Len()-1] + `],"token_ids":[77]}]}` + "\n\n")
	next := []byte(head + `"prompt_token_ids":null,"token_ids":[77]}]}` + "\n\n")
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	list := make([]Stream, streams)
	for i := range list {
		for k := range outputs {
			e := next
			if k == 0 {
				e = first
			}
			for len(e) > 0 { // as a socket gives it
				n := min(len(e), 4096)
				if _, err := list[i].Pass(e[:n]); err != nil {
					t.Fatal(err)
				}
				e = e[n:]
			}
		}
	}
	each := (heap() - before) / streams
	if list[0].Sent() != outputs {
		t.Fatalf("%d tokens sent, refused %q", list[0].Sent(), list[0].Refused())
	}
	t.Logf("%d bytes a stream, %d of them for ids", each, 4*cap(list[0].ids))
	if most := uint64((inputs+outputs)*4*5/4 + 3<<10); each > most {
		t.Errorf("%d bytes a stream, more than %d", each, most)
	}
	runtime.KeepAlive(list)
}

func BenchmarkPass(b *testing.B) {
	events := engine(0, 1000, 1, false, true, "one")
	var s Stream
	for b.Loop() {
		s.Begin()
		for _, e := range events {
			if _, err := s.Pass([]byte(e)); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(events)), "ns/event")
}

// TestOddEngines: what no engine should say ends the reading along, and nothing else.
func TestOddEngines(t *testing.T) {
	first := func(choice string) string {
		return `data: {"id":"a","created":1,"model":"m","choices":[{"index":0,"prompt_token_ids":[1,2,3],` + choice + "}]}\n\n"
	}
	for name, c := range map[string]struct {
		events []string
		why    Refusal
	}{
		"a negative id":          {[]string{first(`"text":"x","token_ids":[-1]`)}, NoIDs},
		"a negative id, no text": {[]string{first(`"text":"","token_ids":[-1]`), first(`"text":"x","token_ids":[5]`)}, NoIDs},
		"an id of 33 bits":       {[]string{first(`"text":"x","token_ids":[4294967296]`)}, NoIDs},
		"a prompt's odd id":      {[]string{strings.Replace(first(`"text":"x","token_ids":[4]`), "[1,2,3]", "[1,-2,3]", 1)}, NoIDs},
		"ids without end":        {slices.Repeat([]string{first(`"text":"","token_ids":[` + strings.Repeat("1,", 1<<18) + "1]")}, 5), TooLong},
	} {
		t.Run(name, func(t *testing.T) {
			var s Stream
			s.Begin()
			for _, e := range c.events {
				if _, err := s.Pass([]byte(e)); err != nil {
					t.Fatal(err)
				}
			}
			if s.Refused() != c.why {
				t.Errorf("%q, want %q", s.Refused(), c.why)
			}
			s.Unaligned()
			if ids, why := s.Next(); why != c.why || len(ids) > 0 {
				t.Errorf("%d ids, %q", len(ids), why)
			}
		})
	}
	// The rest of a chat, in which a member stands within another that is changed.
	s := Stream{Chat: true}
	s.Begin()
	if _, err := s.Pass([]byte(`data: {"id":"a","object":"chat.completion.chunk","created":1,"model":"m","prompt_token_ids":[1,2],"choices":[{"index":0,"delta":{"role":"assistant","content":"x"},"token_ids":[3]}]}` + "\n\n")); err != nil {
		t.Fatal(err)
	}
	if _, why := s.Next(); why != "" {
		t.Fatal(why)
	}
	s.Begin()
	if _, err := s.Pass([]byte(`data: {"text":"a","id":"y","choices":[{"delta":{"content":"x"}}]}` + "\n\n")); err != nil && s.Refused() == "" {
		t.Errorf("%v %q", err, s.Refused())
	}
}
