package lifecycle

import (
	"net/http"
	"strconv"

	"github.com/dynctl/dynctl/internal/router/route"
)

// Headers sets the headers that say what was decided.
func (r *Record) Headers(h http.Header) {
	values := make([]string, 0, 5) // one allocation for all
	set := func(key, value string) {
		values = append(values, value)
		h[key] = values[len(values)-1 : len(values) : len(values)]
	}
	set("X-Dynctl-Decision", r.Live.ID())
	p, in := &r.Routing.Run.Plan, &r.Routing.Run.In
	if p.Err != nil || p.DecodeIndex < 0 || p.Path == "" {
		return
	}
	set("X-Dynctl-Path", string(p.Path))
	set("X-Dynctl-Worker", in.DecodePeers[p.DecodeIndex].Rank.Label)
	if p.Path == route.Remote {
		set("X-Dynctl-Prefill-Worker", in.PrefillPeers[p.PrefillIndex].Rank.Label)
	}
	set("X-Dynctl-Cached-Tokens", strconv.Itoa(p.CachedTokens))
}
