package lifecycle

import (
	"net/http"
	"testing"

	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestHeaders: the client learns of the ranks that were decided on, and of the decision
// even if it was for none.
func TestHeaders(t *testing.T) {
	t.Parallel()
	local := map[string]string{"X-Dynctl-Path": "local", "X-Dynctl-Worker": "a/dp0", "X-Dynctl-Cached-Tokens": "32"}
	remote := map[string]string{"X-Dynctl-Path": "remote", "X-Dynctl-Worker": "a/dp0", "X-Dynctl-Prefill-Worker": "p/dp0", "X-Dynctl-Cached-Tokens": "32"}
	for _, c := range []struct {
		plan decide.Plan
		want map[string]string
	}{
		{decide.Plan{Path: route.Local, CachedTokens: 32, PrefillIndex: -1}, local},
		{decide.Plan{Path: route.Remote, CachedTokens: 32}, remote},
		{decide.Plan{Path: route.Local, DecodeIndex: -1}, map[string]string{}},
		{decide.Plan{Path: route.Local, Err: decide.ErrNoDecode}, map[string]string{}},
		{decide.Plan{}, map[string]string{}},
	} {
		s := newStand(t, c.plan)
		s.Routing.Run.In.PrefillPeers = []workers.Peer{{Rank: &workers.Rank{Label: "p/dp0"}}}
		h := http.Header{}
		s.Headers(h)
		if h.Get("X-Dynctl-Decision") != s.Live.ID() || len(h) != len(c.want)+1 {
			t.Errorf("%+v: %v", c.plan, h)
		}
		for k, v := range c.want {
			if h.Get(k) != v {
				t.Errorf("%s: %q, want %q", k, h.Get(k), v)
			}
		}
	}
}
