package play

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/router/attempt"
	"github.com/dynctl/dynctl/internal/router/resume"
	"github.com/dynctl/dynctl/internal/router/selector"
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
	voice  voice
	client []byte // whole events
}

// script is one stream of a kind whose first engine breaks off after so many tokens.
type script struct {
	kind       api.Kind
	ids, stops bool
	limit, cut int
	struck     bool // it has
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
	for i, token := range q.want.tokens {
		finish := engine.Running
		if i == len(q.want.tokens)-1 {
			finish = q.want.finish
		}
		if _, end := alone.text(token, finish); end != engine.Running {
			q.want = answerOf{q.want.tokens[:i+1], end}
			break
		}
	}
}

// drawStops draws stop strings: mostly a part of the answer, of a few characters.
func (q *request) drawStops(rng *rand.Rand) []string {
	text := []rune(tokenizer().Decode(q.want.tokens, true))
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

// voice makes text of a leg's tokens as vLLM 0.32 does, or SGLang: whole characters only,
// and as much held back as may begin a stop string. SGLang (0.5.23) holds back all of an
// event whose text ends with the beginning of one, but not within a character.
type voice struct {
	kind   api.Kind
	prompt []uint32
	ids    bool // tells ids
	stops  []string
	hold   int // characters
	tokens []uint32
	raw    string // text that may not be whole characters yet
	all    string // text
	shown  int    // bytes of it
	stop   string // the one that has ended it
	// Of SGLang: events, the tokens that the text of the newest leaves out, and those before
	// the last place at which none was left out.
	events, ahead, whole int
}

// alone is the voice of an engine that does all of the answer.
func (t *stream) alone(prompt []uint32) *voice {
	v := &voice{kind: t.kind, ids: t.judged == "" || t.ids, prompt: prompt, stops: t.stops}
	for _, w := range t.stops {
		if t.kind != api.SGLangGenerate {
			v.hold = max(v.hold, utf8.RuneCountInString(w)-1)
		}
	}
	// vLLM repeats a prompt that ends within a character, all of it, once that is whole.
	if tail := tokenizer().Decode(prompt[max(0, len(prompt)-utf8.UTFMax):], true); !utf8.ValidString(tail) && strings.HasSuffix(vocab.Printable(tail), "\uFFFD") {
		v.raw = tokenizer().Decode(prompt, true)
	}
	return v
}

// text is what a token adds, and how the answer ends with it.
func (v *voice) text(token uint32, finish engine.Finish) (string, engine.Finish) {
	v.tokens = append(v.tokens, token)
	if token != vocab.End {
		v.raw += tokenizer().Text(token)
	}
	text := vocab.Printable(v.raw)
	if !strings.HasSuffix(text, "\uFFFD") || v.kind == api.SGLangGenerate && finish != engine.Running {
		before := len(v.all)
		v.all, v.raw = v.all+text, ""
		for _, w := range v.stops {
			from := max(0, before-len(w)+1)
			if k := strings.Index(v.all[from:], w); k >= 0 {
				v.all, v.stop, finish = v.all[:from+k], w, engine.FinishStop
				break
			}
		}
	}
	show := v.all
	if finish == engine.Running {
		for range v.hold {
			_, n := utf8.DecodeLastRuneInString(show)
			show = show[:len(show)-n]
		}
		if v.kind == api.SGLangGenerate && v.stopBegins() {
			return "", finish
		}
	}
	show = show[min(v.shown, len(show)):]
	v.shown += len(show)
	return show, finish
}

// stopBegins reports whether a stop string may begin in the text and end behind it.
func (v *voice) stopBegins() bool {
	return slices.ContainsFunc(v.stops, func(w string) bool {
		for n := range len(w) {
			if n > 0 && strings.HasSuffix(v.all, w[:n]) {
				return true
			}
		}
		return false
	})
}

// chunk is an event of a completion or a chat.
type chunk struct {
	ID      string         `json:"id"`
	Object  string         `json:"object"`
	Created int64          `json:"created"`
	Model   string         `json:"model"`
	Choices []chunkChoice  `json:"choices"`
	Prompt  []uint32       `json:"prompt_token_ids,omitempty"` // of a chat
	Usage   map[string]int `json:"usage"`
}

type chunkChoice struct {
	Index  int            `json:"index"`
	Text   *string        `json:"text,omitempty"`
	Delta  *chunkDelta    `json:"delta,omitempty"`
	IDs    []uint32       `json:"token_ids"`
	Prompt []uint32       `json:"prompt_token_ids,omitempty"`
	Finish *engine.Finish `json:"finish_reason"`
	Stop   *string        `json:"stop_reason"`
}

type chunkDelta struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

// generated is an event of SGLang's /generate: the answer so far.
type generated struct {
	Text string   `json:"text"`
	IDs  []uint32 `json:"output_ids"`
	Meta struct {
		ID         string    `json:"id"`
		Finish     *finished `json:"finish_reason"`
		Prompt     int       `json:"prompt_tokens"`
		Completion int       `json:"completion_tokens"`
		Cached     int       `json:"cached_tokens"`
	} `json:"meta_info"`
}

type finished struct {
	Type    engine.Finish `json:"type"`
	Length  int           `json:"length,omitempty"`
	Matched string        `json:"matched,omitempty"`
}

func event(c any) []byte {
	raw, err := json.Marshal(c)
	if err != nil {
		panic(err) // strings and numbers
	}
	return fmt.Appendf(nil, "data: %s\n\n", raw)
}

func (v *voice) chunk(id string, choices ...chunkChoice) *chunk {
	c := &chunk{ID: id, Object: "text_completion", Created: clockBase.Unix(), Model: "sim", Choices: choices}
	if v.kind == api.Chat {
		c.Object = "chat.completion.chunk"
	}
	return c
}

// says is the event of an output that has a token, how the answer ends with it, and what
// comes behind it when it is the last.
func (v *voice) says(id string, o engine.Output, usage bool) (now, end []byte, finish engine.Finish) {
	first := len(v.tokens) == 0
	text, finish := v.text(o.Token, o.Finish)
	if finish != engine.Running {
		end = []byte("data: [DONE]\n\n")
	}
	p, n := len(v.prompt), len(v.tokens)
	if v.kind == api.SGLangGenerate {
		if v.raw == "" && v.shown < len(v.all) {
			return nil, nil, finish
		}
		if v.raw == "" {
			v.whole = n
		}
		v.events, v.ahead = v.events+1, n-v.whole
		g := &generated{Text: v.all[:v.shown], IDs: v.tokens}
		g.Meta.ID, g.Meta.Prompt, g.Meta.Completion, g.Meta.Cached = id, p, n, o.Cached
		switch finish {
		case engine.Running:
		case engine.FinishStop:
			g.Meta.Finish = &finished{Type: finish, Matched: v.stop}
		default:
			g.Meta.Finish = &finished{Type: finish, Length: n}
		}
		return event(g), end, finish
	}
	choice := chunkChoice{Text: &text}
	if v.ids {
		choice.IDs = []uint32{o.Token}
	}
	if v.kind == api.Chat {
		choice.Text, choice.Delta = nil, &chunkDelta{Content: text}
		if first {
			role := v.chunk(id, chunkChoice{Delta: &chunkDelta{Role: "assistant"}})
			if v.ids {
				role.Prompt = v.prompt
			}
			now = event(role)
		}
	} else if first && v.ids {
		choice.Prompt = v.prompt
	}
	if finish != engine.Running {
		if choice.Finish = &finish; v.stop != "" {
			choice.Stop = &v.stop
		}
		if usage {
			u := v.chunk(id)
			u.Choices, u.Usage = []chunkChoice{}, map[string]int{"prompt_tokens": p, "completion_tokens": n, "total_tokens": p + n}
			end = append(event(u), end...)
		}
	}
	return append(now, event(v.chunk(id, choice))...), end, finish
}

// listen begins to read along with a leg. The rest of a chat is a completion.
func (q *request) listen() {
	t := q.stream
	t.read.Begin()
	t.read.Refuse(t.judged)
	if t.kind == api.SGLangGenerate && t.judged == "" && q.run.History.Continued == 0 {
		t.read.Given([]byte(t.given))
	}
	if t.voice = *t.alone(q.tokens); t.kind == api.Chat && q.run.History.Continued > 0 {
		t.voice.kind = api.Completion
	}
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

// speak takes an output of the newest decode leg to the client, and tells how the answer
// ends with it.
func (q *request) speak(l *leg, o engine.Output) engine.Finish {
	t := q.stream
	now, end, finish := t.voice.says(l.id, o, t.usage)
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
	for i, token := range q.want.tokens {
		finish := engine.Running
		if i == len(q.want.tokens)-1 {
			finish = q.want.finish
		}
		alone.text(token, finish)
	}
	var got strings.Builder
	var usage map[string]int
	var finish []engine.Finish
	stop, told, ids, done := "", []uint32(nil), map[string]bool{}, false
	for e := range strings.SplitSeq(string(t.client), "\n\n") {
		data, ok := strings.CutPrefix(e, "data: ")
		if !ok {
			continue
		}
		if done = data == "[DONE]"; done {
			continue
		}
		if t.kind == api.SGLangGenerate {
			var g generated
			if err := json.Unmarshal([]byte(data), &g); err != nil {
				s.violate("%s: the client got %q: %v", q.id, e, err)
				return
			}
			if m := &g.Meta; !strings.HasPrefix(g.Text, got.String()) || m.Prompt != len(q.whole) || m.Completion != len(g.IDs) || len(g.IDs) <= len(told) {
				s.violate("%s: after %q and %d ids the client got %s", q.id, got.String(), len(told), data)
			}
			got.Reset()
			got.WriteString(g.Text)
			if told, ids[g.Meta.ID] = g.IDs, true; g.Meta.Finish != nil {
				stop = g.Meta.Finish.Matched
				if finish = append(finish, g.Meta.Finish.Type); finish[0] == engine.FinishLength && g.Meta.Finish.Length != len(told) {
					s.violate("%s: %d ids end with %s", q.id, len(told), data)
				}
			}
			continue
		}
		var c chunk
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			s.violate("%s: the client got %q: %v", q.id, e, err)
			return
		}
		if ids[c.ID] = true; c.Object != alone.chunk("").Object {
			s.violate("%s: the client got a %s", q.id, data)
		}
		if c.Usage != nil {
			usage = c.Usage
		}
		shown := c.Prompt != nil
		for _, choice := range c.Choices {
			if t.kind == api.Chat && choice.Delta != nil {
				got.WriteString(choice.Delta.Content)
			} else if t.kind == api.Completion && choice.Text != nil {
				got.WriteString(*choice.Text)
			}
			if choice.Finish != nil {
				finish = append(finish, *choice.Finish)
			}
			if choice.Stop != nil {
				stop = *choice.Stop
			}
			shown = shown || choice.IDs != nil || choice.Prompt != nil
			told = append(told, choice.IDs...)
		}
		if shown && !t.ids {
			s.violate("%s: the client did not ask for ids: %s", q.id, data)
		}
	}
	p, n := len(q.whole), len(q.want.tokens)
	switch {
	case len(ids) > 1:
		s.violate("%s: one answer has the ids %v", q.id, ids)
	case !strings.HasPrefix(alone.all, got.String()) || whole && got.Len() != len(alone.all):
		s.violate("%s: the client read %q, the answer is %q", q.id, got.String(), alone.all)
	case whole && (!done || len(finish) != 1 || finish[0] != q.want.finish || stop != alone.stop):
		s.violate("%s: the stream ended %v %q, end mark %v; the answer ends %s %q", q.id, finish, stop, done, q.want.finish, alone.stop)
	case (t.ids || t.kind == api.SGLangGenerate) && (len(told) > n || !slices.Equal(told, q.want.tokens[:len(told)]) || whole && len(told) < n):
		s.violate("%s: the client was told %v, the answer is %v", q.id, told, q.want.tokens)
	case whole && t.usage != (usage != nil), usage != nil && (usage["prompt_tokens"] != p || usage["completion_tokens"] != n || usage["total_tokens"] != p+n):
		s.violate("%s: usage %v, the answer has %d and %d tokens", q.id, usage, p, n)
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
	case t.kind == api.SGLangGenerate && (t.voice.events == 1 || t.voice.ahead > 3 && t.voice.shown > 0):
		return resume.Seam // from one event nobody knows what the next would tell, and three tokens are looked at
	case t.kind == api.Chat && !t.spoken():
		return resume.Silent
	case t.ids && t.voice.raw != "", t.kind == api.SGLangGenerate && t.voice.ahead > 0:
		return resume.ToldIDs
	}
	return ""
}

// silent reports whether a leg has said nothing so far: all its events were held back.
func (t *stream) silent() bool { return t.kind == api.SGLangGenerate && t.voice.events == 0 }

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
		if now, _, _ := t.voice.says(l.id, engine.Output{Token: 300}, false); len(now) > 0 {
			q.pass(now[:s.rng.IntN(slices.Index(now, '\n'))])
		}
	}
	read := &t.read
	told := slices.Clone(q.got)
	read.Broke()
	read.SettleBy(func(ids []uint32) (string, error) { return tokenizer().Decode(ids, true), nil })
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
	if want := append(slices.Clone(q.whole), q.want.tokens[:min(sent, len(q.want.tokens))]...); !slices.Equal(ids, want) {
		s.violate("%s would go on from %v, the client has %v", q.id, ids, want)
		return false
	}
	q.report(selector.Decode, health.ServerError)
	may := q.mayGoOn()
	next := q.run.Failed(attempt.Failure{
		Worker: l.n.worker.State, Name: l.n.name, Phase: selector.Decode, Reason: attempt.Reset, Sent: true, Begun: true, Admission: q.leave[0],
	})
	if next.Step != attempt.Continue {
		if may {
			s.violate("%s does not go on elsewhere: %s", q.id, next.Why)
		}
		s.out.cutFor("went on as often as it may")
		return false
	}
	s.out.Continued++
	s.note("%s: %s broke off (%s), goes on after %d tokens", q.id, l.n.name, why, sent)
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
		q.tokens, q.limit = append(slices.Clone(q.whole), told...), q.most-len(told)
		q.got = told
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
