package adminserver

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/admission"
	"github.com/dynctl/dynctl/internal/router/approx"
	"github.com/dynctl/dynctl/internal/router/eventlog"
	"github.com/dynctl/dynctl/internal/router/kvfeed"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/router/ledger"
	"github.com/dynctl/dynctl/internal/router/receipt"
	"github.com/dynctl/dynctl/internal/router/state"
	"github.com/dynctl/dynctl/internal/router/traffic"
	"github.com/dynctl/dynctl/internal/workers"
)

// odd is a router that has nothing to tell but that something is odd.
type odd struct{}

func (odd) Settings() state.Settings              { return state.Settings{Revision: 7, Policy: "kv"} }
func (odd) BlockOf(*workers.Worker) int           { return 16 }
func (odd) Counts(*workers.Rank) (uint64, uint64) { return 0, 0 }
func (odd) Troubles() []string                    { return []string{"something is odd"} }
func (odd) TokenizerRests(string) bool            { return false }
func (odd) Drain() *admin.DrainState              { return nil }

// stand is the API of a router that does nothing.
func stand(t testing.TB) Options {
	t.Helper()
	index, guesses := kvindex.New(kvindex.Options{MaxBlocks: 1 << 12}), approx.New(approx.Options{})
	t.Cleanup(func() {
		if err := errors.Join(index.Close(), guesses.Close()); err != nil {
			t.Error(err)
		}
	})
	feeds, err := kvfeed.New(kvfeed.Options{Index: index, BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	registry := workers.NewRegistry(func(workers.Event) {})
	return Options{
		Name: "here:1", Registry: registry, Receipts: receipt.NewRing(receipt.Options{Capacity: 16}), Events: eventlog.New(16, nil, nil), Index: index,
		State: &state.State{
			Router: odd{}, Version: "v1", Registry: registry, Index: index, Guesses: guesses, Feeds: feeds, Ledger: ledger.New(), Gate: admission.New(admission.Limits{}), Bodies: admission.NewMemory(1<<20, nil),
			Traffic: &traffic.Traffic{},
		},
		Metrics: http.NotFoundHandler(), Probe: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) },
		Hosts:    func() []string { return []string{"router.test"} },
		BodyTime: func() time.Duration { return time.Second }, WriteTime: func() time.Duration { return time.Second },
		Config: func() admin.ConfigView { return admin.ConfigView{Revision: 7} },
		Patch:  func(map[string]any) error { return errors.New("threshold: no number") },
		Route: func(context.Context, admin.RouteRequest) (*receipt.Receipt, error) {
			return &receipt.Receipt{ID: "dry-run"}, nil
		},
		Drain: func(d time.Duration) admin.DrainState {
			return admin.DrainState{Until: time.Unix(int64(d.Seconds()), 0).UTC(), Inflight: 3}
		}, Draining: make(chan struct{}),
	}
}

// ask sends a request to the API.
func ask(t *testing.T, h http.Handler, method, path, body string) (int, map[string]any) {
	t.Helper()
	w := httptest.NewRecorder()
	q := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
	q.Host = "localhost:8001"
	h.ServeHTTP(w, q)
	var v map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &v); err != nil {
		t.Fatalf("%s %s: %v in %q", method, path, err, w.Body)
	}
	return w.Code, v
}

// TestAnswers: every address answers what it is for, and says what is wrong
// with a question.
func TestAnswers(t *testing.T) {
	h, err := New(stand(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		method, path, body string
		status             int
		want               string // somewhere in the answer
	}{
		{"GET", "/admin/v1/status", "", 200, `"config_revision":7`},
		{"GET", "/admin/v1/status", "", 200, `"something is odd"`},
		{"GET", "/admin/v1/status", "", 200, `"name":"here:1"`},
		{"GET", "/admin/v1/ranks", "", 200, `"ranks":[]`},
		{"GET", "/admin/v1/index/stats", "", 200, `"untrusted_ranks":0`},
		{"GET", "/admin/v1/index/children?sort=size", "", 400, "is not one of offset"},
		{"GET", "/admin/v1/index/children?rank=x", "", 400, `no rank \"x\"`},
		{"GET", "/admin/v1/decisions?limit=0", "", 400, "not a number from 1 to 1000"},
		{"GET", "/admin/v1/decisions?filter=moon%3D1", "", 400, "unknown key"},
		{"GET", "/admin/v1/decisions/x", "", 404, "decision_not_found"},
		{"GET", "/admin/v1/events?wait=1h", "", 400, "not a duration up to"},
		{"GET", "/admin/v1/events?after=x", "", 400, "not a sequence number"},
		{"GET", "/admin/v1/snapshot", "", 200, `"decisions":[]`},
		{"POST", "/admin/v1/config", `{"settings":{"a":1}}`, 400, "threshold: no number"},
		{"POST", "/admin/v1/config", `{}`, 400, "no settings to change"},
		{"POST", "/admin/v1/config", `{"moon":1}`, 400, "unknown field"},
		{"POST", "/admin/v1/route", `{}`, 400, "exactly one of body, prompt and tokens"},
		{"POST", "/admin/v1/route", `{"tokens":[1]}`, 200, "dry-run"},
		{"POST", "/admin/v1/workers", `{"spec":"http://127.0.0.1:1,name=w,role=decode"}`, 200, `"role":"decode"`},
		{"POST", "/admin/v1/workers/w/drain", `{}`, 200, `"draining":true`},
		{"POST", "/admin/v1/workers/v/drain", `{}`, 404, `did you mean \"w\"`},
		{"DELETE", "/admin/v1/workers/w", ``, 200, `"removed":"w"`},
		{"POST", "/admin/v1/drain", `{}`, 200, `"inflight_requests":3`},
		{"POST", "/admin/v1/drain", `{"timeout_seconds":90}`, 200, `"until":"1970-01-01T00:01:30Z"`},
		{"POST", "/admin/v1/drain", `{"timeout_seconds":-1}`, 400, "not a number from 0"},
		{"GET", "/v1/models", "", 404, "clients' requests go to the data plane"},
	} {
		status, v := ask(t, h, c.method, c.path, c.body)
		if raw, err := json.Marshal(v); err != nil || status != c.status || !strings.Contains(strings.ReplaceAll(string(raw), `\u003e`, ">"), c.want) {
			t.Errorf("%s %s: %d %s, want %d with %s", c.method, c.path, status, raw, c.status, c.want)
		}
	}
}

// TestTokenFile: a token that is missing or could be guessed is refused at the
// start.
func TestTokenFile(t *testing.T) {
	o := stand(t)
	o.TokenFile = filepath.Join(t.TempDir(), "token")
	if _, err := New(o); err == nil || !strings.Contains(err.Error(), "admin_token_file") {
		t.Errorf("no file: %v", err)
	}
	if err := os.WriteFile(o.TokenFile, []byte("short\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(o); err == nil || !strings.Contains(err.Error(), "5 characters, fewer than 16") {
		t.Errorf("a short token: %v", err)
	}
}

// TestWebPages: without a token, nothing that a web page of another site could
// send is answered, whatever the site calls itself; programs on this machine are.
func TestWebPages(t *testing.T) {
	o := stand(t)
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("a-long-enough-token-42"), 0o600); err != nil {
		t.Fatal(err)
	}
	open, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	o.TokenFile = file
	closed, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
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
	for host, ok := range hosts {
		for page, may := range pages {
			for _, at := range []string{"GET /admin/v1/status", "HEAD /admin/v1/config", "GET /metrics", "GET /debug/pprof/cmdline", "GET /debug/pprof/symbol", "POST /admin/v1/drain", "POST /debug/pprof/symbol", "DELETE /admin/v1/workers/x"} {
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
				if got := status(open); (got != http.StatusForbidden) != want {
					t.Errorf("%s as %q from %+v: %d, allowed: %v", at, host, page, got, want)
				}
				if got := status(closed); got != http.StatusUnauthorized {
					t.Errorf("%s as %q from %+v without its token: %d", at, host, page, got)
				}
			}
		}
	}
}

// FuzzFromPage: whatever a request says of where it goes and where it comes from,
// without a token it is answered only if it goes to a loopback address, localhost
// or a stated name, and comes from no other page.
func FuzzFromPage(f *testing.F) {
	for _, host := range []string{
		"127.0.0.1:8001", "[::1]:8001", "::1", "[::ffff:127.0.0.1]", "localhost.", "router.test:8001", "evil.example", "127.0.0.1.evil.example",
		"127.0.0.1:80.evil.example", "localhost:@evil.example", "[localhost]", "[[127.0.0.1]]", "127.1", "2130706433", "0x7f.1", "[::]", "[::1%25lo]", "localho\u017ft",
	} {
		for _, origin := range []string{"", "null", "http://" + host, "https://" + host, "http://evil.example"} {
			f.Add(host, origin, "", true)
			f.Add(host, origin, "same-origin", false)
		}
	}
	f.Add("localhost", "", "cross-site", true)
	h, err := New(stand(f))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, host, origin, site string, read bool) {
		method, path := http.MethodPost, "/debug/pprof/symbol"
		if read {
			method, path = http.MethodGet, "/metrics"
		}
		q := httptest.NewRequestWithContext(t.Context(), method, path, nil)
		q.Host = host
		q.Header["Origin"], q.Header["Sec-Fetch-Site"] = []string{origin}, []string{site}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, q)
		if w.Code == http.StatusForbidden {
			return
		}
		if !ours(host, "router.test") {
			t.Errorf("%s as %q: %d", method, host, w.Code)
		}
		if origin != "" && (!read || origin != "http://"+host) {
			t.Errorf("%s as %q from %q: %d", method, host, origin, w.Code)
		}
		if site != "" && (!read || site != "none" && site != "same-origin") {
			t.Errorf("%s as %q from a page that is %q: %d", method, host, site, w.Code)
		}
	})
}

// ours judges a Host header by what a URL and an address are, strictly: a
// loopback address, localhost or stated, with a port or without.
func ours(host, stated string) bool {
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.Unmap().IsLoopback()
	}
	u, err := url.Parse("http://" + host)
	if err != nil || u.Host != host || u.User != nil || u.Path != "" {
		return false
	}
	name := strings.TrimSuffix(strings.ToLower(u.Hostname()), ".")
	if ip, err := netip.ParseAddr(name); err == nil {
		return ip.Unmap().IsLoopback()
	}
	return !strings.HasPrefix(host, "[") && (name == "localhost" || name == stated)
}
