package sse

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

// Events as vLLM 0.32.0 sends them.
const (
	vllmRole   = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1795261515,"model":"small","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}` + "\n\n"
	vllmToken  = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1795261515,"model":"small","choices":[{"index":0,"delta":{"content":" \"quoted\\\" pop##\n"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n"
	vllmFinish = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1795261515,"model":"small","choices":[{"index":0,"delta":{"content":" Stat"},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}]}` + "\n\n"
	vllmUsage  = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1795261515,"model":"small","choices":[],"usage":{"prompt_tokens":166,"total_tokens":178,"completion_tokens":12,"prompt_tokens_details":{"cached_tokens":160,"created_cache_tokens":0}},"system_fingerprint":"vllm-0.32.0-c6468118"}` + "\n\n"
	vllmError  = `data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}` + "\n\n"
	done       = "data: [DONE]\n\n"
)

var streams = []struct {
	name, text string
	want       Summary
}{
	{"chat", vllmRole + vllmToken + vllmToken + vllmFinish + vllmUsage + done,
		Summary{Events: 6, Tokens: 3, Done: true, FinishReason: "length", Usage: Usage{166, 12, 160}}},
	{"failed load, chat", vllmRole + vllmError + done,
		Summary{Events: 3, Done: true, Usage: noUsage, Failed: true, ErrorFirst: true, Error: vllmError[6 : len(vllmError)-2]}},
	{"failed load, completion", vllmError + done,
		Summary{Events: 2, Done: true, Usage: noUsage, Failed: true, ErrorFirst: true, Error: vllmError[6 : len(vllmError)-2]}},
	{"error after tokens", vllmRole + vllmToken + vllmError + done,
		Summary{Events: 4, Tokens: 1, Done: true, Usage: noUsage, Failed: true, Error: vllmError[6 : len(vllmError)-2]}},
	{"completions, CRLF, keep-alives, a token without text", ": ping\r\n\r\ndata: {\"choices\":[{\"index\":0,\"text\":\"\"}]}\r\n\r\n: ping\r\n\r\n" +
		"data: {\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":\"stop\"}],\"usage\":null}\r\n\r\ndata: [DONE]\r\n\r\n",
		Summary{Events: 3, Comments: 2, Tokens: 2, Done: true, FinishReason: "stop", Usage: noUsage}},
	{"reasoning and tools", `data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}` + "\n\n" +
		`data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"error\":{\"a\":1}}"}}]}}]}` + "\n\n" +
		`data: {"choices":[{"delta":{"content":null,"tool_calls":[]},"finish_reason":"tool_calls"}]}` + "\n\n",
		Summary{Events: 3, Tokens: 2, FinishReason: "tool_calls", Usage: noUsage}},
	{"words of the protocol within text", `data: {"choices":[{"delta":{"content":"\"finish_reason\":\"stop\",\"error\":{} \\"},"finish_reason":null}]}` + "\n\n",
		Summary{Events: 1, Tokens: 1, Usage: noUsage}},
	{"token ids", `data: {"request_id":"r","choices":[{"index":0,"token_ids":[5,6]}]}` + "\n\n" + `data: {"choices":[{"index":0,"token_ids":[],"finish_reason":"stop"}]}` + "\n\n",
		Summary{Events: 2, Tokens: 1, FinishReason: "stop", Usage: noUsage}},
	{"SGLang generate", `data: {"text":" a","output_ids":[1],"meta_info":{"id":"x","finish_reason":null,"prompt_tokens":5,"completion_tokens":1,"cached_tokens":4}}` + "\n\n" +
		`data: {"text":" a b","output_ids":[1,2],"meta_info":{"finish_reason":{"type":"length","length":2},"prompt_tokens":5,"completion_tokens":2,"cached_tokens":4}}` + "\n\n" + done,
		Summary{Events: 3, Tokens: 2, Done: true, FinishReason: "length", Usage: Usage{5, 2, 4}}},
	{"SGLang abort", `data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"KV transfer failed"}}}` + "\n\n",
		Summary{Events: 1, FinishReason: "abort", Usage: noUsage, Failed: true, ErrorFirst: true,
			Error: `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"KV transfer failed"}}}`}},
	{"responses", "event: response.created\ndata: {\"response\":{\"status\":\"in_progress\",\"error\":null,\"usage\":null},\"sequence_number\":0,\"type\":\"response.created\"}\n\n" +
		"event: response.output_text.delta\ndata: {\"delta\":\"Hi\",\"type\":\"response.output_text.delta\"}\n\n" +
		"event: response.output_text.done\ndata: {\"text\":\"Hi\",\"type\":\"response.output_text.done\"}\n\n" +
		"event: response.completed\ndata: {\"response\":{\"status\":\"completed\",\"error\":null,\"usage\":{\"input_tokens\":9,\"input_tokens_details\":{\"cached_tokens\":3},\"output_tokens\":1,\"output_tokens_details\":{\"reasoning_tokens\":0}}},\"type\":\"response.completed\"}\n\n",
		Summary{Events: 4, Tokens: 1, Done: true, FinishReason: "completed", Usage: Usage{9, 1, 3}}},
	{"responses failed", "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"status\":\"failed\"}}\n\n",
		Summary{Events: 1, Done: true, FinishReason: "failed", Usage: noUsage, Failed: true, ErrorFirst: true, Error: `{"type":"response.failed","response":{"status":"failed"}}`}},
	{"messages", "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[],\"stop_reason\":null,\"usage\":{\"input_tokens\":12,\"cache_read_input_tokens\":8,\"output_tokens\":0}}}\n\n" +
		"event: ping\ndata: {\"type\":\"ping\"}\n\n" +
		"event: content_block_start\ndata: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n" +
		"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"Hi\"}}\n\n" +
		"event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":3}}\n\n" +
		"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
		Summary{Events: 6, Tokens: 1, Done: true, FinishReason: "end_turn", Usage: Usage{20, 3, 8}}},
	{"messages, cut off", "data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":12,\"cache_read_input_tokens\":8,\"output_tokens\":0}}}\n\n" +
		"data: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"Hi\"}}\n\n",
		Summary{Events: 2, Tokens: 1, Usage: Usage{20, -1, 8}}},
	{"messages error", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"x\"}}\n\n",
		Summary{Events: 1, Usage: noUsage, Failed: true, ErrorFirst: true, Error: `{"type":"error","error":{"type":"overloaded_error","message":"x"}}`}},
	{"error by its event name only", "event: error\ndata: {\"message\":\"x\"}\n\n",
		Summary{Events: 1, Usage: noUsage, Failed: true, ErrorFirst: true, Error: `{"message":"x"}`}},
	{"data of several lines", "data: {\"choices\":[{\"delta\":\ndata:  {\"content\":\"x\"}}]}\nid: 7\nretry: 10\n\n",
		Summary{Events: 1, Tokens: 1, Usage: noUsage}},
	{"no empty line at the end", vllmToken + strings.TrimRight(vllmFinish, "\n"),
		Summary{Events: 2, Tokens: 2, FinishReason: "length", Usage: noUsage}},
	{"byte order mark", "\xef\xbb\xbf" + vllmToken, Summary{Events: 1, Tokens: 1, Usage: noUsage}},
	{"not JSON", "data: hello\n\ndata: {\n\ndata: {\"choices\":[{\"delta\"\n\ndata: [1,2\n\ndata\n\n", Summary{Events: 5, Usage: noUsage}},
	{"choices null", `data: {"choices":null,"usage":{"prompt_tokens":1}}` + "\n\n", Summary{Events: 1, Usage: Usage{1, -1, -1}}},
}

func TestStreams(t *testing.T) {
	t.Parallel()
	for _, c := range streams {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var s Scanner
			s.Feed([]byte(c.text))
			s.Finish()
			if diff := cmp.Diff(c.want, s.Summary()); diff != "" {
				t.Errorf("summary (-want +got):\n%s", diff)
			}
		})
	}
}

// However a stream is split, the same is read, the pieces are not changed, and
// nothing of a piece is used after Feed has returned.
func TestSplitsDoNotMatter(t *testing.T) {
	t.Parallel()
	property.Check(t, func(t *rapid.T) {
		c := rapid.SampledFrom(streams).Draw(t, "stream")
		cuts := rapid.SliceOfN(rapid.IntRange(0, len(c.text)), 0, 12).Draw(t, "cuts")
		at := make([]bool, len(c.text)+1)
		for _, k := range cuts {
			at[k] = true
		}
		var s Scanner
		var total Piece
		for start, i := 0, 1; i <= len(c.text); i++ {
			if i < len(c.text) && !at[i] {
				continue
			}
			if start == 0 && i < 3 && c.name == "byte order mark" {
				continue // looked for in the first piece only
			}
			p := []byte(c.text[start:i])
			got := s.Feed(p)
			total.Events += got.Events
			total.Tokens += got.Tokens
			if string(p) != c.text[start:i] {
				t.Fatalf("Feed changed %q to %q", c.text[start:i], p)
			}
			for k := range p {
				p[k] = '#'
			}
			start = i
		}
		fed := s.Summary()
		if total.Events != fed.Events || total.Tokens != fed.Tokens {
			t.Fatalf("pieces add up to %+v, summary %+v", total, fed)
		}
		s.Finish()
		if diff := cmp.Diff(c.want, s.Summary()); diff != "" {
			t.Fatalf("summary (-want +got):\n%s", diff)
		}
		s.Reset()
		s.Feed([]byte(c.text))
		s.Finish()
		if diff := cmp.Diff(c.want, s.Summary()); diff != "" {
			t.Fatalf("after Reset (-want +got):\n%s", diff)
		}
	})
}

func TestOversizedEventsAreMarkedAndBounded(t *testing.T) {
	t.Parallel()
	s := Scanner{MaxEvent: 1000}
	big := "data: {\"choices\":[{\"delta\":{\"content\":\"" + strings.Repeat("x", 100_000) + "\"}}]}\n\n"
	for i := 0; i < len(big); i += 300 {
		s.Feed([]byte(big[i:min(i+300, len(big))]))
		if cap(s.line)+cap(s.own) > 8000 {
			t.Fatalf("holds %d bytes", cap(s.line)+cap(s.own))
		}
	}
	for range 100 { // many data lines, each below the bound
		s.Feed([]byte("data: " + strings.Repeat("y", 500) + "\n"))
	}
	if cap(s.own) > 8000 {
		t.Fatalf("holds %d bytes", cap(s.own))
	}
	s.Feed([]byte("\n" + vllmToken + done))
	want := Summary{Events: 4, Oversized: 2, Tokens: 3, Done: true, Usage: noUsage}
	if diff := cmp.Diff(want, s.Summary()); diff != "" {
		t.Errorf("summary (-want +got):\n%s", diff)
	}
}

func TestInspect(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, body string
		want       Summary
	}{
		{"chat", `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"prompt_tokens_details":null},"kv_transfer_params":null}`,
			Summary{Events: 1, Tokens: 1, Done: true, FinishReason: "stop", Usage: Usage{3, 1, -1}}},
		{"messages", `{"type":"message","content":[{"type":"text","text":"hi"}],"stop_reason":"end_turn","usage":{"input_tokens":3,"output_tokens":1}}`,
			Summary{Events: 1, Tokens: 1, Done: true, FinishReason: "end_turn", Usage: Usage{3, 1, -1}}},
		{"messages with a cache", `{"type":"message","content":[],"stop_reason":"end_turn","usage":{"cache_creation_input_tokens":4,"input_tokens":3,"cache_read_input_tokens":32,"output_tokens":1}}`,
			Summary{Events: 1, Done: true, FinishReason: "end_turn", Usage: Usage{39, 1, 32}}},
		{"responses", `{"object":"response","status":"completed","error":null,"output":[{"type":"message"}],"usage":{"input_tokens":3,"output_tokens":1,"input_tokens_details":{"cached_tokens":2}}}`,
			Summary{Events: 1, Tokens: 1, Done: true, FinishReason: "completed", Usage: Usage{3, 1, 2}}},
		{"error", `{"error":{"message":"m"}}`, Summary{Events: 1, Done: true, Usage: noUsage, Failed: true, ErrorFirst: true, Error: `{"error":{"message":"m"}}`}},
		{"embeddings", `{"object":"list","data":[{"embedding":[0.1,-2e-3]}],"usage":{"prompt_tokens":4,"total_tokens":4}}`,
			Summary{Events: 1, Done: true, Usage: Usage{4, -1, -1}}},
		{"nothing", ``, Summary{Events: 1, Done: true, Usage: noUsage}},
	} {
		if diff := cmp.Diff(c.want, Inspect([]byte(c.body))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}

func TestHead(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	for _, c := range []struct {
		name  string
		feed  []string
		step  time.Duration
		want  []Verdict
		bytes int
	}{
		{"role, then token", []string{vllmRole, vllmToken}, 0, []Verdict{Hold, Forward}, 0},
		{"role, then error", []string{vllmRole, vllmError + done}, 0, []Verdict{Hold, Failed}, 0},
		{"all in one", []string{vllmRole + vllmError + done}, 0, []Verdict{Failed}, 0},
		{"token and error in one", []string{vllmRole + vllmToken + vllmError}, 0, []Verdict{Forward}, 0},
		{"split within the error", []string{vllmRole + vllmError[:20], vllmError[20:100], vllmError[100:]}, 0, []Verdict{Hold, Hold, Failed}, 0},
		{"empty answer", []string{vllmRole, `data: {"choices":[{"delta":{},"finish_reason":"stop"}]}` + "\n\n"}, 0, []Verdict{Hold, Forward}, 0},
		{"bytes", []string{"data: {}\n\n", "data: {}\n\n", "data: {}\n\n"}, 0, []Verdict{Hold, Hold, Forward}, 30},
		{"time", []string{"data: {}\n\n", "data: {}\n\n", "data: {}\n\n"}, 6 * time.Second, []Verdict{Hold, Hold, Forward}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := Head{MaxBytes: c.bytes}
			at, got := now, []Verdict(nil)
			for _, p := range c.feed {
				got = append(got, h.Feed([]byte(p), at))
				at = at.Add(c.step)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("verdicts (-want +got):\n%s", diff)
			}
			if string(h.Held()) != strings.Join(c.feed, "") {
				t.Errorf("held %q", h.Held())
			}
		})
	}
	var h Head
	if v := h.Feed([]byte(strings.TrimRight(vllmError, "\n")), now); v != Hold || h.End() != Failed {
		t.Error("an error that is not closed by an empty line is missed")
	}
	h.Reset()
	if v := h.Feed([]byte(vllmRole), now); v != Hold || h.End() != Forward {
		t.Error("a stream that ends without content is not forwarded")
	}
}

// TestHeadPassesComments: comments between events are not held, wherever the stream is split;
// those within an event, and all other bytes, are. They do not count as bytes held, nor does the
// time of the head run.
func TestHeadPassesComments(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"\n", "\r\n"} {
		lines := func(s string) string { return strings.ReplaceAll(s, "~", end) }
		text, passed, held := lines(": a~~:~: b~~data: {}~~: c~~event: x~: d~data: {}~~: e~: f"), lines(": a~~:~: b~~: c~~: e~"), lines("data: {}~~event: x~: d~data: {}~~: f")
		for size := 1; size <= len(text); size++ {
			h, at, out := Head{MaxBytes: len(text) + 1}, time.Unix(1000, 0), ""
			for rest := text; rest != ""; {
				n := min(size, len(rest))
				if v := h.Feed([]byte(rest[:n]), at); v != Hold {
					t.Fatalf("verdict %v with %q to come", v, rest)
				}
				out, rest = out+string(h.Comments()), rest[n:]
			}
			// The empty line behind a comment is held where it comes alone.
			blank := func(s string) string { return strings.ReplaceAll(s, end, "") }
			if blank(out) != blank(passed) || blank(string(h.Held())) != blank(held) {
				t.Fatalf("in pieces of %d: passed %q, held %q", size, out, h.Held())
			}
		}
	}
	h := Head{MaxBytes: 20}
	for i := range 100 {
		if v := h.Feed([]byte(": ping\n\n"), time.Unix(int64(1000*i), 0)); v != Hold || string(h.Comments()) != ": ping\n\n" {
			t.Fatalf("comment %d: verdict %v, passed %q", i, v, h.Comments())
		}
	}
	if v := h.Feed([]byte(vllmToken), time.Unix(1e6, 0)); v != Forward || string(h.Held()) != vllmToken || len(h.Comments()) != 0 {
		t.Errorf("verdict %v, held %q, passed %q", v, h.Held(), h.Comments())
	}
}

func TestNoAllocationForWholeEvents(t *testing.T) {
	var s Scanner
	p := []byte(vllmToken)
	if n := testing.AllocsPerRun(200, func() { s.Feed(p) }); n != 0 {
		t.Errorf("%v allocations for an event", n)
	}
	half := []byte(vllmToken[:100])
	rest := []byte(vllmToken[100:])
	if n := testing.AllocsPerRun(200, func() { s.Feed(half); s.Feed(rest) }); n != 0 {
		t.Errorf("%v allocations for an event in two pieces", n)
	}
}

func FuzzScanner(f *testing.F) {
	for _, c := range streams {
		f.Add([]byte(c.text), 7)
	}
	f.Fuzz(func(t *testing.T, text []byte, step int) {
		whole := Scanner{MaxEvent: 512}
		if bytes.HasPrefix(text, []byte("\xef\xbb")) {
			return
		}
		whole.Feed(text)
		whole.Finish()
		split := Scanner{MaxEvent: 512}
		step = max(step%64, 1)
		for i := 0; i < len(text); i += step {
			split.Feed(bytes.Clone(text[i:min(i+step, len(text))]))
		}
		split.Finish()
		a, b := whole.Summary(), split.Summary()
		if a.Oversized == 0 && b.Oversized == 0 { // a bound on memory depends on the split
			if diff := cmp.Diff(a, b); diff != "" {
				t.Errorf("split by %d (-whole +split):\n%s", step, diff)
			}
		}
		if cap(split.line)+cap(split.own) > 16<<10 {
			t.Errorf("holds %d bytes", cap(split.line)+cap(split.own))
		}
		// Of valid JSON, everything is seen.
		if json.Valid(text) {
			Inspect(text)
		}
	})
}

func BenchmarkEvent(b *testing.B) {
	for _, c := range []struct{ name, event string }{
		{"chat token", vllmToken}, {"usage", vllmUsage}, {"comment", ": ping\n\n"},
	} {
		b.Run(c.name, func(b *testing.B) {
			var s Scanner
			p := []byte(c.event)
			b.SetBytes(int64(len(p)))
			b.ReportAllocs()
			for b.Loop() {
				s.Feed(p)
			}
		})
	}
}
