package api

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestAllowOrigin: pages of the allowed origins may read answers, and ask before whether they
// may send a request; others get no such header.
func TestAllowOrigin(t *testing.T) {
	t.Parallel()
	const page = "https://chat.example"
	preflight := http.Header{"Access-Control-Request-Method": {"POST"}, "Access-Control-Request-Headers": {"authorization,content-type"}}
	for name, c := range map[string]struct {
		method, origin string
		sent           http.Header
		allowed        []string
		preflight      bool
		want           http.Header
	}{
		"no setting":               {http.MethodOptions, page, preflight, nil, false, http.Header{}},
		"no page":                  {http.MethodPost, "", nil, []string{page}, false, http.Header{"Vary": {"Origin"}}},
		"another page":             {http.MethodPost, "https://evil.example", nil, []string{page}, false, http.Header{"Vary": {"Origin"}}},
		"another page's preflight": {http.MethodOptions, "https://chat.example.evil", preflight, []string{page}, false, http.Header{"Vary": {"Origin"}}},
		"a page without an origin": {http.MethodPost, "null", nil, []string{page}, false, http.Header{"Vary": {"Origin"}}},
		"OPTIONS that is no preflight": {http.MethodOptions, page, nil, []string{page}, false, http.Header{
			"Vary": {"Origin"}, "Access-Control-Allow-Origin": {page}, "Access-Control-Expose-Headers": {"*"},
		}},
		"an allowed page": {http.MethodPost, page, nil, []string{"http://localhost:3000", "HTTPS://chat.example"}, false, http.Header{
			"Vary": {"Origin"}, "Access-Control-Allow-Origin": {page}, "Access-Control-Expose-Headers": {"*"},
		}},
		"every page": {http.MethodPost, "null", nil, []string{"*"}, false, http.Header{
			"Access-Control-Allow-Origin": {"*"}, "Access-Control-Expose-Headers": {"*"},
		}},
		"its preflight": {http.MethodOptions, page, preflight, []string{page}, true, http.Header{
			"Vary": {"Origin", "Access-Control-Request-Headers"}, "Access-Control-Allow-Origin": {page}, "Access-Control-Allow-Methods": {"GET, HEAD, POST, DELETE"},
			"Access-Control-Allow-Headers": {"authorization,content-type"}, "Access-Control-Max-Age": {"600"},
		}},
	} {
		r := httptest.NewRequest(c.method, "/v1/models", nil)
		for k, v := range c.sent {
			r.Header[k] = v
		}
		if c.origin != "" {
			r.Header.Set("Origin", c.origin)
		}
		h := http.Header{}
		if got := AllowOrigin(h, r, c.allowed); got != c.preflight {
			t.Errorf("%s: a preflight: %v", name, got)
		}
		if diff := cmp.Diff(c.want, h); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
