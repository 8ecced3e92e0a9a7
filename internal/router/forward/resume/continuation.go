package resume

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// How many tokens vLLM answers a completion with that names no limit, and SGLang's
// /generate.
const (
	completionTokens = 16
	nativeTokens     = 128
)

// Budget is the memory that what is kept of streams is taken out of.
type Budget interface {
	Take(n int64) bool
	Give(n int64)
}

// Continuation is what a request has for the case that its engine dies in the middle of
// the stream: the stream that is read along with, and the request without its prompt.
type Continuation struct {
	Stream Stream
	// Refused says why the request cannot be continued, and Member what of it.
	Refused Refusal
	Member  string

	kind api.Kind // of the request for the rest
	// rest is the request without the value of its prompt, which stood at a place.
	rest   []byte
	at     int
	memory Budget
	taken  int64 // bytes out of memory
	lost   bool  // there was none left, and Lost has not reported it yet
}

// New begins to read along with the answer to a request, as [Open] does.
func New(v *api.View, decode func(dst []byte, id uint32) ([]byte, bool), m Budget) Continuation {
	c := Continuation{kind: RestKind(v.Kind), memory: m}
	c.Stream, c.Refused, c.Member = Open(v, decode)
	return c
}

// Release gives back the memory that is accounted for.
func (c *Continuation) Release() {
	c.memory.Give(c.taken)
	c.taken = 0
}

// ReportsIDs reports whether an engine sends the ids of the answer, if asked.
func (c *Continuation) ReportsIDs(e workers.Engine) bool {
	if c.Stream.Native {
		return e == workers.SGLang
	}
	return e == workers.VLLM
}

// PathOfRest is where the rest of the answer to a request that came to a path is requested.
func (c *Continuation) PathOfRest(path string) string {
	if c.Stream.Chat { // whose rest is a completion
		return strings.Replace(path, "/chat/completions", "/completions", 1)
	}
	return path
}

// Begin makes ready for the answer to another leg.
func (c *Continuation) Begin() {
	c.Stream.Begin()
	c.Stream.Refuse(c.Refused)
}

// Pass is [Stream.Pass] with what is kept taken out of memory. Of an endpoint whose events
// are of another kind everything passes.
func (c *Continuation) Pass(p []byte) ([]byte, error) {
	if c.Refused == Endpoint {
		return p, nil
	}
	out, err := c.Stream.Pass(p)
	c.reserveMemory()
	return out, err
}

// Lost reports, once, that the stream cannot be continued from now on because no memory was
// left for it.
func (c *Continuation) Lost() bool {
	lost := c.lost
	c.lost = false
	return lost
}

// reserveMemory takes what is kept for another leg out of memory.
func (c *Continuation) reserveMemory() {
	n := int64(0)
	if c.Stream.Refused() != "" {
		c.rest = nil
	} else {
		n = int64(c.Stream.Kept() + cap(c.rest))
	}
	switch more := n - c.taken; {
	case more == 0:
	case more < 0:
		c.memory.Give(-more)
		c.taken = n
	case c.memory.Take(more):
		c.taken = n
	default:
		c.Stream.Refuse(Memory)
		c.rest, c.lost = nil, true
		c.Release()
	}
}

// Keep keeps what another leg would be made of, but for the ids, which the stream has.
func (c *Continuation) Keep(v *api.View) {
	if c.rest != nil || c.Stream.Refused() != "" {
		return
	}
	defer c.reserveMemory()
	if c.Stream.Chat {
		c.rest = restOfChat(v)
		c.at = len(c.rest) - 1
		return
	}
	if c.Stream.Native {
		c.Stream.Given(v.PromptValue.Of(v.Body))
	}
	c.at = v.PromptValue.Start
	c.rest = append(append(make([]byte, 0, len(v.Body)-v.PromptValue.Len()), v.Body[:c.at]...), v.Body[v.PromptValue.End:]...)
}

// restOfChat is a completion with the members of a chat, whose prompt's value is to
// stand before its last byte.
func restOfChat(v *api.View) []byte {
	b := []byte{'{'}
	for i := range v.Fields {
		if name, raw := v.Member(i); kept(name) {
			b = append(append(append(rawjson.AppendString(b, name), ':'), raw...), ',')
		}
	}
	b = append(b, `"max_tokens":`...)
	if v.MaxTokens >= 0 {
		b = append(b, api.RawInt(v.MaxTokens)...)
	} else {
		b = append(b, api.RawNull...) // as far as the model goes, as with a chat
	}
	return append(b, `,"prompt":}`...)
}

// RestKind is the kind of the request for the rest of an answer to one of a kind: a
// completion, of a chat, too, or one of SGLang's own.
func RestKind(kind api.Kind) api.Kind {
	if kind == api.SGLangGenerate {
		return kind
	}
	return api.Completion
}

// Rest builds the request that asks another engine to continue after the ids, whose last ones
// are the answer's.
func (c *Continuation) Rest(ids []uint32, sent int) ([]byte, Refusal) {
	body := make([]byte, 0, len(c.rest)+7*len(ids)+2)
	body = append(body, c.rest[:c.at]...)
	body = append(body, '[')
	for i, id := range ids {
		if i > 0 {
			body = append(body, ',')
		}
		body = append(body, api.RawInt(int64(id))...)
	}
	body = append(append(body, ']'), c.rest[c.at:]...)
	var v api.View
	if err := v.Parse(body, c.kind, api.Limits{}); err != nil {
		return nil, Prompt
	}
	var edits []api.Edit
	most, least, limit := "max_tokens", "min_tokens", v.MaxTokens
	_, null := v.Get(most) // as many as fit
	if c.Stream.Native {
		most, least, null = "sampling_params.max_new_tokens", "sampling_params.min_new_tokens", false
	}
	switch {
	case limit >= 0:
	case c.Stream.Native:
		limit = nativeTokens
	case !null:
		limit = completionTokens
	}
	if limit >= 0 {
		if limit <= int64(sent) {
			return nil, Unmatched // the engine has not said that it was the last
		}
		edits = append(edits, api.Set(most, api.RawInt(limit-int64(sent))))
	}
	if v.MinTokens > 0 {
		edits = append(edits, api.Set(least, api.RawInt(max(0, v.MinTokens-int64(sent)))))
	}
	return bytes.Join(v.Segments(nil, edits), nil), ""
}

// Ending is what is missing of a stream whose engine died after the answer's last token;
// ok is false where that is not known. usage says that the client wants its tokens counted.
func (c *Continuation) Ending(usage bool) (end []byte, ok bool) {
	if c.Stream.Done() {
		return nil, true
	}
	if c.Stream.Refused() != "" && usage {
		return nil, false // who knows how many there were
	}
	return c.Stream.Closing(usage), true
}

// Whole reports whether nothing is missing of the stream but its ending.
func (c *Continuation) Whole() bool {
	return (c.Stream.Ended() || c.Stream.Done()) && c.Refused == ""
}

// Words are a refusal in words, with the member of the request that it is about.
func (c *Continuation) Words(why Refusal) string {
	if c.Member != "" {
		return fmt.Sprintf("%s (%s)", why, c.Member)
	}
	return why.String()
}
