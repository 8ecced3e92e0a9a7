package routing

import (
	"fmt"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// Fits returns the error of an engine where the prompt, or the prompt with the longest answer
// asked for, exceeds what every decode worker can hold; nil where one may have room. It judges
// where the prompt's tokens are counted, and for engines that refuse such requests: others may
// cut the prompt or the answer.
func (q *Request) Fits() error {
	f := &q.Run.Criteria.Facts
	counted := f.Source == route.FromIDs || f.Source == route.FromEngine || f.Source == route.FromLocal
	refused := f.Kind == api.Completion || f.Kind == api.Chat || f.Kind == api.Messages
	if !counted || !refused || f.Prompts > 1 || f.Truncated {
		return nil
	}
	limit := 0
	for _, w := range q.List {
		if !w.Role.CanDecode() {
			continue
		}
		if w.MaxModelLen <= 0 || w.WireEngine() != workers.VLLM {
			return nil
		}
		limit = max(limit, w.MaxModelLen)
	}
	longest := max(f.MaxTokens, 0)
	switch {
	case limit == 0 || int64(f.ISL)+longest <= int64(limit):
		return nil
	case f.ISL > limit:
		return api.BadRequest("", "the model's context holds %d tokens, and the prompt has %d: shorten the prompt", limit, f.ISL)
	}
	return api.BadRequest(f.MaxTokensKey, "the model's context holds %d tokens; the prompt has %d, and %s asks for %d: shorten the prompt or the answer", limit, f.ISL, fmt.Sprintf("%q", f.MaxTokensKey), longest)
}
