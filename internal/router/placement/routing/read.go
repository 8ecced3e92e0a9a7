package routing

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// Read finds what decisions need to know of a request: its prompt, the names of its
// blocks, and the facts by which its path is judged. kind is what it is to the stages: the
// rest of a chat is a completion.
func (d *Decider) Read(ctx context.Context, q *Request, ep *api.Endpoint, kind api.Kind, v *api.View) {
	q.AcquireHashes()
	now := time.Now()
	tokenized := ep.Splittable || ep.Streamable
	q.Unread = tokenized && q.Settings.Limits.WaitForWorker && !slices.ContainsFunc(q.List, decide.Serves)
	switch {
	case q.Unread:
		q.Prompt = prompt.Estimate(v, d.from.Media, q.Model, "not tokenized: the model has no usable worker")
	case tokenized:
		model := q.Model
		if _, unlisted := q.Fleet.Candidates(model); unlisted {
			model = cmp.Or(q.Fleet.Only(), model) // an adapter's prompts are those of its base
		}
		q.Prompt = d.from.Prompts.Find(ctx, v, model, q.List, q.IDs)
		if q.Prompt.Source == route.FromIDs {
			q.IDs = q.Prompt.IDs
		}
	case ep.Body == api.JSONBody && v.Prompt != api.PromptNone:
		q.Prompt = prompt.Estimate(v, d.from.Media, q.Model, "")
	default:
		q.Prompt = prompt.Prompt{Source: route.FromNothing}
	}
	found := time.Now()
	q.Took.Tokenize = found.Sub(now)
	d.Hash(q, v, found)
	f := &q.Run.Criteria.Facts
	*f = api.Facts{
		Kind: kind, Splittable: ep.Splittable && ep.Body == api.JSONBody,
		ISL: q.Prompt.ISL, Source: q.Prompt.Source,
		N: int(max(1, v.N)), Prompts: v.Prompts(), Multimodal: v.Multimodal, Opaque: v.Opaque, MediaTokens: q.Prompt.MediaTokens(),
		PromptLogprobs: v.PromptLogprobs || v.Echo && (v.Logprobs || v.Kind == api.Chat), RoutedExperts: v.RoutedExperts,
		MaxTokens: v.MaxTokens, MaxTokensKey: v.MaxTokensKey, MinTokens: v.MinTokens,
		Logprobs: v.Logprobs, Echo: v.Echo, TokenIDs: q.Prompt.IDs,
		Truncated: q.Prompt.Truncated, StreamUsage: v.Stream && v.IncludeUsage,
	}
	if f.Splittable {
		f.Continues, f.ServerTools, f.ThinkingBudget = v.Continues(), v.ServerTools(), v.ThinkingBudget()
	}
	if ep.Body != api.JSONBody {
		f.MaxTokens, f.MinTokens = -1, -1
	}
	if ep.Streamable {
		f.ExpectOutput(cmp.Or(v.OutputHint, d.from.Answers.Expect(q.Model, q.Tenant)))
	}
}

// Renew moves the request to the fleet as it is now: between two decisions workers may
// have come and gone.
func (d *Decider) Renew(q *Request, fleet *workers.Snapshot, v *api.View) {
	if fleet == q.Fleet {
		return
	}
	q.UseFleet(fleet)
	d.Hash(q, v, time.Now()) // there may be other block sizes
}
