package adminserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
)

// stand is a reader that shows events and receipts only.
type stand struct {
	events   *eventlog.Log
	receipts *receipt.Ring
}

func newStand(events int) *stand {
	return &stand{eventlog.New(events, nil), receipt.NewRing(receipt.Options{Capacity: 16})}
}

func (s *stand) Now() time.Time               { return time.Now() }
func (s *stand) Status() admin.Status         { return admin.Status{} }
func (s *stand) Workers() admin.WorkerList    { return admin.WorkerList{} }
func (s *stand) Receipts() *receipt.Ring      { return s.receipts }
func (s *stand) Events() *eventlog.Log        { return s.events }
func (s *stand) IndexStats() admin.IndexStats { return admin.IndexStats{} }
func (s *stand) IndexChildren(IndexQuery) (admin.IndexChildren, error) {
	return admin.IndexChildren{}, nil
}

// anybody gives clients so long to read a piece.
func anybody(write time.Duration) Access {
	return Access{Terms: func() Terms { return Terms{Hosts: []string{"router.test"}, Body: time.Second, Write: write} }}
}

// ask asks the API for something.
func ask(t *testing.T, h http.Handler, path string) (int, map[string]any) {
	t.Helper()
	w := httptest.NewRecorder()
	q := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
	q.Host = "localhost:8001"
	h.ServeHTTP(w, q)
	var v map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &v); err != nil {
		t.Errorf("GET %s: %v in %q", path, err, w.Body)
	}
	return w.Code, v
}

// TestTokenFile: a token that is missing or could be guessed is refused at the
// start.
func TestTokenFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if _, err := ReadToken(file); err == nil || !strings.Contains(err.Error(), "admin_token_file") {
		t.Errorf("no file: %v", err)
	}
	for text, want := range map[string]string{"short\n": "5 characters, fewer than 16", "a-long-enough-token-42\n": ""} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		token, err := ReadToken(file)
		if (err == nil) != (want == "") || !strings.Contains(fmt.Sprint(err), want) || err == nil && string(token) != strings.TrimSpace(text) {
			t.Errorf("%q is %q, %v, want the error %q", text, token, err, want)
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
	h := New(anybody(time.Second), newStand(1), nil, map[string]http.Handler{"GET /metrics": http.NotFoundHandler()})
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

// deciding is a router that decides and does nothing else.
type deciding struct {
	Control
	receipt receipt.Receipt
	err     error
}

func (d *deciding) Route(context.Context, admin.RouteRequest) (*receipt.Receipt, error) {
	c := d.receipt
	return &c, d.err
}

// TestRouteWithoutFigures: a decision over engines that do not report the usage of their
// caches is answered as a kept receipt is. An error of the router is an event.
func TestRouteWithoutFigures(t *testing.T) {
	s := newStand(4)
	d := &deciding{receipt: receipt.Receipt{ID: "dry-run"}}
	d.receipt.Decode.Candidates = []decision.Candidate{{Rank: "d0/dp0", KVUsage: math.NaN()}}
	h := New(anybody(time.Second), s, d, nil)
	route := func() (int, string) {
		w := httptest.NewRecorder()
		q := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/admin/v1/route", strings.NewReader(`{"prompt": "x"}`))
		q.Host = "localhost:8001"
		h.ServeHTTP(w, q)
		return w.Code, w.Body.String()
	}
	if code, body := route(); code != http.StatusOK || !strings.Contains(body, `"kv_usage_ratio":-1`) {
		t.Errorf("%d %s", code, body)
	}
	if !math.IsNaN(d.receipt.Decode.Candidates[0].KVUsage) {
		t.Error("the router's own candidates were changed")
	}
	d.err = errors.New("no figures")
	code, body := route()
	events := s.events.Last(4)
	if code != http.StatusInternalServerError || strings.Contains(body, "no figures") {
		t.Errorf("%d %s", code, body)
	}
	if len(events) != 1 || events[0].Kind != "admin_failed" || !strings.HasSuffix(events[0].Text, "POST /admin/v1/route: no figures") {
		t.Errorf("events %v", events)
	}
}

// TestIDsThatArePaths: an id that a client chose is found by the client of the API, and by a
// request that does not escape it, whatever it would be as a path. One that is unknown is
// not found.
func TestIDsThatArePaths(t *testing.T) {
	s := newStand(4)
	h := New(anybody(time.Second), s, nil, nil)
	router := httptest.NewServer(h)
	t.Cleanup(router.Close)
	c, err := admin.NewClient(router.URL, admin.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	ids := []string{".", "..", "/", "a/b", "../decisions", "%2e", "%2F", "a?b=c#d", "..."}
	unknown := func(id string) {
		t.Helper()
		var status *admin.StatusError
		if raw, err := c.Decision(t.Context(), id); !errors.As(err, &status) || status.Status != http.StatusNotFound || status.Code != "decision_not_found" {
			t.Errorf("%q, which is unknown: %s, %v", id, raw, err)
		}
	}
	for _, id := range ids {
		unknown(id)
	}
	unknown("")
	for _, id := range ids {
		live := s.receipts.Begin(time.Now())
		live.Finish(func(r *receipt.Receipt) { r.RequestID = id })
		var r receipt.Receipt
		if raw, err := c.Decision(t.Context(), id); err != nil || json.Unmarshal(raw, &r) != nil || r.RequestID != id {
			t.Errorf("%q: %s, %v", id, raw, err)
		}
	}
	for _, id := range []string{".", ".."} {
		if code, v := ask(t, h, "/admin/v1/decisions/"+id); code != http.StatusOK || v["request_id"] != id {
			t.Errorf("%s unescaped: %d %v", id, code, v)
		}
	}
	if code, v := ask(t, h, "/admin/v1/./decisions"); code != http.StatusNotFound {
		t.Errorf("another path: %d %v", code, v)
	}
}
