package play

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

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
	read   resume.Stream
	voice  voice
	client []byte // whole events
	usage  bool   // the client asked for it
}

// voice makes events of a leg's tokens as vLLM 0.32 does for completions with
// return_token_ids: text holds whole characters only.
type voice struct {
	prompt []uint32
	said   int    // tokens of the answer
	raw    string // text that may not be whole characters yet
}

// begin is the start of a leg. vLLM repeats a prompt that ends within a character, all
// of it, once that is whole.
func (v *voice) begin(prompt []uint32) {
	*v = voice{prompt: prompt}
	if tail := tokenizer().Decode(prompt[max(0, len(prompt)-utf8.UTFMax):], true); !utf8.ValidString(tail) && strings.HasSuffix(vocab.Printable(tail), "\uFFFD") {
		v.raw = tokenizer().Decode(prompt, true)
	}
}

// text is what a token adds.
func (v *voice) text(token uint32) string {
	v.said++
	if token != vocab.End {
		v.raw += tokenizer().Text(token)
	}
	text := vocab.Printable(v.raw)
	if strings.HasSuffix(text, "\uFFFD") {
		return ""
	}
	v.raw = ""
	return text
}

// chunk is an event of a completion.
type chunk struct {
	ID      string         `json:"id"`
	Object  string         `json:"object"`
	Created int64          `json:"created"`
	Model   string         `json:"model"`
	Choices []chunkChoice  `json:"choices"`
	Usage   map[string]int `json:"usage"`
}

type chunkChoice struct {
	Index  int            `json:"index"`
	Text   string         `json:"text"`
	IDs    []uint32       `json:"token_ids"`
	Prompt []uint32       `json:"prompt_token_ids,omitempty"`
	Finish *engine.Finish `json:"finish_reason"`
}

func event(c *chunk) []byte {
	c.Object, c.Created, c.Model = "text_completion", clockBase.Unix(), "sim"
	raw, err := json.Marshal(c)
	if err != nil {
		panic(err) // strings and numbers
	}
	return fmt.Appendf(nil, "data: %s\n\n", raw)
}

// says is the event of an output that has a token, and what comes behind it when it is
// the last.
func (t *stream) says(id string, o engine.Output) (now, end []byte) {
	c := &chunk{ID: id, Choices: []chunkChoice{{}}}
	if t.voice.said == 0 {
		c.Choices[0].Prompt = t.voice.prompt
	}
	c.Choices[0].Text, c.Choices[0].IDs = t.voice.text(o.Token), []uint32{o.Token}
	if o.Finish == engine.Running {
		return event(c), nil
	}
	c.Choices[0].Finish = &o.Finish
	now = event(c)
	if t.usage {
		p, n := len(t.voice.prompt), t.voice.said
		end = event(&chunk{ID: id, Choices: []chunkChoice{}, Usage: map[string]int{"prompt_tokens": p, "completion_tokens": n, "total_tokens": p + n}})
	}
	return now, append(end, "data: [DONE]\n\n"...)
}

// pass gives the router a piece of the engine's stream, and the client what comes of it.
func (q *request) pass(p []byte) {
	got, err := q.stream.read.Pass(p)
	q.stream.client = append(q.stream.client, got...)
	if err != nil {
		q.s.violate("%s: an event was taken for an error: %s", q.id, q.stream.read.Held())
	}
}

// speak takes an output of the newest decode leg to the client. It reports false when
// the end of the stream is lost.
func (q *request) speak(l *leg, o engine.Output) bool {
	now, end := q.stream.says(l.id, o)
	q.pass(now)
	if len(end) == 0 {
		return true
	}
	if q.s.chance(0.05) {
		q.s.note("%s: %s breaks off after the last token", q.id, l.n.name)
		q.s.out.Closed++
		q.stream.client = append(q.stream.client, q.stream.read.Closing(q.stream.usage)...)
		return false
	}
	q.pass(end)
	return true
}

// heard wants what the client has of a stream to be the answer of one engine, or its
// beginning.
func (q *request) heard(whole bool) {
	s := q.s
	var alone stream
	alone.usage = q.stream.usage
	alone.voice.begin(q.whole)
	var text strings.Builder
	for i, token := range q.want.tokens {
		o := engine.Output{Token: token}
		if i == len(q.want.tokens)-1 {
			o.Finish = q.want.finish
		}
		text.WriteString(alone.voice.text(o.Token))
	}
	var got strings.Builder
	var usage map[string]int
	var finish []engine.Finish
	ids, done := map[string]bool{}, false
	for e := range strings.SplitSeq(string(q.stream.client), "\n\n") {
		data, ok := strings.CutPrefix(e, "data: ")
		if !ok {
			continue
		}
		if done = data == "[DONE]"; done {
			continue
		}
		var c chunk
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			s.violate("%s: the client got %q: %v", q.id, e, err)
			return
		}
		ids[c.ID] = true
		if c.Usage != nil {
			usage = c.Usage
		}
		for _, choice := range c.Choices {
			got.WriteString(choice.Text)
			if choice.Finish != nil {
				finish = append(finish, *choice.Finish)
			}
			if choice.IDs != nil || choice.Prompt != nil {
				s.violate("%s: the client did not ask for ids: %s", q.id, data)
			}
		}
	}
	p, n := len(q.whole), len(q.want.tokens)
	switch {
	case len(ids) > 1:
		s.violate("%s: one answer has the ids %v", q.id, ids)
	case !strings.HasPrefix(text.String(), got.String()) || whole && got.Len() != text.Len():
		s.violate("%s: the client read %q, the answer is %q", q.id, got.String(), text.String())
	case whole && (!done || len(finish) != 1 || finish[0] != q.want.finish):
		s.violate("%s: the stream ended %v, end mark %v; the answer ends %s", q.id, finish, done, q.want.finish)
	case whole && q.stream.usage != (usage != nil), usage != nil && (usage["prompt_tokens"] != p || usage["completion_tokens"] != n || usage["total_tokens"] != p+n):
		s.violate("%s: usage %v, the answer has %d and %d tokens", q.id, usage, p, n)
	}
}

// mayGoOn reports whether the request is a stream that the policy would let go on.
func (q *request) mayGoOn() bool {
	return q.stream != nil && q.run.History.Continued < q.s.settings.Continuations
}

// goesOn asks the policy whether the rest of a stream comes from elsewhere when its leg
// broke off, and asks for it there.
func (q *request) goesOn(l *leg, why string) bool {
	s := q.s
	if q.stream == nil || s.settings.Continuations == 0 {
		return false
	}
	if s.chance(0.5) { // in the middle of an event
		now, _ := q.stream.says(l.id, engine.Output{Token: 300})
		q.pass(now[:s.rng.IntN(len(now)-1)])
	}
	read := &q.stream.read
	read.Broke()
	q.report(selector.Decode, health.ServerError)
	f := attempt.Failure{
		Worker: l.n.worker.State, Name: l.n.name, Phase: selector.Decode, Reason: attempt.Reset, Sent: true, Begun: true, Admission: q.leave[0],
	}
	ids, refused := read.Next()
	if refused != "" {
		s.violate("%s cannot go on elsewhere: %s", q.id, refused)
		return false
	}
	sent := read.Sent()
	if want := append(slices.Clone(q.whole), q.want.tokens[:min(sent, len(q.want.tokens))]...); !slices.Equal(ids, want) {
		s.violate("%s would go on from %v, the client has %v", q.id, ids, want)
		return false
	}
	may := q.mayGoOn()
	next := q.run.Failed(f)
	if next.Step != attempt.Continue {
		if may {
			s.violate("%s does not go on elsewhere: %s", q.id, next.Why)
		}
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
