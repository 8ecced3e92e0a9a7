package resume

import (
	"fmt"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// budget is memory that is used up at a limit.
type budget struct{ used, limit int64 }

func (b *budget) Take(n int64) bool {
	if b.used+n > b.limit {
		return false
	}
	b.used += n
	return true
}

func (b *budget) Give(n int64) { b.used -= n }

// continuationOf reads along with the answer to a body.
func continuationOf(t *testing.T, kind api.Kind, body string, m Budget) (*Continuation, *api.View) {
	t.Helper()
	v := &api.View{}
	if err := v.Parse([]byte(body), kind, api.Limits{}); err != nil {
		t.Fatal(err)
	}
	c := New(v, nil, m)
	c.Begin()
	return &c, v
}

// TestRest: the rest is asked for with the ids as the prompt and what was sent taken off
// the limits; all else stays as the client sent it, but of a chat what made its prompt.
func TestRest(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		kind api.Kind
		body string
		sent int
		want string
		why  Refusal
	}{
		{"limits", api.Completion, `{"model":"m","prompt":"hi","stream":true,"max_tokens":9,"min_tokens":2}`, 3, `{"model":"m","prompt":[1,2,3],"stream":true,"max_tokens":6,"min_tokens":0}`, ""},
		{"no limit named", api.Completion, `{"prompt":"hi","stream":true}`, 3, `{"max_tokens":13,"prompt":[1,2,3],"stream":true}`, ""},
		{"as many as fit", api.Completion, `{"prompt":"hi","stream":true,"max_tokens":null}`, 3, `{"prompt":[1,2,3],"stream":true,"max_tokens":null}`, ""},
		{"nothing left", api.Completion, `{"prompt":"hi","stream":true,"max_tokens":3}`, 3, "", Unmatched},
		{"a chat", api.Chat, `{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"temperature":0,"max_completion_tokens":9}`, 3, `{"model":"m","stream":true,"temperature":0,"max_tokens":6,"prompt":[1,2,3]}`, ""},
		{"a chat without limit", api.Chat, `{"messages":[{"role":"user","content":"hi"}],"stream":true}`, 3, `{"stream":true,"max_tokens":null,"prompt":[1,2,3]}`, ""},
		{"SGLang's own", api.SGLangGenerate, `{"input_ids":[1],"stream":true,"sampling_params":{"max_new_tokens":9}}`, 2, `{"input_ids":[1,2,3],"stream":true,"sampling_params":{"max_new_tokens":7}}`, ""},
		{"SGLang's own default", api.SGLangGenerate, `{"input_ids":[1],"stream":true,"sampling_params":{"temperature":0}}`, 2, `{"input_ids":[1,2,3],"stream":true,"sampling_params":{"temperature":0,"max_new_tokens":126}}`, ""},
	} {
		m := &budget{limit: 1 << 20}
		k, v := continuationOf(t, c.kind, c.body, m)
		k.Keep(v)
		got, why := k.Rest([]uint32{1, 2, 3}, c.sent)
		if same := sameMembers(t, string(got), c.want); why != c.why || !same {
			t.Errorf("%s: %s %q, want %s %q", c.name, got, why, c.want, c.why)
		}
		if k.Release(); m.used != 0 {
			t.Errorf("%s: %d bytes are still taken", c.name, m.used)
		}
	}
}

// sameMembers compares two bodies whatever the order of their members.
func sameMembers(t *testing.T, a, b string) bool {
	t.Helper()
	if a == "" || b == "" {
		return a == b
	}
	members := func(body string) string {
		v := api.View{}
		if err := v.Parse([]byte(body), api.Completion, api.Limits{}); err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		m := map[string]string{}
		for i := range v.Fields {
			name, raw := v.Member(i)
			m[name] = string(raw)
		}
		return fmt.Sprint(m)
	}
	return members(a) == members(b)
}

// TestNoMemoryForAStream: what is kept is taken out of the budget; when that is used up the
// stream cannot be gone on with, which is said once, and all is given back.
func TestNoMemoryForAStream(t *testing.T) {
	t.Parallel()
	m := &budget{limit: 400}
	c, v := continuationOf(t, api.Completion, `{"model":"m","prompt":"hi","stream":true}`, m)
	c.Keep(v)
	if c.Lost() || m.used == 0 || c.Stream.Refused() != "" {
		t.Fatalf("%d bytes taken, refused %q", m.used, c.Stream.Refused())
	}
	event := `data: {"id":"a","choices":[{"index":0,"text":"x","token_ids":[7],"prompt_token_ids":[` + strings.Repeat("1,", 200) + `1]}]}` + "\n\n"
	if _, err := c.Pass([]byte(event)); err != nil {
		t.Fatal(err)
	}
	if !c.Lost() || c.Lost() || m.used != 0 || c.Stream.Refused() != Memory {
		t.Errorf("%d bytes taken, refused %q", m.used, c.Stream.Refused())
	}
	c.Keep(v)
	if m.used != 0 {
		t.Errorf("%d bytes taken for a stream that is given up", m.used)
	}
}

// TestEnding: a stream of which only the end is missing gets it, unless its tokens are to
// be counted and nobody knows how many there were.
func TestEnding(t *testing.T) {
	t.Parallel()
	c, _ := continuationOf(t, api.Completion, `{"prompt":"hi","stream":true}`, &budget{limit: 1 << 20})
	end := `data: {"id":"a","created":1,"model":"m","choices":[{"index":0,"text":"x","token_ids":[7],"prompt_token_ids":[1],"finish_reason":"stop"}]}` + "\n\n"
	if _, err := c.Pass([]byte(end)); err != nil || !c.Whole() {
		t.Fatalf("%v, whole %v", err, c.Whole())
	}
	if b, ok := c.Ending(false); !ok || string(b) != "data: [DONE]\n\n" {
		t.Errorf("%q %v", b, ok)
	}
	if b, ok := c.Ending(true); !ok || !strings.Contains(string(b), `"completion_tokens":1`) {
		t.Errorf("%q %v", b, ok)
	}
	c.Stream.Refuse(Unexpected)
	if b, ok := c.Ending(true); ok {
		t.Errorf("%q", b)
	}
	if _, err := c.Pass([]byte("data: [DONE]\n\n")); err != nil {
		t.Fatal(err)
	}
	if b, ok := c.Ending(true); !ok || len(b) > 0 {
		t.Errorf("%q %v", b, ok)
	}
}

// TestWhereTheRestGoes: the rest of a chat is a completion, that of anything else is asked
// for where the request was; only engines that report ids are asked for them.
func TestWhereTheRestGoes(t *testing.T) {
	t.Parallel()
	m := &budget{limit: 1 << 20}
	chat, _ := continuationOf(t, api.Chat, `{"messages":[{"role":"user","content":"hi"}],"stream":true}`, m)
	native, _ := continuationOf(t, api.SGLangGenerate, `{"input_ids":[1],"stream":true}`, m)
	seeded, _ := continuationOf(t, api.Completion, `{"prompt":"hi","stream":true,"seed":1}`, m)
	if a, b := chat.PathOfRest("/v1/chat/completions?a=b"), native.PathOfRest("/generate"); a != "/v1/completions?a=b" || b != "/generate" {
		t.Error(a, b)
	}
	if !chat.ReportsIDs(workers.VLLM) || chat.ReportsIDs(workers.SGLang) || native.ReportsIDs(workers.VLLM) || !native.ReportsIDs(workers.SGLang) {
		t.Error("which engines report ids")
	}
	if seeded.Words(seeded.Refused) != "it has a seed, and another engine would draw from the start (seed)" || chat.Words(Stops) != Stops.String() {
		t.Error(seeded.Words(seeded.Refused), chat.Words(Stops))
	}
	if _, err := seeded.Pass([]byte("data: {}\n\n")); err != nil {
		t.Error(err)
	}
}
