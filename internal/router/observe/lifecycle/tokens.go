package lifecycle

import (
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/placement/outputs"
	"github.com/dynctl/dynctl/internal/router/request/media"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Tokens are the tokens of a request that has ended. Numbers are -1 where they are unknown.
type Tokens struct {
	Prompt, Cached, Completion int
	// PromptCounted and CompletionCounted report that the number is the router's own, because
	// the engine reported none.
	PromptCounted, CompletionCounted bool
}

// Tokens returns what the request took: the engine's usage, or else the router's count of the
// prompt and of the streamed events, which hold one token or more each. A request whose answer
// has not begun took none that are known. It is for requests that have ended.
func (r *Record) Tokens() Tokens {
	a := &r.Answer
	t := Tokens{-1, -1, -1, false, false}
	if a.leg == nil || !a.Streamed && r.Outcome.Err != nil {
		return t
	}
	t.Prompt, t.Cached, t.Completion = a.Prompt, a.Cached, a.Completion
	if p := &r.Routing.Prompt; t.Prompt < 0 && r.Endpoint.Streamable && p.ISL > 0 && p.Source != route.FromNothing {
		t.Prompt, t.PromptCounted = p.ISL, true
	}
	if t.Completion < 0 && a.Streamed {
		t.Completion, t.CompletionCounted = a.Events, true
	}
	return t
}

// AnswerLengths learns how many tokens good answers have.
func AnswerLengths(l *outputs.Lengths) Subscriber {
	return Subscriber{Answered: func(e *Event) {
		r, f := e.Request, &e.Request.Routing.Run.Criteria.Facts
		if n := r.Tokens().Completion / (max(1, f.N) * max(1, f.Prompts)); n > 0 {
			l.Learn(r.Model, r.Tenant, n)
		}
	}}
}

// MediaLengths learns how many tokens images, sounds and videos have, from the usage of answers to
// prompts whose text is estimated.
func MediaLengths(t *media.Table) Subscriber {
	return Subscriber{Answered: func(e *Event) {
		r := e.Request
		if p := &r.Routing.Prompt; t != nil && len(p.Each) > 0 && !p.Truncated && r.Answer.Prompt > 0 {
			t.LearnFromUsage(r.Routing.Model, p.Has, p.Text, r.Answer.Prompt)
		}
	}}
}

// TokensByTenant counts the tokens of requests for Prometheus, also of those whose clients left.
func TokensByTenant(m *telemetry.Metrics) Subscriber {
	source := func(counted bool) string {
		if counted {
			return "router"
		}
		return "engine"
	}
	return Subscriber{Ended: func(e *Event) {
		r := e.Request
		t := r.Tokens()
		m.Tokens(r.Model, r.Tenant, "prompt", source(t.PromptCounted), t.Prompt)
		m.Tokens(r.Model, r.Tenant, "cached", source(false), t.Cached)
		m.Tokens(r.Model, r.Tenant, "completion", source(t.CompletionCounted), t.Completion)
	}}
}
