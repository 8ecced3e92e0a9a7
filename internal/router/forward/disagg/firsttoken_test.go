package disagg

import (
	"testing"
	"time"
)

// TestFirstTokenIsTheClientsFirst: the client gets the prefill's token as an event of its
// own, or in front of the text, where it counts as generated.
func TestFirstTokenIsTheClientsFirst(t *testing.T) {
	t.Parallel()
	tok := FirstToken{Text: "a\"b"}
	const event = `data: {"choices":[{"finish_reason":null,"index":0,"logprobs":null,"text":"a\"b"}],"created":9,"id":"cmpl-id","model":"m","object":"text_completion"}` + "\n\n"
	if got := string(tok.Event("id", "m", time.Unix(9, 0))); got != event {
		t.Errorf("%s", got)
	}
	for _, c := range [][2]string{
		{`{"choices":[{"text":"c"}],"usage":{"prompt_tokens":5,"completion_tokens":1}}`, `{"choices":[{"text":"a\"bc"}],"usage":{"prompt_tokens":4,"completion_tokens":2}}`},
		{`{"choices":[{"index":0, "text":""}]}`, `{"choices":[{"index":0, "text":"a\"b"}]}`},
		{`{"error":"x"}`, `{"error":"x"}`},
	} {
		if got := string(tok.Before([]byte(c[0]))); got != c[1] {
			t.Errorf("%s: %s, want %s", c[0], got, c[1])
		}
	}
}
