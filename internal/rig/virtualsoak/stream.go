package virtualsoak

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/rig/virtualsoak/reference"
	"github.com/dynctl/dynctl/internal/router/forward/resume"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// stream is a streamed answer: what the client asks for, and what the newest engine has said.
type stream struct {
	kind   api.Kind
	usage  bool     // the client asked for it
	ids    bool     // and for these
	stops  []string // stop strings
	member string   // of the body, for which it is to be refused as why says
	why    resume.Refusal
	voice  *reference.Voice // of the newest leg
}

// script is one stream of a kind whose first engine breaks off after that many tokens.
type script struct {
	kind       api.Kind
	ids, stops bool
	on         bool // the answer does not end by itself
	limit, cut int
	struck     bool // it has
	// does is what the request does to engines; a deadly one kills them after cut tokens.
	// whole asks for an answer that is no stream.
	does  kind
	whole bool
}

// refusals are members for which a request's stream is not gone on with, by name.
var refusals = []struct {
	kind   api.Kind
	member string
	why    resume.Refusal
}{
	{api.Completion, `"presence_penalty":0.5`, resume.Penalties}, {api.Completion, `"frequency_penalty":-1`, resume.Penalties},
	{api.Completion, `"seed":7`, resume.Seed}, {api.Completion, `"n":2`, resume.Several}, {api.Completion, `"best_of":3`, resume.Several},
	{api.Completion, `"logprobs":1`, resume.Logprobs}, {api.Completion, `"echo":true`, resume.Echo}, {api.Completion, `"suffix":"x"`, resume.Prompt},
	{api.Completion, `"structured_outputs":{"regex":"a"}`, resume.Guided}, {api.Completion, `"min_tokens":1,"stop":"x"`, resume.Stops},
	{api.Completion, `"return_token_ids":true,"stop":"x"`, resume.Stops}, {api.Completion, `"surprise":1`, resume.Field},
	{api.Chat, `"tools":[{"type":"function"}]`, resume.Tools}, {api.Chat, `"reasoning_effort":"low"`, resume.Reasoning},
	{api.Chat, `"top_logprobs":2`, resume.Logprobs}, {api.Chat, `"response_format":{"type":"json_object"}`, resume.Guided},
	{api.SGLangGenerate, `"return_logprob":true`, resume.Logprobs}, {api.SGLangGenerate, `"sampling_params":{"stop_regex":"x"}`, resume.Stops},
	{api.SGLangGenerate, `"sampling_params":{"regex":"a"}`, resume.Guided}, {api.SGLangGenerate, `"sampling_params":{"sampling_seed":1}`, resume.Seed},
}

// newStream draws what kind of stream a request asks for.
func newStream(rng *rand.Rand) *stream {
	t := &stream{usage: rng.IntN(2) == 0, kind: api.Completion}
	switch k := rng.IntN(20); {
	case k < 6:
		t.kind = api.Chat
	case k < 10:
		t.kind = api.SGLangGenerate
	}
	if rng.IntN(10) == 0 {
		r := refusals[rng.IntN(len(refusals))]
		t.kind, t.member, t.why = r.kind, r.member, r.why
	}
	t.usage = t.usage && t.kind != api.SGLangGenerate // which always counts
	return t
}

// ask draws what the stream is to have besides, now that its answer is known, and writes
// the body. The answer is cut where a stop string ends it.
func (q *request) ask(rng *rand.Rand) {
	t := q.stream
	ids, _ := json.Marshal(q.whole) // numbers
	if t == nil {
		q.body = fmt.Sprintf(`{"model":%q,"prompt":%s,"max_tokens":%d}`, model, ids, q.most)
		return
	}
	if c := q.s.script; c != nil {
		if t.ids = c.ids; c.stops {
			t.stops = q.drawStops(rng)
		}
	} else if t.why == "" {
		switch rng.IntN(6) {
		case 0, 1:
			t.stops = q.drawStops(rng)
		case 2:
			t.ids = t.kind == api.Completion
		}
	}
	stops, _ := json.Marshal(t.stops) // strings or null, which is none
	var b strings.Builder
	fmt.Fprintf(&b, `{"model":%q,"stream":true,"stream_options":{"include_usage":%v}`, model, t.usage)
	switch t.kind {
	case api.Chat:
		fmt.Fprintf(&b, `,"messages":[{"role":"user","content":"%d"}],"max_tokens":%d`, q.no, q.most)
	case api.SGLangGenerate:
		b.Reset()
		fmt.Fprintf(&b, `{"stream":true,"input_ids":%s`, ids)
		if !strings.Contains(t.member, "sampling_params") {
			fmt.Fprintf(&b, `,"sampling_params":{"max_new_tokens":%d,"stop":%s}`, q.most, stops)
		}
	default:
		fmt.Fprintf(&b, `,"prompt":%s,"max_tokens":%d`, ids, q.most)
	}
	if t.ids {
		b.WriteString(`,"return_token_ids":true`)
	}
	if len(t.stops) > 0 && t.kind != api.SGLangGenerate {
		fmt.Fprintf(&b, `,"stop":%s`, stops)
	}
	if t.member != "" && q.s.plant != forgetRefusal { // else the router does not see it
		b.WriteString("," + t.member)
	}
	b.WriteByte('}')
	q.body = b.String()
	q.want = recite(t.alone(q.whole), q.want)
}

// recite has a voice say an answer, and returns it as far as no stop string has ended it.
func recite(v *reference.Voice, a reference.Answer) reference.Answer {
	for i, token := range a.Tokens {
		finish := engine.Running
		if i == len(a.Tokens)-1 {
			finish = a.Finish
		}
		if _, end := v.Text(token, finish); end != engine.Running {
			return reference.Answer{Tokens: a.Tokens[:i+1], Finish: end}
		}
	}
	return a
}

// drawStops draws stop strings: mostly a part of the answer, of a few characters.
func (q *request) drawStops(rng *rand.Rand) []string {
	text := []rune(tokenizer().Decode(q.want.Tokens, true))
	stops := []string{"never in an answer"}
	for range 1 + rng.IntN(2) {
		at := rng.IntN(max(1, len(text)))
		part := string(text[at:min(len(text), at+1+rng.IntN(9))])
		if part != "" && !strings.ContainsRune(part, utf8.RuneError) && rng.IntN(5) > 0 {
			stops = append(stops, part)
		}
	}
	return stops[rng.IntN(len(stops)):]
}

// decodeToken is the tokenizer that a router with the model's file has.
func decodeToken(dst []byte, id uint32) ([]byte, bool) {
	if id == vocab.End {
		return dst, true
	}
	return append(dst, tokenizer().Text(id)...), true
}

// alone is the voice of an engine that does all of the answer.
func (t *stream) alone(prompt []uint32) *reference.Voice {
	return reference.NewVoice(tokenizer(), t.kind, prompt, t.ids, t.stops)
}

// heard wants what the client has of a stream to be the answer of one engine, or its
// beginning.
func (q *request) heard(whole bool) {
	s, t := q.s, q.stream
	alone := t.alone(q.whole)
	recite(alone, q.want)
	got, err := reference.Read(string(q.client), t.kind, len(q.whole), t.ids || strings.Contains(t.member, "return_token_ids"))
	if err != nil {
		s.violate("%s: %v", q.id, err)
		return
	}
	p, n := len(q.whole), len(q.want.Tokens)
	switch {
	case len(got.Names) > 1:
		s.violate("%s: one answer has the ids %v", q.id, got.Names)
	case !strings.HasPrefix(alone.All, got.Text) || whole && got.Text != alone.All:
		s.violate("%s: the client read %q, the answer is %q", q.id, got.Text, alone.All)
	case whole && (!got.Done || len(got.Finish) != 1 || got.Finish[0] != q.want.Finish || got.Stop != alone.Stop):
		s.violate("%s: the stream ended %v %q, end mark %v; the answer ends %s %q", q.id, got.Finish, got.Stop, got.Done, q.want.Finish, alone.Stop)
	case (t.ids || t.kind == api.SGLangGenerate) && (len(got.IDs) > n || !slices.Equal(got.IDs, q.want.Tokens[:len(got.IDs)]) || whole && len(got.IDs) < n):
		s.violate("%s: the client was sent %v, the answer is %v", q.id, got.IDs, q.want.Tokens)
	case whole && t.usage != (got.Usage != nil), got.Usage != nil && (got.Usage["prompt_tokens"] != p || got.Usage["completion_tokens"] != n || got.Usage["total_tokens"] != p+n):
		s.violate("%s: usage %v, the answer has %d and %d tokens", q.id, got.Usage, p, n)
	}
}

// readWhole wants an answer that is no stream to be that of one engine.
func (q *request) readWhole() {
	alone := reference.NewVoice(tokenizer(), api.Completion, q.whole, false, nil)
	recite(alone, q.want)
	l := q.decoding
	if want := alone.Answer(l.id, q.want.Finish); string(want) != string(q.client) {
		q.s.violate("%s: the client read %s, the answer is %s", q.id, q.client, want)
	}
}

// mayGoOn reports whether the request is a stream that the policy would let go on.
func (q *request) mayGoOn() bool {
	return q.stream != nil && q.call.Routing.Run.History.Continued < q.s.settings.Decisions.Continuations
}

// mayNot is why the stream may not go on as it stands, from what its engines have said.
func (q *request) mayNot() resume.Refusal {
	t := q.stream
	switch {
	case t.why != "":
		return t.why
	case t.kind == api.SGLangGenerate && (t.voice.Events == 1 || t.voice.Ahead > 3 && t.voice.Shown > 0):
		return resume.Unmatched // one event does not show what the next would have, and three tokens are looked at
	case t.kind == api.Chat && !q.spoken():
		return resume.Silent
	case t.ids && t.voice.Rest != "", t.kind == api.SGLangGenerate && t.voice.Ahead > 0:
		return resume.SentIDs
	}
	return ""
}

// spoken reports whether the client has text of a chat.
func (q *request) spoken() bool {
	return strings.Count(string(q.client), `"content":`) > strings.Count(string(q.client), `"content":""`)
}
