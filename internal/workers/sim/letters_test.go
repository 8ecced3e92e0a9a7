package sim_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

type spoken struct {
	Choices []struct {
		Text     string
		TokenIDs []uint32 `json:"token_ids"`
	}
}

// say asks for n tokens after a prompt of ids, with their ids, whole or streamed.
func say(t *testing.T, url string, prompt []uint32, n int, stream bool) (text string, ids []uint32) {
	t.Helper()
	status, b := post(t, url+"/v1/completions", object{"model": "sim", "prompt": prompt, "max_tokens": n, "ignore_eos": true, "return_token_ids": true, "stream": stream})
	if status != 200 {
		t.Fatalf("%d %s", status, b)
	}
	if !stream {
		c := decode[spoken](t, b).Choices[0]
		return c.Text, c.TokenIDs
	}
	lines := bufio.NewScanner(bytes.NewReader(b))
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		var part spoken
		if !ok || json.Unmarshal(data, &part) != nil || len(part.Choices) == 0 {
			continue
		}
		if c := part.Choices[0]; !utf8.ValidString(c.Text) {
			t.Fatalf("%q is no UTF-8", c.Text)
		} else {
			text, ids = text+c.Text, append(ids, c.TokenIDs...)
		}
	}
	return text, ids
}

// TestLetters: characters that take several tokens are shown whole or not at all,
// streamed or not, and what an engine says after a prompt and a part of its answer
// is the rest of that answer, wherever it is cut.
func TestLetters(t *testing.T) {
	v := vocab.New()
	prompt := v.Encode(nil, "Tell me about the river.")
	before := v.Decode(prompt, true)
	for _, engine := range []string{"vllm", "sglang"} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			e := start(t, "1a:profile=instant,answers=letters,engine="+engine).Engine(0)
			url := e.URL()
			const n = 60
			whole, ids := say(t, url, prompt, n, false)
			if streamed, _ := say(t, url, prompt, n, true); streamed != whole {
				t.Errorf("streamed %q, whole %q", streamed, whole)
			}
			if engine == "sglang" { // it returns no ids
				if !utf8.ValidString(whole) || utf8.RuneCountInString(whole) == len(whole) {
					t.Errorf("%q", whole)
				}
				return
			}
			shown := func(k int) string { // of the first k tokens
				return strings.TrimRight(vocab.Printable(v.Decode(ids[:k], true)), "\uFFFD")
			}
			if len(ids) != n || whole != shown(n) {
				t.Errorf("%q of %d tokens, want %q", whole, len(ids), shown(n))
			}
			within := 0
			for k := 1; k < n; k++ {
				rest, more := say(t, url, append(append([]uint32{}, prompt...), ids[:k]...), n-k, true)
				want := whole[len(shown(k)):]
				if !utf8.ValidString(v.Decode(ids[:k], true)) {
					if within++; want != "" {
						want = before + whole // vLLM sends the prompt's ids again
					}
				}
				if rest != want || len(more) != n-k {
					t.Errorf("cut after %d tokens: %q and %d tokens, want %q and %d", k, rest, len(more), want, n-k)
				}
			}
			if within < 10 {
				t.Errorf("only %d cuts are within a character", within)
			}
		})
	}
}
