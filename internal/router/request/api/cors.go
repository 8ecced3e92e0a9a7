package api

import (
	"net/http"
	"slices"
	"strings"
)

// AnyOrigin allows pages of every origin.
const AnyOrigin = "*"

// preflightAge is for how long browsers may keep the answer to a preflight, in seconds.
const preflightAge = "600"

// AllowOrigin sets the headers that let a page read the answer to r, if its origin is one of
// the allowed ones ("https://chat.example", or [AnyOrigin]). It reports whether r is a
// preflight from such a page: the headers are all of its answer then.
//
// A page sends its API key in a header that it sets itself, so no cookies are allowed.
func AllowOrigin(h http.Header, r *http.Request, allowed []string) (preflight bool) {
	if len(allowed) == 0 {
		return false
	}
	value := AnyOrigin
	if !slices.Contains(allowed, AnyOrigin) {
		h.Add("Vary", "Origin")
		value = r.Header.Get("Origin")
		if value == "" || !slices.ContainsFunc(allowed, func(a string) bool { return strings.EqualFold(a, value) }) {
			return false
		}
	}
	h.Set("Access-Control-Allow-Origin", value)
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		h.Set("Access-Control-Expose-Headers", "*")
		return false
	}
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, DELETE")
	if headers := r.Header.Get("Access-Control-Request-Headers"); headers != "" {
		h.Add("Vary", "Access-Control-Request-Headers")
		h.Set("Access-Control-Allow-Headers", headers)
	}
	h.Set("Access-Control-Max-Age", preflightAge)
	return true
}

// originHeader reports whether a header of an answer says which pages may read it. The
// operator of the router decides that, not an engine.
func originHeader(key string) bool { return strings.HasPrefix(key, "Access-Control-") }
