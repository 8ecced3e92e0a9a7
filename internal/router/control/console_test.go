package control

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/telemetry"
	"github.com/dynctl/dynctl/internal/router/request/admission"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/settings/effective"
	"github.com/dynctl/dynctl/internal/workers"
)

// names describes a registry by its workers' names and states.
type names struct{ registry *workers.Registry }

func (n names) Status(now time.Time) admin.Status         { return admin.Status{Now: now, State: "ready"} }
func (n names) IndexStats(now time.Time) admin.IndexStats { return admin.IndexStats{Now: now} }
func (n names) Workers(time.Time) (l admin.WorkerList) {
	for _, w := range n.registry.Snapshot().Workers {
		l.Workers = append(l.Workers, admin.Worker{Name: w.Name, Source: w.Source, Origin: w.Origin, Draining: w.State.Draining()})
	}
	return l
}

// stand is a router with a worker from flags, one from a file and one that is a pod which
// is being deleted.
func stand(t *testing.T, change func(*settings.Config)) *console {
	t.Helper()
	config := settings.Default()
	change(&config)
	r := &Router{
		Registry: workers.NewRegistry(func(eventlog.Event) {}), Index: kvindex.New(kvindex.Options{}), Log: eventlog.New(100, nil),
		Kept: receipt.NewRing(receipt.Options{Capacity: 1}), Metrics: http.NotFoundHandler(),
		Probe: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("probed")) }),
	}
	t.Cleanup(func() { _ = r.Index.Close() })
	r.State = names{r.Registry}
	event := func(e eventlog.Event) { r.Log.Add(e) }
	s, err := effective.New(config, nil, 1)
	if err != nil {
		t.Fatal(err)
	}
	r.InForce = effective.NewReloader(effective.NewInForce(s), effective.Options{
		Prepare: func(_, _ *effective.Settings, _ []workers.Spec) error { return nil }, Follow: func(*effective.Settings) {}, Event: event, Result: func(string) {},
	})
	if r.Secure, err = NewSecure(SecureOptions{Config: &config, Connections: func(netip.Addr) int { return 0 }, Metrics: telemetry.New("test", "", nil), Event: event}); err != nil {
		t.Fatal(err)
	}
	r.Ending = NewDrain(admission.NewLimiter(admission.Limits{}), func() (time.Duration, time.Duration) { return time.Second, time.Minute }, event)
	for source, text := range map[string]string{workers.SourceFlag: "http://a:1,name=flagged,model=m", workers.SourceFile: "http://b:1,name=filed,model=m", workers.SourceKube: "http://c:1,name=pod,model=m"} {
		spec, err := workers.ParseSpec("", text)
		if err != nil {
			t.Fatal(err)
		}
		spec.Origin = "the " + source
		if source == workers.SourceKube {
			spec.Leaving = "its pod is being deleted"
		}
		if _, err := r.Registry.Apply(source, []workers.Spec{spec}); err != nil {
			t.Fatal(err)
		}
	}
	return &console{r, Options{}}
}

// kinds are the events so far.
func (c *console) kinds() (list []string) {
	for _, e := range c.Log.Last(100) {
		list = append(list, e.Kind)
	}
	return list
}

// refused checks how a change is refused.
func refused(t *testing.T, err error, status int, says string) {
	t.Helper()
	var e *api.Error
	if !errors.As(err, &e) || e.Status != status || !strings.Contains(e.Message, says) {
		t.Errorf("%v, want %d %q", err, status, says)
	}
}

// TestWorkersComeAndGo: what was added through the API or named by flags is removed here,
// what comes from elsewhere is not.
func TestWorkersComeAndGo(t *testing.T) {
	c := stand(t, func(*settings.Config) {})
	spec, err := workers.ParseSpec("", "http://d:1,name=added")
	if err != nil {
		t.Fatal(err)
	}
	if w, err := c.AddWorker(spec); err != nil || w.Name != "added" || w.Source != workers.SourceAdmin || w.Origin != "admin API" {
		t.Errorf("%+v, %v", w, err)
	}
	_, err = c.AddWorker(spec)
	refused(t, err, 409, "added")
	refused(t, c.RemoveWorker("filed"), 409, "worker filed comes from the file; remove it there, or drain it")
	refused(t, c.RemoveWorker("pod"), 409, "worker pod comes from the")
	refused(t, c.RemoveWorker("flaged"), 404, `did you mean "flagged"?`)
	refused(t, c.RemoveWorker(strings.Repeat("x", 5000)), 404, "there is no worker")
	for _, name := range []string{"added", "flagged"} {
		if err := c.RemoveWorker(name); err != nil {
			t.Error(err)
		}
	}
	if n := len(c.Workers().Workers); n != 2 {
		t.Errorf("%d are left", n)
	}
}

// TestDrainWorker: a worker drains and resumes, each logged once; one that leaves does not
// come back, and streams are moved only where they can go on.
func TestDrainWorker(t *testing.T) {
	c := stand(t, func(*settings.Config) {})
	for range 2 {
		if w, err := c.DrainWorker("filed", true); err != nil || !w.Draining {
			t.Errorf("%+v, %v", w, err)
		}
	}
	for range 2 {
		if w, err := c.DrainWorker("filed", false); err != nil || w.Draining {
			t.Errorf("%+v, %v", w, err)
		}
	}
	if got := c.kinds(); !slices.Equal(got, []string{"worker_draining", "worker_resumed"}) {
		t.Errorf("%q", got)
	}
	_, err := c.DrainWorker("pod", false)
	refused(t, err, 409, "it takes no requests again")
	_, err = c.DrainWorker("nobody", true)
	refused(t, err, 404, "there is no worker")
	_, err = c.MoveStreams("filed")
	refused(t, err, 409, "continue.mode is off")

	c = stand(t, func(c *settings.Config) { c.Continue.Mode = settings.ContinueExact })
	_, err = c.MoveStreams("nobody")
	refused(t, err, 404, "there is no worker")
	for range 2 {
		if w, err := c.MoveStreams("filed"); err != nil || !w.Draining {
			t.Errorf("%+v, %v", w, err)
		}
	}
	if got := c.kinds(); !slices.Equal(got, []string{"worker_draining"}) {
		t.Errorf("%q", got)
	}
}

// TestRoute: a prompt or tokens become the body of a request for the only model, a body
// stays as it is, and an endpoint that takes none is refused.
func TestRoute(t *testing.T) {
	c := stand(t, func(*settings.Config) {})
	var got admin.RouteRequest
	c.DryRun = func(_ context.Context, ep *api.Endpoint, in admin.RouteRequest) (*receipt.Receipt, error) {
		got = in
		return &receipt.Receipt{Endpoint: ep.Kind.String()}, nil
	}
	for _, q := range []struct {
		in   admin.RouteRequest
		body string
	}{
		{admin.RouteRequest{Prompt: "hello"}, `{"model":"m","prompt":"hello"}`},
		{admin.RouteRequest{Tokens: []uint32{1, 2}, Model: "other"}, `{"model":"other","prompt":[1,2]}`},
		{admin.RouteRequest{Body: json.RawMessage(`{"x": 1}`), Session: "s", Path: "local"}, `{"x": 1}`},
	} {
		q.in.Endpoint = "/v1/completions"
		receipt, err := c.Route(t.Context(), q.in)
		if err != nil {
			t.Fatalf("%+v: %v", q.in, err)
		}
		type facts struct{ Body, Session, Path, Endpoint string }
		if d := cmp.Diff(facts{q.body, q.in.Session, q.in.Path, api.Completion.String()}, facts{string(got.Body), got.Session, got.Path, receipt.Endpoint}); d != "" {
			t.Errorf("%+v (-want +got):\n%s", q.in, d)
		}
	}
	_, err := c.Route(t.Context(), admin.RouteRequest{Prompt: "x", Endpoint: "/v1/audio/transcriptions"})
	refused(t, err, 400, "takes no JSON body")
	_, err = c.Route(t.Context(), admin.RouteRequest{Prompt: "x", Endpoint: "/nosuch"})
	refused(t, err, 404, "")
	other, err := workers.ParseSpec("", "http://d:1,model=n")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.AddWorker(other); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Route(t.Context(), admin.RouteRequest{Prompt: "x", Endpoint: "/v1/completions"}); err != nil || string(got.Body) != `{"model":"","prompt":"x"}` {
		t.Errorf("of two models one was chosen: %s, %v", got.Body, err)
	}
}

// TestConfig: settings are shown with who set them, a patch is the API's own, and a drain
// goes on as it began.
func TestConfig(t *testing.T) {
	c := stand(t, func(s *settings.Config) { s.Trace.Endpoint = "https://me:s3cret@collector" })
	if raw, err := json.Marshal(c.Config()); err != nil || strings.Contains(string(raw), "s3cret") || !strings.Contains(string(raw), "https://redacted@collector") {
		t.Errorf("the collector's password: %v %s", err, raw)
	}
	if err := c.Patch(map[string]any{"trace.endpoint": "https://other"}); err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("a change that needs a restart: %v", err)
	}
	if err := c.Patch(map[string]any{"limits.queue": 7.0}); err != nil {
		t.Fatal(err)
	}
	v := c.Config()
	i := slices.IndexFunc(v.Settings, func(s admin.ConfigValue) bool { return s.Key == "limits.queue" })
	if i < 0 || v.Revision != 2 || v.Settings[i].Value != 7 || v.Settings[i].Origin != "admin API" {
		t.Errorf("%+v", v)
	}
	if err := c.Patch(map[string]any{"limits.queue": -7.0}); err == nil || c.Config().Revision != 2 {
		t.Errorf("%v, revision %d", err, c.Config().Revision)
	}
	first := c.Drain(time.Hour)
	<-c.Draining()
	if again := c.Drain(0); again.Until != first.Until || first.Until.Sub(first.Since) < time.Hour {
		t.Errorf("%+v, then %+v", first, again)
	}
}

// TestHandler: probes answer anybody, the rest those with the token; what lets everybody
// in is logged; and a router that cannot read its token has no admin API.
func TestHandler(t *testing.T) {
	c := stand(t, func(c *settings.Config) { c.AdminHosts = []string{"router.test"} })
	ask := func(h http.Handler, host, path, token string) (int, string) {
		q := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+host+path, http.NoBody)
		if token != "" {
			q.Header.Set("Authorization", "Bearer "+token)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, q)
		return w.Code, w.Body.String()
	}
	h, err := c.Handler(Options{Name: "0.0.0.0:8000", AdminName: "127.0.0.1:8001"})
	if err != nil {
		t.Fatal(err)
	}
	if got := c.kinds(); !slices.Equal(got, []string{"listener_exposed"}) {
		t.Errorf("%q", got)
	}
	for _, host := range []string{"127.0.0.1", "router.test"} {
		if code, body := ask(h, host, "/admin/v1/status", ""); code != 200 || !strings.Contains(body, `"name":"0.0.0.0:8000"`) || !strings.Contains(body, `"listen":"127.0.0.1:8001"`) {
			t.Errorf("%s: %d %s", host, code, body)
		}
	}
	if code, _ := ask(h, "evil.test", "/admin/v1/status", ""); code != 403 {
		t.Errorf("another name: %d", code)
	}
	for _, path := range []string{"/sim/v1/engines", "/admin/v1/stream"} {
		if code, _ := ask(h, "127.0.0.1", path, ""); code != 404 {
			t.Errorf("%s: %d where there is none", path, code)
		}
	}

	const token = "a-long-enough-token"
	file := filepath.Join(t.TempDir(), "token")
	if _, err := c.Handler(Options{TokenFile: file}); err == nil || !strings.Contains(err.Error(), "admin_token_file") {
		t.Errorf("no token: %v", err)
	}
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	teapot := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	if h, err = c.Handler(Options{TokenFile: file, Sim: teapot, Stream: teapot}); err != nil {
		t.Fatal(err)
	}
	for _, q := range []struct {
		path, token string
		code        int
	}{
		{"/healthz", "", 200}, {"/readyz", "", 200}, {"/admin/v1/status", "", 401}, {"/admin/v1/status", token, 200}, {"/metrics", "", 401},
		{"/sim/v1/engines", token, http.StatusTeapot}, {"/admin/v1/stream", token, http.StatusTeapot},
	} {
		if code, body := ask(h, "evil.test", q.path, q.token); code != q.code {
			t.Errorf("%+v: %d %s", q, code, body)
		}
	}
}
