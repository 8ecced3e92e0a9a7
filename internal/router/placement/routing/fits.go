package routing

import (
	"fmt"

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
	switch {
	case limit == 0:
		return nil
	case f.ISL > limit:
		return api.BadRequest("", "the model's context holds %d tokens, and the prompt has %d: shorten the prompt", limit, f.ISL)
	}
	return api.BadRequest(f.MaxTokensKey, "the model's context holds %d tokens; the prompt has %d, and %s is %d: shorten the prompt or the answer", limit, f.ISL, fmt.Sprintf("%q", f.MaxTokensKey), f.MaxTokens)
}
