package serving

import (
	"io"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/forward/upstream"
	"github.com/dynctl/dynctl/internal/router/observe/lifecycle"
)

// counted is the answer of a decode leg, nil for none, that reports the cached tokens of its
// prefill, where the settings want that.
func counted(c *Call, t *disagg.Transfer, a *Answer) *Answer {
	cached := func() int { return prefillCached(c, t) }
	switch {
	case a == nil || !c.Routing.Settings.Routing.PrefillUsage:
	case a.Streams():
		a.Body = &countedBody{Body: a.Body, usage: disagg.Usage{Cached: cached}, answer: &c.Record.Answer}
	case a.Whole != nil:
		u := disagg.Usage{Cached: cached}
		body := u.Pass(a.Whole)
		if body = append(body, u.Rest()...); u.Replaced {
			a.Whole = body
			if c.Record.Answer.Cached >= 0 {
				c.Record.Answer.Cached = cached()
			}
			c.Record.Answer.FromPrefill, c.Record.Answer.Decode = true, u.Own
		}
	}
	return a
}

// prefillCached is how many tokens of the prompt the prefill engine had in its cache; -1 while
// its answer has not come.
func prefillCached(c *Call, t *disagg.Transfer) int {
	if p := c.decoding.beside; p != nil && !p.PrefillEnded() {
		return -1
	}
	return t.Facts().CachedTokens
}

// countedBody is the stream of a decode leg. A connector that does not read its prefill's answer
// leaves the engine's count. What each piece asks for comes first and lies in one line of a
// processor's cache: after the wait for a piece each line is read from memory.
type countedBody struct {
	Body
	ended  bool
	usage  disagg.Usage
	answer *lifecycle.Answer
}

func (b *countedBody) Next() (p []byte, head bool, err error) {
	for len(p) == 0 {
		if b.ended {
			return nil, false, io.EOF
		}
		var first bool
		p, first, err = b.Body.Next()
		head = head || first
		switch {
		case upstream.AtEnd(err):
			if b.ended, p = true, b.usage.Rest(); len(p) > 0 {
				return p, head, nil
			}
			return nil, head, err
		case err != nil:
			return nil, head, err
		case len(p) == 0:
			return p, head, nil
		}
		if p = b.usage.Pass(p); b.usage.Replaced {
			b.answer.FromPrefill, b.answer.Decode = true, b.usage.Own
		}
	}
	return p, head, nil
}

func (b *countedBody) Done() bool {
	return b.ended || len(b.usage.Rest()) == 0 && b.Body.Done()
}
