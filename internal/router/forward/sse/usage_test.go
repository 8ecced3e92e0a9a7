package sse

import (
	"strings"
	"testing"
)

// through is what a client gets of a stream in pieces of at most n bytes.
func through(text string, n int) string {
	var g Gate
	var s Scanner
	u := UsageGate{Gate: &g, Scanner: &s}
	out := ""
	for text != "" {
		p := []byte(text[:min(n, len(text))])
		text = text[len(p):]
		s.Feed(p)
		held, ready := u.Pass(p)
		out += string(held) + string(ready)
	}
	return out + string(u.Rest())
}

const (
	tokenEvent = `data: {"choices":[{"index":0,"text":"a \"usage\":{} \n"}],"usage":null}` + "\n\n"
	usageEvent = `data: {"id":"x","choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}` + "\n\n"
	doneEvent  = "data: [DONE]\n\n"
)

// TestUsageGate: wherever a stream is split, the event with usage and no choice is missing, and
// every other byte passes.
func TestUsageGate(t *testing.T) {
	t.Parallel()
	large := `data: {"choices":[{"text":"` + strings.Repeat("l", maxHeld) + `"}]}` + "\n\n"
	for _, c := range []struct{ what, text, want string }{
		{"a stream", tokenEvent + tokenEvent + usageEvent + doneEvent, tokenEvent + tokenEvent + doneEvent},
		{"with CRLF", strings.ReplaceAll(tokenEvent+usageEvent+doneEvent, "\n", "\r\n"), strings.ReplaceAll(tokenEvent+doneEvent, "\n", "\r\n")},
		{"usage beside a choice", strings.ReplaceAll(tokenEvent, "null", `{"prompt_tokens":7}`) + doneEvent, strings.ReplaceAll(tokenEvent, "null", `{"prompt_tokens":7}`) + doneEvent},
		{"no choices and no usage", `data: {"choices":[]}` + "\n\n" + doneEvent, `data: {"choices":[]}` + "\n\n" + doneEvent},
		{"usage twice", usageEvent + tokenEvent + usageEvent, tokenEvent},
		{"a comment before", tokenEvent + ": ping\n" + doneEvent, tokenEvent + ": ping\n" + doneEvent},
		{"an event that is not ended", tokenEvent + strings.TrimSuffix(usageEvent, "\n\n"), tokenEvent},
		{"after a large event", large + usageEvent + doneEvent, large + doneEvent},
	} {
		for _, n := range []int{1, 2, 3, 17, 90, 1 << 20} {
			if got := through(c.text, n); got != c.want {
				t.Errorf("%s in pieces of %d: %.300q, want %.300q", c.what, n, got, c.want)
			}
		}
	}
}

// TestUsageGateAllocatesNothing: a piece without usage costs no memory.
func TestUsageGateAllocatesNothing(t *testing.T) {
	var g Gate
	var s Scanner
	u := UsageGate{Gate: &g, Scanner: &s}
	p := []byte(tokenEvent)
	if n := testing.AllocsPerRun(100, func() { s.Feed(p); u.Pass(p) }); n > 0 {
		t.Errorf("%v allocations for a piece", n)
	}
}

func FuzzUsageGate(f *testing.F) {
	f.Add(tokenEvent+usageEvent+doneEvent, 9)
	f.Add("data: a\r\rdata: b\n", 1)
	f.Fuzz(func(t *testing.T, text string, n int) {
		n = max(1, n)
		got := through(text, n)
		var s Scanner
		s.Feed([]byte(text))
		if s.Finish(); s.usages == 0 && got != text {
			t.Fatalf("%q without usage became %q", text, got)
		}
		if len(got) > len(text) {
			t.Fatalf("%q became %q", text, got)
		}
	})
}
