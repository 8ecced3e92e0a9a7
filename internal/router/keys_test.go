package router_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/settings"
)

// The keys of tests: what is shown, and the file of their hashes.
const (
	userSecret  = "dynctl_user-2Jd8kPlantedSecretOfAUser0000000000000"
	otherSecret = "dynctl_other-9XkPlantedSecretOfAnother00000000000"
	readSecret  = "dynctl_read-Pq4PlantedSecretOfAReader000000000000"
	opsSecret   = "dynctl_ops-Lm5PlantedSecretOfAnOperator0000000000"
	adminSecret = "dynctl_admin-Zt7PlantedSecretOfAnAdmin00000000000"
	wrongSecret = "dynctl_wrong-Uv3PlantedSecretOfNobody000000000000"
)

func keysFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys.yaml")
	putKeys(t, path, "name: user, tenant: web", userSecret, "name: other, models: [nosuch, other], rate: 12", otherSecret,
		"name: reader, roles: [read]", readSecret, "name: operator, roles: [use, operate]", opsSecret, "name: root, roles: [admin]", adminSecret)
	return path
}

// putKeys writes a file of pairs: what stands of a key besides its hash, and the key.
func putKeys(t *testing.T, path string, pairs ...string) {
	t.Helper()
	text := "keys:\n"
	for i := 0; i < len(pairs); i += 2 {
		sum := sha256.Sum256([]byte(pairs[i+1]))
		text += fmt.Sprintf("  - {%s, sha256: %s}\n", pairs[i], hex.EncodeToString(sum[:]))
	}
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func bearer(secret string) []string { return []string{"Authorization", "Bearer " + secret} }

// TestAPIKeys: which key may do what at the data plane, and with what the others are refused.
func TestAPIKeys(t *testing.T) {
	path := keysFile(t)
	r := start(t, "1a:profile=instant+1a:profile=instant,model=blue", func(c *settings.Config) { c.Keys.File = path })
	body := encode(t, object{"model": "sim", "prompt": ids(40, 1), "max_tokens": 4})
	ask := func(header ...string) *answer { return r.send(http.MethodPost, "/v1/completions", body, header...) }

	e := ask().refused(t, 401, "unauthorized")
	if e.Error.Type != "authentication_error" {
		t.Errorf("%+v", e)
	}
	for _, h := range [][]string{bearer(wrongSecret), bearer(userSecret + "x"), bearer(userSecret[:20]), {"Authorization", userSecret}, {"X-Api-Key", wrongSecret}, {"Authorization", "Basic " + userSecret}} {
		if e := ask(h...).refused(t, 401, "unauthorized"); strings.Contains(e.Error.Message, "Planted") {
			t.Errorf("the answer shows the key: %s", e.Error.Message)
		}
	}
	ask(bearer(readSecret)...).refused(t, 403, "forbidden")
	if e := ask(bearer(otherSecret)...).refused(t, 403, "forbidden"); e.Error.Type != "permission_error" || e.Error.Param != "model" {
		t.Errorf("%+v", e)
	}
	// A key that is not for a model does not learn whether it exists; one that it is
	// for may be missing.
	r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "nosuch", "prompt": "x"}), bearer(otherSecret)...).refused(t, 404, "model_not_found")
	if a := ask(bearer(otherSecret)...); a.status != 429 || a.header.Get("Retry-After") == "" {
		t.Errorf("the third of twelve a minute, at once: %s", a)
	} else {
		a.refused(t, 429, "rate_limited")
	}
	for _, h := range [][]string{bearer(userSecret), {"X-Api-Key", userSecret}, bearer(opsSecret)} {
		if a := ask(h...); a.status != 200 {
			t.Errorf("%s", a)
		}
	}
	id := ask(bearer(userSecret)...).header.Get("X-Dynctl-Decision")
	if c := r.receipt(id); c.Key != "user" || c.Tenant != "web" {
		t.Errorf("the receipt is of %q, %q", c.Key, c.Tenant)
	}
	if a := r.send(http.MethodGet, "/v1/models", nil); a.status != 401 {
		t.Errorf("models without a key: %s", a)
	}
	if a := r.send(http.MethodGet, "/v1/models", nil, bearer(userSecret)...); a.status != 200 || !bytes.Contains(a.body, []byte(`"sim"`)) {
		t.Errorf("models: %s", a)
	}
	if a := r.send(http.MethodGet, "/healthz", nil); a.status != 200 {
		t.Errorf("a probe: %s", a)
	}
	if n := r.metric(`dynctl_rejections_total{reason="key"}`); n < 8 {
		t.Errorf("%v refusals", n)
	}
	if n := r.metric("dynctl_api_keys"); n != 5 {
		t.Errorf("%v keys", n)
	}

	// One that is revoked is refused as soon as the file is read.
	putKeys(t, path, "name: other, models: [sim]", otherSecret)
	r.eventually("the key is revoked", func() error {
		if a := ask(bearer(userSecret)...); a.status != 401 {
			return fmt.Errorf("%s", a)
		}
		return nil
	})
	if a := ask(bearer(otherSecret)...); a.status != 200 {
		t.Errorf("a key that may more now: %s", a)
	}
	if err := r.Router.Settings().Change(func(c settings.Config, o map[string]string) (settings.Config, map[string]string, error) {
		c.Keys.Required = false
		return c, o, nil
	}); err != nil {
		t.Fatal(err)
	}
	if a := ask(); a.status != 200 {
		t.Errorf("no key where none is required: %s", a)
	}
	ask(bearer(userSecret)...).refused(t, 401, "unauthorized")
	t.Run("models of a key", func(t *testing.T) { modelsOfAKey(t, r.in(t), path) })
	t.Run("the default model of a key", func(t *testing.T) { defaultModelOfAKey(t, r.in(t), path) })
}

// modelsOfAKey: a key for some models is shown no others.
func modelsOfAKey(t *testing.T, r *rig, path string) {
	putKeys(t, path, "name: some, models: [other]", otherSecret, "name: alias, models: [nice]", userSecret)
	r.set(func(c *settings.Config) {
		c.Aliases, c.Routing.DefaultModel = []settings.Alias{{Name: "nice", Model: "sim"}}, "sim"
	})
	r.eventually("the keys", func() error {
		if a := r.send(http.MethodGet, "/v1/models", nil, bearer(otherSecret)...); a.status != 200 || bytes.Contains(a.body, []byte(`"id"`)) {
			return errors.New(a.String())
		}
		return nil
	})
	if a := r.send(http.MethodGet, "/version", nil, bearer(otherSecret)...); a.status != 403 {
		t.Errorf("/version of an engine that the key is not for: %s", a)
	}
	if a := r.send(http.MethodGet, "/v1/models/sim", nil, bearer(otherSecret)...); a.status != 403 {
		t.Errorf("%s", a)
	}
	if a := r.send(http.MethodGet, "/v1/models", nil, bearer(userSecret)...); a.status != 200 || !bytes.Contains(a.body, []byte(`"id":"nice"`)) || bytes.Contains(a.body, []byte(`"id":"sim"`)) {
		t.Errorf("%s", a)
	}
	r.post("/v1/completions", object{"model": "nice", "prompt": "hello", "max_tokens": 2}, bearer(userSecret)...)
	r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": "x"}), bearer(userSecret)...).refused(t, 403, "forbidden")
	r.send(http.MethodPost, "/v1/completions", encode(t, object{"prompt": "x"}), bearer(userSecret)...).refused(t, 403, "forbidden")
}

// defaultModelOfAKey: a key counts for the model that really serves, whatever the client
// calls it.
func defaultModelOfAKey(t *testing.T, r *rig, path string) {
	putKeys(t, path, "name: red, models: [sim, gpt-9, claude-3]", otherSecret, "name: pattern, models: [claude-*]", userSecret)
	r.set(func(c *settings.Config) {
		c.Routing.DefaultModel, c.Aliases = "blue", []settings.Alias{{Name: "claude-*", Model: "blue"}}
	})
	r.eventually("the keys", func() error {
		if a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": "hello", "max_tokens": 1}), bearer(otherSecret)...); a.status != 200 {
			return errors.New(a.String())
		}
		return nil
	})
	for _, c := range []struct {
		secret string
		body   object
		status int
	}{
		{otherSecret, object{"model": "sim"}, 200},
		{otherSecret, object{"model": "gpt-9"}, 403}, // the key has the name, but blue would serve it
		{otherSecret, object{"model": "claude-3"}, 403},
		{otherSecret, object{}, 403},
		{userSecret, object{"model": "claude-3"}, 200}, // an alias counts by its own name
		{userSecret, object{"model": "gpt-9"}, 403},
		{userSecret, object{}, 403},
	} {
		c.body["prompt"], c.body["max_tokens"] = "hello", 1
		if a := r.send(http.MethodPost, "/v1/completions", encode(t, c.body), bearer(c.secret)...); a.status != c.status {
			t.Errorf("%v: %s, want %d", c.body, a, c.status)
		}
	}
}

// rigToken is the admin token of tests.
const rigToken = "a-token-of-the-rig-itself"

// tokenFile is a file with a token.
func tokenFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte(rigToken), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// locked is a writer that several may use.
type locked struct {
	mu *sync.Mutex
	w  io.Writer
}

func (l locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// watched is a router whose log, recording and engines are read along with.
type watched struct {
	*rig
	p             *tap
	mu            sync.Mutex
	log, recorded bytes.Buffer
}

// TestWhoSeesWhat: what keys of each role may do and see at the admin API, and that neither
// keys nor prompts stand where they should not.
func TestWhoSeesWhat(t *testing.T) {
	path := keysFile(t)
	r := &watched{p: &tap{}}
	r.rig = startCold(t, loopback.Options{
		Fleet: "2a:profile=instant", Admin: router.AdminOptions{TokenFile: tokenFile(t)}, Specs: r.p.specs(t),
		Logger: slog.New(slog.NewJSONHandler(locked{&r.mu, &r.log}, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Observer: router.Observer{
			Decision: func(_ time.Time, d *trace.Decision) { fmt.Fprintf(locked{&r.mu, &r.recorded}, "%+v\n", *d) },
			Outcome: func(c *receipt.Receipt) {
				_ = json.NewEncoder(locked{&r.mu, &r.recorded}).Encode(c)
				_ = c.Explain(locked{&r.mu, &r.recorded})
			},
		},
	}, func(c *settings.Config) { c.Keys.File, c.Keys.Admin = path, true })
	if err := r.Ready(r.wait()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		test func(*testing.T, *watched)
	}{
		{"texts of engines", textsByRole},
		{"roles", rolesOfTheAdminAPI},
		{"secrets", secretsAreNowhere},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := r.rig
			defer func() { r.rig = all }()
			r.rig = all.in(t)
			for _, e := range r.Sim.Engines() {
				r.Router.Heal(e.Name())
			}
			c.test(t, r)
		})
	}
}

// rolesOfTheAdminAPI: each route with each role, and the log of who changed
// what.
func rolesOfTheAdminAPI(t *testing.T, r *watched) {
	worker := r.Sim.Engines()[0].Name()
	shown := func(authorization, method, path, body string) int {
		t.Helper()
		status, _, err := r.askAdmin(t.Context(), authorization, method, path, body)
		if err != nil {
			t.Fatal(err)
		}
		return status
	}
	ask := func(secret, method, path, body string) int {
		t.Helper()
		if secret != "" {
			secret = "Bearer " + secret
		}
		return shown(secret, method, path, body)
	}
	for _, path := range []string{"/admin/v1/status", "/admin/v1/config", "/metrics", "/debug/pprof/cmdline", "/admin/v1/decisions/x"} {
		for _, h := range []string{"", rigToken, "Bearer wrong", "Bearer " + rigToken + "x", "bearer"} {
			if got := shown(h, "GET", path, ""); got != http.StatusUnauthorized {
				t.Errorf("%s with %q: %d", path, h, got)
			}
		}
	}
	// Roles in rising order; "-" needs none, and "token" is that of the file.
	const none = "-"
	order := []string{none, "", "use", "read", "operate", "admin", "token"}
	at := func(role string) int { return slices.Index(order, role) }
	for _, c := range []struct{ method, path, body, least string }{
		{"GET", "/admin/v1/status", "", "read"},
		{"GET", "/admin/v1/decisions", "", "read"},
		{"GET", "/admin/v1/config", "", "read"},
		{"GET", "/metrics", "", "read"},
		{"POST", "/admin/v1/route", `{"prompt": "hello"}`, "operate"},
		{"POST", "/admin/v1/workers/" + worker + "/drain", "", "operate"},
		{"POST", "/admin/v1/control/start_profile", "", "admin"},
		{"POST", "/admin/v1/workers/" + worker + "/resume", "", "operate"},
		{"POST", "/admin/v1/config", `{"settings": {"routing.threshold": 7}}`, "admin"},
		{"POST", "/admin/v1/workers", `{"role": "decode", "spec": "http://127.0.0.1:1"}`, "admin"},
		{"DELETE", "/admin/v1/workers/127.0.0.1:1", "", "admin"},
		{"GET", "/debug/pprof/cmdline", "", "admin"},
		{"GET", "/healthz", "", none},
	} {
		for i, k := range []struct{ role, secret string }{{"", ""}, {"", wrongSecret}, {"use", userSecret}, {"read", readSecret}, {"operate", opsSecret}, {"admin", adminSecret}, {"token", rigToken}} {
			got := ask(k.secret, c.method, c.path, c.body)
			want := 200
			switch {
			case at(k.role) >= at(c.least):
				if k.role == "token" && (c.method == "DELETE" || c.method == "POST" && c.path == "/admin/v1/workers") {
					continue // done before
				}
			case i < 2:
				want = 401
			default:
				want = 403
			}
			if got != want {
				t.Errorf("%s %s with role %q: %d, want %d", c.method, c.path, k.role, got, want)
			}
		}
	}
	changes, denied := r.events("admin_change"), r.events("admin_denied")
	var text string
	for _, e := range append(changes, denied...) {
		text += e.Text + "\n"
	}
	for _, want := range []string{
		"POST /admin/v1/workers/" + worker + `/drain by the key "operator" from 127.0.0.1`, ": status 200",
		`by the key "root" from`, `by the admin token from`, `the key "operator" may not POST /admin/v1/config: it lacks the role admin`,
		`the key "user" may not GET /admin/v1/status`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the log of changes lacks %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "Planted") {
		t.Error("the log of changes has a key")
	}
}

// textsByRole: who only reads is not shown what engines said, which may quote a
// prompt.
func textsByRole(t *testing.T, r *watched) {
	r.p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path == "/v1/completions" {
			w.WriteHeader(http.StatusInternalServerError)
			return true
		}
		return false
	})
	defer r.p.set(nil)
	a := r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": "hello"}), bearer(userSecret)...)
	id := a.header.Get("X-Dynctl-Decision")
	for _, c := range []struct {
		secret string
		sees   bool
	}{{readSecret, false}, {opsSecret, true}} {
		for _, p := range []string{"/admin/v1/decisions/" + id, "/admin/v1/decisions", "/admin/v1/snapshot?events=0", "/admin/v1/snapshot?decisions=0", "/admin/v1/events"} {
			status, page, err := r.askAdmin(t.Context(), "Bearer "+c.secret, http.MethodGet, p, "")
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Contains(page, "status 500"); got != c.sees || strings.Contains(page, "kept back") == c.sees || status != 200 {
				t.Errorf("%s: %d, texts seen %v, want %v\n%s", p, status, got, c.sees, page)
			}
		}
	}
}

// secretsAreNowhere: keys that were shown, right and wrong ones, are in no log,
// answer, receipt, event, metric, recording or configuration, and reach no engine.
func secretsAreNowhere(t *testing.T, r *watched) {
	var seen strings.Builder
	for _, secret := range []string{userSecret, otherSecret, readSecret, wrongSecret} {
		for _, name := range []string{"Authorization", "X-Api-Key"} {
			value := secret
			if name == "Authorization" {
				value = "Bearer " + secret
			}
			for _, body := range []string{`{"model":"sim","prompt":"hello","max_tokens":2}`, `{"model":"sim","prompt":7`, `{"model":"nosuch","prompt":"x"}`} {
				fmt.Fprintln(&seen, r.send(http.MethodPost, "/v1/completions", []byte(body), name, value))
			}
			fmt.Fprintln(&seen, r.send(http.MethodGet, "/v1/nosuch", nil, name, value))
		}
	}
	for _, p := range []string{"/admin/v1/status", "/admin/v1/decisions?limit=1000", "/admin/v1/events?limit=1000", "/admin/v1/config", "/admin/v1/snapshot", "/metrics", "/admin/v1/workers", "/debug/pprof/cmdline"} {
		for _, secret := range []string{adminSecret, wrongSecret} {
			status, page, err := r.askAdmin(t.Context(), "Bearer "+secret, http.MethodGet, p, "")
			if err != nil {
				t.Fatal(err)
			}
			if want := map[bool]int{true: 200, false: 401}[secret == adminSecret]; status != want {
				t.Errorf("%s: %d", p, status)
			}
			seen.WriteString(page)
		}
	}
	if _, err := r.Admin.SetConfig(t.Context(), map[string]any{"routing.threshold": 5}); err != nil {
		t.Fatal(err)
	}
	var engines bytes.Buffer
	r.p.mu.Lock()
	for _, c := range r.p.calls {
		_ = c.header.Write(&engines)
	}
	r.p.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if engines.Len() == 0 || r.log.Len() == 0 || r.recorded.Len() == 0 || !strings.Contains(seen.String(), `"choices"`) {
		t.Fatal("nothing was looked at")
	}
	for what, text := range map[string]string{"the log": r.log.String(), "an engine": engines.String(), "an answer": seen.String(), "a recording": r.recorded.String()} {
		if i := strings.Index(text, "Planted"); i >= 0 {
			t.Errorf("%s has a key: …%s…", what, text[max(0, i-200):min(len(text), i+60)])
		}
	}
}
