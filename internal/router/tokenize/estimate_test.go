package tokenize

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

func TestEstimate(t *testing.T) {
	t.Parallel()
	x := func(n int) string { return strings.Repeat("x", n) }
	ids := "[" + strings.TrimSuffix(strings.Repeat("7,", 500), ",") + "]"
	for _, c := range []struct {
		name string
		kind Kind
		body string
		want int
	}{
		{"400 characters", KindCompletion, `{"prompt":"` + x(400) + `"}`, 100},
		{"500 ids", KindCompletion, `{"prompt":` + ids + `}`, 500},
		{"two messages", KindChat, `{"messages":[{"role":"user","content":"` + x(800) + `"},{"content":"` + x(1200) + `"}]}`, 500},
		{"parts", KindChat, `{"messages":[{"content":[{"type":"text","text":"` + x(400) + `"},{"type":"image_url","image_url":{"url":"` + x(400) + `"}}]}]}`, 100},
		{"nothing", KindChat, `{}`, 0},
		{"3", KindCompletion, `{"prompt":"abc"}`, 0},
		{"4", KindCompletion, `{"prompt":"abcd"}`, 1},
		{"7", KindCompletion, `{"prompt":"abcdefg"}`, 1},
		{"one floor at the end", KindChat, `{"messages":[{"content":"ab"},{"content":"cd"}]}`, 1},
		{"CJK", KindCompletion, `{"prompt":"你好世界"}`, 1},
		{"escapes", KindCompletion, `{"prompt":"\u4f60\n\"\ud83d\ude00"}`, 1},
		{"combining marks count", KindCompletion, "{\"prompt\":\"e\u0301e\u0301\"}", 1},
		{"prompt wins", KindChat, `{"messages":[{"content":"` + x(400) + `"}],"prompt":"abcd"}`, 1},
		{"null prompt wins", KindChat, `{"prompt":null,"messages":[{"content":"` + x(400) + `"}]}`, 0},
		{"object prompt", KindChat, `{"prompt":{"a":1}}`, 0},
		{"strings are summed", KindCompletion, `{"prompt":["abc","defgh"]}`, 2},
		{"id lists are summed", KindCompletion, `{"prompt":[[1,2,3],[4]]}`, 4},
		{"empty list", KindCompletion, `{"prompt":[]}`, 0},
		{"null text", KindChat, `{"messages":[{"content":[{"type":"text","text":null}]},null,"x",{"content":null}]}`, 0},
		{"unknown part type", KindChat, `{"messages":[{"content":[{"type":"input_text","text":"abcdefgh"}]}]}`, 0},
		{"names and tools do not count", KindChat, `{"tools":[{"x":"` + x(99) + `"}],"messages":[{"name":"` + x(99) + `","content":"abcd"}]}`, 1},
		{"last of two keys", KindCompletion, `{"prompt":"abcd","prompt":"abcdefgh"}`, 2},
		{"anthropic", KindMessages, `{"system":"abcd","messages":[{"role":"user","content":"efgh"}]}`, 2},
		{"anthropic parts", KindMessages, `{"system":[{"type":"text","text":"abcd"}],"messages":[{"content":[{"type":"text","text":"efgh"}]}]}`, 2},
		{"responses text", KindResponses, `{"instructions":"abcd","input":"efgh"}`, 2},
		{"responses items", KindResponses, `{"input":[{"role":"user","content":[{"type":"input_text","text":"abcdefgh"}]}]}`, 2},
		{"malformed", KindChat, `{"messages":[`, 0},
		{"no object", KindChat, `[]`, 0},
	} {
		if got := Estimate(c.kind, []byte(c.body)); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
		if c.kind != KindCompletion && c.kind != KindChat {
			continue
		}
		var v map[string]any
		if json.Unmarshal([]byte(c.body), &v) == nil {
			if got := EstimateValue(v); got != c.want {
				t.Errorf("%s: of the value %d, want %d", c.name, got, c.want)
			}
		}
	}
}

func text(t testing.TB, kind Kind, body string) string {
	t.Helper()
	var b bytes.Buffer
	if err := Text(kind, []byte(body), func(p []byte) { b.Write(p) }); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestText(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		kind Kind
		body string
		want string
	}{
		{"prompt", KindCompletion, `{"prompt":"a\u4f60\n","max_tokens":5}`, "a你\n"},
		{"ids", KindCompletion, `{"prompt":[1,2]}`, "1\x1e2"},
		{"chat", KindChat, `{"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}`,
			"\x1esystem\x1fs\x1euser\x1fa\x1eb"},
		{"tools come first", KindChat, `{"messages":[{"role":"user","content":"u"}],"tools":[{"x":1}]}`, "\x1e{\"x\":1}\x1euser\x1fu"},
		{"tool calls", KindChat, `{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1"}]}]}`, "\x1eassistant\x1f\x1e{\"id\":\"1\"}"},
		{"image", KindChat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]}`,
			"\x1euser\x1f{\"type\":\"image_url\",\"image_url\":{\"url\":\"u\"}}"},
		{"anthropic", KindMessages, `{"messages":[{"role":"user","content":"u"}],"system":"s"}`, "\x1es\x1euser\x1fu"},
		{"responses", KindResponses, `{"input":"i","instructions":"s"}`, "\x1es\x1ei"},
		{"responses items", KindResponses, `{"input":[{"role":"user","content":[{"type":"input_text","text":"i"}]},{"type":"function_call_output","output":"o"}]}`,
			"\x1euser\x1fi\x1e\x1fo"},
	} {
		if got := text(t, c.kind, c.body); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	if err := Text(KindChat, []byte(`{"messages"`), func([]byte) {}); err == nil {
		t.Error("malformed body gave no error")
	}
}

// TestTextPrefix: a longer conversation's text starts with the shorter one's.
func TestTextPrefix(t *testing.T) {
	t.Parallel()
	one := text(t, KindChat, `{"stream":true,"messages":[{"role":"user","content":"a"}]}`)
	two := text(t, KindChat, `{"messages":[{"content":"a","role":"user"},{"role":"assistant","content":"b"}],"n":1}`)
	if !strings.HasPrefix(two, one) {
		t.Errorf("%q does not start with %q", two, one)
	}
}

func TestTextAllocs(t *testing.T) {
	body := []byte(`{"messages":[{"role":"user","content":"` + strings.Repeat("word ", 40000) + `"}]}`)
	n := 0
	emit := func(p []byte) { n += len(p) }
	if a := testing.AllocsPerRun(20, func() {
		if err := Text(KindChat, body, emit); err != nil {
			t.Fatal(err)
		}
	}); a > 30 {
		t.Errorf("%v allocations, want a few", a)
	}
}

// FuzzBody: no body makes the pure functions panic, and where encoding/json
// can read it the two estimates agree.
func FuzzBody(f *testing.F) {
	f.Add([]byte(`{"prompt":["a",[1]],"messages":[{"role":"user","content":[{"type":"text","text":"\ud83d\ude00"}]}]}`))
	f.Add([]byte(`{"input":[{"content":"x"}],"system":"y","tools":[]}`))
	for _, p := range DefaultProbes("m") {
		f.Add(p.Body)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, k := range []Kind{KindCompletion, KindChat, KindMessages, KindResponses} {
			n := Estimate(k, body)
			if n < 0 || n > len(body) {
				t.Fatalf("%s: estimate %d of %d bytes", k, n, len(body))
			}
			_ = Text(k, body, func([]byte) {})
		}
		_ = aspects(body)
		_, _ = parseChat(body)
		_, _ = parseAnswer(body)
	})
}

func BenchmarkEstimate220KB(b *testing.B) {
	body := []byte(`{"messages":[{"role":"user","content":"` + strings.Repeat(`word \n wörd `, 15000) + `"}]}`)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		Estimate(KindChat, body)
	}
}

func BenchmarkText220KB(b *testing.B) {
	body := []byte(`{"messages":[{"role":"user","content":"` + strings.Repeat(`word \n wörd `, 15000) + `"}]}`)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		if err := Text(KindChat, body, func(p []byte) { n += len(p) }); err != nil {
			b.Fatal(err)
		}
	}
}
