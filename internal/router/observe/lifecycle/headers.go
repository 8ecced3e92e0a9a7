package lifecycle

import (
	"net/http"
	"strconv"
)

// Headers sets the headers that say what was decided.
func (r *Record) Headers(h http.Header) {
	values := make([]string, 0, 5) // one allocation for all
	set := func(key, value string) {
		values = append(values, value)
		h[key] = values[len(values)-1 : len(values) : len(values)]
	}
	set("X-Dynctl-Decision", r.Live.ID())
	p := &r.Routing.Run.Plan
	decode, prefill := r.ranks()
	if decode == "" {
		return
	}
	set("X-Dynctl-Path", string(p.Path))
	set("X-Dynctl-Worker", decode)
	if prefill != "" {
		set("X-Dynctl-Prefill-Worker", prefill)
	}
	set("X-Dynctl-Cached-Tokens", strconv.Itoa(p.CachedTokens))
}
