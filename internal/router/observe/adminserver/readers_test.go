package adminserver_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/rig/loopbacktest"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/adminserver"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/settings"
)

const recorded = "vllm-0.32.0-1p1d-evictions.jsonl.zst"

// TestReaders: the API of a running router and that of a recording.
func TestReaders(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	rig := loopbacktest.Start(t, loopback.Options{Fleet: "1a:profile=instant", Configure: func(c *settings.Config) {
		c.AdminHosts = []string{"router.test"}
	}})
	if err := rig.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	open := newReaders(t, rig.Router, "")
	t.Run("answers", func(t *testing.T) { answers(t, open) }) // the first: the router has done nothing yet
	t.Run("web pages", func(t *testing.T) { webPages(t, open, newReaders(t, rig.Router, "a-long-enough-token-42")) })
	t.Run("documented requests", func(t *testing.T) { documentedRequests(t, open) })
}

// newReaders are the API of a running router and that of a recording at its end.
func newReaders(t *testing.T, r *router.Router, token string) map[string]http.Handler {
	t.Helper()
	o := router.AdminOptions{Name: "here:1"}
	a := adminserver.Access{Terms: func() adminserver.Terms {
		return adminserver.Terms{Hosts: []string{"router.test"}, Body: time.Second, Write: time.Second}
	}}
	if token != "" {
		o.TokenFile, a.Token = filepath.Join(t.TempDir(), "token"), []byte(token)
		if err := os.WriteFile(o.TokenFile, a.Token, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h, err := r.AdminHandler(o)
	if err != nil {
		t.Fatal(err)
	}
	stage, err := replay.NewStage(func() (*trace.Reader, error) {
		return trace.Open(filepath.Join("../../../../testdata/trace", recorded), nil, trace.Options{})
	}, replay.PlayerOptions{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stage.Close)
	if err := stage.Control("step", 1000); err != nil {
		t.Fatal(err)
	}
	return map[string]http.Handler{"router": h, "recording": stage.Handler(a)}
}

// answers: every address answers what it is for, and says what is wrong
// with a question, for a router and for a recording.
func answers(t *testing.T, readers map[string]http.Handler) {
	type answer struct {
		status int
		want   string // somewhere in it
	}
	ask := func(reader, method, path, body string, want answer) (v map[string]any) {
		w := httptest.NewRecorder()
		q := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
		q.Host = "localhost:8001"
		readers[reader].ServeHTTP(w, q)
		if err := json.Unmarshal(w.Body.Bytes(), &v); err != nil {
			t.Errorf("%s: %s %s: %v in %q", reader, method, path, err, w.Body)
		}
		if raw, err := json.Marshal(v); err != nil || w.Code != want.status || !strings.Contains(strings.ReplaceAll(string(raw), `\u003e`, ">"), want.want) {
			t.Errorf("%s: %s %s: %d %.400s, want %d with %s", reader, method, path, w.Code, raw, want.status, want.want)
		}
		return v
	}
	for _, c := range []struct {
		method, path, body string
		router, recording  answer
	}{
		{"GET", "/admin/v1/status", "", answer{200, `"config_revision":1`}, answer{200, `"the recording ends here"`}},
		{"GET", "/admin/v1/status", "", answer{200, `"name":"here:1"`}, answer{200, recorded}},
		{"GET", "/admin/v1/workers", "", answer{200, `"source":"sim"`}, answer{200, `"source":"trace"`}},
		{"GET", "/admin/v1/ranks", "", answer{200, `"label":"aggregated-0/dp0"`}, answer{200, `"label":"127.0.0.1:18101/dp0"`}},
		{"GET", "/admin/v1/index/stats", "", answer{200, `"untrusted_ranks":0`}, answer{200, `"untrusted_ranks":2`}},
		{"GET", "/admin/v1/index/stats", "", answer{200, `"label":"aggregated-0/dp0"`}, answer{200, `"label":"127.0.0.1:18101/dp0"`}},
		{"GET", "/admin/v1/index/children", "", answer{200, `"children":[]`}, answer{200, `"rank_labels":["127.0.0.1:18100/dp0"`}},
		{"GET", "/admin/v1/index/children?rank=127.0.0.1:18100/dp0&limit=1", "", answer{400, "there is no rank"}, answer{200, `"rank_labels":["127.0.0.1:18100/dp0"`}},
		{"GET", "/admin/v1/index/children?flat=true&limit=3", "", answer{200, `"children":[]`}, answer{200, `"total":`}},
		{"GET", "/admin/v1/decisions", "", answer{200, `"decisions_total":0`}, answer{200, `"decisions_total":72`}},
		{"GET", "/admin/v1/decisions?limit=1&brief=true", "", answer{200, `"decisions":[]`}, answer{200, `"next":"`}},
		{"GET", "/admin/v1/decisions?filter=path%3Dlocal", "", answer{200, `"decisions":[]`}, answer{200, `"path":"local"`}},
		{"GET", "/admin/v1/decisions?filter=worker%3Dnobody", "", answer{200, `"decisions":[]`}, answer{200, `"decisions":[]`}},
		{"GET", "/admin/v1/decisions/1da5f01d000000000001", "", answer{404, "decision_not_found"}, answer{200, `"request_id":"91c7aeef791e09b47c403d40f2da2248"`}},
		{"GET", "/admin/v1/decisions/91c7aeef791e09b47c403d40f2da2248", "", answer{404, "--receipts"}, answer{200, `"id":"1da5f01d000000000001"`}},
		{"GET", "/admin/v1/events?limit=1", "", answer{200, `"events":[{`}, answer{200, `"events":[{`}},
		{"GET", "/admin/v1/snapshot", "", answer{200, `"decisions":[]`}, answer{200, `"decisions":[{`}},

		{"POST", "/admin/v1/config", `{"settings":{"routing.treshold":1}}`, answer{400, `unknown key \"routing.treshold\"; did you mean \"routing.threshold\"?`}, answer{}},
		{"POST", "/admin/v1/config", `{"settings":{"routing.threshold":"many"}}`, answer{400, `routing.threshold: \"many\" is not a whole number`}, answer{}},
		{"POST", "/admin/v1/config", `{"settings":{"routing.decode_gate":2}}`, answer{400, "routing.decode_gate: 2 is not a share between 0 and 1"}, answer{}},
		{"POST", "/admin/v1/config", `{"settings":{"receipts":100}}`, answer{400, "receipts cannot change while the router runs"}, answer{}},
		{"POST", "/admin/v1/config", `{}`, answer{400, "no settings to change"}, answer{}},
		{"POST", "/admin/v1/config", `{"moon":1}`, answer{400, "unknown field"}, answer{}},
		{"GET", "/admin/v1/config", "", answer{200, `"config_revision":1`}, answer{}},
		{"POST", "/admin/v1/route", `{}`, answer{400, "exactly one of body, prompt and tokens"}, answer{}},
		{"POST", "/admin/v1/route", `{"tokens":[1]}`, answer{200, "dry-run"}, answer{}},
		{"POST", "/admin/v1/workers", `{"spec":"moon"}`, answer{400, `"param":"spec"`}, answer{}},
		{"POST", "/admin/v1/workers", `{"spec":"http://127.0.0.1:1,name=w,role=decode"}`, answer{200, `"role":"decode"`}, answer{}},
		{"POST", "/admin/v1/workers", `{"spec":"http://127.0.0.1:2,name=w,role=decode"}`, answer{409, `"param":"spec"`}, answer{}},
		{"POST", "/admin/v1/workers/w/drain", `{}`, answer{200, `"draining":true`}, answer{}},
		{"POST", "/admin/v1/workers/w/resume", `{}`, answer{200, `"draining":false`}, answer{}},
		{"POST", "/admin/v1/workers/v/drain", `{}`, answer{404, `did you mean \"w\"`}, answer{}},
		{"POST", "/admin/v1/control/sleep?worker=v", "", answer{404, `did you mean \"w\"`}, answer{}},
		{"POST", "/admin/v1/control/sleep?depth=1", "", answer{400, `takes no \"depth\"`}, answer{}},
		{"POST", "/admin/v1/control/sleep", `{"worker":"w"}`, answer{400, "takes no body"}, answer{}},
		{"POST", "/admin/v1/control/start_profile?worker=w", "", answer{200, `"failed":1`}, answer{}},
		{"DELETE", "/admin/v1/workers/w", ``, answer{200, `"removed":"w"`}, answer{}},
		{"POST", "/admin/v1/drain", `{"timeout_seconds":-1}`, answer{400, "not a number from 0"}, answer{}},

		{"POST", "/admin/v1/replay?do=pause", "", answer{404, "is not part of the admin API"}, answer{200, `"paused":true`}},
		{"POST", "/admin/v1/replay?do=dance", "", answer{404, "unknown_path"}, answer{400, `"code":"invalid_request"`}},
		{"POST", "/admin/v1/replay?do=step&n=x", "", answer{404, "unknown_path"}, answer{400, "not a number from 0"}},
	} {
		ask("router", c.method, c.path, c.body, c.router)
		if c.recording == (answer{}) {
			c.recording = answer{409, "not_running"}
		}
		ask("recording", c.method, c.path, c.body, c.recording)
	}
	for path, want := range map[string]answer{
		"/admin/v1/index/children?sort=size":        {400, "is not one of blocks"},
		"/admin/v1/index/children?flat=true&node=1": {400, "does not go with flat=true"},
		"/admin/v1/index/children?flat=perhaps":     {400, "neither true nor false"},
		"/admin/v1/index/children?rank=x":           {400, `no rank \"x\"`},
		"/admin/v1/index/children?limit=5000":       {400, "not a number from 1 to 1000"},
		"/admin/v1/index/children?node=moon":        {400, "not an id that this API gave"},
		"/admin/v1/index/children?node=1234567890":  {404, "node_not_found"},
		"/admin/v1/decisions?limit=0":               {400, "not a number from 1 to 1000"},
		"/admin/v1/decisions?limit=1001":            {400, "not a number from 1 to 1000"},
		"/admin/v1/decisions?cursor=moon":           {400, "is not a cursor"},
		"/admin/v1/decisions?filter=moon%3D1":       {400, "unknown key"},
		"/admin/v1/decisions/x":                     {404, "decision_not_found"},
		"/admin/v1/events?wait=1h":                  {400, "not a duration up to"},
		"/admin/v1/events?after=x":                  {400, "not a sequence number"},
		"/admin/v1/events?limit=100000":             {400, "not a number from 1 to 10000"},
		"/admin/v1/snapshot?decisions=1001":         {400, "not a number from 0 to 1000"},
		"/admin/v1/snapshot?after=abc":              {400, "not a sequence number"},
		"/admin/v1/snapshot?after=-1":               {400, "not a sequence number"},
		"/admin/v1/stream":                          {404, "unknown_path"},
		"/v1/models":                                {404, "clients' requests go to the data plane"},
	} {
		for reader := range readers {
			v := ask(reader, "GET", path, "", want)
			e, _ := v["error"].(map[string]any)
			if code, _ := e["code"].(string); code == "" {
				t.Errorf("%s: GET %s: %v: no code", reader, path, v)
			}
		}
	}
	raw, err := json.Marshal(ask("router", "POST", "/admin/v1/drain", `{"timeout_seconds":90}`, answer{200, `"inflight_requests":0`}))
	var drain admin.DrainState
	if err := errors.Join(err, json.Unmarshal(raw, &drain)); err != nil || drain.Until.Sub(drain.Since) != 90*time.Second {
		t.Errorf("%s, %v", raw, err)
	}
	ask("router", "POST", "/admin/v1/drain", `{}`, answer{200, drain.Until.Format(time.RFC3339Nano)})
	ask("recording", "POST", "/admin/v1/drain", `{}`, answer{409, "not_running"})
}

// documentedRequests: whatever the documentation names is answered in JSON, by
// a router and by a recording, and so is what it does not name; errors have a code.
func documentedRequests(t *testing.T, readers map[string]http.Handler) {
	doc, err := os.ReadFile("../../../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile("`(GET|POST|DELETE) (/admin/v1/[^`]+)`").FindAllStringSubmatch(string(doc), -1)
	if len(found) < 17 {
		t.Fatalf("found only %d requests", len(found))
	}
	for reader, h := range readers {
		for _, f := range found {
			path := strings.NewReplacer("{name}", "nobody", "{id}", "nothing").Replace(f[2])
			for _, method := range []string{f[1], http.MethodPut} {
				q := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader("{}"))
				q.Host = "127.0.0.1"
				w := httptest.NewRecorder()
				h.ServeHTTP(w, q)
				var v struct {
					Error *struct{ Message, Code string }
				}
				if err := json.Unmarshal(w.Body.Bytes(), &v); err != nil || w.Header().Get("Content-Type") != "application/json" {
					t.Errorf("%s: %s %s: %d %s, no JSON (%v)", reader, method, path, w.Code, w.Body, err)
				} else if good := w.Code == http.StatusOK; good != (v.Error == nil) || method == http.MethodPut && w.Code != http.StatusNotFound {
					t.Errorf("%s: %s %s: %d %s", reader, method, path, w.Code, w.Body)
				} else if !good && (v.Error.Message == "" || v.Error.Code == "") {
					t.Errorf("%s: %s %s: %d, an error without a code or a message: %s", reader, method, path, w.Code, w.Body)
				}
				if reader == "recording" && w.Code == http.StatusOK && method != http.MethodGet {
					t.Errorf("a recording takes %s %s", method, path)
				}
			}
		}
	}
}

// webPages: without a token, nothing that a web page of another site could
// send is answered, whatever the site calls itself; programs on this machine are.
func webPages(t *testing.T, open, closed map[string]http.Handler) {
	hosts := map[string]bool{
		"127.0.0.1:8001": true, "127.0.0.1": true, "127.8.9.1:1": true, "[::1]:8001": true, "::1": true, "localhost:8001": true, "LOCALHOST": true, "localhost.": true,
		"router.test": true, "Router.Test:8001": true,
		"evil.example": false, "evil.example:8001": false, "127.0.0.1.evil.example": false, "localhost.evil.example": false, "evil-localhost": false,
		"10.0.0.1:8001": false, "0.0.0.0:8001": false, "": false, "[::]:8001": false,
	}
	// What a browser adds, and whether a page may read, or change, by it.
	type sent struct{ origin, site string }
	pages := map[sent]struct{ reads, changes bool }{
		{"", ""}:                        {true, true},
		{"", "none"}:                    {true, false},
		{"", "same-origin"}:             {true, false},
		{"", "same-site"}:               {false, false},
		{"", "cross-site"}:              {false, false},
		{"null", ""}:                    {false, false},
		{"http://evil.example", ""}:     {false, false},
		{"http://localhost:3000", ""}:   {false, false},
		{"http://HOST", "same-origin"}:  {true, false},
		{"http://HOST", "cross-site"}:   {false, false},
		{"https://HOST", "same-origin"}: {false, false},
	}
	for reader, own := range map[string]string{"router": "GET /metrics", "recording": "POST /admin/v1/replay?do=pause"} {
		for host, ok := range hosts {
			for page, may := range pages {
				for _, at := range []string{own, "GET /admin/v1/status", "HEAD /admin/v1/config", "GET /debug/pprof/cmdline", "GET /debug/pprof/symbol", "POST /admin/v1/drain", "POST /debug/pprof/symbol", "DELETE /admin/v1/workers/x"} {
					method, path, _ := strings.Cut(at, " ")
					status := func(h http.Handler) int {
						q := httptest.NewRequestWithContext(t.Context(), method, path, nil)
						q.Host = host
						for k, v := range map[string]string{"Origin": strings.ReplaceAll(page.origin, "HOST", host), "Sec-Fetch-Site": page.site} {
							if v != "" {
								q.Header.Set(k, v)
							}
						}
						w := httptest.NewRecorder()
						h.ServeHTTP(w, q)
						return w.Code
					}
					want := ok && (may.changes || may.reads && (method == http.MethodGet || method == http.MethodHead))
					if got := status(open[reader]); (got != http.StatusForbidden) != want {
						t.Errorf("%s of the %s as %q from %+v: %d, allowed: %v", at, reader, host, page, got, want)
					}
					if got := status(closed[reader]); got != http.StatusUnauthorized {
						t.Errorf("%s of the %s as %q from %+v without its token: %d", at, reader, host, page, got)
					}
				}
			}
		}
	}
}
