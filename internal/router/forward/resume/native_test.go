package resume

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// nativeEngine streams what follows after the first tokens of the answer as SGLang's
// /generate does, so many bytes in an event: text and ids of the whole answer so far, or
// only what is new.
func nativeEngine(after, at int, id string, cumulative bool) (events []string) {
	whole := []byte(answer)[after:]
	sent := 0
	for i := 0; i < len(whole); i += at {
		next := min(i+at, len(whole))
		n := next
		for n > 0 && !fullEnd(whole[:n]) {
			n--
		}
		text, ids := string(whole[:n]), tokens(whole[:next])
		if !cumulative {
			text, ids = string(whole[sent:max(sent, n)]), tokens(whole[i:next])
		}
		sent = max(sent, n)
		meta := map[string]any{
			"id": id, "finish_reason": nil, "prompt_tokens": len(prompt) + after, "completion_tokens": next, "cached_tokens": after,
			"weight_version": "default",
		}
		if next == len(whole) {
			meta["finish_reason"] = map[string]any{"type": "length", "length": next}
		}
		events = append(events, event(map[string]any{"text": text, "output_ids": ids, "meta_info": meta}))
	}
	return append(events, "data: [DONE]\n\n")
}

// natively is the stream that reads along with one of SGLang's own.
func natively() *Stream {
	s := &Stream{KeepIDs: true, Native: true}
	s.Begin()
	s.Given([]byte("[1000, 1001,1002]"))
	return s
}

// align finds where a text ends in its tokens, as an engine's /detokenize would.
func align(s *Stream) {
	ids, text := s.Unaligned()
	for n := len(ids); n > 0 && text != ""; n-- {
		if bytesOf(ids[:n]) == text {
			s.Align(n)
			return
		}
	}
}

// breaks ends the first engine's part of a stream that another one may continue.
func breaks(t *testing.T, s *Stream) {
	t.Helper()
	s.Broke()
	align(s)
	if _, why := s.Next(); why != "" {
		t.Fatal(why)
	}
}

// TestNative: wherever the stream of SGLang's /generate is cut, either all that the
// client gets is what it gets from one engine, or the stream is refused for what the
// client has of a character or of one event only; again at a second engine.
func TestNative(t *testing.T) {
	for _, at := range []int{1, 2, 3, 7} {
		whole := nativeEngine(0, at, "one", true)
		continued := 0
		for cut := 1; cut < len(whole)-1; cut++ {
			s := natively()
			out, err := s.Pass([]byte(strings.Join(whole[:cut], "")))
			if err != nil {
				t.Fatal(err)
			}
			got := string(out)
			first := min(cut*at, len(answer))
			seams := []int{first}
			for engine := range 3 {
				at := seams[len(seams)-1]
				s.Broke()
				align(s)
				ids, why := s.Next()
				begun := 0
				if len(seams) > 1 {
					begun = seams[len(seams)-2]
				}
				switch {
				case engine == 0 && cut == 1:
					if why != Unmatched {
						t.Fatalf("after one event: %q", why)
					}
				case !fullEnd([]byte(answer[:at])):
					if why != SentIDs {
						t.Fatalf("cut at %v, within a character: %q", seams, why)
					}
				case why != "":
					t.Fatalf("cut at %v (begun at %d): %q", seams, begun, why)
				case bytesOf(ids[len(prompt):]) != answer[:at] || !slices.Equal(ids[:len(prompt)], prompt):
					t.Fatalf("cut at %v: %v", seams, ids)
				}
				if why != "" {
					break
				}
				continued++
				rest := nativeEngine(at, 1, fmt.Sprint("another", engine), true)
				end := len(rest)
				if next := at + 9; engine < 2 && next < len(answer) {
					for !fullEnd([]byte(answer[:next])) {
						next++
					}
					end = next - at
					seams = append(seams, next)
				}
				out, err := s.Pass([]byte(strings.Join(rest[:end], "")))
				if err != nil {
					t.Fatal(err)
				}
				if got += string(out); end == len(rest) {
					break
				}
			}
			if s.Refused() == "" && s.Done() {
				checkNative(t, got)
			}
		}
		if continued < 10 {
			t.Errorf("%d continued", continued)
		}
	}
}

// checkNative looks at what a client has of a stream: each event has the answer so far,
// with as many ids as it counts, and the last one all of it.
func checkNative(t *testing.T, got string) {
	t.Helper()
	var last struct {
		Text string   `json:"text"`
		IDs  []uint32 `json:"output_ids"`
		Meta struct {
			ID         string `json:"id"`
			Prompt     int    `json:"prompt_tokens"`
			Completion int    `json:"completion_tokens"`
			Cached     int    `json:"cached_tokens"`
			Finish     *struct {
				Length int `json:"length"`
			} `json:"finish_reason"`
		} `json:"meta_info"`
	}
	was := 0
	for e := range strings.SplitSeq(strings.TrimSuffix(got, "data: [DONE]\n\n"), "\n\n") {
		if e == "" {
			continue
		}
		if err := json.Unmarshal([]byte(strings.TrimPrefix(e, "data: ")), &last); err != nil {
			t.Fatalf("%v: %q", err, e)
		}
		m := &last.Meta
		if m.ID != "one" || m.Prompt != len(prompt) || m.Cached > len(prompt) {
			t.Fatalf("answer %q to %d tokens, %d of them cached, of a prompt of %d: %q", m.ID, m.Prompt, m.Cached, len(prompt), e)
		}
		if m.Completion != len(last.IDs) || len(last.IDs) <= was {
			t.Fatalf("%d tokens with %d ids after %d: %q", m.Completion, len(last.IDs), was, e)
		}
		if !strings.HasPrefix(bytesOf(last.IDs), last.Text) || !strings.HasPrefix(answer, last.Text) {
			t.Fatalf("%q is no beginning of its ids' text or of the answer %q", last.Text, answer)
		}
		was = len(last.IDs)
	}
	if last.Text != answer || bytesOf(last.IDs) != answer || last.Meta.Finish == nil || last.Meta.Finish.Length != len(answer) {
		t.Fatalf("%+v", last)
	}
}

// TestNativeRefused: what has other ids than those of the answer so far is not gone
// on with, and passes as it is.
func TestNativeRefused(t *testing.T) {
	cumulative := nativeEngine(0, 1, "one", true)
	with := func(e, old, more string) string { return strings.Replace(e, old, more, 1) }
	for name, c := range map[string]struct {
		events []string
		why    Refusal
	}{
		"what is new":              {nativeEngine(0, 1, "one", false)[:5], NoIDs},
		"ids of the prompt before": {[]string{with(cumulative[0], `"output_ids":[`, `"output_ids":[1001,1002,`), with(cumulative[1], `"output_ids":[`, `"output_ids":[1001,1002,`)}, NoIDs},
		"no count":                 {[]string{cumulative[0], with(cumulative[1], "completion_tokens", "completed")}, NoIDs},
		"no ids":                   {[]string{cumulative[0], with(cumulative[1], "output_ids", "ids")}, Unexpected},
		"one of several":           {[]string{with(cumulative[0], "{", `{"index":0,`)}, Unexpected},
		"one event":                {cumulative[:1], Unmatched},
		"nothing":                  {nil, NoIDs},
	} {
		s := natively()
		all := strings.Join(c.events, "")
		out, err := s.Pass([]byte(all))
		if err != nil || string(out) != all {
			t.Errorf("%s: %v %q", name, err, out)
		}
		s.Broke()
		align(s)
		if _, why := s.Next(); why != c.why {
			t.Errorf("%s: %q, want %q", name, why, c.why)
		}
	}
	for _, odd := range []string{`data: {"error":{"message":"gone"}}`, `data: {"text":"a","output_ids":[1],"meta_info":{"finish_reason":{"type":"abort"}}}`} {
		if _, err := natively().Pass([]byte(cumulative[0] + odd + "\n\n")); err == nil {
			t.Errorf("%s is no error", odd)
		}
	}
	// An engine that goes on and sends only what is new: its events cannot be made those
	// of the whole answer.
	s := natively()
	if _, err := s.Pass([]byte(strings.Join(cumulative[:4], ""))); err != nil {
		t.Fatal(err)
	}
	breaks(t, s)
	rest := nativeEngine(4, 1, "two", false)
	if _, err := s.Pass([]byte(rest[0] + rest[1])); !errors.Is(err, ErrUnclear) || s.Refused() != NoIDs {
		t.Errorf("%v, %q", err, s.Refused())
	}
}

// TestNativeStops: a stream with stop strings is gone on with where none begins in what the
// client has, and one that the next engine has not seen at its beginning ends it.
func TestNativeStops(t *testing.T) {
	whole := nativeEngine(0, 1, "one", true)
	const seam = 4
	for name, c := range map[string]struct {
		stop  string
		why   Refusal // of going on
		joins bool    // what the next engine says
	}{
		"elsewhere":                      {"never in it", "", true},
		"begins before, ends after":      {answer[seam-2 : seam+3], Stops, false},
		"begins with the last character": {answer[seam-1:seam] + "?", Stops, false},
		"ends before":                    {answer[seam-3 : seam], Stops, false},
		"begins the rest":                {answer[seam : seam+3], "", false},
		"is later in the rest":           {answer[seam+1 : seam+4], "", true}, // which is that engine's to see
	} {
		s := natively()
		s.Stops = []string{"nor this", c.stop}
		s.Begin()
		s.Given([]byte("[1000,1001,1002]"))
		if _, err := s.Pass([]byte(strings.Join(whole[:seam], ""))); err != nil {
			t.Fatal(err)
		}
		s.Broke()
		align(s)
		if _, why := s.Next(); why != c.why {
			t.Errorf("%s: %q, want %q", name, why, c.why)
			continue
		}
		if c.why != "" {
			continue
		}
		_, err := s.Pass([]byte(strings.Join(nativeEngine(seam, 1, "two", true)[:6], "")))
		if unclear := errors.Is(err, ErrUnclear) && s.Refused() == Stops; (err == nil) != c.joins || unclear == c.joins {
			t.Errorf("%s: %v, refused %q; joins: %v", name, err, s.Refused(), c.joins)
		}
	}
	// The engine's own end there is the stream's.
	s := natively()
	s.Stops = []string{answer[seam : seam+3]}
	s.Begin()
	s.Given([]byte("[1000,1001,1002]"))
	if _, err := s.Pass([]byte(strings.Join(whole[:seam], ""))); err != nil {
		t.Fatal(err)
	}
	breaks(t, s)
	end := nativeEngine(seam, 1, "two", true)[2]
	end = strings.Replace(end, `"finish_reason":null`, `"finish_reason":{"type":"stop","matched":"x"}`, 1)
	if out, err := s.Pass([]byte(end)); err != nil || !s.Ended() || len(out) == 0 {
		t.Errorf("%v %q", err, out)
	}
}

// TestJudgeNative: the members of SGLang's /generate.
func TestJudgeNative(t *testing.T) {
	for body, want := range map[string]Refusal{
		`{"input_ids":[1,2],"stream":true}`: "",
		`{"input_ids":[1,2],"stream":true,"sampling_params":{"max_new_tokens":5,"temperature":0.7,"stop":null}}`: "",
		`{"input_ids":[1,2],"stream":true,"sampling_params":{"stop":["x"]}}`:                                     Stops,
		`{"input_ids":[1,2],"stream":true,"sampling_params":{"stop_regex":"x"}}`:                                 Stops,
		`{"input_ids":[1,2],"stream":true,"sampling_params":{"repetition_penalty":1.1}}`:                         Penalties,
		`{"input_ids":[1,2],"stream":true,"sampling_params":{"frequency_penalty":1}}`:                            Penalties,
		`{"input_ids":[1,2],"stream":true,"sampling_params":{"sampling_seed":1}}`:                                Seed,
		`{"input_ids":[1,2],"stream":true,"sampling_params":{"json_schema":"{}"}}`:                               Guided,
		`{"input_ids":[1,2],"stream":true,"sampling_params":{"n":2}}`:                                            Several,
		`{"input_ids":[1,2],"stream":true,"sampling_params":{"st\u006fp":["x"]}}`:                                Field,
		`{"input_ids":[1,2],"stream":true,"sampling_params":{"new":1}}`:                                          Field,
		`{"input_ids":[1,2],"stream":true,"return_logprob":true}`:                                                Logprobs,
		`{"input_ids":[1,2],"stream":true,"image_data":"x"}`:                                                     Field,
		`{"input_ids":[[1,2]],"stream":true}`:                                                                    Prompt,
		`{"input_ids":[[1,2],[3]],"stream":true}`:                                                                Several,
		`{"text":"a","stream":true}`:                                                                             NoIDs,
		`{"input_ids":[1,2]}`:                                                                                    Endpoint,
	} {
		var v api.View
		if err := v.Parse([]byte(body), api.SGLangGenerate, api.Limits{}); err != nil {
			t.Fatal(err)
		}
		if why, _ := Judge(&v, false); why != want {
			t.Errorf("%s: %q, want %q", body, why, want)
		}
	}
	for body, want := range map[string]string{
		`{"stop":"a"}`: "a", `{"stop":["b","c"]}`: "b c", `{"stop":""}`: "", `{"stop":["a",7]}`: "", `{}`: "",
	} {
		var v api.View
		if err := v.Parse([]byte(`{"input_ids":[1,2],"stop":"z","stream":true,"sampling_params":`+body+`}`), api.SGLangGenerate, api.Limits{}); err != nil {
			t.Fatal(err)
		}
		if stops, ok := StopStrings(&v); strings.Join(stops, " ") != want || ok != (want != "") {
			t.Errorf("%s: %q %t", body, stops, ok)
		}
	}
	var v api.View
	if err := v.Parse([]byte(`{"input_ids":[1,2],"stream":true,"sampling_params":{"stop":"a","stop_regex":"b"}}`), api.SGLangGenerate, api.Limits{}); err != nil {
		t.Fatal(err)
	}
	if why, member := Judge(&v, true); why != Stops || member != "sampling_params.stop_regex" {
		t.Errorf("%q %q", why, member)
	}
}

// FuzzNative: whatever an engine says, nothing breaks, and without another engine all
// passes as it is.
func FuzzNative(f *testing.F) {
	f.Add([]byte(strings.Join(nativeEngine(0, 3, "one", true), "")), uint8(40))
	f.Add([]byte("data: {\"text\":\"\\ud83d\",\"output_ids\":[1,2],\"meta_info\":{\"completion_tokens\":2,\"finish_reason\":{\"type\":\"length\",\"length\":2}}}\n\n"), uint8(1))
	f.Add([]byte("data: {\"text\":\"a\",\"text\":\"b\",\"output_ids\":[],\"output_ids\":[1],\"meta_info\":{\"meta_info\":{\"id\":{}},\"id\":[],\"id\":7}}\n\n"), uint8(1))
	f.Fuzz(func(t *testing.T, b []byte, at uint8) {
		s := natively()
		k := min(int(at), len(b))
		var out []byte
		for _, p := range [][]byte{b[:k], b[k:]} {
			piece, err := s.Pass(bytes.Clone(p))
			if out = append(out, piece...); err != nil {
				break
			}
		}
		if !bytes.HasPrefix(b, out) {
			t.Fatalf("%q became %q", b, out)
		}
		s.Broke()
		if ids, _ := s.Unaligned(); len(ids) > 0 {
			s.Align(len(ids))
		}
		if ids, why := s.Next(); why != "" || len(ids) < 3 {
			if why == "" {
				t.Fatalf("%d ids", len(ids))
			}
			return
		}
		_, _ = s.Pass(bytes.Clone(b)) // it may be none of the stream's
		_, _ = s.Pass([]byte(strings.Join(nativeEngine(0, 5, "two", true), "")))
	})
}

// TestNativeWithoutID: where the first engine sent no id, that of the one that goes on
// stays, and its events are JSON.
func TestNativeWithoutID(t *testing.T) {
	s := natively()
	var first []string
	for _, e := range nativeEngine(0, 1, "one", true)[:4] {
		first = append(first, strings.Replace(e, `"id":"one",`, "", 1))
	}
	if _, err := s.Pass([]byte(strings.Join(first, ""))); err != nil {
		t.Fatal(err)
	}
	breaks(t, s)
	out, err := s.Pass([]byte(nativeEngine(4, 1, "two", true)[0]))
	data, is := bytes.CutPrefix(bytes.TrimSpace(out), []byte("data: "))
	if err != nil || !is || !json.Valid(data) || !bytes.Contains(data, []byte(`"id":"two"`)) {
		t.Errorf("%s, %v", out, err)
	}
}
