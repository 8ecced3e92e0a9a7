package question

import (
	"context"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// Read finds what decisions need to know of a request: its prompt, the names of its
// blocks, and the facts by which its path is judged. kind is what it is to the stages: the
// rest of a chat is a completion.
func (a *Asker) Read(ctx context.Context, d *Question, ep *api.Endpoint, kind api.Kind, v *api.View) {
	d.AcquireHashes()
	now := time.Now()
	switch {
	case ep.Splittable || ep.Streamable:
		d.Prompt = a.from.Prompts.Find(ctx, v, d.Model, d.List, d.IDs)
		if d.Prompt.Source == route.FromIDs {
			d.IDs = d.Prompt.IDs
		}
	case ep.Body == api.JSONBody && v.Prompt != api.PromptNone:
		d.Prompt = prompt.Prompt{ISL: v.EstimateTokens(), Source: route.FromEstimate}
	default:
		d.Prompt = prompt.Prompt{Source: route.FromNothing}
	}
	found := time.Now()
	d.Took.Tokenize = found.Sub(now)
	a.Hash(d, v, found)
	f := &d.Run.Request.Facts
	*f = api.Facts{
		Kind: kind, Splittable: ep.Splittable && ep.Body == api.JSONBody,
		ISL: d.Prompt.ISL, Source: d.Prompt.Source,
		N: int(max(1, v.N)), Prompts: v.Prompts(), Multimodal: v.Multimodal,
		PromptLogprobs: v.PromptLogprobs || v.Echo && v.Logprobs,
		MaxTokens:      v.MaxTokens, MaxTokensKey: v.MaxTokensKey, MinTokens: v.MinTokens,
		Logprobs: v.Logprobs, Echo: v.Echo, TokenIDs: d.Prompt.IDs,
		Truncated: d.Prompt.Truncated, StreamUsage: v.Stream && v.IncludeUsage,
	}
	if f.Splittable {
		f.Continues, f.ServerTools, f.ThinkingBudget = v.Continues(), v.ServerTools(), v.ThinkingBudget()
	}
	if ep.Body != api.JSONBody {
		f.MaxTokens, f.MinTokens = -1, -1
	}
}

// Renew has the question asked of the fleet as it is now: between two decisions workers
// may have come and gone.
func (a *Asker) Renew(d *Question, fleet *workers.Snapshot, v *api.View) {
	if fleet == d.Fleet {
		return
	}
	d.Look(fleet)
	a.Hash(d, v, time.Now()) // there may be other block sizes
}
