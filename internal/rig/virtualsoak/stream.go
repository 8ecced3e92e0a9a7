package virtualsoak

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/rig/virtualsoak/reference"
	"github.com/dynctl/dynctl/internal/rig/virtualsoak/voice"
	"github.com/dynctl/dynctl/internal/router/forward/resume"
	"github.com/dynctl/dynctl/internal/router/placement/attempt"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers/health"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// stream is a streamed answer: what the router keeps of it to go on elsewhere when its
// engine dies, and what the client has got.
type stream struct {
	kind   api.Kind
	usage  bool     // the client asked for it
	ids    bool     // and for these
	stops  []string // stop strings
	member string   // of the body, for which it is to be refused as why says
	why    resume.Refusal

	read   resume.Stream
	judged resume.Refusal // by the router
	given  string         // the ids of the prompt, raw
	voice  *voice.Voice   // of the newest leg
	client []byte         // whole events
}

// script is one stream of a kind whose first engine breaks off after so many tokens.
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

// ask draws what the stream is to have besides, now that its answer is known, and asks
// the router to read along. The answer is cut where a stop string ends it.
func (q *request) ask(rng *rand.Rand) {
	t := q.stream
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
	ids, _ := json.Marshal(q.whole) // numbers
	t.given = string(ids)
	stops, _ := json.Marshal(t.stops) // strings or null, which is none
	var b strings.Builder
	fmt.Fprintf(&b, `{"model":"sim","stream":true,"stream_options":{"include_usage":%v}`, t.usage)
	switch t.kind {
	case api.Chat:
		fmt.Fprintf(&b, `,"messages":[{"role":"user","content":"a"}],"max_tokens":%d`, q.most)
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
	if t.member != "" {
		b.WriteString("," + t.member)
	}
	b.WriteByte('}')
	var v api.View
	if err := v.Parse([]byte(b.String()), t.kind, api.Limits{}); err != nil {
		q.s.violate("%s: %s: %v", q.id, b.String(), err)
		return
	}
	t.read, t.judged, _ = resume.Open(&v, decodeToken)
	if t.judged != t.why {
		q.s.violate("%s is refused as %q, not %q: %s", q.id, t.judged, t.why, b.String())
	}
	if q.s.plant == forgetRefusal {
		t.judged = ""
	}
	alone := t.alone(q.whole)
	for i, token := range q.want.Tokens {
		finish := engine.Running
		if i == len(q.want.Tokens)-1 {
			finish = q.want.Finish
		}
		if _, end := alone.Text(token, finish); end != engine.Running {
			q.want = reference.Answer{Tokens: q.want.Tokens[:i+1], Finish: end}
			break
		}
	}
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
func (t *stream) alone(prompt []uint32) *voice.Voice { return t.engine(t.kind, prompt) }

func (t *stream) engine(kind api.Kind, prompt []uint32) *voice.Voice {
	return voice.New(tokenizer(), kind, prompt, t.judged == "" || t.ids, t.stops)
}

// listen begins to read along with a leg. The rest of a chat is a completion.
func (q *request) listen() {
	t := q.stream
	t.read.Begin()
	t.read.Refuse(t.judged)
	if t.kind == api.SGLangGenerate && t.judged == "" && q.run.History.Continued == 0 {
		t.read.Given([]byte(t.given))
	}
	kind := t.kind
	if kind == api.Chat && q.run.History.Continued > 0 {
		kind = api.Completion
	}
	t.voice = t.engine(kind, q.tokens)
}

// pass gives the router a piece of the engine's stream, and the client what comes of it. It
// reports whether the router ended the stream.
func (q *request) pass(p []byte) (stopped bool) {
	got, err := q.stream.read.Pass(p)
	q.stream.client = append(q.stream.client, got...)
	if stopped = errors.Is(err, resume.ErrStopped); err != nil && !stopped {
		q.s.violate("%s: an event was taken for an error (%v): %s", q.id, err, q.stream.read.Held())
	}
	return stopped
}

// speak takes an output of the newest decode leg to the client, and returns how the
// answer ends with it.
func (q *request) speak(l *leg, o engine.Output) engine.Finish {
	t := q.stream
	now, end, finish := t.voice.Says(l.id, o, t.usage)
	switch {
	case q.pass(now):
		q.s.out.Stopped++
		return engine.FinishStop
	case finish == engine.Running:
	case t.judged == "" && (q.s.chance(0.05) || q.s.script != nil && q.s.script.cut == q.s.script.limit):
		q.s.note("%s: %s breaks off after the last token", q.id, l.n.name)
		q.s.out.Closed++
		t.client = append(t.client, t.read.Closing(t.usage)...)
	default:
		q.pass(end)
	}
	return finish
}

// heard wants what the client has of a stream to be the answer of one engine, or its
// beginning.
func (q *request) heard(whole bool) {
	s, t := q.s, q.stream
	alone := t.alone(q.whole)
	for i, token := range q.want.Tokens {
		finish := engine.Running
		if i == len(q.want.Tokens)-1 {
			finish = q.want.Finish
		}
		alone.Text(token, finish)
	}
	got, err := voice.Read(string(t.client), t.kind, len(q.whole), t.ids)
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

// mayGoOn reports whether the request is a stream that the policy would let go on.
func (q *request) mayGoOn() bool {
	return q.stream != nil && q.run.History.Continued < q.s.settings.Continuations
}

// refusal is why the stream may not go on as it stands, from what its engines have said.
func (q *request) refusal() resume.Refusal {
	t := q.stream
	switch {
	case t.why != "":
		return t.why
	case t.kind == api.SGLangGenerate && (t.voice.Events == 1 || t.voice.Ahead > 3 && t.voice.Shown > 0):
		return resume.Seam // from one event nobody knows what the next would have, and three tokens are looked at
	case t.kind == api.Chat && !t.spoken():
		return resume.Silent
	case t.ids && t.voice.Rest != "", t.kind == api.SGLangGenerate && t.voice.Ahead > 0:
		return resume.SentIDs
	}
	return ""
}

// silent reports whether a leg has said nothing so far: all its events were held back.
func (t *stream) silent() bool {
	return t.kind == api.SGLangGenerate && (t.voice == nil || t.voice.Events == 0)
}

// spoken reports whether the client has text of a chat.
func (t *stream) spoken() bool {
	return strings.Count(string(t.client), `"content":`) > strings.Count(string(t.client), `"content":""`)
}

// goesOn asks the policy whether the rest of a stream comes from elsewhere when its leg
// broke off, and asks for it there.
func (q *request) goesOn(l *leg, why string) bool {
	s, t := q.s, q.stream
	switch {
	case t == nil:
		s.out.cutFor("not a stream")
		return false
	case s.settings.Continuations == 0:
		s.out.cutFor("not switched on")
		return false
	}
	want := q.refusal()
	if s.chance(0.5) { // in the middle of an event
		if now, _, _ := t.voice.Says(l.id, engine.Output{Token: 300}, false); len(now) > 0 {
			q.pass(now[:s.rng.IntN(slices.Index(now, '\n'))])
		}
	}
	read := &t.read
	had := slices.Clone(q.got)
	read.Broke()
	read.AlignBy(func(ids []uint32) (string, error) { return tokenizer().Decode(ids, true), nil })
	ids, refused := read.Next()
	if refused != want {
		s.violate("%s cannot go on elsewhere for %q; it should be %q", q.id, refused, want)
		return false
	}
	if refused != "" {
		s.out.cutFor(string(refused))
		return false
	}
	sent := read.Sent()
	if want := append(slices.Clone(q.whole), q.want.Tokens[:min(sent, len(q.want.Tokens))]...); !slices.Equal(ids, want) {
		s.violate("%s would go on from %v, the client has %v", q.id, ids, want)
		return false
	}
	q.report(selector.Decode, health.ServerError)
	may := q.mayGoOn()
	next := q.run.Failed(attempt.Failure{
		Worker: l.n.worker.State, Name: l.n.name, Phase: selector.Decode, Reason: attempt.Reset, Sent: true, Begun: true, Admission: q.leave[0],
	})
	if next.Step != attempt.Continue {
		if may && len(q.run.History.Lost) < attempt.MaxLost {
			s.violate("%s does not go on elsewhere: %s", q.id, next.Why)
		}
		s.out.cutFor("went on as often as it may")
		return false
	}
	s.out.Continued++
	s.note("%s: %s broke off (%s), goes on after %d tokens", q.id, l.n.name, why, sent)
	l.n.faulted = true
	q.stop()
	q.release()
	q.tokens, q.limit, q.got = slices.Clone(ids), q.most-sent, slices.Clone(q.got[:sent])
	switch s.plant {
	case seamTwice: // the client has the last one already
		if sent > 0 {
			q.tokens = q.tokens[:len(q.tokens)-1]
		}
	case wholeLimit:
		q.limit = q.most
	case aheadOfText:
		q.tokens, q.limit = append(slices.Clone(q.whole), had...), q.most-len(had)
		q.got = had
	}
	facts := &q.run.Request.Facts
	facts.ISL, facts.MaxTokens = len(q.tokens), int64(q.limit)
	s.w.At(s.w.Now(), func() { // those in line are asked first
		if q.ended == 0 {
			q.try()
		}
	})
	return true
}
