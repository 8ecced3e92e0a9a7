package benchcmd

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rig/loopbacktest"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestApplyToAuto: a threshold that is auto is no number, whatever decides meanwhile:
// a run's number takes its place, and what was learned is shown beside it.
func TestApplyToAuto(t *testing.T) {
	t.Parallel()
	g := loopbacktest.Start(t, loopback.Options{
		Fleet: "1p1d:profile=instant", Configure: func(c *settings.Config) { c.Routing.Threshold = decide.Threshold{Tokens: 2048, Auto: true} },
	})
	at, err := url.Parse(g.AdminURL)
	if err != nil {
		t.Fatal(err)
	}
	// Between the command and the router: what a busier one would have learned.
	costs := []admin.ModelCosts{{Model: "sim", Crossings: []admin.Crossing{{Running: 0}, {Running: 8, Low: new(300), Tokens: new(512), High: new(900)}}}}
	proxy := httputil.NewSingleHostReverseProxy(at)
	between := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/admin/v1/status" {
			q.Host = at.Host
			proxy.ServeHTTP(w, q)
			return
		}
		s, err := g.Admin.Status(q.Context())
		if err != nil {
			t.Error(err)
		}
		s.Costs = costs
		if err := json.NewEncoder(w).Encode(s); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(between.Close)
	run := filepath.Join(t.TempDir(), "result.json")
	if err := os.WriteFile(run, []byte(`{"schema":"dynctl.bench/v1","valid":true,"sentence":"remote wins from 2048","recommend":{"eff_isl_tokens":2048}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	threshold := func() any {
		t.Helper()
		s, err := g.Admin.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return s.Threshold()
	}
	if is := threshold(); is != "auto:2048" {
		t.Errorf("the threshold is %v", is)
	}
	code, stdout, stderr := typed("bench", "apply", "--yes", "--router", between.URL, run)
	if code != cli.ExitOK || !strings.Contains(stdout, "learned for sim: remote from about 510 tokens at 8 running answers (300 to 900)") {
		t.Errorf("code %d\n%s%s", code, stdout, stderr)
	}
	if is := threshold(); is != 2048 {
		t.Errorf("2048 was applied, and the threshold is %v", is)
	}
}
