package routing

import (
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Fits returns the error of an engine where the request exceeds what every decode worker that
// it may use can hold ([decide.Overflows]); nil where one may have room.
func (q *Request) Fits() error {
	f := &q.Run.Criteria.Facts
	limit := 0
	for _, w := range q.List {
		if pin := q.Run.Criteria.Pin.Decode; !w.Role.CanDecode() || pin != "" && pin != w.Name {
			continue
		}
		if !decide.Overflows(f, w, route.Decode) {
			return nil
		}
		limit = max(limit, w.MaxModelLen)
	}
	if limit == 0 {
		return nil
	}
	// Agents shorten a conversation when they find this code, or the first words.
	e := api.BadRequest("", "this model's maximum context length is %d tokens, and the prompt has %d: shorten the prompt", limit, f.ISL)
	if f.ISL <= limit {
		e = api.BadRequest(f.MaxTokensKey, "this model's maximum context length is %d tokens; the prompt has %d, and %q is %d: shorten the prompt or the answer", limit, f.ISL, f.MaxTokensKey, f.MaxTokens)
	}
	e.Code = api.CodeContextLength
	return e
}
